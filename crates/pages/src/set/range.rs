//! Whole ranges at a time: what a hint, a batch and a harvest speak in.

use super::node::{Bits, GROUP_PAGES};
use super::{PageSet, as_index};
use crate::{Layout, PageRange};

/// The part of a range that lies in one group.
struct Part {
    group: usize,
    /// Pages of the group.
    valid: u64,
    /// The part, counted in pages from the group's start.
    from: u64,
    to: u64,
}

impl PageSet {
    /// Puts the RAM pages of `range` in; how many were new.
    pub fn insert_range(&mut self, range: PageRange) -> u64 {
        self.set_range(range, true)
    }

    /// Takes the pages of `range` out; how many were in.
    pub fn remove_range(&mut self, range: PageRange) -> u64 {
        self.set_range(range, false)
    }

    fn set_range(&mut self, range: PageRange, value: bool) -> u64 {
        let groups = &mut self.groups;
        let set = |part: Part| groups[part.group].set(value, part.from, part.to, part.valid);
        parts(&self.layout, range).map(set).sum()
    }

    /// How many pages of `range` are in the set.
    pub fn count_range(&self, range: PageRange) -> u64 {
        let count = |part: Part| self.groups[part.group].count_range(part.from, part.to);
        parts(&self.layout, range).map(count).sum()
    }
}

/// The RAM pages of `range`, group by group.
fn parts(layout: &Layout, range: PageRange) -> impl Iterator<Item = Part> {
    let first = layout.regions().partition_point(|r| r.end() <= range.start());
    let of_region = move |i: usize| {
        let region = *layout.regions().get(i)?;
        let inside = region.intersection(range);
        if region.start() >= range.end() || inside.is_empty() {
            return None;
        }
        let (from, to) = (inside.start().0 - region.start().0, inside.end().0 - region.start().0);
        let part = move |group: u64| {
            let start = group * GROUP_PAGES;
            let valid = (region.count() - start).min(GROUP_PAGES);
            Part {
                group: layout.first_group(i) + as_index(group),
                valid,
                from: from.saturating_sub(start),
                to: (to - start).min(valid),
            }
        };
        Some((from / GROUP_PAGES..to.div_ceil(GROUP_PAGES)).map(part))
    };
    (first..).map_while(of_region).flatten()
}
