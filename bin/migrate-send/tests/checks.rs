//! What a source checks before anything is sent, and guests in files.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use support::{Ended, Running};

/// Nothing listens there: a source must not get so far.
const NOWHERE: &str = "tcp:127.0.0.1:1";
const PAGES: u64 = 1024 + 3;

fn source(folder: &Path, arguments: &[&str]) -> Ended {
    Running::source(folder, NOWHERE, arguments).end()
}

/// A RAM file in which every third page has content, and the free map that calls every ninth page free.
fn image(folder: &Path) -> (PathBuf, PathBuf) {
    let (ram, map) = (folder.join("ram.img"), folder.join("free.map"));
    let mut file = File::create(&ram).unwrap();
    let mut bits = vec![0u8; usize::try_from(PAGES.div_ceil(8)).unwrap()];
    for page in 0..PAGES {
        if page % 3 == 0 {
            file.seek(SeekFrom::Start(page * 4096)).unwrap();
            file.write_all(&[page.to_le_bytes()[0] | 1; 4096]).unwrap();
        }
        if page % 9 == 0 {
            bits[usize::try_from(page / 8).unwrap()] |= 1 << (page % 8);
        }
    }
    file.set_len(PAGES * 4096).unwrap();
    std::fs::write(&map, bits).unwrap();
    (ram, map)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_guest_in_a_file_is_rebuilt_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let (ram, map) = image(folder.path());
    let before = std::fs::read(&ram).unwrap();
    let layout = folder.path().join("layout.json");
    let regions =
        r#"{"page_size": 4096, "regions": [{"start": 0, "bytes": 4194304}, {"start": 4294967296, "bytes": 12288}]}"#;
    std::fs::write(&layout, regions).unwrap();
    let copy = folder.path().join("copy.img");
    for after in ["exit", "run"] {
        let receiving = Running::receiver(folder.path(), &["--ram", text(&copy), "--after", after]);
        let arguments = [
            "--guest",
            "file",
            "--ram",
            text(&ram),
            "--layout",
            text(&layout),
            "--free-map",
            text(&map),
        ];
        let sent = Running::source(
            folder.path(),
            &receiving.address.clone(),
            &[&arguments[..], &["--verify", "--ask", "always"]].concat(),
        );
        let (sent, received) = (sent.end(), receiving.end());
        sent.expect(0);
        received.expect(0);
        assert!(received.report()["guest"]["self_check"].is_null());
        assert_eq!(sent.report()["pages"]["hinted"], PAGES.div_ceil(9));
        let (copy, mut page) = (File::open(&copy).unwrap(), [0; 4096]);
        assert_eq!(copy.metadata().unwrap().len(), PAGES * 4096);
        for number in (0..PAGES).filter(|n| n % 9 != 0) {
            copy.read_exact_at(&mut page, number * 4096).unwrap();
            let expected = if number % 3 == 0 {
                number.to_le_bytes()[0] | 1
            } else {
                0
            };
            assert!(page.iter().all(|&byte| byte == expected), "page {number}");
        }
    }
    assert_eq!(std::fs::read(&ram).unwrap(), before, "the source's file is as it was");
}

#[test]
fn a_ram_file_that_will_not_do_is_refused_before_anything_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let (ram, map) = image(folder.path());
    let layout = folder.path().join("layout.json");
    std::fs::write(
        &layout,
        r#"{"page_size": 4096, "regions": [{"start": 0, "bytes": 8388608}]}"#,
    )
    .unwrap();
    let file = ["--guest", "file", "--ram"];
    let short = source(
        folder.path(),
        &[&file[..], &[text(&ram), "--layout", text(&layout)]].concat(),
    );
    short.expect(3).says("8388608");
    assert_eq!(short.report()["result"], "refused");
    let gone = folder.path().join("gone.img");
    source(folder.path(), &[&file[..], &[text(&gone)]].concat())
        .expect(3)
        .says("gone.img");
    source(folder.path(), &[&file[..], &[text(folder.path())]].concat()).expect(3);
    std::fs::write(&map, [0; 5]).unwrap();
    source(
        folder.path(),
        &[&file[..], &[text(&ram), "--free-map", text(&map)]].concat(),
    )
    .expect(3)
    .says("free.map");
    let writer = OpenOptions::new().write(true).open(&ram).unwrap();
    writer.lock().unwrap();
    source(folder.path(), &[&file[..], &[text(&ram)]].concat())
        .expect(3)
        .says("in use by another process");
}

