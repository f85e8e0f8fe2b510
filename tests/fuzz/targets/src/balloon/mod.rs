//! A hostile guest's balloon driver, in each dialect: real rings in guest memory, any descriptors, any bytes, kicks and
//! configuration writes in any order, and a host that asks, saves and restores meanwhile.
//!
//! The oracle reads the rings by itself ([`oracle`]) and knows which pages any buffer named. After every step:
//! nothing was discarded, called free or put into the balloon that no buffer named; nothing outside RAM was; guest memory
//! changed in used rings and request buffers alone; answers came for the open session alone.

mod oracle;
mod rig;

use ::balloon::Dialect::{self, Bitmap, BitmapRfc, Standard};
use ::balloon::feature::{FREE_PAGE_HINT, MISC_VQ, MUST_TELL_HOST, PAGE_BITMAP, PAGE_POISON, REPORTING, STATS_VQ};
use ::balloon::{Config, DiscardPolicy};
use arbitrary::{Result, Unstructured};
use rig::{MEMORY_BYTES, RING_ENTRIES, Rig};

/// Mainline's driver, hostile.
pub fn balloon_standard(input: &[u8]) {
    run(Standard, input);
}

/// The driver of the 2016 patch set, hostile.
pub fn balloon_bitmap(input: &[u8]) {
    run(Bitmap, input);
}

/// The driver of the 2016 RFC, hostile.
pub fn balloon_bitmap_rfc(input: &[u8]) {
    run(BitmapRfc, input);
}

/// The most steps of an input: what takes longer finds nothing that this does not.
const MOST_STEPS: usize = 400;

fn run(dialect: Dialect, input: &[u8]) {
    let mut u = Unstructured::new(input);
    // An input that ends early has said all it had to say.
    let _ = steps(dialect, &mut u);
}

fn steps(dialect: Dialect, u: &mut Unstructured<'_>) -> Result<()> {
    let mut rig = Rig::new(config(dialect, u)?, if u.ratio(1, 4)? { 32 } else { 1 });
    rig.drive();
    for _ in 0..MOST_STEPS {
        if u.is_empty() {
            break;
        }
        step(&mut rig, u)?;
        rig.check();
    }
    Ok(())
}

fn config(dialect: Dialect, u: &mut Unstructured<'_>) -> Result<Config> {
    let usual = match dialect {
        Standard => STATS_VQ | FREE_PAGE_HINT | PAGE_POISON | REPORTING,
        Bitmap => PAGE_BITMAP | STATS_VQ | MISC_VQ,
        BitmapRfc => PAGE_BITMAP | STATS_VQ,
    };
    let features = match u.int_in_range(0..=3)? {
        0 => u.arbitrary::<u64>()? & (usual | MUST_TELL_HOST),
        1 => usual,
        _ => usual | MUST_TELL_HOST,
    };
    Ok(Config {
        discard: if u.arbitrary()? {
            DiscardPolicy::AtOnce
        } else {
            DiscardPolicy::MarkOnly
        },
        ..Config::new(dialect, features)
    })
}

fn step(rig: &mut Rig, u: &mut Unstructured<'_>) -> Result<()> {
    match u.int_in_range(0..=19)? {
        0..=2 => {
            let chain = chain(u)?;
            rig.add(queue(u)?, &chain);
        }
        3..=5 => rig.kick(queue(u)?),
        6 => {
            let (queue, at) = (queue(u)?, u.int_in_range(0..=RING_ENTRIES)?);
            rig.descriptor(
                queue,
                at,
                address(u)?,
                length(u)?,
                u.int_in_range(0..=7)?,
                u.int_in_range(0..=RING_ENTRIES)?,
            );
        }
        7 => rig.push(queue(u)?, u.int_in_range(0..=RING_ENTRIES)?),
        8 => rig.set_avail(queue(u)?, u.arbitrary()?),
        9 => {
            let (at, len) = (u.int_in_range(0..=MEMORY_BYTES)?, u.int_in_range(0..=64)?);
            rig.write(at, u.bytes(len)?);
        }
        10 => {
            let (offset, len) = (u.int_in_range(0..=20)?, u.int_in_range(0..=8)?);
            rig.write_config(offset, u.bytes(len)?);
        }
        11 | 12 => pages(rig, u)?,
        13 => answer(rig, u)?,
        14 => rig.begin(),
        15 => {
            if u.arbitrary()? {
                rig.end();
            } else {
                rig.hold();
            }
        }
        16 => rig.ask_for_stats(),
        17 => rig.move_to_another(u.arbitrary()?),
        18 => rig.set_target(u.int_in_range(0..=2000)?),
        _ => {
            rig.reset();
            rig.drive();
        }
    }
    Ok(())
}

