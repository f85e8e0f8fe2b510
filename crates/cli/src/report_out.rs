//! The report's way out: JSON to a file or to stdout, and a summary for a person.
//!
//! A report file is whole or absent: it is written beside its place and renamed. A device that stands in its place, as
//! /dev/null, is written to: a rename by root would put a file there in its stead. Where the report goes to stdout, it is
//! the last thing there, and no sentence for a person is: those go to stderr then. Before it come (at the receiver) the
//! first line with the address, and what a Linux guest's console printed, where that is stdout.

use crate::logging::{OutputFlags, say_stderr};
use crate::{Error, human_bytes};
use engine::{Ending, Report, Role};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the guest said of itself after it had arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GuestReport {
    /// `passed` or `failed`; null where the guest has no check of its own, or did not run it.
    pub self_check: Option<&'static str>,
    /// Pages that it checked.
    pub pages_checked: u64,
    /// Its own clock: how often its workload has run.
    pub ticks: u64,
}

#[derive(Serialize)]
struct WholeReport<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    guest: Option<GuestReport>,
}

/// Where reports and sentences go.
#[derive(Clone, Debug)]
pub struct ReportOut {
    file: Option<PathBuf>,
    quiet: bool,
    /// The file was written last without success. Clones share it.
    missing: Arc<AtomicBool>,
}

/// What a command exits with that did what it was there for, and whose report is missing.
pub const REPORT_MISSING: u8 = 8;

impl ReportOut {
    /// As the flags say.
    pub fn new(flags: &OutputFlags) -> Self {
        let file = flags.report.as_deref().filter(|&name| name != "-").map(PathBuf::from);
        ReportOut {
            file,
            quiet: flags.log.quiet,
            missing: Arc::default(),
        }
    }

    /// The code to exit with, where `code` is what the migration came to. A report that is missing in its file changes that
    /// of a success only: where the guest is matters more than whether there are words about it.
    pub fn code(&self, code: u8) -> u8 {
        match code {
            0 if self.missing.load(Ordering::Relaxed) => REPORT_MISSING,
            code => code,
        }
    }

    /// Checks that the report can be written where it is to go, so that a migration does not run and then lose its
    /// report: makes, and removes, the file that will stand beside its place.
    ///
    /// # Errors
    /// [`Error::Usage`] names the folder or the file, for it is the flag that is wrong, and nothing was begun.
    pub fn check(&self) -> Result<(), Error> {
        let Some(file) = &self.file else { return Ok(()) };
        let folder = folder_of(file);
        if !folder.is_dir() {
            return Err(Error::Usage(format!(
                "--report: there is no folder {} to write the report to",
                folder.display()
            )));
        }
        match kind_of(file) {
            Kind::New => {}
            Kind::Device => return Ok(()),
            Kind::Folder => {
                return Err(Error::Usage(format!(
                    "--report: {} is a folder: name a file in it",
                    file.display()
                )));
            }
            Kind::Other => {
                return Err(Error::Usage(format!(
                    "--report: {} is a pipe or something else than a file: give a file, or - for stdout",
                    file.display()
                )));
            }
        }
        let tried = beside(file).and_then(|beside| {
            std::fs::write(&beside, [])?;
            std::fs::remove_file(&beside)
        });
        tried.map_err(|error| {
            Error::Usage(format!(
                "--report: a report cannot be written to {}: {error}",
                file.display()
            ))
        })
    }

    /// The file that it goes to, if it does.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Writes the report to its file, if it has one. May be called again when more is known.
    ///
    /// # Errors
    /// [`Error::Failed`] names the file and the reason.
    pub fn write_file(&self, report: &Report, guest: Option<GuestReport>) -> Result<(), Error> {
        match &self.file {
            Some(file) => {
                let written = json(report, guest).and_then(|text| write_atomically(file, text.as_bytes()));
                self.missing.store(written.is_err(), Ordering::Relaxed);
                written
            }
            None => Ok(()),
        }
    }

    /// The last word: the report to stdout where it has no file, else (unless quiet) a summary for a person.
    ///
    /// # Errors
    /// [`Error::Failed`] where stdout takes nothing any more.
    pub fn conclude(&self, report: &Report, guest: Option<GuestReport>) -> Result<(), Error> {
        if self.file.is_none() {
            print_stdout(&json(report, guest)?)
        } else if self.quiet {
            Ok(())
        } else {
            print_stdout(&summary(report))
        }
    }

    /// A sentence for a person; nothing where the command is to be quiet.
    ///
    /// # Errors
    /// [`Error::Failed`] where stdout takes nothing any more.
    pub fn say(&self, sentence: &str) -> Result<(), Error> {
        if self.quiet {
            return Ok(());
        }
        if self.file.is_none() {
            say_stderr(sentence);
            return Ok(());
        }
        print_stdout(&format!("{sentence}\n"))
    }
}

