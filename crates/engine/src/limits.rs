//! Limits on what a machine's state may be, checked on both sides.

use machine::Section;

/// The most sections.
pub(crate) const MAX_SECTIONS: u32 = 4096;
/// The most bytes of all sections together.
pub(crate) const MAX_STATE_BYTES: u64 = 64 << 20;

/// Bytes that sections take.
pub(crate) fn state_bytes(sections: &[Section]) -> u64 {
    sections.iter().map(section_bytes).sum()
}

/// Bytes that one takes.
pub(crate) fn section_bytes(section: &Section) -> u64 {
    section.data.len() as u64 + section.name.len() as u64
}
