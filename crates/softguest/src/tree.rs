//! Sets of numbers in guest RAM: a bitmap, and over it bitmaps of which words below are not zero, up to one word.
//!
//! Finding the next member costs a few reads, whatever the size, and memory of a part that was never in the set is never
//! written: an idle guest of any size touches few pages of its bookkeeping.

use crate::Result;
use crate::ram::Ram;

/// One such set. Holds only addresses: all bits are in RAM.
#[derive(Clone, Debug)]
pub(crate) struct BitTree {
    /// Address and bits of each level, leaves first.
    levels: Vec<(u64, u64)>,
}

impl BitTree {
    /// A set of numbers below `bits`, at `address`, and how many bytes it takes.
    pub(crate) fn new(address: u64, bits: u64) -> (Self, u64) {
        let (mut levels, mut at, mut n) = (Vec::new(), address, bits.max(1));
        loop {
            levels.push((at, n));
            let words = n.div_ceil(64);
            at += words * 8;
            if words == 1 {
                break;
            }
            n = words;
        }
        (BitTree { levels }, at - address)
    }

    /// Numbers below this can be members.
    pub(crate) fn bits(&self) -> u64 {
        self.levels[0].1
    }

    pub(crate) fn contains(&self, ram: &Ram, i: u64) -> Result<bool> {
        if i >= self.bits() {
            return Ok(false);
        }
        // From the top, so that a part that never had a member is not even read.
        for (level, (address, _)) in self.levels.iter().enumerate().rev() {
            let bit = i >> (6 * level);
            if ram.read_u64(address + bit / 64 * 8)? >> (bit % 64) & 1 == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes `i` in; whether it is new.
    pub(crate) fn insert(&self, ram: &Ram, i: u64) -> Result<bool> {
        let mut bit = i;
        for (level, (address, _)) in self.levels.iter().enumerate() {
            let at = address + bit / 64 * 8;
            let word = ram.read_u64(at)?;
            if word >> (bit % 64) & 1 == 1 {
                return Ok(level > 0);
            }
            ram.write_u64(at, word | 1 << (bit % 64))?;
            if word != 0 {
                return Ok(true);
            }
            bit /= 64;
        }
        Ok(true)
    }

    /// Takes `i` out; whether it was in.
    pub(crate) fn remove(&self, ram: &Ram, i: u64) -> Result<bool> {
        if !self.contains(ram, i)? {
            return Ok(false);
        }
        let mut bit = i;
        for (address, _) in &self.levels {
            let at = address + bit / 64 * 8;
            let word = ram.read_u64(at)? & !(1 << (bit % 64));
            ram.write_u64(at, word)?;
            if word != 0 {
                break;
            }
            bit /= 64;
        }
        Ok(true)
    }

    /// Takes in the members of one word that `mask` names, `first` being the word's first bit. False, and nothing done,
    /// where one of them is in already.
    pub(crate) fn insert_bits(&self, ram: &Ram, first: u64, mask: u64) -> Result<bool> {
        let at = self.levels[0].0 + first / 64 * 8;
        let word = ram.read_u64(at)?;
        if word & mask != 0 {
            return Ok(false);
        }
        ram.write_u64(at, word | mask)?;
        let mut bit = first / 64;
        for (address, _) in self.levels.iter().skip(1).filter(|_| word == 0) {
            let at = address + bit / 64 * 8;
            let word = ram.read_u64(at)?;
            ram.write_u64(at, word | 1 << (bit % 64))?;
            if word != 0 {
                break;
            }
            bit /= 64;
        }
        Ok(true)
    }

    /// Takes out the least members, `most` at most and of one word only: the word's first bit, and which.
    pub(crate) fn take_bits(&self, ram: &Ram, most: u64) -> Result<Option<(u64, u64)>> {
        let Some(least) = self.next(ram, 0)? else {
            return Ok(None);
        };
        let at = self.levels[0].0 + least / 64 * 8;
        let word = ram.read_u64(at)?;
        let mut taken = word;
        while u64::from(taken.count_ones()) > most {
            taken &= !(1 << taken.ilog2());
        }
        ram.write_u64(at, word & !taken)?;
        let mut bit = least / 64;
        for (address, _) in self.levels.iter().skip(1).filter(|_| word == taken) {
            let at = address + bit / 64 * 8;
            let word = ram.read_u64(at)? & !(1 << (bit % 64));
            ram.write_u64(at, word)?;
            if word != 0 {
                break;
            }
            bit /= 64;
        }
        Ok(Some((least / 64 * 64, taken)))
    }

    /// The least member from `from` on.
    pub(crate) fn next(&self, ram: &Ram, from: u64) -> Result<Option<u64>> {
        let (mut level, mut bit) = (0, from);
        // Up until a word has a member at or after the place looked from.
        loop {
            let Some((address, bits)) = self.levels.get(level) else {
                return Ok(None);
            };
            if bit < *bits {
                let word = ram.read_u64(address + bit / 64 * 8)? >> (bit % 64);
                if word != 0 {
                    bit += u64::from(word.trailing_zeros());
                    break;
                }
            }
            bit = bit / 64 + 1;
            level += 1;
        }
        // Down again to its first member.
        while level > 0 {
            level -= 1;
            let word = ram.read_u64(self.levels[level].0 + bit * 8)?;
            if word == 0 || bit * 64 >= self.levels[level].1 {
                return Err(crate::Error::Corrupt(format!(
                    "a bitmap at {:#x} is empty where the one above it says it is not",
                    self.levels[level].0 + bit * 8
                )));
            }
            bit = bit * 64 + u64::from(word.trailing_zeros());
        }
        Ok(Some(bit))
    }

    /// Calls `each` with every word that has a member, ascending: the number of its first bit, and the word.
    pub(crate) fn for_each_word(&self, ram: &Ram, mut each: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
        let mut from = 0;
        while let Some(i) = self.next(ram, from)? {
            let word = i / 64;
            each(word * 64, ram.read_u64(self.levels[0].0 + word * 8)?)?;
            from = (word + 1) * 64;
        }
        Ok(())
    }

    /// Calls `each` with every member, ascending.
    pub(crate) fn for_each(&self, ram: &Ram, mut each: impl FnMut(u64) -> Result<()>) -> Result<()> {
        let mut from = 0;
        while let Some(i) = self.next(ram, from)? {
            each(i)?;
            from = i + 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::{Backing, GuestMemory};
    use pages::Layout;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::sync::Arc;

    fn ram() -> Ram {
        let layout = Arc::new(Layout::flat(4096).unwrap());
        Ram::new(Arc::new(GuestMemory::new(layout, &Backing::Anonymous).unwrap()))
    }

    proptest! {
        #[test]
        fn a_tree_is_a_set(bits in 1u64..300_000, ops in prop::collection::vec((0u8..5, any::<u64>()), 1..200)) {
            let ram = ram();
            let (tree, bytes) = BitTree::new(8192, bits);
            prop_assert!(bytes <= bits / 8 + bits / 400 + 64);
            let mut oracle = BTreeSet::new();
            for (op, n) in ops {
                let i = n % bits;
                match op {
                    0 => prop_assert_eq!(tree.insert(&ram, i).unwrap(), oracle.insert(i)),
                    1 => prop_assert_eq!(tree.remove(&ram, i).unwrap(), oracle.remove(&i)),
                    2 => {
                        let first = i / 64 * 64;
                        let named = |mask: u64| (0..64).filter(move |bit| mask >> bit & 1 == 1).map(move |bit| first + bit);
                        // Members below the bound alone.
                        let mask = (n.rotate_left(17) | 1 << (i % 64)) & (u64::MAX >> (64 - (bits - first).min(64)));
                        let new = named(mask).all(|i| !oracle.contains(&i));
                        prop_assert_eq!(tree.insert_bits(&ram, first, mask).unwrap(), new);
                        oracle.extend(named(mask).filter(|_| new));
                    }
                    3 => {
                        let most = 1 + n % 70;
                        let word = oracle.first().map(|least| least / 64 * 64);
                        let members: Vec<u64> = word.map_or(Vec::new(), |w| {
                            oracle.range(w..w + 64).copied().take(usize::try_from(most).unwrap()).collect()
                        });
                        let mask = members.iter().fold(0u64, |mask, i| mask | 1 << (i % 64));
                        prop_assert_eq!(tree.take_bits(&ram, most).unwrap(), word.map(|w| (w, mask)));
                        oracle.retain(|i| !members.contains(i));
                    }
                    _ => prop_assert_eq!(tree.next(&ram, i).unwrap(), oracle.range(i..).next().copied()),
                }
                prop_assert_eq!(tree.contains(&ram, i).unwrap(), oracle.contains(&i));
            }
            let mut all = Vec::new();
            tree.for_each(&ram, |i| { all.push(i); Ok(()) }).unwrap();
            let mut by_words = Vec::new();
            tree.for_each_word(&ram, |first, word| {
                by_words.extend((0..64).filter(|bit| word >> bit & 1 == 1).map(|bit| first + bit));
                Ok(())
            })
            .unwrap();
            prop_assert_eq!(&by_words, &all);
            prop_assert_eq!(all, oracle.into_iter().collect::<Vec<_>>());
        }
    }
}
