//! A layout file: where a guest's RAM lies, as JSON beside its RAM in a file.
//!
//! `{"page_size": 4096, "regions": [{"start": 0, "bytes": 3221225472}, {"start": 4294967296, "bytes": 5368709120}]}`;
//! `start` and `bytes` are guest-physical bytes, multiples of 4096, regions by ascending address.

use crate::error::{Error, Result};
use pages::{Layout, PAGE_BYTES, PageRange, Pfn};
use serde::Deserialize;

use std::io::Read;
use std::path::Path;

/// Bytes of a layout file at most: far more than 512 regions take.
const MOST_BYTES: u64 = 1 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    page_size: u64,
    regions: Vec<FormRegion>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FormRegion {
    start: u64,
    bytes: u64,
}

/// Reads and checks a layout file.
///
/// # Errors
/// [`Error::Format`] for what is not such a JSON document, [`Error::Layout`] for regions that are no layout.
pub fn load(path: impl AsRef<Path>) -> Result<Layout> {
    let path = path.as_ref();
    let failed = |e| Error::sys(format!("reading layout file {}", path.display()), e);
    let mut text = Vec::new();
    let file = crate::backing::open_regular(path, "layout file")?;
    file.take(MOST_BYTES + 1).read_to_end(&mut text).map_err(failed)?;
    if text.len() as u64 > MOST_BYTES {
        return Err(format(
            path,
            format!("longer than the {MOST_BYTES} bytes that a layout file may have"),
        ));
    }
    parse(path, &text)
}

fn parse(path: &Path, text: &[u8]) -> Result<Layout> {
    let form: Form = serde_json::from_slice(text).map_err(|e| format(path, format!("not a layout file: {e}")))?;
    if form.page_size != PAGE_BYTES {
        return Err(format(
            path,
            format!("page_size is {}, only {PAGE_BYTES} is supported", form.page_size),
        ));
    }
    let mut regions = Vec::new();
    for (i, region) in form.regions.iter().enumerate() {
        for (name, value) in [("start", region.start), ("bytes", region.bytes)] {
            if !value.is_multiple_of(PAGE_BYTES) {
                return Err(format(
                    path,
                    format!("region {i}: {name} {value} is not a multiple of {PAGE_BYTES}"),
                ));
            }
        }
        let range = PageRange::new(Pfn(region.start / PAGE_BYTES), region.bytes / PAGE_BYTES);
        regions.push(range.ok_or_else(|| format(path, format!("region {i} wraps around")))?);
    }
    Layout::new(regions).map_err(|source| Error::Layout {
        path: path.to_owned(),
        source,
    })
}

fn format(path: &Path, what: String) -> Error {
    Error::Format {
        path: path.to_owned(),
        what,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_str(text: &str) -> Result<Layout> {
        parse(Path::new("layout.json"), text.as_bytes())
    }

    #[test]
    fn the_layout_of_a_pc() {
        let text =
            r#"{"page_size":4096,"regions":[{"start":0,"bytes":3221225472},{"start":4294967296,"bytes":5368709120}]}"#;
        assert_eq!(parse_str(text).unwrap(), Layout::pc(8 << 18).unwrap());
    }

    #[test]
    fn bad_files_are_refused_with_the_value() {
        for (text, expected) in [
            ("{", "not a layout file"),
            (r#"{"page_size":4096}"#, "regions"),
            (r#"{"page_size":65536,"regions":[]}"#, "65536"),
            (r#"{"page_size":4096,"regions":[]}"#, "0 regions"),
            (r#"{"page_size":4096,"regions":[{"start":0,"bytes":4097}]}"#, "4097"),
            (
                r#"{"page_size":4096,"regions":[{"start":-1,"bytes":4096}]}"#,
                "invalid value",
            ),
            (
                r#"{"page_size":4096,"regions":[{"start":8192,"bytes":4096},{"start":0,"bytes":4096}]}"#,
                "overlaps or precedes",
            ),
            (
                r#"{"page_size":4096,"regions":[{"start":18446744073709547520,"bytes":8192}]}"#,
                "ends past",
            ),
        ] {
            let error = parse_str(text).unwrap_err();
            let mut all = error.to_string();
            if let Some(source) = std::error::Error::source(&error) {
                all += &source.to_string();
            }
            assert!(all.contains(expected), "{text}: {all}");
        }
    }
}