/// One past the most that any dialect has, too.
fn queue(u: &mut Unstructured<'_>) -> Result<usize> {
    u.int_in_range(0..=5)
}

/// Page starts, places of buffers, the ends of memory and of everything.
fn address(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=4)? {
        0 => u.int_in_range(0..=800)? * 4096,
        1 | 2 => rig::BUFFERS + u.int_in_range(0..=255)?,
        3 => u.int_in_range(0..=MEMORY_BYTES + 64)?,
        _ => u.arbitrary()?,
    })
}

fn length(u: &mut Unstructured<'_>) -> Result<u32> {
    const USUAL: [u32; 12] = [0, 1, 4, 10, 16, 28, 32, 40, 4096, 3 << 12, 2 << 20, (1 << 20) + 32];
    Ok(match u.int_in_range(0..=2)? {
        0 => *u.choose(&USUAL)?,
        1 => u.int_in_range(0..=600)?,
        _ => u.arbitrary()?,
    })
}

fn chain(u: &mut Unstructured<'_>) -> Result<Vec<rig::Desc>> {
    let mut all = Vec::new();
    for _ in 0..u.int_in_range(1..=4)? {
        all.push((address(u)?, length(u)?, u.arbitrary()?));
    }
    Ok(all)
}

/// What an honest driver would send to the inflate or the deflate queue, of whatever pages.
fn pages(rig: &mut Rig, u: &mut Unstructured<'_>) -> Result<()> {
    let queue = u.int_in_range(0..=1)?;
    let mut bytes = Vec::new();
    if rig.carries_bitmaps() {
        let start = u.int_in_range(0..=14)? * 64;
        let len = u.int_in_range(0..=100)?;
        bytes = rig.bitmap_buffer(0, 0, start, u.bytes(len)?);
    } else {
        for _ in 0..u.int_in_range(0..=24)? {
            bytes.extend(u.int_in_range(0..=800u32)?.to_le_bytes());
        }
    }
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    rig.write(rig::BUFFERS, &bytes);
    rig.add(queue, &[(rig::BUFFERS, len, false)]);
    rig.kick(queue);
    Ok(())
}

/// What an honest driver would say to the open question, or a little beside it.
fn answer(rig: &mut Rig, u: &mut Unstructured<'_>) -> Result<()> {
    let Some(queue) = rig.asking_queue() else {
        return Ok(());
    };
    let what: u8 = u.int_in_range(0..=3)?;
    if rig.dialect() == Standard {
        let mut id = rig.hint_command();
        match what {
            0 => id = 0,
            1 => id = id.wrapping_add(1),
            _ => {}
        }
        rig.write(rig::BUFFERS, &id.to_le_bytes());
        rig.add(queue, &[(rig::BUFFERS, 4, false)]);
    } else if what == 0 {
        rig.add(queue, &[(rig::REQUEST, 16, true)]);
    } else {
        let (window, len) = (u.int_in_range(0..=3)? * 512, u.int_in_range(0..=100)?);
        let bytes = rig.bitmap_buffer(u.int_in_range(0..=2)?, rig.request_id(), window, u.bytes(len)?);
        let bytes_len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        rig.write(rig::BUFFERS, &bytes);
        rig.add(queue, &[(rig::BUFFERS, bytes_len, false)]);
    }
    rig.kick(queue);
    Ok(())
}