/// Reports a command that failed before the library had a migration to report on; returns the error, for its caller to
/// return. A usage error has no report.
pub fn report_early(out: &ReportOut, role: Role, error: Error) -> Error {
    let Some(ending) = error.ending() else { return error };
    let report = Report::nothing_sent(role, ending, Some(error.to_string()), 0.0);
    for failed in [out.write_file(&report, None), out.conclude(&report, None)]
        .into_iter()
        .filter_map(Result::err)
    {
        tracing::error!("the report is lost: {failed}");
    }
    error
}

fn json(report: &Report, guest: Option<GuestReport>) -> Result<String, Error> {
    let mut text = serde_json::to_string_pretty(&WholeReport { report, guest })
        .map_err(|error| Error::Failed(format!("writing the report as JSON: {error}")))?;
    text.push('\n');
    Ok(text)
}

/// Prints a line to stdout and flushes, quiet or not: for what programs wait for.
///
/// # Errors
/// [`Error::Failed`] where stdout takes nothing any more.
pub fn print_line(line: &str) -> Result<(), Error> {
    print_stdout(&format!("{line}\n"))
}

/// Makes a warning on stderr of a report or sentence that could not be written. For use once a migration has an outcome:
/// that stands, and a guest that is here goes on, whatever becomes of the words about it.
pub fn or_warn(written: Result<(), Error>) {
    if let Err(error) = written {
        say_stderr(format_args!("warning: {error}"));
    }
}

/// Prints to stdout and flushes; a reader that went away is an error, not a panic.
fn print_stdout(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| Error::Failed(format!("writing to stdout: {error}")))
}

fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// What stands in a report's place.
enum Kind {
    /// Nothing, or a file, which the report replaces.
    New,
    /// A character device.
    Device,
    Folder,
    Other,
}

fn kind_of(file: &Path) -> Kind {
    // What cannot be looked at cannot be written either: the write says why.
    match std::fs::metadata(file).map(|meta| meta.file_type()) {
        Ok(kind) if kind.is_char_device() => Kind::Device,
        Ok(kind) if kind.is_dir() => Kind::Folder,
        Ok(kind) if !kind.is_file() => Kind::Other,
        Ok(_) | Err(_) => Kind::New,
    }
}

/// The file that a report is written to before it is renamed.
fn beside(file: &Path) -> std::io::Result<PathBuf> {
    let name = file.file_name().ok_or(std::io::ErrorKind::InvalidInput)?;
    let mut beside = std::ffi::OsString::from(".");
    beside.push(name);
    beside.push(format!(".{}", std::process::id()));
    Ok(folder_of(file).join(beside))
}

fn write_atomically(file: &Path, bytes: &[u8]) -> Result<(), Error> {
    let failed = |error: std::io::Error| Error::Failed(format!("writing the report to {}: {error}", file.display()));
    match kind_of(file) {
        Kind::New => {}
        Kind::Device => {
            let device = std::fs::OpenOptions::new().write(true).open(file);
            return device.and_then(|mut device| device.write_all(bytes)).map_err(failed);
        }
        // It came there since the check.
        Kind::Folder | Kind::Other => return Err(failed(std::io::ErrorKind::AlreadyExists.into())),
    }
    let beside = beside(file).map_err(failed)?;
    let written = std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, file));
    if written.is_err() {
        // The half-written file helps nobody; that it cannot be removed either adds nothing to the error.
        std::fs::remove_file(&beside).ok();
    }
    written.map_err(failed)
}

