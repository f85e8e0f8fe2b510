//! A link that is cut: forwards connections to a receiver, and resets them when a test's rule says so.

use pageferry::Address;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use wire::frame::Decoder;
use wire::{ConnectionRole, Message, PREAMBLE_BYTES, Preamble, REPLY_BYTES};

type Asked = Box<dyn FnMut(&Message) -> bool + Send>;

/// When to cut.
pub enum Rule {
    /// Everything, each time that so many bytes have gone to the receiver since the last time.
    Bytes(VecDeque<u64>),
    /// One data stream, once it has carried so many bytes.
    OneStream(u64),
    /// Everything, instead of passing the message on for which this says so; asked of both directions.
    Before(Asked),
}

pub struct Cutter {
    pub address: Address,
    /// How often it cut.
    pub cuts: Arc<AtomicU64>,
    shared: Arc<Shared>,
}

struct Shared {
    rule: Mutex<Rule>,
    /// Bytes since the last cut.
    bytes: AtomicU64,
    /// Counted up by each cut: connections of an older one carry nothing any more.
    era: AtomicU64,
    cuts: Arc<AtomicU64>,
    sockets: Mutex<Vec<TcpStream>>,
    /// New connections are closed at once.
    dead: AtomicBool,
}

impl Cutter {
    pub fn start(to: &Address, rule: Rule) -> Self {
        let Address::Tcp { port, .. } = *to else {
            panic!("{to} is no TCP address")
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port());
        let cuts = Arc::new(AtomicU64::new(0));
        let shared = Arc::new(Shared {
            rule: Mutex::new(rule),
            bytes: AtomicU64::new(0),
            era: AtomicU64::new(0),
            cuts: Arc::clone(&cuts),
            sockets: Mutex::default(),
            dead: AtomicBool::new(false),
        });
        let accepts = Arc::clone(&shared);
        std::thread::spawn(move || {
            for from in listener.incoming() {
                let from = from.unwrap();
                if accepts.dead.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(to) = TcpStream::connect(("127.0.0.1", port)) else {
                    continue;
                };
                accepts.forward(&from, &to);
            }
        });
        Cutter {
            address: address.parse().unwrap(),
            cuts,
            shared,
        }
    }

    /// Cuts everything now; with `dead` nothing passes any more.
    pub fn cut(&self, dead: bool) {
        self.shared.dead.store(dead, Ordering::SeqCst);
        self.shared.cut();
    }
}

impl Shared {
    fn forward(self: &Arc<Self>, a: &TcpStream, b: &TcpStream) {
        let twin = |socket: &TcpStream| socket.try_clone().unwrap();
        self.sockets.lock().unwrap().extend([twin(a), twin(b)]);
        for (from, to, from_source) in [(twin(a), twin(b), true), (twin(b), twin(a), false)] {
            let shared = Arc::clone(self);
            std::thread::spawn(move || {
                // A cut ends it, as does either side.
                let _ = shared.pump(from, to, from_source);
            });
        }
    }

    fn pump(&self, mut from: TcpStream, mut to: TcpStream, from_source: bool) -> std::io::Result<()> {
        let era = self.era.load(Ordering::SeqCst);
        let mut role = None;
        let (mut carried, mut decoder) = (0u64, Decoder::new());
        let mut buffer = vec![0; 64 << 10];
        // What opens a connection comes first, whole.
        let opening = if from_source { PREAMBLE_BYTES } else { REPLY_BYTES };
        from.read_exact(&mut buffer[..opening])?;
        if from_source {
            role = Some(Preamble::decode(buffer[..opening].try_into().unwrap()).unwrap().role);
        }
        to.write_all(&buffer[..opening])?;
        loop {
            let n = from.read(&mut buffer)?;
            if n == 0 {
                // Both directions end: half a connection is another test's.
                to.shutdown(Shutdown::Both)?;
                return Ok(());
            }
            if self.era.load(Ordering::SeqCst) != era {
                return Ok(());
            }
            carried += n as u64;
            let is_data = matches!(role, Some(ConnectionRole::Data { .. }));
            if self.cuts_now(from_source, is_data, carried, n, &mut decoder, &buffer[..n]) {
                let one = matches!(*self.rule.lock().unwrap(), Rule::OneStream(_));
                if one {
                    self.cuts.fetch_add(1, Ordering::SeqCst);
                    reset(&from);
                    reset(&to);
                } else {
                    self.cut();
                }
                return Ok(());
            }
            to.write_all(&buffer[..n])?;
        }
    }

    fn cuts_now(
        &self,
        from_source: bool,
        data: bool,
        carried: u64,
        n: usize,
        decoder: &mut Decoder,
        bytes: &[u8],
    ) -> bool {
        match &mut *self.rule.lock().unwrap() {
            Rule::Bytes(after) => {
                if !from_source {
                    return false;
                }
                let so_far = self.bytes.fetch_add(n as u64, Ordering::SeqCst) + n as u64;
                let now = after.front().is_some_and(|most| so_far >= *most);
                if now {
                    after.pop_front();
                }
                now
            }
            Rule::OneStream(after) => {
                let now = data && carried >= *after;
                if now {
                    *after = u64::MAX;
                }
                now
            }
            Rule::Before(asked) => {
                if data {
                    return false;
                }
                let mut input = bytes;
                // A receiver's answers on a data connection are no frames: there are none.
                while let Ok(Some(message)) = decoder.push(&mut input) {
                    if asked(&message) {
                        return true;
                    }
                }
                false
            }
        }
    }

    fn cut(&self) {
        self.cuts.fetch_add(1, Ordering::SeqCst);
        self.era.fetch_add(1, Ordering::SeqCst);
        self.bytes.store(0, Ordering::SeqCst);
        for socket in self.sockets.lock().unwrap().drain(..) {
            reset(&socket);
        }
    }
}

fn reset(socket: &TcpStream) {
    // What is under way is lost with it, as when a link is cut.
    socket2::SockRef::from(socket)
        .set_linger(Some(std::time::Duration::ZERO))
        .unwrap();
    let _ = socket.shutdown(Shutdown::Both);
}
