//! The tree under a set: words of 64 pages, blocks of 64 words (16 MiB), groups of 64 blocks (1 GiB). A node has children
//! only where it holds some of its pages and lacks others; one that becomes empty or full loses them. So two sets of the same
//! pages are the same tree, and what is alike is passed over at once, however large.
//!
//! A region's last nodes may have fewer pages than they could; `valid` says how many, down to none. What lies past them is
//! clear, always: that is what lets algebra go word by word.

/// 4096 pages.
pub(super) type Block = Node<u64>;
/// 262,144 pages.
pub(crate) type Group = Node<Block>;

/// Pages of a group.
pub(crate) const GROUP_PAGES: u64 = Group::PAGES;

/// Children of a node, and bits of a word.
const FANOUT: usize = 64;

/// So many pages in a row, each in the set or not: a word, or a node of what is smaller. `from` and `to` count pages from its
/// first one.
pub(crate) trait Bits: Clone + PartialEq {
    /// How many pages it has at most.
    const PAGES: u64;

    /// All of `valid` pages, or none.
    fn all(value: bool, valid: u64) -> Self;

    /// Whether it is that.
    fn is_all(&self, value: bool, valid: u64) -> bool;

    /// How many pages are in.
    fn count(&self, valid: u64) -> u64;

    /// How many pages of `from..to` are in.
    fn count_range(&self, from: u64, to: u64) -> u64;

    /// Puts `from..to` in, or takes it out; how many pages that changed.
    fn set(&mut self, value: bool, from: u64, to: u64, valid: u64) -> u64;

    /// Puts in the pages that `bits` names, from `at` on, which is where a word starts; how many were new.
    fn insert_word(&mut self, at: u64, bits: u64, valid: u64) -> u64;

    /// The first page at or after `from` that is in (`value`) or is not. The latter may be past the valid ones.
    fn find(&self, value: bool, from: u64) -> Option<u64>;

    /// Puts `op` of both in place of this one; how many pages changed. `op` works bit by bit, and either only adds pages or only
    /// takes some out.
    fn combine(&mut self, other: &Self, valid: u64, op: impl Fn(u64, u64) -> u64 + Copy) -> u64;

    /// How many pages are in both.
    fn common(&self, other: &Self, valid: u64) -> u64;
}

impl Bits for u64 {
    const PAGES: u64 = 64;

    fn all(value: bool, valid: u64) -> Self {
        if value { bits_between(0, valid) } else { 0 }
    }

    fn is_all(&self, value: bool, valid: u64) -> bool {
        *self == u64::all(value, valid)
    }

    fn count(&self, _valid: u64) -> u64 {
        u64::from(self.count_ones())
    }

    fn count_range(&self, from: u64, to: u64) -> u64 {
        u64::from((self & bits_between(from, to)).count_ones())
    }

    fn set(&mut self, value: bool, from: u64, to: u64, _valid: u64) -> u64 {
        let mask = bits_between(from, to);
        let old = *self;
        *self = if value { old | mask } else { old & !mask };
        u64::from((old ^ *self).count_ones())
    }

    fn insert_word(&mut self, _at: u64, bits: u64, _valid: u64) -> u64 {
        let new = bits & !*self;
        *self |= bits;
        u64::from(new.count_ones())
    }

    fn find(&self, value: bool, from: u64) -> Option<u64> {
        let wanted = if value { *self } else { !*self };
        let bits = wanted & (u64::MAX << from);
        (bits != 0).then(|| u64::from(bits.trailing_zeros()))
    }

    fn combine(&mut self, other: &Self, _valid: u64, op: impl Fn(u64, u64) -> u64 + Copy) -> u64 {
        let old = *self;
        *self = op(old, *other);
        u64::from((old ^ *self).count_ones())
    }

    fn common(&self, other: &Self, _valid: u64) -> u64 {
        u64::from((self & other).count_ones())
    }
}

/// A node of 64 children.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Node<T> {
    /// No page.
    Empty,
    /// Every page that is valid, of which there are some.
    Full,
    /// Some, and not all.
    Mixed(Box<[T; FANOUT]>),
}

impl<T: Bits> Node<T> {
    /// Of a node of `valid` pages, the valid pages of child `i`.
    fn valid_of(i: usize, valid: u64) -> u64 {
        valid.saturating_sub(i as u64 * T::PAGES).min(T::PAGES)
    }

    /// The children, to be changed; [`Node::merge`] comes after.
    fn children_mut(&mut self, valid: u64) -> &mut [T; FANOUT] {
        if let Node::Empty | Node::Full = self {
            let value = matches!(self, Node::Full);
            let child = |i| T::all(value, Node::<T>::valid_of(i, valid));
            *self = Node::Mixed(Box::new(std::array::from_fn(child)));
        }
        match self {
            Node::Mixed(children) => children,
            Node::Empty | Node::Full => unreachable!("made Mixed above"),
        }
    }

    /// Drops the children if all of them are `value`.
    fn merge(&mut self, value: bool, valid: u64) {
        if let Node::Mixed(children) = self {
            let mut each = children.iter().enumerate();
            if each.all(|(i, child)| child.is_all(value, Node::<T>::valid_of(i, valid))) {
                *self = Node::all(value, valid);
            }
        }
    }

    /// Becomes `new`, which holds all of what this holds, or is held by it; how many pages changed.
    fn replace(&mut self, new: Self, valid: u64) -> u64 {
        let changed = self.count(valid).abs_diff(new.count(valid));
        *self = new;
        changed
    }
}

