//! Whole migrations over real sockets: RAM, state and figures arrive.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use machine::GuestRam;
use pageferry::{Ask, Ending, Finished, Migration, SkipSet};
use pages::{Layout, Pfn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn assert_completed(source: &Finished, destination: &Finished) {
    assert_eq!(source.outcome.ending, Ending::Completed, "{:?}", source.outcome.error);
    assert_eq!(
        destination.outcome.ending,
        Ending::Completed,
        "{:?}",
        destination.outcome.error
    );
    for finished in [source, destination] {
        let report = &finished.outcome.report;
        assert!(report.pages.adds_up(), "{report:?}");
        assert!(report.peak_rss_bytes > 0 && report.total_ms > 0.0 && report.throughput_bytes_per_s > 0.0);
        assert!(finished.guest.is_some());
    }
    assert_eq!(source.outcome.report.pages, destination.outcome.report.pages);
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_arrive_over_one_two_and_four_streams() {
    for streams in [1, 2, 4] {
        let layout = Layout::flat(5000).unwrap();
        let (guest, probe) = busy_guest(&layout, None);
        let mut options = send_options(streams);
        options.source.verify = true;
        let (source, destination, there) = migrate(guest, options, receive_options()).await;
        assert_completed(&source, &destination);
        let there = there.unwrap();
        assert_same_ram(&probe, &there, &[]);
        assert!(there.is_running() && !probe.is_running());
        assert_eq!(there.inner.restored.lock().unwrap().as_ref().unwrap().sections.len(), 2);
        let report = source.outcome.report;
        assert_eq!(report.verified, Some(true));
        // Under huge pages, what was never touched beside what was is there, and zero.
        assert_eq!((report.pages.sent, report.pages.zero + report.pages.hole), (2500, 2500));
        assert!(report.wire_bytes > report.payload_bytes && report.payload_bytes == 2500 * 4096);
    }
}

/// A device whose state is larger than a control frame.
#[tokio::test(flavor = "multi_thread")]
async fn large_state_arrives_whole() {
    let (guest, probe) = busy_guest(&Layout::flat(100).unwrap(), None);
    probe.inner.large_state.store(3 << 20, Ordering::SeqCst);
    let (source, destination, there) = migrate(guest, send_options(1), receive_options()).await;
    assert_completed(&source, &destination);
    let state = there.unwrap().inner.restored.lock().unwrap().take().unwrap();
    let data: Vec<u8> = (0..3u64 << 20).map(|i| i.to_le_bytes()[1]).collect();
    assert_eq!(state.sections.len(), 3);
    assert!(state.sections[2].name == "gpu" && state.sections[2].data == data);
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_arrive_over_a_unix_socket() {
    let layout = Layout::flat(3000).unwrap();
    let (guest, probe) = busy_guest(&layout, None);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ferry.sock");
    // A dead receiver's file is in the way.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let (receiving, address, made) = receiver_at(&format!("unix:{}", path.display()), receive_options(), |_| {});
    let sending = Migration::send(guest, &address, send_options(2));
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_completed(&source, &destination);
    assert_same_ram(&probe, &made.lock().unwrap()[0], &[]);
    assert!(!path.exists(), "the socket's file is left behind");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_skipped_where_nothing_may_be() {
    let layout = Layout::flat(600).unwrap();
    let (guest, probe) = busy_guest(&layout, None);
    let mut options = send_options(1);
    options.source.skip = SkipSet::NONE;
    let (source, destination, there) = migrate(guest, options, receive_options()).await;
    assert_completed(&source, &destination);
    assert_eq!(source.outcome.report.pages.sent, 600);
    assert_same_ram(&probe, &there.unwrap(), &[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_writes_all_the_time_arrives_whole() {
    let layout = Layout::flat(2000).unwrap();
    let (guest, probe) = busy_guest(&layout, None);
    let stop = Arc::new(AtomicBool::new(false));
    let (writer, stopped) = (probe.clone(), Arc::clone(&stop));
    let writing = std::thread::spawn(move || {
        let mut n = 0u64;
        while !stopped.load(Ordering::SeqCst) {
            n = n.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            if !writer.guest_writes((n >> 33) % 2000, n.to_le_bytes()[6]) {
                break;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    });
    let mut options = send_options(2);
    options.source.verify = true;
    options.max_bandwidth = Some(100 << 20);
    let (source, destination, there) = migrate(guest, options, receive_options()).await;
    stop.store(true, Ordering::SeqCst);
    writing.join().unwrap();
    assert_completed(&source, &destination);
    assert!(source.outcome.report.rounds.len() >= 2);
    assert!(source.outcome.report.pages.resent > 0);
    assert_same_ram(&probe, &there.unwrap(), &[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_01_the_second_region_alone_is_dirty() {
    let layout = Layout::new(vec![r(0, 67), r(1000, 131)]).unwrap();
    let (guest, probe) = blank_guest(&layout, None);
    for pfn in 1000..1131u64 {
        probe.memory.write(pfn * 4096, &pfn.to_le_bytes()).unwrap();
    }
    probe.inner.running.store(true, Ordering::SeqCst);
    let (source, destination, there) = migrate(guest, send_options(2), receive_options()).await;
    assert_completed(&source, &destination);
    assert_eq!(source.outcome.report.pages.sent, 131);
    assert_same_ram(&probe, &there.unwrap(), &[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_17_the_last_page_of_an_odd_count() {
    let layout = Layout::flat(1027).unwrap();
    let (guest, probe) = blank_guest(&layout, None);
    probe.memory.write(1026 * 4096, &[3; 4096]).unwrap();
    let (source, destination, there) = migrate(guest, send_options(1), receive_options()).await;
    assert_completed(&source, &destination);
    assert_same_ram(&probe, &there.unwrap(), &[]);
    assert_eq!(source.outcome.report.pages.sent, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_06_a_paused_guest_arrives_paused() {
    let layout = Layout::flat(300).unwrap();
    let (guest, probe) = busy_guest(&layout, None);
    probe.inner.running.store(false, Ordering::SeqCst);
    let (source, destination, there) = migrate(guest, send_options(1), receive_options()).await;
    assert_completed(&source, &destination);
    let there = there.unwrap();
    assert!(!there.is_running() && there.inner.resumes.load(Ordering::SeqCst) == 0);
    assert_same_ram(&probe, &there, &[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn free_pages_stay_behind() {
    let layout = Layout::flat(40_000).unwrap();
    let free = Free {
        ranges: vec![r(10_000, 20_000)],
        poison: None,
        ballooned: vec![r(35_000, 100)],
        silent: false,
    };
    let (guest, probe) = busy_guest(&layout, Some(free));
    let mut options = send_options(2);
    options.source.verify = true;
    options.source.ask = Ask::Always;
    let (source, destination, there) = migrate(guest, options, receive_options()).await;
    assert_completed(&source, &destination);
    let report = source.outcome.report;
    assert!(report.balloon.asked, "{}", report.balloon.why);
    assert_eq!((report.pages.hinted, report.pages.ballooned), (20_000, 100));
    let there = there.unwrap();
    assert_same_ram(&probe, &there, &[r(10_000, 20_000), r(35_000, 100)]);
    let mut page = [1; 4096];
    there.memory.read_page(Pfn(10_003), &mut page).unwrap();
    assert_eq!(page, [0; 4096]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_34_poisoned_free_pages_read_as_poison() {
    let layout = Layout::flat(20_000).unwrap();
    let free = Free {
        ranges: vec![r(100, 15_000)],
        poison: Some(0xAAAA_AAAA),
        ballooned: vec![],
        silent: false,
    };
    let (guest, probe) = busy_guest(&layout, Some(free));
    let mut options = send_options(1);
    options.source.ask = Ask::Always;
    let (source, destination, there) = migrate(guest, options, receive_options()).await;
    assert_completed(&source, &destination);
    assert_eq!(source.outcome.report.pages.filled, 15_000);
    let there = there.unwrap();
    let mut page = [0; 4096];
    for pfn in [100, 7000, 15_099] {
        there.memory.read_page(Pfn(pfn), &mut page).unwrap();
        assert_eq!(page, [0xAA; 4096]);
    }
    assert_same_ram(&probe, &there, &[r(100, 15_000)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_is_not_known_to_be_zero_is_zeroed() {
    let layout = Layout::flat(400).unwrap();
    let (guest, probe) = busy_guest(&layout, None);
    let mut options = receive_options();
    options.destination.memory_is_zero = false;
    let listener = pageferry::Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_address().clone();
    let made = Made::default();
    let makes = Arc::clone(&made);
    let receiving = Migration::receive(listener, options, move |incoming| {
        let (guest, probe) = blank_guest(&incoming.config.layout, None);
        probe.memory.fill(r(0, 400), 0xDEAD_BEEF).unwrap();
        makes.lock().unwrap().push(probe);
        Ok(guest)
    });
    let sending = Migration::send(guest, &address, send_options(1));
    let (source, destination) = guarded(async { tokio::join!(sending.finish(), receiving.finish()) }).await;
    assert_completed(&source, &destination);
    assert_same_ram(&probe, &made.lock().unwrap()[0], &[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_arrive_over_vsock() {
    let address: pageferry::Address = "vsock:1:49152".parse().unwrap();
    let Ok(listener) = pageferry::Listener::bind(&address) else {
        println!("SKIPPED: vsock: this system makes no vsock sockets on the loopback context");
        return;
    };
    let receiving = Migration::receive(listener, receive_options(), |incoming| {
        Ok(blank_guest(&incoming.config.layout, None).0)
    });
    let (guest, _) = busy_guest(&Layout::flat(300).unwrap(), None);
    let sending = Migration::send(guest, &address, send_options(1));
    let source = guarded(sending.finish()).await;
    receiving.cancel();
    let destination = guarded(receiving.finish()).await;
    match &source.outcome.error {
        Some(error) if error.contains("cannot connect") => println!("SKIPPED: vsock: {error}"),
        _ => assert_completed(&source, &destination),
    }
}
