//! Links that harm by themselves: two network namespaces, and a link between them that is slow, loses packets, or is down
//! for a while. That takes root and ip(8); where there is neither, these cells are skipped.

use crate::cell::{HANG, receiver, send, unharmed};
use crate::host::{answers, ask, state};
use crate::proxy::poll;
use crate::support::Running;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::json;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Where the receiver listens.
const THERE: &str = "10.86.0.2";
/// A guest that writes less than any of these links carries.
const GUEST: [&str; 8] = [
    "--memory",
    "64M",
    "--used",
    "16M",
    "--aged",
    "24M",
    "--workload",
    "churn:200",
];
/// How it is sent.
const SEND: [&str; 7] = ["--streams", "2", "--timeout", "20s", "--on-timeout", "stop", "--verify"];
/// The relay for links that this kernel cannot make.
const RELAY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/lib/bench/link.c");

/// Links made so far: their names differ.
static MADE: AtomicUsize = AtomicUsize::new(0);

/// What kind of link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The kernel's, with 100 Mbit/s.
    Slow,
    /// With 40 ms there and back, one packet in 200 lost.
    Lossy,
}

/// Two namespaces with a link between them.
pub(crate) struct Link {
    names: [String; 2],
    relay: Option<Child>,
    /// Of the relay's program.
    _folder: tempfile::TempDir,
}

impl Link {
    /// Makes one, or says why that cannot be done here.
    pub(crate) fn make(kind: Kind) -> Result<Link, String> {
        let number = MADE.fetch_add(1, Ordering::SeqCst);
        let unique = format!("pf-matrix-{}-{number}", std::process::id());
        let mut link = Link {
            names: [format!("{unique}-a"), format!("{unique}-b")],
            relay: None,
            _folder: tempfile::tempdir().unwrap(),
        };
        for name in &link.names {
            run("ip", &["netns", "add", name])?;
            run("ip", &["-n", name, "link", "set", "lo", "up"])?;
        }
        let devices = match kind {
            Kind::Slow => link.by_kernel()?,
            Kind::Lossy => link.by_relay()?,
        };
        let addresses = [("10.86.0.1", THERE), (THERE, "10.86.0.1")];
        for ((name, device), (own, other)) in link.names.iter().zip(devices).zip(addresses) {
            run("ip", &["-n", name, "address", "add", own, "peer", other, "dev", device])?;
            run("ip", &["-n", name, "link", "set", device, "up"])?;
        }
        Ok(link)
    }

    fn by_kernel(&mut self) -> Result<[&'static str; 2], String> {
        let [a, b] = &self.names;
        run(
            "ip",
            &[
                "link", "add", "pfm0", "netns", a, "type", "veth", "peer", "name", "pfm1", "netns", b,
            ],
        )?;
        for (name, device) in [(a, "pfm0"), (b, "pfm1")] {
            let bucket = ["rate", "100mbit", "burst", "256kb", "latency", "50ms"];
            run(
                "tc",
                &[&["-n", name, "qdisc", "add", "dev", device, "root", "tbf"], &bucket[..]].concat(),
            )?;
        }
        Ok(["pfm0", "pfm1"])
    }

    fn by_relay(&mut self) -> Result<[&'static str; 2], String> {
        let program = self._folder.path().join("link");
        let program = program.to_str().unwrap();
        run("cc", &["-O2", "-o", program, RELAY])?;
        let [a, b] = &self.names;
        // 1 Gbit/s, 20 ms each way.
        let mut relay = Command::new(program);
        relay
            .args([a, b, "125000000", "20000000", "200"])
            .stdout(Stdio::piped());
        let mut relay = relay.spawn().map_err(|e| e.to_string())?;
        let mut said = String::new();
        let mut out = std::io::BufReader::new(relay.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut out, &mut said).unwrap();
        self.relay = Some(relay);
        if said.trim() == "ready" {
            Ok(["pfb0", "pfb0"])
        } else {
            Err(said)
        }
    }

