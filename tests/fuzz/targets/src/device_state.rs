//! A machine's state from a hostile source: the VMM's board with its balloon in each dialect, its vCPU and the chips that
//! live in the kernel, and the built-in guest. What is refused changes nothing that matters; what is taken is the state of
//! a machine that goes on, and that can be saved and restored again.

use crate::json;
use ::balloon::Dialect::{Bitmap, BitmapRfc, Standard};
use ::balloon::feature::{
    FREE_PAGE_HINT, MISC_VQ, MUST_TELL_HOST, PAGE_BITMAP, PAGE_POISON, REPORTING, STATS_VQ, VERSION_1,
};
use arbitrary::{Result, Unstructured};
use machine::{Machine, MachineState};
use memory::{Backing, GuestMemory};
use pages::Layout;
use softguest::{GuestConfig, SoftGuest};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use vmm::fuzzing::{FuzzedBoard, VIRTIO, check_kernel_sections, kernel_sections};

/// Pages of RAM: rings and buffers, and some that are only named.
const RAM_PAGES: u64 = 512;

/// A whole state of the board, of a vCPU and chips, or of the built-in guest, changed in a few places.
pub fn device_state(input: &[u8]) {
    let mut u = Unstructured::new(input);
    // An input that ends early has said all it had to say.
    let _ = match u.int_in_range(0..=9) {
        Ok(0 | 1) => kernel(&mut u),
        Ok(2 | 3) => soft(&mut u),
        Ok(_) => board(&mut u),
        Err(_) => return,
    };
}

/// Changes one section or two; at times there is one less, or one twice.
fn changed(u: &mut Unstructured<'_>, state: &MachineState) -> Result<MachineState> {
    let mut changed = state.clone();
    for _ in 0..u.int_in_range(1..=2)? {
        let at = u.int_in_range(0..=changed.sections.len() - 1)?;
        let section = &mut changed.sections[at];
        section.data = json::change(u, &section.data)?;
    }
    match u.int_in_range(0..=31)? {
        0 => drop(changed.sections.pop()),
        1 => changed.sections.push(changed.sections[0].clone()),
        2 => changed.sections.swap(0, 1),
        3 => changed.sections[0].version = u.arbitrary()?,
        _ => {}
    }
    Ok(changed)
}

fn kernel(u: &mut Unstructured<'_>) -> Result<()> {
    let good = kernel_sections().expect("sections without KVM");
    assert!(check_kernel_sections(&good).is_ok(), "what is right is refused");
    let state = changed(u, &good)?;
    if let Err(error) = check_kernel_sections(&state) {
        assert!(!error.to_string().is_empty() && state != good);
    }
    Ok(())
}

fn ram() -> Arc<GuestMemory> {
    let layout = Layout::flat(RAM_PAGES).expect("a layout");
    Arc::new(GuestMemory::new(Arc::new(layout), &Backing::Anonymous).expect("guest memory"))
}

fn board(u: &mut Unstructured<'_>) -> Result<()> {
    let (dialect, features) = *u.choose(&[
        (
            Standard,
            STATS_VQ | FREE_PAGE_HINT | PAGE_POISON | REPORTING | MUST_TELL_HOST,
        ),
        (Bitmap, PAGE_BITMAP | STATS_VQ | MISC_VQ | MUST_TELL_HOST),
        (BitmapRfc, PAGE_BITMAP | STATS_VQ | MUST_TELL_HOST),
    ])?;
    let config = ::balloon::Config::new(dialect, features);
    let ram = ram();
    let make = || FuzzedBoard::new(&ram, config).expect("a board");
    let source = make();
    source.resume().expect("a new board runs");
    if u.ratio(7, 8)? {
        probe(&source, &ram, 0, features | VERSION_1);
        probe(&source, &ram, 1, VERSION_1);
    }
    accesses(u, &source, &ram)?;
    let good = source.save().expect("a board that runs is saved");
    if let Err(error) = make().restore(&good) {
        panic!("whatever its guest did, a board's state is taken: {error}");
    }
    let state = changed(u, &good)?;

    let other = make();
    if other.restore(&state).is_err() {
        assert!(state != good, "what was saved is refused");
        return Ok(());
    }
    other.resume().expect("a board that took a state over goes on");
    accesses(u, &other, &ram)?;
    let again = other.save().expect("a board that goes on is saved");
    assert!(!other.has_failed(), "a device failed");
    let third = make();
    if let Err(error) = third.restore(&again) {
        panic!("a board that took a state over saves one that is refused: {error}");
    }
    Ok(())
}

fn write(board: &FuzzedBoard, device: u64, register: u64, value: u32) {
    let address = VIRTIO.0 + device * VIRTIO.1 + register;
    board.memory(address, Some(&value.to_le_bytes()), &mut [0; 4]);
}

