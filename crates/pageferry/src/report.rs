//! What the engine cannot know of a report, and reports of migrations that never came to an engine.

use engine::{Ending, Outcome, Report, Role};

/// Fills in what this process knows: control bytes, throughput, memory.
pub(crate) fn complete(outcome: &mut Outcome, control_bytes: u64) {
    let report = &mut outcome.report;
    report.wire_bytes = report.wire_bytes.saturating_add(control_bytes);
    if report.total_ms > 0.0 {
        report.throughput_bytes_per_s = as_f64(report.wire_bytes) / (report.total_ms / 1000.0);
    }
    report.peak_rss_bytes = peak_rss_bytes();
}

/// The outcome of a migration that failed before the engine had a say.
pub(crate) fn failed(role: Role, error: String, total_ms: f64) -> Outcome {
    ended(role, Ending::Failed, error, total_ms)
}

/// The outcome of a migration that ended so before the engine had a say.
pub(crate) fn ended(role: Role, ending: Ending, error: String, total_ms: f64) -> Outcome {
    let mut report = Report::nothing_sent(role, ending, Some(error.clone()), total_ms);
    report.peak_rss_bytes = peak_rss_bytes();
    Outcome {
        ending,
        error: Some(error),
        report,
    }
}

/// The most memory that this process ever held; 0 where the system does not tell.
fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    parse_high_water(&status).unwrap_or(0)
}

fn parse_high_water(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people to read")]
fn as_f64(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_high_water_mark_is_read() {
        assert_eq!(
            parse_high_water("VmPeak:\t 9 kB\nVmHWM:\t    1234 kB\nx"),
            Some(1234 << 10)
        );
        assert_eq!(parse_high_water("VmHWM: many"), None);
        assert!(peak_rss_bytes() > 100 << 10);
    }
}