/// The report for a person.
fn summary(report: &Report) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<11} {value}");
    };
    line("result", report.result.to_string());
    if report.result == Ending::Completed {
        let verify = if report.verify_ms > 0.0 {
            format!(", verify {:.1} ms", report.verify_ms)
        } else {
            String::new()
        };
        line(
            "time",
            format!(
                "total {:.1} ms, downtime {:.1} ms{verify}",
                report.total_ms, report.downtime_ms
            ),
        );
    }
    // Without a page there is nothing to count.
    if report.pages.total == 0 {
        return text;
    }
    line(
        "traffic",
        format!(
            "{} of {} RAM, {} stream{}, {} round{}",
            human_bytes(report.wire_bytes),
            human_bytes(report.ram_bytes),
            report.streams,
            plural(report.streams.into()),
            report.rounds.len(),
            plural(report.rounds.len())
        ),
    );
    let p = &report.pages;
    line(
        "pages",
        format!(
            "{} = {} sent + {} zero + {} hole + {} hinted + {} ballooned + {} filled; {} resent",
            p.total, p.sent, p.zero, p.hole, p.hinted, p.ballooned, p.filled, p.resent
        ),
    );
    let link = &report.link;
    if link.resumed > 0 {
        line(
            "link",
            format!(
                "lost and taken up again {} time{}, {:.0} ms without one, {} sent in vain",
                link.resumed,
                plural(link.resumed as usize),
                link.down_ms,
                human_bytes(link.bytes_again)
            ),
        );
    }
    if let Some(compress) = &report.compress {
        let ratio = if compress.used == "none" {
            String::new()
        } else {
            format!(
                ", {} as {}",
                human_bytes(compress.raw_bytes),
                human_bytes(compress.wire_bytes)
            )
        };
        line("compress", format!("{}{ratio}: {}", compress.used, compress.why));
    }
    // The source asks; a receiver's line could only say that it did not.
    if report.role == Role::Source {
        let asked = if report.balloon.asked { "asked" } else { "not asked" };
        line(
            "balloon",
            format!("{}, {asked}: {}", report.balloon.dialect, report.balloon.why),
        );
    }
    if let Some(verified) = report.verified {
        line("verified", if verified { "yes".to_owned() } else { "NO".to_owned() });
    }
    text
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report::nothing_sent(Role::Source, Ending::Failed, Some("no luck".to_owned()), 0.0)
    }

    fn out(file: Option<PathBuf>) -> ReportOut {
        ReportOut {
            file,
            quiet: true,
            missing: Arc::default(),
        }
    }

    #[test]
    fn the_keys_are_the_contract() {
        let value: serde_json::Value = serde_json::from_str(&json(&report(), None).unwrap()).unwrap();
        let keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        for key in [
            "version",
            "role",
            "result",
            "error",
            "total_ms",
            "setup_ms",
            "hint_ms",
            "precopy_ms",
            "downtime_ms",
            "guest_stall_ms",
            "ram_bytes",
            "wire_bytes",
            "payload_bytes",
            "throughput_bytes_per_s",
            "streams",
            "pages",
            "balloon",
            "rounds",
            "link",
            "compress",
            "verified",
            "verify_ms",
            "verify_ahead_ms",
            "peak_rss_bytes",
        ] {
            assert!(keys.contains(&key), "{key} is missing from {keys:?}");
        }
        assert_eq!(value["role"], "source");
        assert_eq!(value["result"], "failed");
        assert_eq!(value["error"], "no luck");
        assert!(value.get("guest").is_none());
        for key in [
            "total",
            "sent",
            "resent",
            "zero",
            "hole",
            "hinted",
            "ballooned",
            "filled",
            "hinted_then_sent",
        ] {
            assert!(value["pages"][key].is_u64(), "{key}");
        }
    }

    #[test]
    fn the_guests_word_is_added() {
        let guest = GuestReport {
            self_check: Some("passed"),
            pages_checked: 5,
            ticks: 7,
        };
        let value: serde_json::Value = serde_json::from_str(&json(&report(), Some(guest)).unwrap()).unwrap();
        assert_eq!(
            value["guest"],
            serde_json::json!({"self_check": "passed", "pages_checked": 5, "ticks": 7})
        );
        let none = json(&report(), Some(GuestReport::default())).unwrap();
        let value: serde_json::Value = serde_json::from_str(&none).unwrap();
        assert!(value["guest"]["self_check"].is_null());
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("report.json");
        out(Some(file.clone())).write_file(&report(), None).unwrap();
        out(Some(file.clone()))
            .write_file(&report(), Some(GuestReport::default()))
            .unwrap();
        let value: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(value["guest"]["ticks"], 0);
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            1,
            "nothing is left beside it"
        );
    }

    #[test]
    fn what_is_no_file_is_not_replaced() {
        // A link, so that a mistake here replaces that and not the machine's own device.
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("null");
        std::os::unix::fs::symlink("/dev/null", &device).unwrap();
        let null = out(Some(device.clone()));
        null.check().unwrap();
        null.write_file(&report(), None).unwrap();
        assert!(std::fs::symlink_metadata(&device).unwrap().is_symlink());
        let socket = folder.path().join("socket");
        let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let pipe = out(Some(socket));
        assert_eq!(pipe.check().unwrap_err().exit_code(), 2);
        assert!(pipe.write_file(&report(), None).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left");
    }

    #[test]
    fn a_folder_that_is_not_there_is_named_before_and_after() {
        let folder = tempfile::tempdir().unwrap();
        let lost = out(Some(folder.path().join("no/report.json")));
        assert!(lost.check().unwrap_err().to_string().contains("/no"));
        assert!(
            lost.write_file(&report(), None)
                .unwrap_err()
                .to_string()
                .contains("no/report.json")
        );
        out(Some(PathBuf::from("report.json"))).check().unwrap();
        let good = out(Some(folder.path().join("good.json")));
        good.check().unwrap();
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            0,
            "a check leaves nothing"
        );
        // A folder in the report's place: the rename fails, and nothing stays behind.
        let taken = folder.path().join("taken");
        std::fs::create_dir(&taken).unwrap();
        let error = out(Some(taken.clone())).check().unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("is a folder"), "{error}");
        assert!(out(Some(taken)).write_file(&report(), None).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_summary_names_what_matters() {
        let mut report = report();
        assert_eq!(
            summary(&report).trim(),
            "result      failed",
            "nothing was sent, there is nothing to count"
        );
        report.result = Ending::Completed;
        report.verified = Some(true);
        report.pages.total = 1;
        let text = summary(&report);
        for word in ["completed", "downtime", "hinted", "verified", "balloon"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        report.role = Role::Receiver;
        assert!(!summary(&report).contains("balloon "), "the source asks");
    }
}
