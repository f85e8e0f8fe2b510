//! Kernels for tests: small, whole, and wrong in whatever way a test makes them.

use super::ONE_MIB;

/// Where [`bzimage`] wants to lie.
pub(super) const LOAD_AT: u64 = 2 << 20;
/// What it needs from there on.
pub(super) const INIT_SIZE: u32 = 0x8000;
/// Where [`elf`]'s two segments lie.
pub(super) const SEGMENTS_AT: [u64; 2] = [ONE_MIB, 4 * ONE_MIB];
/// Where its second segment ends, mostly not in the file.
pub(super) const ELF_END: u64 = 4 * ONE_MIB + 0x3000;

/// Overwrites bytes.
pub(super) fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

/// A bzImage with one sector of setup, whose 64-bit entry holds `code`.
pub(super) fn bzimage(code: &[u8]) -> Vec<u8> {
    let body = (0x200 + code.len()).next_multiple_of(16);
    let mut image = vec![0; 1024 + body];
    put(&mut image, 0x1f1, &[1]);
    put(&mut image, 0x1f4, &u32::try_from(body / 16).unwrap().to_le_bytes());
    put(&mut image, 0x1fe, &[0x55, 0xaa, 0xeb, 0x66]);
    put(&mut image, 0x202, b"HdrS");
    put(&mut image, 0x206, &0x20fu16.to_le_bytes());
    put(&mut image, 0x211, &[1]);
    put(&mut image, 0x22c, &0x7fff_ffffu32.to_le_bytes());
    put(&mut image, 0x230, &0x20_0000u32.to_le_bytes());
    put(&mut image, 0x234, &[1]);
    put(&mut image, 0x236, &1u16.to_le_bytes());
    put(&mut image, 0x238, &100u32.to_le_bytes());
    // A pointer that must not get through.
    put(&mut image, 0x250, &0x1234_5678u64.to_le_bytes());
    put(&mut image, 0x258, &LOAD_AT.to_le_bytes());
    put(&mut image, 0x260, &INIT_SIZE.to_le_bytes());
    // The header ends at 0x268: this is code.
    put(&mut image, 0x268, &[0xcc; 4]);
    put(&mut image, 1024 + 0x200, code);
    image
}

/// An ELF kernel: a note, a segment that holds `code` at its entry, and one that goes on in memory beyond the file.
pub(super) fn elf(code: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 0x200];
    put(&mut image, 0, b"\x7fELF\x02\x01\x01");
    put(&mut image, 16, &[2, 0, 62, 0, 1]);
    put(&mut image, 24, &SEGMENTS_AT[0].to_le_bytes());
    put(&mut image, 32, &64u64.to_le_bytes());
    put(&mut image, 52, &[64, 0, 56, 0, 3, 0]);
    let code_bytes = code.len() as u64;
    let rows = [
        // A note that says more than there is: nobody is to read it.
        (4u32, 0x1f0u64, 0u64, u64::MAX, 0u64),
        (1, 0x200, SEGMENTS_AT[0], code_bytes, code_bytes),
        (1, 0x1e0, SEGMENTS_AT[1], 0x10, ELF_END - SEGMENTS_AT[1]),
    ];
    for (row, (kind, offset, address, file_bytes, memory_bytes)) in rows.into_iter().enumerate() {
        let at = 64 + 56 * row;
        put(&mut image, at, &kind.to_le_bytes());
        for (field, value) in [
            (8, offset),
            (16, !0),
            (24, address),
            (32, file_bytes),
            (40, memory_bytes),
        ] {
            put(&mut image, at + field, &u64::to_le_bytes(value));
        }
    }
    put(&mut image, 0x1e0, &[0x5a; 16]);
    image.extend_from_slice(code);
    image
}