/// The children that pages `from..to` of a node touch, and which pages of each.
fn touched<T: Bits>(from: u64, to: u64) -> impl Iterator<Item = (usize, u64, u64)> {
    (from / T::PAGES..to.div_ceil(T::PAGES)).map(move |i| {
        let start = i * T::PAGES;
        let first = from.saturating_sub(start);
        // There are 64 children.
        (super::as_index(i), first, (to - start).min(T::PAGES))
    })
}

impl<T: Bits> Bits for Node<T> {
    const PAGES: u64 = FANOUT as u64 * T::PAGES;

    fn all(value: bool, valid: u64) -> Self {
        if value && valid > 0 { Node::Full } else { Node::Empty }
    }

    fn is_all(&self, value: bool, valid: u64) -> bool {
        match self {
            Node::Empty => !value || valid == 0,
            Node::Full => value,
            Node::Mixed(_) => false,
        }
    }

    fn count(&self, valid: u64) -> u64 {
        match self {
            Node::Empty => 0,
            Node::Full => valid,
            Node::Mixed(children) => {
                let each = children.iter().enumerate();
                each.map(|(i, child)| child.count(Self::valid_of(i, valid))).sum()
            }
        }
    }

    fn count_range(&self, from: u64, to: u64) -> u64 {
        match self {
            Node::Empty => 0,
            Node::Full => to - from,
            Node::Mixed(children) => {
                let each = touched::<T>(from, to);
                each.map(|(i, from, to)| children[i].count_range(from, to)).sum()
            }
        }
    }

    fn set(&mut self, value: bool, from: u64, to: u64, valid: u64) -> u64 {
        if from >= to || self.is_all(value, valid) {
            return 0;
        }
        if from == 0 && to == valid {
            return self.replace(Node::all(value, valid), valid);
        }
        let children = self.children_mut(valid);
        let mut changed = 0;
        for (i, from, to) in touched::<T>(from, to) {
            changed += children[i].set(value, from, to, Self::valid_of(i, valid));
        }
        self.merge(value, valid);
        changed
    }

    fn insert_word(&mut self, at: u64, bits: u64, valid: u64) -> u64 {
        if bits == 0 || matches!(self, Node::Full) {
            return 0;
        }
        let i = super::as_index(at / T::PAGES);
        let new = self.children_mut(valid)[i].insert_word(at % T::PAGES, bits, Self::valid_of(i, valid));
        self.merge(true, valid);
        new
    }

    fn find(&self, value: bool, from: u64) -> Option<u64> {
        match self {
            Node::Empty => (!value).then_some(from),
            Node::Full => value.then_some(from),
            Node::Mixed(children) => {
                let first = super::as_index(from / T::PAGES);
                children.iter().enumerate().skip(first).find_map(|(i, child)| {
                    let start = i as u64 * T::PAGES;
                    Some(start + child.find(value, from.saturating_sub(start))?)
                })
            }
        }
    }

    fn combine(&mut self, other: &Self, valid: u64, op: impl Fn(u64, u64) -> u64 + Copy) -> u64 {
        // What `op` makes of a page here that is not in and one that is: beside one of theirs, or in the place of theirs.
        let made = match (&*self, other) {
            (_, Node::Empty) => (op(0, 0), op(u64::MAX, 0)),
            (_, Node::Full) => (op(0, u64::MAX), op(u64::MAX, u64::MAX)),
            (Node::Empty, Node::Mixed(_)) => (op(0, 0), op(0, u64::MAX)),
            (Node::Full, Node::Mixed(_)) => (op(u64::MAX, 0), op(u64::MAX, u64::MAX)),
            (Node::Mixed(_), Node::Mixed(_)) => (u64::MAX, 0),
        };
        match (made, other) {
            ((0, 0), _) => self.replace(Node::Empty, valid),
            ((u64::MAX, u64::MAX), _) => self.replace(Node::all(true, valid), valid),
            // As it was.
            ((0, u64::MAX), Node::Empty | Node::Full) => 0,
            ((0, u64::MAX), Node::Mixed(_)) => self.replace(other.clone(), valid),
            (_, Node::Mixed(theirs)) => {
                let mut changed = 0;
                for (i, (mine, theirs)) in self.children_mut(valid).iter_mut().zip(&**theirs).enumerate() {
                    changed += mine.combine(theirs, Self::valid_of(i, valid), op);
                }
                if changed > 0 {
                    self.merge(false, valid);
                    self.merge(true, valid);
                }
                changed
            }
            (_, Node::Empty | Node::Full) => unreachable!("no operation turns pages over"),
        }
    }

    fn common(&self, other: &Self, valid: u64) -> u64 {
        match (self, other) {
            (Node::Empty, _) | (_, Node::Empty) => 0,
            (Node::Full, node) | (node, Node::Full) => node.count(valid),
            (Node::Mixed(a), Node::Mixed(b)) => {
                let each = a.iter().zip(&**b).enumerate();
                each.map(|(i, (a, b))| a.common(b, Self::valid_of(i, valid))).sum()
            }
        }
    }
}

/// Bits `from..to` of a word; both may exceed 64.
pub(super) fn bits_between(from: u64, to: u64) -> u64 {
    let below = |n: u64| if n >= 64 { u64::MAX } else { (1 << n) - 1 };
    below(to) & !below(from)
}
