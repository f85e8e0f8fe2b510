//! What is typed, on its way to the guest: a thread that moves it from stdin into a pipe, which the guest's serial port
//! reads as far as the guest takes it.
//!
//! From a terminal, Ctrl-A x is picked out, also when the guest takes nothing any more: what is typed into a full line is
//! lost then, as on a real one. From anywhere else all bytes go through, as fast as the guest takes them.

use super::terminal;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::stdio::stdin;
use std::io;
use std::thread::JoinHandle;

/// Bytes that wait for the guest beside those in the pipe.
const PENDING_BYTES: usize = 4 << 10;

/// What Ctrl-A sends.
const CTRL_A: u8 = 1;

/// What stdin is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// Nothing that says anything.
    None,
    /// A terminal that this process may set.
    Terminal,
    /// A pipe, a file, a socket.
    Other,
}

impl Input {
    /// Looks at stdin. A closed one was opened as /dev/null when the program began.
    pub(super) fn of_stdin() -> Self {
        if rustix::termios::isatty(stdin()) {
            if terminal::is_ours() {
                return Input::Terminal;
            }
            tracing::warn!("stdin is a terminal that another process uses: the guest's console takes no input");
            return Input::None;
        }
        match (rustix::fs::fstat(stdin()), rustix::fs::stat("/dev/null")) {
            (Ok(stdin), Ok(null)) if stdin.st_rdev == null.st_rdev && null.st_rdev != 0 => Input::None,
            (Ok(_), _) => Input::Other,
            (Err(_), _) => Input::None,
        }
    }
}

/// A pipe: our end, which does not block, and the guest's.
pub(super) fn line() -> io::Result<(OwnedFd, OwnedFd)> {
    let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs))
}

