//! A migration whose link is cut five times, in equal pieces.

use crate::cell::{receiver, unharmed};
use crate::proxy::Proxy;
use crate::support::Running;

/// How often the link is cut.
const CUTS: u64 = 5;
/// A page's bytes.
const PAGE_BYTES: u64 = 4096;

/// Sends a guest with so much RAM, half of it in use, and holds it whole at the other end; says what that cost.
pub(crate) fn cut_five_times(memory_bytes: u64, window: &str) -> String {
    let used_bytes = memory_bytes / 2;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("there.sock");
    let receiver = receiver(&folder.path().join("first"), &socket, "tcp:127.0.0.1:0", window);
    // A fifth of what the guest uses reads as zero, and is not sent.
    let after = (1..=CUTS).map(|i| used_bytes / 4 * 3 / (CUTS + 1) * i);
    let proxy = Proxy::cutting(&receiver.address, after);
    let (memory, used) = (memory_bytes.to_string(), used_bytes.to_string());
    let guest = ["--memory", &memory, "--used", &used, "--workload", "churn:200"];
    let how = [
        "--streams",
        "4",
        "--compress",
        "none",
        "--verify",
        "--resume-window",
        window,
    ];
    let sent = Running::source(folder.path(), &proxy.address, &[&guest[..], &how].concat()).end();
    sent.expect(0);
    assert_eq!(proxy.confused(), None);
    assert_eq!(proxy.cuts_left(), 0, "it was not cut often enough");
    let report = sent.report();
    assert_eq!(report["verified"], true);
    let link = &report["link"];
    assert_eq!(link["resumed"], CUTS, "{report}");
    let (again, wire) = (
        link["bytes_again"].as_u64().unwrap(),
        report["wire_bytes"].as_u64().unwrap(),
    );
    // What is under way fits into buffers and batches: with a small guest and a busy machine, that can be all since the last
    // cut. Were nothing kept of what arrived before, it would be two and a half times the guest.
    let once = wire.saturating_sub(again);
    assert!(again > 0 && again < 2 * once, "{again} of {wire} bytes were sent again");
    format!(
        "0 | 0 | receiver | equal, {}; {:.1} MiB RAM sent, resumed {}x, {:.1} MiB again, down {:.0} ms, total {:.0} ms",
        unharmed(receiver, &socket),
        (report["pages"]["sent"].as_u64().unwrap() * PAGE_BYTES) as f64 / f64::from(1 << 20),
        link["resumed"],
        again as f64 / f64::from(1 << 20),
        link["down_ms"].as_f64().unwrap(),
        report["total_ms"].as_f64().unwrap(),
    )
}
