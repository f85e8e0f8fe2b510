//! Limits on what a machine's state may be, checked on both sides, and how a large section crosses in pieces.
//!
//! A section is larger than a control frame where a device has much to say: the balloon's state of a large guest is
//! megabytes. Its pieces are messages of the same name and version, one behind the other. As no two sections have the
//! same name, joining them needs no marks.

use machine::Section;
use std::collections::BTreeSet;
use wire::MAX_SECTION_BYTES;

/// The most sections.
pub(crate) const MAX_SECTIONS: u32 = wire::MAX_SECTIONS;
/// The most bytes of all sections together.
pub(crate) const MAX_STATE_BYTES: u64 = 64 << 20;

/// Checks a machine's state before it is sent: how many sections it has, else what is wrong with it.
pub(crate) fn check_state(sections: &[Section]) -> Result<u32, String> {
    let bytes = sections.iter().map(section_bytes).sum::<u64>();
    let count = u32::try_from(sections.len()).ok().filter(|n| *n <= MAX_SECTIONS);
    let Some(count) = count.filter(|_| bytes <= MAX_STATE_BYTES) else {
        let n = sections.len();
        return Err(format!(
            "it has {n} sections of {bytes} bytes in all, more than {MAX_SECTIONS} of {MAX_STATE_BYTES}"
        ));
    };
    let mut names = BTreeSet::new();
    match sections.iter().find(|section| !names.insert(&section.name)) {
        Some(twice) => Err(format!(
            "two of its sections are named \"{}\"; each vCPU and device needs a name of its own",
            twice.name
        )),
        None => Ok(count),
    }
}

/// Cuts a section into the pieces that it is sent in; one that is empty is a piece too.
pub(crate) fn pieces(section: Section) -> Vec<Section> {
    if section.data.len() <= MAX_SECTION_BYTES {
        return vec![section];
    }
    let piece = |data: &[u8]| Section {
        name: section.name.clone(),
        version: section.version,
        data: data.to_vec(),
    };
    section.data.chunks(MAX_SECTION_BYTES).map(piece).collect()
}

/// Sections as they arrive, joined.
#[derive(Debug, Default)]
pub(crate) struct Joined {
    sections: Vec<Section>,
    names: BTreeSet<String>,
    bytes: u64,
}

impl Joined {
    /// How many sections have come.
    pub(crate) fn count(&self) -> usize {
        self.sections.len()
    }

    /// All of them.
    pub(crate) fn take(&mut self) -> Vec<Section> {
        std::mem::take(&mut self.sections)
    }

    /// Takes the next message in: a section, or another piece of the last one. Says what the peer sent where it must
    /// not be.
    pub(crate) fn push(&mut self, piece: Section) -> Result<(), String> {
        let last = self.sections.last_mut().filter(|last| last.name == piece.name);
        let more = match &last {
            Some(_) => piece.data.len() as u64,
            None => section_bytes(&piece),
        };
        self.bytes = self.bytes.saturating_add(more);
        let full = last.is_none() && self.names.len() >= MAX_SECTIONS as usize;
        if full || self.bytes > MAX_STATE_BYTES {
            return Err(format!(
                "more machine state than {MAX_SECTIONS} sections of {MAX_STATE_BYTES} bytes in all"
            ));
        }
        match last {
            Some(last) if last.version != piece.version => Err(format!(
                "pieces of section \"{}\" of versions {} and {}",
                piece.name.escape_debug(),
                last.version,
                piece.version
            )),
            // It would take no room, and so could be sent without end.
            Some(_) if piece.data.is_empty() => Err(format!(
                "an empty further piece of section \"{}\"",
                piece.name.escape_debug()
            )),
            Some(last) => {
                last.data.extend_from_slice(&piece.data);
                Ok(())
            }
            None if !self.names.insert(piece.name.clone()) => {
                Err(format!("section \"{}\" twice", piece.name.escape_debug()))
            }
            None => {
                self.sections.push(piece);
                Ok(())
            }
        }
    }
}

/// Bytes that one takes.
fn section_bytes(section: &Section) -> u64 {
    section.data.len() as u64 + section.name.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(name: &str, version: u32, bytes: usize) -> Section {
        Section {
            name: name.to_owned(),
            version,
            data: (0..bytes).map(|i| (i % 251).to_le_bytes()[0]).collect(),
        }
    }

    #[test]
    fn sections_are_cut_and_joined() {
        for bytes in [
            0,
            1,
            MAX_SECTION_BYTES,
            MAX_SECTION_BYTES + 1,
            2 * MAX_SECTION_BYTES,
            3 << 20,
        ] {
            let state = [section("a", 1, 7), section("big", 3, bytes), section("b", 1, 0)];
            let mut joined = Joined::default();
            for piece in state.iter().cloned().flat_map(pieces) {
                assert!(piece.data.len() <= MAX_SECTION_BYTES);
                joined.push(piece).unwrap();
            }
            assert_eq!(joined.count(), 3);
            assert_eq!(joined.take(), state);
        }
    }

    #[test]
    fn what_is_no_sequence_of_sections_is_refused() {
        let refused = |pieces: &[Section]| {
            let mut joined = Joined::default();
            let all = pieces.iter().cloned().try_for_each(|piece| joined.push(piece));
            all.unwrap_err()
        };
        let (a, b) = (section("a", 1, 4), section("b", 1, 4));
        assert_eq!(refused(&[a.clone(), b, a.clone()]), "section \"a\" twice");
        let newer = section("a", 2, 4);
        assert_eq!(
            refused(&[a.clone(), newer]),
            "pieces of section \"a\" of versions 1 and 2"
        );
        let empty = section("a", 1, 0);
        assert_eq!(refused(&[a, empty]), "an empty further piece of section \"a\"");
        let large = section("a", 1, 16 << 20);
        assert!(refused(&vec![large; 5]).contains("more machine state than"));
        let many: Vec<Section> = (0..=MAX_SECTIONS).map(|i| section(&i.to_string(), 1, 0)).collect();
        assert!(refused(&many).contains("more machine state than"));
        assert!(check_state(&many).unwrap_err().contains("4097 sections"));
    }
}
