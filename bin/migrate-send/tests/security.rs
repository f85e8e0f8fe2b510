//! TLS, token and plain TCP as an operator has them: exit codes, and a sentence at both ends.
#![allow(clippy::unwrap_used)]

mod support;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, date_time_ymd,
};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use support::{Ended, Running};

const SMALL: [&str; 4] = ["--memory", "32M", "--used", "8M"];

struct Ca {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    fn new(folder: &Path, name: &str) -> Ca {
        let folder = folder.join(name);
        std::fs::create_dir(&folder).unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        std::fs::write(folder.join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Ca {
            folder,
            issuer: Issuer::new(params, key),
        }
    }

    /// The flags of a side with a certificate for these names.
    fn side(&self, name: &str, names: &[&str], until: i32) -> Vec<String> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(until, 2, 3);
        let key = KeyPair::generate().unwrap();
        let (cert_at, key_at) = (self.file(&format!("{name}.pem")), self.file(&format!("{name}.key")));
        std::fs::write(&cert_at, params.signed_by(&key, &self.issuer).unwrap().pem()).unwrap();
        std::fs::write(&key_at, key.serialize_pem()).unwrap();
        tls(&cert_at, &key_at, &self.file("ca.pem"))
    }

    fn file(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().to_owned()
    }
}

fn tls(cert: &str, key: &str, ca: &str) -> Vec<String> {
    ["--tls-cert", cert, "--tls-key", key, "--tls-ca", ca]
        .map(str::to_owned)
        .to_vec()
}

fn send(folder: &Path, to: &str, flags: &[String]) -> Ended {
    let mut arguments = SMALL.to_vec();
    arguments.extend(flags.iter().map(String::as_str));
    Running::source(folder, to, &arguments).end()
}

fn receive(folder: &Path, flags: &[String]) -> Running {
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    Running::receiver(folder, &flags)
}

fn words(list: &[&str]) -> Vec<String> {
    list.iter().map(|&word| word.to_owned()).collect()
}

/// Wrong sources are refused with a sentence at both ends, and the right one is served by the same receiver.
#[test]
fn wrong_sources_are_refused_at_both_ends_and_the_right_one_gets_in() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (ca, other) = (Ca::new(folder, "ours"), Ca::new(folder, "theirs"));
    let there = [
        ca.side("there", &["127.0.0.1"], 2100),
        words(&["--allow-peer", "here.example"]),
    ]
    .concat();
    let receiving = receive(folder, &there);
    let to = receiving.address.clone();
    let mut stranger = other.side("stranger", &["here.example"], 2100);
    stranger[5] = ca.file("ca.pem");
    for (flags, here, there) in [
        (stranger, "did not sign it", "is not signed by a CA of --tls-ca"),
        (
            ca.side("old", &["here.example"], 2001),
            "expired",
            "certificate expired on 2001-02-03",
        ),
        (
            ca.side("else", &["else.example"], 2100),
            "--allow-peer",
            "is for else.example",
        ),
        (
            Vec::new(),
            "takes TLS only",
            "a source is refused: this receiver takes TLS only",
        ),
    ] {
        let ended = send(folder, &to, &flags);
        ended.expect(3).unharmed();
        assert!(ended.err.contains(here), "{}", ended.err);
        receiving.wait_for_stderr(there);
    }
    send(folder, &to, &ca.side("here", &["here.example"], 2100)).expect(0);
    receiving.end().expect(0);
}