/// A driver as it should be: features, queues with a buffer each, DRIVER_OK. Virtio 1.3, sections 3.1 and 4.2.2.
fn probe(board: &FuzzedBoard, ram: &GuestMemory, device: u64, features: u64) {
    for status in [0, 1, 3] {
        write(board, device, 0x70, status);
    }
    for select in [0u32, 1] {
        write(board, device, 0x24, select);
        let bits = features >> (32 * select) & u64::from(u32::MAX);
        write(board, device, 0x20, u32::try_from(bits).unwrap_or(0));
    }
    write(board, device, 0x70, 11);
    for queue in 0..5u32 {
        let base = 0x1000 + 0x1000 * (device * 8 + u64::from(queue));
        let low = |at: u64| u32::try_from(at).unwrap_or(0);
        for (register, value) in [
            (0x30, queue),
            (0x38, 16),
            (0x80, low(base)),
            (0x84, 0),
            (0x90, low(base + 0x400)),
            (0x94, 0),
            (0xa0, low(base + 0x800)),
            (0xa4, 0),
            (0x44, 1),
        ] {
            write(board, device, register, value);
        }
        // One buffer of 16 bytes, which the device may read; of the last queue it may write it.
        let flags = u16::from(queue >= 3 || device == 1) << 1;
        let buffer = [
            &0x8_0000u64.to_le_bytes()[..],
            &16u32.to_le_bytes(),
            &flags.to_le_bytes(),
            &[0; 2],
        ]
        .concat();
        for (at, bytes) in [(base, &buffer[..]), (base + 0x402, &1u16.to_le_bytes())] {
            ram.write(at, bytes).expect("rings lie in RAM");
        }
    }
    write(board, device, 0x70, 15);
}

/// What a guest does at registers and in its rings.
fn accesses(u: &mut Unstructured<'_>, board: &FuzzedBoard, ram: &GuestMemory) -> Result<()> {
    for _ in 0..u.int_in_range(0..=12)? {
        let value: u32 = match u.arbitrary()? {
            true => u.int_in_range(0..=15)?,
            false => u.arbitrary()?,
        };
        match u.int_in_range(0..=6)? {
            6 => {
                // An available index that runs ahead, or a head that is none, and a kick.
                let (device, queue) = (u.int_in_range(0..=1)?, u.int_in_range(0..=4u32)?);
                let ring = 0x1000 + 0x1000 * (device * 8 + u64::from(queue));
                let at = ring + if u.arbitrary()? { 0x402 } else { 0x406 };
                ram.write(at, &value.to_le_bytes()[..2]).expect("rings lie in RAM");
                write(board, device, 0x50, queue);
            }
            0 => {
                let port = *u.choose(&[0x3f8, 0x3f9, 0x3fa, 0x3fb, 0x3fc, 0x60, 0x64, 0x600, 0x601])?;
                board.port(port, Some(&value.to_le_bytes()[..1]), &mut [0]);
            }
            1 => {
                let at = 0x1000 + u.int_in_range(0..=0x10_000)?;
                ram.write(at, &value.to_le_bytes()).expect("within RAM");
            }
            2 | 3 => write(board, u.int_in_range(0..=1)?, 0x50, value),
            _ => {
                let registers = [
                    0x14, 0x20, 0x24, 0x30, 0x38, 0x44, 0x64, 0x70, 0x80, 0x90, 0xa0, 0x104, 0x10c,
                ];
                write(board, u.int_in_range(0..=1)?, *u.choose(&registers)?, value);
            }
        }
    }
    Ok(())
}

/// The built-in guest, booted once and paused, and what it was saved as.
struct Soft {
    machine: Box<dyn Machine>,
    good: MachineState,
    _guest: SoftGuest,
}

fn soft(u: &mut Unstructured<'_>) -> Result<()> {
    static SOFT: OnceLock<Mutex<Soft>> = OnceLock::new();
    let soft = SOFT.get_or_init(|| {
        let layout = Layout::flat(softguest::MIN_BYTES / 4096).expect("a layout");
        let config = GuestConfig::new(Arc::new(layout)).with_balloon(Standard);
        let guest = SoftGuest::start(config, &Backing::Anonymous).expect("a guest");
        let mut machine = guest.parts().machine;
        machine.pause().expect("it pauses");
        let good = machine.save().expect("it is saved");
        let _guest = guest;
        Mutex::new(Soft { machine, good, _guest })
    });
    let mut soft = soft.lock().unwrap_or_else(PoisonError::into_inner);
    let state = changed(u, &soft.good)?;
    if soft.machine.restore(&state).is_err() {
        assert!(state != soft.good, "what was saved is refused");
        return Ok(());
    }
    // Whatever it is now, it is a state that such a guest has.
    let again = soft.machine.save().expect("a guest that was restored is saved");
    soft.machine
        .restore(&again)
        .expect("what was restored and saved is taken");
    Ok(())
}
