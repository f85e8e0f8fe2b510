//! COM1.

use super::*;
use crate::platform::{SERIAL_GSI, SERIAL_PORT};
use std::io::{self, Read};
use std::time::{Duration, Instant};

/// Data, interrupt enable, interrupt identification, modem control, line status.
const DATA: u16 = SERIAL_PORT;
const IER: u16 = SERIAL_PORT + 1;
const IIR: u16 = SERIAL_PORT + 2;
const MCR: u16 = SERIAL_PORT + 4;
const LSR: u16 = SERIAL_PORT + 5;

impl Rig {
    fn inb(&self, port: u16) -> u8 {
        let mut byte = [0];
        self.exits.port_read(port, &mut byte);
        byte[0]
    }

    fn outb(&self, port: u16, value: u8) {
        self.exits.port_write(port, &[value]);
    }

    /// Waits, a minute at most, for a byte of input.
    fn wait_input(&self) {
        let start = Instant::now();
        while self.inb(LSR) & 1 == 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "no input came");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn take_input(&self, len: usize) -> Vec<u8> {
        let mut all = Vec::new();
        while all.len() < len {
            self.wait_input();
            all.push(self.inb(DATA));
        }
        all
    }
}

/// A running board whose console input is the pipe that comes back with it.
fn with_input() -> (Rig, io::PipeWriter) {
    let (reader, writer) = io::pipe().unwrap();
    let rig = Rig::parked(&ram(), None, Some(reader.into()));
    rig.board.start().unwrap();
    (rig, writer)
}

#[test]
fn output_reaches_the_console_and_raises_its_interrupt() {
    let rig = Rig::new(None);
    for byte in b"hello\n" {
        rig.outb(DATA, *byte);
    }
    assert_eq!(rig.screen.text(), "hello\n");
    assert_eq!(rig.irqs(SERIAL_GSI), 0, "not asked for");
    rig.outb(IER, 2);
    assert_eq!(rig.irqs(SERIAL_GSI), 1);
    assert_eq!(rig.inb(IIR) & 0xf, 2);
    rig.outb(DATA, b'x');
    assert_eq!(rig.irqs(SERIAL_GSI), 1);
    rig.exits.port_write(DATA, b"xy");
    assert_eq!(rig.screen.text(), "hello\nx", "two bytes at once are no access to it");
}

#[test]
fn a_console_that_is_gone_does_not_disturb_the_guest() {
    struct Gone;
    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
    }
    let console = Console {
        input: None,
        output: Box::new(Gone),
    };
    let (ram, wires) = (ram(), Wires::default());
    let memory = DeviceMemory::new(&ram);
    let board = Board::new(&wires, &memory, ram.layout(), None, console, Ending::default()).unwrap();
    board.exits().port_write(IER, &[2]);
    for _ in 0..3 {
        board.exits().port_write(DATA, b"x");
        let mut iir = [0];
        board.exits().port_read(IIR, &mut iir);
        assert_eq!(iir[0] & 0xf, 2, "the transmitter is empty again");
    }
}