#[test]
fn a_wrong_receiver_gets_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ca = Ca::new(folder, "ours");
    let receiving = receive(folder, &ca.side("there", &["there.example"], 2100));
    let to = receiving.address.clone();
    let here = ca.side("here", &["here.example"], 2100);
    let ended = send(folder, &to, &here);
    ended.expect(3).unharmed();
    assert!(
        ended.err.contains("is for there.example") || ended.err.contains("there.example"),
        "{}",
        ended.err
    );
    receiving.wait_for_stderr("it expects another name in it");
    send(folder, &to, &[here, words(&["--tls-name", "there.example"])].concat()).expect(0);
    receiving.end().expect(0);
    // One without TLS.
    let receiving = receive(folder, &[]);
    let ended = send(folder, &receiving.address, &ca.side("again", &["here.example"], 2100));
    ended.expect(3).unharmed();
    assert!(ended.err.contains("takes no TLS"), "{}", ended.err);
    receiving.wait_for_stderr("it speaks TLS, and this receiver was started without");
    receiving.signal(rustix::process::Signal::TERM);
    receiving.end().expect(5);
}

#[test]
fn files_that_cannot_be_used_are_a_usage_error_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ca = Ca::new(folder, "ours");
    ca.side("a", &["a"], 2100);
    ca.side("b", &["b"], 2100);
    let (cert, key, root) = (ca.file("a.pem"), ca.file("a.key"), ca.file("ca.pem"));
    std::fs::write(ca.file("text"), "no certificate").unwrap();
    for (flags, word) in [
        (tls(&ca.file("none"), &key, &root), "none cannot be read"),
        (tls(&ca.file("text"), &key, &root), "text has no certificate in PEM"),
        (tls(&cert, &ca.file("text"), &root), "text has no private key in PEM"),
        (
            tls(&cert, &ca.file("b.key"), &root),
            "b.key is not the key of --tls-cert",
        ),
        (tls(&cert, &key, &root)[..4].to_vec(), "--tls-ca is missing"),
        (words(&["--allow-peer", "x"]), "--allow-peer goes with"),
        (words(&["--tls-name", "x"]), "--tls-name goes with"),
    ] {
        let ended = send(folder, "tcp:127.0.0.1:1", &flags);
        ended.expect(2);
        assert!(ended.err.contains(word), "{word}: {}", ended.err);
    }
}

#[test]
fn a_token_with_a_newline_is_the_same_and_one_that_others_may_read_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let token = |name: &str, content: &str, mode: u32| {
        let path = folder.join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        words(&["--token-file", path.to_str().unwrap()])
    };
    let receiving = receive(folder, &token("there", "a secret of both\n", 0o600));
    let to = receiving.address.clone();
    for (flags, code, word) in [
        (token("open", "a secret of both", 0o644), 2, "chmod 600"),
        (token("short", "secret\n", 0o600), 2, "6 bytes"),
        (token("wrong", "another secret!!", 0o600), 3, "another token"),
        (Vec::new(), 3, "asks for a token"),
    ] {
        let ended = send(folder, &to, &flags);
        ended.expect(code);
        assert!(ended.err.contains(word), "{word}: {}", ended.err);
    }
    receiving.wait_for_stderr("its token is another one");
    receiving.wait_for_stderr("this receiver asks for a token");
    send(folder, &to, &token("here", "a secret of both\r\n", 0o600)).expect(0);
    receiving.end().expect(0);
}

#[test]
fn plain_tcp_beyond_this_machine_is_refused_unless_insecure_which_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ended = send(folder, "tcp:192.0.2.1:9", &[]);
    ended.expect(2);
    assert!(
        ended.err.contains("--tls-cert") && ended.err.contains("--insecure"),
        "{}",
        ended.err
    );
    let listen = ["--listen", "tcp:0.0.0.0:0"];
    let ended = Running::command("migrate-recv", &listen).end();
    ended.expect(2);
    assert!(ended.err.contains("--insecure"), "{}", ended.err);
    let receiving = Running::receiver(folder, &[&listen[..], &["--insecure"]].concat());
    receiving.wait_for_stderr("warning: --insecure");
    let port = receiving.address.rsplit(':').next().unwrap().to_owned();
    send(folder, &format!("tcp:127.0.0.1:{port}"), &[]).expect(0);
    receiving.end().expect(0);
}
