//! The floor that migrations are measured against: so many bytes by plain writes of 1 MiB over loopback TCP, from one
//! process's warm memory into another's, cold or populated. Prints milliseconds from the first write to the receiver's
//! word that all is there.
//!
//! `cargo run --release -p memory --example plain_copy -- MIB [--prealloc]`
#![allow(clippy::unwrap_used)]

use machine::GuestRam;
use memory::{Backing, GuestMemory};
use pages::{Layout, PageRange, Pfn};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

const BATCH_PAGES: u64 = 256;

fn memory(pages: u64) -> GuestMemory {
    GuestMemory::new(Arc::new(Layout::flat(pages).unwrap()), &Backing::Anonymous).unwrap()
}

/// Calls `io` until all of each batch has moved.
fn batches(pages: u64, mut io: impl FnMut(&[PageRange], usize) -> std::io::Result<usize>) {
    let mut rest = PageRange::new(Pfn(0), pages).unwrap();
    while !rest.is_empty() {
        let (part, tail) = rest.split_at(BATCH_PAGES);
        let (mut done, total) = (0, usize::try_from(part.bytes()).unwrap());
        while done < total {
            done += io(&[part], done).unwrap();
        }
        rest = tail;
    }
}

fn receive(pages: u64, prealloc: bool) {
    let ram = memory(pages);
    if prealloc {
        ram.populate_all().unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap());
    let (mut socket, _) = listener.accept().unwrap();
    buffers(&socket);
    batches(pages, |ranges, skip| ram.read_from(socket.as_fd(), ranges, skip));
    socket.write_all(&[1]).unwrap();
}

fn buffers(socket: &TcpStream) {
    rustix::net::sockopt::set_socket_recv_buffer_size(socket, 4 << 20).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(socket, 4 << 20).unwrap();
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    let mib: u64 = arguments.first().and_then(|a| a.parse().ok()).unwrap_or(241);
    let pages = mib << 8;
    if has("--receive") {
        return receive(pages, has("--prealloc"));
    }
    let ram = memory(pages);
    ram.fill(PageRange::new(Pfn(0), pages).unwrap(), 0x0102_0304).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(&arguments)
        .args(
            [mib.to_string().as_str(), "--receive"]
                .iter()
                .skip(usize::from(!arguments.is_empty())),
        )
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let mut socket = TcpStream::connect(line.trim()).unwrap();
    buffers(&socket);
    let began = Instant::now();
    batches(pages, |ranges, skip| ram.write_to(socket.as_fd(), &[], ranges, skip));
    socket.read_exact(&mut [0]).unwrap();
    println!("{:.1}", began.elapsed().as_secs_f64() * 1e3);
    child.wait().unwrap();
}