#[test]
fn a_ram_file_that_shrinks_meanwhile_fails_in_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let ram = folder.path().join("ram.img");
    let file = File::create(&ram).unwrap();
    for page in 0..8192 {
        file.write_all_at(&[7; 4096], page * 4096).unwrap();
    }
    let copy = folder.path().join("copy.img");
    let receiving = Running::receiver(folder.path(), &["--ram", text(&copy), "--after", "exit"]);
    let slow = [
        "--guest",
        "file",
        "--ram",
        text(&ram),
        "--max-bandwidth",
        "24Mbit",
        "--compress",
        "none",
    ];
    let sending = Running::source(folder.path(), &receiving.address.clone(), &slow);
    while std::fs::metadata(&copy).map_or(0, |meta| std::os::unix::fs::MetadataExt::blocks(&meta)) == 0 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    file.set_len(4096).unwrap();
    let (sent, received) = (sending.end(), receiving.end());
    sent.expect(4);
    received.expect(4);
    let error = sent.report()["error"].as_str().unwrap();
    assert!(
        received.report()["error"].as_str().unwrap().contains(error) || !error.is_empty(),
        "{error}"
    );
}

#[test]
fn nonsense_is_a_usage_error_without_a_report() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, word) in [
        (&["--guest", "linux"][..], "--kernel"),
        (&["--control", "/run/guest", "--memory", "1G"], "--memory"),
        (&["--send-when", "login:"], "--send-when"),
        (&["--ask", "always", "--balloon", "off"], "--ask always"),
        (&["--balloon", "off", "--ballooned", "1G"], "--ballooned"),
        (&["--memory", "8Q"], "'8Q'"),
        (&["--streams", "65"], "'65'"),
        (&["--skip", "none,free"], "--skip"),
        (&["--guest", "file"], "--ram"),
        (&["--nonsense"], "--nonsense"),
    ] {
        let ended = source(folder.path(), arguments);
        ended.expect(2).says(word);
        assert!(ended.report.is_none());
    }
    let ended = Running::source(folder.path(), "nowhere", &[]).end();
    ended.expect(2).says("tcp:HOST:PORT");
    let lost = folder.path().join("no");
    source(&lost, &[]).expect(2).says("--report");
}

#[test]
fn a_refused_connection_leaves_the_guest_unharmed() {
    let folder = tempfile::tempdir().unwrap();
    let ended = source(folder.path(), &["--memory", "16M", "--used", "1M"]);
    ended.expect(4).unharmed().says("Connection refused");
    assert_eq!(ended.report()["result"], "failed");
}

#[test]
fn a_guest_larger_than_the_host_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    source(folder.path(), &["--memory", "4T", "--used", "4T"])
        .expect(3)
        .says("available");
}

#[test]
fn a_guest_that_was_handed_over_counts_though_its_report_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let receiver = Running::receiver(folder.path(), &[]);
    let arguments = [
        "--memory",
        "32M",
        "--used",
        "24M",
        "--max-bandwidth",
        "64Mbit",
        "--verbose",
    ];
    let source = Running::source(folder.path(), &receiver.address.clone(), &arguments);
    source.wait_for_stderr("connected");
    // It comes in the report's way after the check.
    std::fs::create_dir(folder.path().join("source.json")).unwrap();
    source.end().expect(8).says("warning: writing the report");
    receiver.end().expect(0);
}
