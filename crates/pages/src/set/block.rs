//! A block: 4096 pages (16 MiB) of one region, as words only where it holds some pages and lacks others.
//!
//! A region's last block may have fewer pages; `valid` says how many. Bits past them are clear, always: that is what lets
//! algebra go word by word.

/// Words of a block.
pub(super) const BLOCK_WORDS: usize = 64;

/// Pages of a block.
pub(crate) const BLOCK_PAGES: u64 = 64 * BLOCK_WORDS as u64;

/// A block. `Mixed` may happen to hold no page or all of them; the two others are what is looked for first.
#[derive(Clone, Debug)]
pub(super) enum Block {
    /// No page.
    Empty,
    /// Every page that is valid.
    Full,
    /// These.
    Mixed(Box<[u64; BLOCK_WORDS]>),
}

impl Block {
    /// The bits of word `word`.
    pub(super) fn word(&self, word: usize, valid: u64) -> u64 {
        match self {
            Block::Empty => 0,
            Block::Full => valid_bits(word, valid),
            Block::Mixed(words) => words[word],
        }
    }

    /// The words, to be changed.
    pub(super) fn words_mut(&mut self, valid: u64) -> &mut [u64; BLOCK_WORDS] {
        if let Block::Empty | Block::Full = self {
            *self = Block::Mixed(Box::new(std::array::from_fn(|word| self.word(word, valid))));
        }
        match self {
            Block::Mixed(words) => words,
            Block::Empty | Block::Full => unreachable!("made Mixed above"),
        }
    }

    /// A block of these words, in its shortest form.
    pub(super) fn of(words: Box<[u64; BLOCK_WORDS]>, valid: u64) -> Block {
        match words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>() {
            0 => Block::Empty,
            all if all == valid => Block::Full,
            _ => Block::Mixed(words),
        }
    }

    /// How many pages are in it.
    pub(super) fn count(&self, valid: u64) -> u64 {
        match self {
            Block::Empty => 0,
            Block::Full => valid,
            Block::Mixed(words) => words.iter().map(|word| u64::from(word.count_ones())).sum(),
        }
    }

    /// The first page at or after `from` that is in the block (`set`) or is not; counted from the block's start. May be
    /// one that is not valid, which is not in the block.
    pub(super) fn find(&self, from: u64, set: bool) -> Option<u64> {
        match self {
            Block::Empty => (!set).then_some(from),
            Block::Full => set.then_some(from),
            Block::Mixed(words) => {
                let flip = if set { 0 } else { u64::MAX };
                let first = usize::try_from(from / 64).unwrap_or(BLOCK_WORDS);
                let mut mask = u64::MAX << (from % 64);
                for (i, word) in words.iter().enumerate().skip(first) {
                    let bits = (word ^ flip) & mask;
                    if bits != 0 {
                        return Some(i as u64 * 64 + u64::from(bits.trailing_zeros()));
                    }
                    mask = u64::MAX;
                }
                None
            }
        }
    }
}

/// The bits of word `word` that stand for pages, in a block of `valid` pages.
pub(super) fn valid_bits(word: usize, valid: u64) -> u64 {
    bits_between(0, valid.saturating_sub(word as u64 * 64))
}

/// Bits `from..to` of a word; both may exceed 64.
pub(super) fn bits_between(from: u64, to: u64) -> u64 {
    let below = |n: u64| if n >= 64 { u64::MAX } else { (1 << n) - 1 };
    below(to) & !below(from)
}
