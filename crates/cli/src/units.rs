//! Values with units, as they are given on a command line: `8G`, `300ms`, `10Gbit`.
//!
//! Invariant: nothing is guessed. A value whose unit is missing or unknown, or that does not fit, is an error which
//! names the value and the form that was expected. Only `0` needs no unit, for none of nothing is the same in all.
//!
//! Sizes are powers of 1024 (`8G` is 8 GiB, as every VMM has it); rates in `bit` are powers of 1000, as links are sold.

use std::str::FromStr;
use std::time::Duration;

/// Why a value could not be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{value}' is not {what}: give {form}")]
pub struct UnitError {
    value: String,
    what: &'static str,
    form: &'static str,
}

/// A size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = UnitError;

    fn from_str(value: &str) -> Result<Self, UnitError> {
        const FORM: &str = "a number and K, M, G or T (powers of 1024), as 300M or 8G, or a plain number of bytes";
        let error = || unit_error(value, "a size", FORM);
        let (number, unit) = split(value).ok_or_else(error)?;
        let shift = match unit.strip_suffix("iB").unwrap_or(unit) {
            "" | "B" if !unit.ends_with("iB") => 0,
            "K" | "k" => 10,
            "M" => 20,
            "G" => 30,
            "T" => 40,
            _ => return Err(error()),
        };
        number.times(1 << shift).map(Size).ok_or_else(error)
    }
}

/// Reads a duration: `300ms`, `10s`, `500us`, `2min`, `1h`, or `0`.
///
/// # Errors
/// [`UnitError`] where the unit is missing or unknown, or the value does not fit.
pub fn parse_duration(value: &str) -> Result<Duration, UnitError> {
    let error = || {
        unit_error(
            value,
            "a duration",
            "a number and us, ms, s, min or h, as 300ms or 10s, or 0",
        )
    };
    let (number, unit) = split(value).ok_or_else(error)?;
    let unit_ns: u64 = match unit {
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "min" | "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        "" if number.is_zero() => 1,
        _ => return Err(error()),
    };
    number.times(unit_ns).map(Duration::from_nanos).ok_or_else(error)
}

/// Reads a rate and gives it in bytes a second: `10Gbit`, `500Mbit`, `100MB`, or `0` for no limit.
///
/// # Errors
/// [`UnitError`] where the unit is missing or unknown, or the value does not fit.
pub fn parse_bandwidth(value: &str) -> Result<u64, UnitError> {
    const FORM: &str = "a number and kbit, Mbit or Gbit (bits a second) or kB, MB or GB (bytes), as 10Gbit, or 0";
    let error = || unit_error(value, "a bandwidth", FORM);
    let (number, unit) = split(value).ok_or_else(error)?;
    let unit = unit.strip_suffix("/s").unwrap_or(unit);
    let bits: u64 = match unit {
        "kbit" | "Kbit" => 1_000,
        "Mbit" => 1_000_000,
        "Gbit" => 1_000_000_000,
        "kB" | "KB" => 8_000,
        "MB" => 8_000_000,
        "GB" => 8_000_000_000,
        "" if number.is_zero() => 1,
        _ => return Err(error()),
    };
    let rate = number.times(bits).ok_or_else(error)? / 8;
    // A limit that rounds down to nothing would read as no limit at all.
    if rate == 0 && !number.is_zero() {
        return Err(error());
    }
    Ok(rate)
}

/// A share from 0 to 1.
///
/// # Errors
/// [`UnitError`] where it is no number or lies outside.
pub fn parse_share(value: &str) -> Result<f64, UnitError> {
    match value.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err(unit_error(value, "a share", "a number from 0 to 1, as 0.25")),
    }
}

/// Bytes for a person: `221.3 MiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut scaled = bytes as f64 / 1024.0;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    format!("{scaled:.1} {}", UNITS[unit])
}

fn unit_error(value: &str, what: &'static str, form: &'static str) -> UnitError {
    UnitError {
        value: value.to_owned(),
        what,
        form,
    }
}