    /// Does something as seen from one end: what it starts is there too.
    fn inside<T: Send>(&self, end: usize, what: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/run/netns/{}", self.names[end])).unwrap();
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                what()
            });
            inside.join().unwrap()
        })
    }

    /// Takes the link away for a while.
    fn down_for(&self, time: Duration) {
        let set = |state| run("ip", &["-n", &self.names[0], "link", "set", "pfm0", state]).unwrap();
        set("down");
        std::thread::sleep(time);
        set("up");
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(relay) = &mut self.relay {
            // It may have ended by itself, if it could not begin.
            let _ = relay.kill();
            let _ = relay.wait();
        }
        for name in &self.names {
            // One that was not made cannot be deleted.
            let _ = run("ip", &["netns", "delete", name]);
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{program} {}: {}", arguments.join(" "), said.trim())),
    }
}

/// A guest at one end of a link, and a receiver at the other.
pub(crate) struct Ends<'a> {
    link: &'a Link,
    folder: tempfile::TempDir,
    host: Running,
    receiver: Running,
}

impl<'a> Ends<'a> {
    pub(crate) fn new(link: &'a Link, window: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let host = link.inside(0, || Running::host(&folder.path().join("host.sock"), &GUEST));
        let (own, socket) = (folder.path().join("first"), folder.path().join("there.sock"));
        let receiver = link.inside(1, || receiver(&own, &socket, &format!("tcp:{THERE}:0"), window));
        Ends {
            link,
            folder,
            host,
            receiver,
        }
    }

    fn send(&self, name: &str, to: &str, how: &[&str], window: &str) -> Running {
        let socket = self.folder.path().join("host.sock");
        let how = [&SEND[..], how, &["--insecure", "--resume-window", window]].concat();
        self.link
            .inside(0, || send(&self.folder.path().join(name), &socket, to, &how))
    }

    /// A migration to its end over the link as it is.
    pub(crate) fn cross(self) -> String {
        let sent = self.send("sent", &self.receiver.address, &[], "0s").end();
        sent.expect(0);
        self.host.end().expect(0);
        let there = self.folder.path().join("there.sock");
        row(0, 0, "receiver", &format!("equal, {}", unharmed(self.receiver, &there)))
    }

    /// A migration whose link is down for a while in the middle.
    pub(crate) fn cross_with_a_gap(self, gap: Duration, window: &str) -> String {
        let slowly = ["--max-bandwidth", "24Mbit", "--compress", "none"];
        let sending = self.send("sent", &self.receiver.address, &slowly, window);
        let host = self.folder.path().join("host.sock");
        poll(HANG, || pages_cross(&host).then_some(())).expect("no page crosses");
        self.link.down_for(gap);
        let sent = sending.end();
        let there = self.folder.path().join("there.sock");
        if window != "0s" {
            sent.expect(0);
            self.host.end().expect(0);
            return row(0, 0, "receiver", &format!("equal, {}", unharmed(self.receiver, &there)));
        }
        sent.expect(6);
        let address = self.receiver.address.clone();
        self.receiver.end().expect(6);
        assert_eq!(state(&host).as_deref(), Some("running"));
        assert!(answers(&host), "the guest at the source does nothing");
        let own = self.folder.path().join("second");
        let again = self.link.inside(1, || receiver(&own, &there, &address, "0s"));
        let socket = self.folder.path().join("host.sock");
        let how = [&SEND[..], &["--resume-window", "0s", "--insecure"]].concat();
        let sent = self
            .link
            .inside(0, || send(&self.folder.path().join("again"), &socket, &address, &how));
        sent.end().expect(0);
        self.host.end().expect(0);
        row(6, 6, "source", &format!("again: equal, {}", unharmed(again, &there)))
    }
}

fn row(source: i32, receiver: i32, runs: &str, ram: &str) -> String {
    format!("{source} | {receiver} | {runs} | {}", ram)
}

fn pages_cross(host: &Path) -> bool {
    let progress = ask(host, "progress", &json!({}));
    matches!(progress, Some(Ok(progress)) if progress["progress"]["sent_pages"].as_u64() > Some(100))
}
