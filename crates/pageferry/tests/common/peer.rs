//! Peers that speak the bytes themselves, for whatever a real one would never do.

use pageferry::Address;
use pages::Layout;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;
use wire::{ConnectionRole, Hello, Message, Preamble, PreambleReply, SessionId, VersionRange, frame};

/// What these peers speak, unless they are told otherwise: what every version has.
pub const V1: VersionRange = VersionRange { min: 1, max: 1 };

pub fn preamble(role: ConnectionRole) -> Preamble {
    Preamble {
        versions: V1,
        session: SessionId([5; 16]),
        role,
    }
}

pub fn dial(address: &Address) -> TcpStream {
    let Address::Tcp { host, port } = address else {
        panic!("not TCP")
    };
    let stream = TcpStream::connect((host.as_str(), *port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Opens a connection and takes the answer to its preamble.
pub fn open(address: &Address, role: ConnectionRole) -> TcpStream {
    open_as(address, role, 1)
}

/// The same, as a peer that speaks `version` alone.
pub fn open_as(address: &Address, role: ConnectionRole, version: u16) -> TcpStream {
    let mut stream = dial(address);
    let versions = VersionRange {
        min: version,
        max: version,
    };
    let preamble = Preamble {
        versions,
        ..preamble(role)
    };
    stream.write_all(&preamble.encode()).unwrap();
    let mut reply = [0; wire::REPLY_BYTES];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(PreambleReply::decode(&reply).unwrap().version, version);
    stream
}

pub fn hello(layout: &Layout, streams: u16) -> Message {
    Message::Hello(Hello {
        config: super::config(layout),
        running: true,
        streams,
        verify: false,
        dry_run: false,
    })
}

pub fn say(stream: &mut impl Write, message: &Message) {
    stream.write_all(&frame::encode(message).unwrap()).unwrap();
}

/// The next message that is no ping; `None` at the end.
pub fn hear(stream: &mut impl Read) -> Option<Message> {
    loop {
        let mut header = [0; frame::HEADER_BYTES];
        stream.read_exact(&mut header).ok()?;
        let header = frame::decode_header(&header).unwrap();
        let mut payload = vec![0; header.payload_bytes()];
        stream.read_exact(&mut payload).ok()?;
        match frame::decode_payload(&header, &payload).unwrap() {
            Message::Ping => {}
            message => return Some(message),
        }
    }
}

/// A receiver for one source, driven by the test from a thread.
pub struct FakeReceiver {
    listener: TcpListener,
    streams: Vec<TcpStream>,
    versions: VersionRange,
    pub control: Option<TcpStream>,
}

impl FakeReceiver {
    pub fn bind() -> (Self, Address) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let fake = FakeReceiver {
            listener,
            streams: Vec::new(),
            versions: V1,
            control: None,
        };
        (fake, format!("tcp:127.0.0.1:{port}").parse().unwrap())
    }

    /// Takes the control connection and `data` data connections. What comes on those is thrown away.
    pub fn accept(&mut self, data: usize) {
        self.accept_unread(data);
        for stream in &self.streams {
            let mut sink = stream.try_clone().unwrap();
            std::thread::spawn(move || std::io::copy(&mut sink, &mut std::io::sink()));
        }
    }

    /// The same as a receiver that speaks `version` alone.
    pub fn accept_as(&mut self, data: usize, version: u16) {
        self.versions = VersionRange {
            min: version,
            max: version,
        };
        self.accept(data);
    }

    /// The same, but what comes on those is not read.
    pub fn accept_unread(&mut self, data: usize) {
        for _ in 0..=data {
            let (mut stream, _) = self.listener.accept().unwrap();
            let mut bytes = [0; wire::PREAMBLE_BYTES];
            stream.read_exact(&mut bytes).unwrap();
            let preamble = Preamble::decode(&bytes).unwrap();
            stream
                .write_all(&PreambleReply::answer(self.versions, preamble.versions).encode())
                .unwrap();
            match preamble.role {
                ConnectionRole::Control => self.control = Some(stream),
                ConnectionRole::Data { .. } => self.streams.push(stream),
            }
        }
    }

    pub fn hear(&mut self) -> Option<Message> {
        hear(self.control.as_mut().unwrap())
    }

    /// Hears until a message for which `until` holds.
    pub fn hear_until(&mut self, until: impl Fn(&Message) -> bool) -> Option<Message> {
        loop {
            let message = self.hear()?;
            if until(&message) {
                return Some(message);
            }
        }
    }

    pub fn say(&mut self, message: &Message) {
        say(self.control.as_mut().unwrap(), message);
    }

    /// Pings until the source gives up, and returns its word on that.
    pub fn ping_until_abort(mut self) -> Option<Message> {
        let mut pings = self.control.as_ref().unwrap().try_clone().unwrap();
        let ping = frame::encode(&Message::Ping).unwrap();
        std::thread::spawn(move || {
            while pings.write_all(&ping).is_ok() {
                std::thread::sleep(Duration::from_millis(40));
            }
        });
        self.hear_until(|message| matches!(message, Message::Abort { .. }))
    }

    /// Dies: all connections at once.
    pub fn die(self) {
        for stream in self.streams.iter().chain(&self.control) {
            // It may be gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