/// The thread. Ends when this is dropped.
#[derive(Debug)]
pub(super) struct Pump {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    /// Starts it.
    pub(super) fn start(to: OwnedFd, escapes: bool) -> io::Result<Self> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop.try_clone()?;
        let from = rustix::io::fcntl_dupfd_cloexec(stdin(), 3)?;
        let thread = std::thread::Builder::new().name("console-stdin".to_owned());
        let thread = thread.spawn(move || {
            if let Err(error) = pump(&from, &to, &stopped, escapes) {
                tracing::warn!("the guest's console takes no input any more: {error}");
            }
        })?;
        Ok(Pump {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        if let Err(error) = rustix::io::write(&self.stop, &1u64.to_ne_bytes()) {
            tracing::error!("the console's thread cannot be told to end: {error}");
            return;
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the console's thread panicked");
        }
    }
}

/// Moves bytes until told to stop, or until either end is gone.
fn pump(from: &OwnedFd, to: &OwnedFd, stop: &OwnedFd, escapes: bool) -> rustix::io::Result<()> {
    let mut pending: Vec<u8> = Vec::new();
    let mut escape = escapes.then(Escape::default);
    let mut open = true;
    while open || !pending.is_empty() {
        let read = open && (escapes || pending.len() < PENDING_BYTES);
        let wanted = |wanted, flags| if wanted { flags } else { PollFlags::empty() };
        let mut fds = [
            PollFd::new(stop, PollFlags::IN),
            PollFd::new(to, wanted(!pending.is_empty(), PollFlags::OUT)),
            PollFd::new(from, wanted(read, PollFlags::IN)),
        ];
        let count = if read { 3 } else { 2 };
        match poll(&mut fds[..count], None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let [stopped, writable, readable] = [fds[0].revents(), fds[1].revents(), fds[2].revents()];
        // The pipe's other end is gone: the guest is.
        if !stopped.is_empty() || writable.intersects(PollFlags::ERR) {
            return Ok(());
        }
        if read && !readable.is_empty() {
            open = take(from, escape.as_mut(), &mut pending)?;
        }
        if !pending.is_empty() {
            give(to, &mut pending)?;
        }
    }
    Ok(())
}

/// Reads once; `false` at the end.
fn take(from: &OwnedFd, escape: Option<&mut Escape>, pending: &mut Vec<u8>) -> rustix::io::Result<bool> {
    let mut bytes = [0; 1024];
    let read = match rustix::io::read(from.as_fd(), &mut bytes) {
        // A terminal that has hung up says EIO.
        Ok(0) | Err(Errno::IO) => return Ok(false),
        Ok(read) => &bytes[..read],
        Err(Errno::INTR | Errno::AGAIN) => return Ok(true),
        Err(error) => return Err(error),
    };
    match escape {
        None => pending.extend_from_slice(read),
        Some(escape) => {
            if escape.feed(read, pending) {
                terminal::end_the_command();
            }
            pending.truncate(PENDING_BYTES);
        }
    }
    Ok(true)
}

/// Writes what the pipe takes.
fn give(to: &OwnedFd, pending: &mut Vec<u8>) -> rustix::io::Result<()> {
    match rustix::io::write(to, pending) {
        Ok(written) => {
            pending.drain(..written);
            Ok(())
        }
        Err(Errno::INTR | Errno::AGAIN) => Ok(()),
        Err(Errno::PIPE) => {
            pending.clear();
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Picks Ctrl-A x out of what is typed.
#[derive(Debug, Default)]
struct Escape {
    armed: bool,
}

impl Escape {
    /// Takes bytes in, and puts out those for the guest. Whether the command is to end.
    fn feed(&mut self, typed: &[u8], out: &mut Vec<u8>) -> bool {
        let mut end = false;
        for &byte in typed {
            match (std::mem::take(&mut self.armed), byte) {
                (false, CTRL_A) => self.armed = true,
                (true, b'x' | b'X') => end = true,
                (true, CTRL_A) => out.push(CTRL_A),
                // Not for us: the guest gets both.
                (true, other) => out.extend_from_slice(&[CTRL_A, other]),
                (false, other) => out.push(other),
            }
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn typed(parts: &[&[u8]]) -> (Vec<u8>, bool) {
        let (mut escape, mut out, mut end) = (Escape::default(), Vec::new(), false);
        for part in parts {
            end |= escape.feed(part, &mut out);
        }
        (out, end)
    }

    #[test]
    fn ctrl_a_x_ends_and_all_else_is_the_guests() {
        assert_eq!(typed(&[b"ls\r\x03\x04"]), (b"ls\r\x03\x04".to_vec(), false));
        assert_eq!(typed(&[b"a\x01", b"x"]), (b"a".to_vec(), true));
        assert_eq!(typed(&[b"\x01\x01x"]), (b"\x01x".to_vec(), false));
        assert_eq!(typed(&[b"\x01bc"]), (b"\x01bc".to_vec(), false));
        assert_eq!(typed(&[b"\x01\x01\x01x"]), (b"\x01".to_vec(), true));
    }

    /// A pump between two pipes, in place of stdin and a guest.
    fn pumped(escapes: bool) -> (std::fs::File, std::fs::File, OwnedFd, JoinHandle<()>) {
        let (from, typing) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (ours, theirs) = line().unwrap();
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let stopped = stop.try_clone().unwrap();
        let thread = std::thread::spawn(move || pump(&from, &ours, &stopped, escapes).unwrap());
        (typing.into(), theirs.into(), stop, thread)
    }

    #[test]
    fn every_byte_arrives_in_order_and_the_end_after_them() {
        let (mut typing, mut guest, _stop, thread) = pumped(false);
        let bytes: Vec<u8> = (0..300_000u32)
            .map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1])
            .collect();
        let sent = bytes.clone();
        let writer = std::thread::spawn(move || typing.write_all(&sent).unwrap());
        let mut got = Vec::new();
        guest.read_to_end(&mut got).unwrap();
        assert!(got == bytes, "{} of {} bytes", got.len(), bytes.len());
        writer.join().unwrap();
        thread.join().unwrap();
    }

    #[test]
    fn a_guest_that_takes_nothing_does_not_stop_the_typing() {
        let (mut typing, guest, stop, thread) = pumped(true);
        // Far more than the pipe and the buffer hold: were it not read, this would hang.
        typing.write_all(&vec![b'y'; 1 << 20]).unwrap();
        rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
        thread.join().unwrap();
        drop(guest);
    }

    #[test]
    fn a_guest_that_is_gone_ends_it() {
        let (mut typing, guest, _stop, thread) = pumped(true);
        drop(guest);
        // The pump may have left before this.
        let _ = typing.write_all(b"hello");
        thread.join().unwrap();
    }
}