#[test]
fn input_comes_in_order_with_none_lost_however_slowly_it_is_taken() {
    let (rig, mut writer) = with_input();
    let sent: Vec<u8> = (0..20_000u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
    let typed = sent.clone();
    let typist = std::thread::spawn(move || {
        writer.write_all(&typed).unwrap();
        writer
    });
    rig.wait_input();
    rig.outb(IER, 1);
    assert_eq!(rig.irqs(SERIAL_GSI), 1, "what waits is told when asked for");
    let mut got = rig.take_input(100);
    // Whatever the guest does in between must not lose a byte: loop mode, a pause.
    rig.outb(MCR, 0x18);
    rig.outb(MCR, 0x08);
    rig.board.pause().unwrap();
    rig.board.resume().unwrap();
    got.extend(rig.take_input(sent.len() - got.len()));
    assert!(got == sent);
    drop(typist.join().unwrap());
}

#[test]
fn input_waits_while_the_device_hears_itself() {
    let (rig, mut writer) = with_input();
    rig.outb(MCR, 0x18);
    writer.write_all(b"abc").unwrap();
    std::thread::sleep(Duration::from_millis(20));
    rig.outb(DATA, b'x');
    assert_eq!(rig.take_input(1), b"x");
    rig.outb(MCR, 0x08);
    assert_eq!(rig.take_input(3), b"abc");
    assert_eq!(rig.screen.text(), "", "what it says to itself is not printed");
}

#[test]
fn input_that_the_guest_has_no_room_for_stays_with_who_types_it() {
    let (reader, mut writer) = io::pipe().unwrap();
    let mut rest = reader.try_clone().unwrap();
    let rig = Rig::parked(&ram(), None, Some(reader.into()));
    writer.write_all(&[7; 100]).unwrap();
    // Parked: nothing is taken, however long the thread had for it.
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rig.inb(LSR) & 1, 0);
    rig.board.start().unwrap();
    rig.wait_input();
    let state = rig.save();
    let held = json(&state, "serial")["fifo"].as_array().unwrap().len();
    assert_eq!(held, 64, "as much as there is room for");
    drop((rig, writer));
    let mut left = Vec::new();
    rest.read_to_end(&mut left).unwrap();
    assert_eq!(left.len(), 36);
}

#[test]
fn the_input_thread_ends_with_the_board_whatever_it_waits_for() {
    // For input, for room, for being let run, for nothing any more.
    for fill in [0, 1000] {
        let (rig, mut writer) = with_input();
        writer.write_all(&vec![1; fill]).unwrap();
        if fill > 0 {
            rig.wait_input();
        }
        drop(rig);
    }
    let (reader, _writer) = io::pipe().unwrap();
    drop(Rig::parked(&ram(), None, Some(reader.into())));
    let (rig, mut writer) = with_input();
    writer.write_all(b"ab").unwrap();
    drop(writer);
    assert_eq!(rig.take_input(2), b"ab");
    drop(rig);
}

#[test]
fn its_state_travels_and_its_pending_interrupt_is_raised_again() {
    let (rig, mut writer) = with_input();
    rig.outb(SERIAL_PORT + 7, 0x5a);
    rig.outb(IER, 1);
    writer.write_all(b"abc").unwrap();
    rig.wait_input();
    let start = Instant::now();
    let state = loop {
        let state = rig.save();
        if json(&state, "serial")["fifo"].as_array().unwrap().len() == 3 {
            break state;
        }
        rig.board.resume().unwrap();
        assert!(start.elapsed() < Duration::from_secs(60), "no input came");
        std::thread::sleep(Duration::from_millis(1));
    };
    let arrived = rig.restored(None, &state).unwrap();
    arrived.irqs(SERIAL_GSI);
    arrived.board.resume().unwrap();
    assert_eq!(arrived.irqs(SERIAL_GSI), 1);
    assert_eq!(arrived.inb(IIR) & 0xf, 4);
    assert_eq!(arrived.take_input(3), b"abc");
    assert_eq!((arrived.inb(LSR) & 1, arrived.inb(SERIAL_PORT + 7)), (0, 0x5a));
    arrived.outb(DATA, b'!');
    assert_eq!(arrived.screen.text(), "!");
}

#[test]
fn state_that_no_serial_device_has_is_refused() {
    let rig = Rig::new(None);
    let state = rig.save();
    let good = json(&state, "serial");
    let refused = |field: &str, value: serde_json::Value| {
        let mut bad = good.clone();
        bad[field] = value;
        let error = rig.restored(None, &with(&state, "serial", &bad)).err();
        assert!(error.is_some_and(|e| e.to_string().contains("serial")), "{field}");
    };
    refused("fifo", vec![0u8; 65].into());
    refused("fifo", vec![1u8].into());
    refused("line_status", 0x61.into());
    refused("line_status", 0.into());
    refused("interrupt_enable", 0x10.into());
    refused("interrupt_identification", 0.into());
    refused("interrupt_identification", 3.into());
    refused("interrupt_identification", 4.into());
    refused("interrupt_identification", 8.into());
    refused("modem_status", 0.into());
    refused("another", 0.into());
    rig.restored(None, &state).unwrap();
}