/// A decimal number, exactly: `digits` over ten to the power of `places`.
#[derive(Clone, Copy)]
struct Number {
    digits: u128,
    places: u32,
}

impl Number {
    fn is_zero(self) -> bool {
        self.digits == 0
    }

    /// The number times `unit`, rounded down; `None` where it does not fit.
    fn times(self, unit: u64) -> Option<u64> {
        let scaled = self.digits.checked_mul(u128::from(unit))? / 10u128.checked_pow(self.places)?;
        u64::try_from(scaled).ok()
    }
}

/// Cuts a value into its number and its unit.
fn split(value: &str) -> Option<(Number, &str)> {
    let end = value
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(value.len());
    let (number, unit) = value.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let well_formed = !whole.is_empty() && (number.len() == whole.len() || !fraction.is_empty());
    // Long enough for every 64-bit value with nine places; short enough never to overflow 128 bits.
    if !well_formed || whole.len() > 20 || fraction.len() > 9 {
        return None;
    }
    let digits = format!("{whole}{fraction}").parse().ok()?;
    Some((
        Number {
            digits,
            places: u32::try_from(fraction.len()).ok()?,
        },
        unit.trim_start(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let size = |s: &str| s.parse::<Size>().map(|s| s.0);
        assert_eq!(size("8G"), Ok(8 << 30));
        assert_eq!(size("300M"), Ok(300 << 20));
        assert_eq!(size("1.5G"), Ok(3 << 29));
        assert_eq!(size("4KiB"), Ok(4096));
        assert_eq!(size("64k"), Ok(65536));
        assert_eq!(size("1073754112"), Ok((1 << 30) + 3 * 4096));
        assert_eq!(size("12B"), Ok(12));
        assert_eq!(size("0"), Ok(0));
        assert_eq!(size("16T"), Ok(16 << 40));
        for bad in [
            "",
            "G",
            "8 GG",
            "8Q",
            "-1",
            "1e9",
            "8.G",
            ".5G",
            "99999999999999999999T",
            "1.2.3M",
            "12iB",
            "8BiB",
        ] {
            let error = size(bad).unwrap_err().to_string();
            assert!(error.contains(&format!("'{bad}'")) && error.contains("300M"), "{error}");
        }
    }

    #[test]
    fn durations() {
        assert_eq!(parse_duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("250us"), Ok(Duration::from_micros(250)));
        assert_eq!(parse_duration("2min"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_duration("1h"), Ok(Duration::from_secs(3600)));
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
        for bad in ["", "10", "ms", "10sec", "-5s", "99999999999h"] {
            let error = parse_duration(bad).unwrap_err().to_string();
            assert!(
                error.contains(&format!("'{bad}'")) && error.contains("300ms"),
                "{error}"
            );
        }
    }

    #[test]
    fn bandwidths_are_bytes_a_second() {
        assert_eq!(parse_bandwidth("10Gbit"), Ok(1_250_000_000));
        assert_eq!(parse_bandwidth("500Mbit"), Ok(62_500_000));
        assert_eq!(parse_bandwidth("8kbit/s"), Ok(1000));
        assert_eq!(parse_bandwidth("100MB"), Ok(100_000_000));
        assert_eq!(parse_bandwidth("0"), Ok(0));
        for bad in ["10", "10G", "fast", "0.001kbit", "10gigabit"] {
            let error = parse_bandwidth(bad).unwrap_err().to_string();
            assert!(
                error.contains(&format!("'{bad}'")) && error.contains("10Gbit"),
                "{error}"
            );
        }
    }

    #[test]
    fn shares() {
        assert_eq!(parse_share("0.25"), Ok(0.25));
        assert_eq!(parse_share("1"), Ok(1.0));
        for bad in ["1.1", "-0.1", "half", "NaN"] {
            assert!(parse_share(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bytes_for_a_person() {
        assert_eq!(human_bytes(0), "0 B");
        assert_eq!(human_bytes(300 << 20), "300.0 MiB");
        assert_eq!(human_bytes(8 << 30), "8.0 GiB");
        assert_eq!(human_bytes(5 << 50), "5120.0 TiB");
    }
}
