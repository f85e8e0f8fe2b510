//! What the receiver was told of each page last: both sides keep the same account, in a handful of page sets.
//!
//! Invariant: a page is in at most one of the six sets. When every page is in one, the account is whole, and the six
//! counts add up to all of RAM.

use crate::{PagesReport, RunKind};
use pages::{Layout, PageRange, PageSet};
use std::sync::Arc;
use wire::SkipReason;

/// The account.
#[derive(Clone, Debug)]
pub(crate) struct Fates {
    data: PageSet,
    zero: PageSet,
    filled: PageSet,
    hole: PageSet,
    hinted: PageSet,
    ballooned: PageSet,
    /// Pages that were hinted or filled at some time: where `hinted_then_sent` comes from.
    ever_free: PageSet,
    /// Pages that were told and lost with a connection: to tell them again is to send them again.
    lost: PageSet,
    resent: u64,
}

impl Fates {
    /// Nothing is known of any page.
    pub(crate) fn new(layout: &Arc<Layout>) -> Self {
        let empty = PageSet::empty(layout);
        Fates {
            data: empty.clone(),
            zero: empty.clone(),
            filled: empty.clone(),
            hole: empty.clone(),
            hinted: empty.clone(),
            ballooned: empty.clone(),
            ever_free: empty.clone(),
            lost: empty,
            resent: 0,
        }
    }

    /// A run was sent. What was told of its pages before no longer holds; a page told before was told again.
    pub(crate) fn told(&mut self, range: PageRange, kind: RunKind) {
        for skipped in [&mut self.hole, &mut self.hinted, &mut self.ballooned] {
            skipped.remove_range(range);
        }
        for sent in [&mut self.data, &mut self.zero, &mut self.filled, &mut self.lost] {
            self.resent += sent.remove_range(range);
        }
        match kind {
            RunKind::Data => self.data.insert_range(range),
            RunKind::Zero => self.zero.insert_range(range),
            RunKind::Fill => {
                self.ever_free.insert_range(range);
                self.filled.insert_range(range)
            }
        };
    }

    /// Pages of a run that was told as data were zero after all: one telling, not two.
    pub(crate) fn told_zero_among_data(&mut self, zero: &[PageRange]) {
        for range in zero {
            self.data.remove_range(*range);
            self.zero.insert_range(*range);
        }
    }

    /// Nobody knows whether the receiver was told of these: that did not happen. A page that was told of before, in an
    /// earlier round, has no fate either until it is told again in this one.
    pub(crate) fn lost(&mut self, pages: &PageSet) {
        for told in [&mut self.data, &mut self.zero, &mut self.filled] {
            let mut part = pages.clone();
            part.intersect_with(told);
            told.subtract(&part);
            self.lost.union_with(&part);
        }
    }

    /// Nothing was said of pages that are left out: that will be, anew.
    pub(crate) fn forget_skips(&mut self) {
        for skipped in [&mut self.hole, &mut self.hinted, &mut self.ballooned] {
            skipped.clear();
        }
    }

    /// Of `pages`, those that the receiver has by what they are.
    pub(crate) fn told_among(&self, pages: &PageSet) -> [(wire::Arrived, PageSet); 3] {
        let by = [
            (wire::Arrived::Data, &self.data),
            (wire::Arrived::Zero, &self.zero),
            (wire::Arrived::Filled, &self.filled),
        ];
        by.map(|(arrived, set)| {
            let mut part = pages.clone();
            part.intersect_with(set);
            (arrived, part)
        })
    }

    /// A range was skipped. The caller has checked that nothing was told of its pages.
    pub(crate) fn skipped(&mut self, range: PageRange, reason: SkipReason) {
        match reason {
            SkipReason::Hole => self.hole.insert_range(range),
            SkipReason::Ballooned => self.ballooned.insert_range(range),
            SkipReason::Hinted => {
                self.ever_free.insert_range(range);
                self.hinted.insert_range(range)
            }
        };
    }

    /// How many pages of `range` have a fate.
    pub(crate) fn known_in(&self, range: PageRange) -> u64 {
        self.all().iter().map(|set| set.count_range(range)).sum()
    }

    /// Every page that has a fate.
    pub(crate) fn known(&self) -> PageSet {
        let mut known = self.data.clone();
        for set in &self.all()[1..] {
            known.union_with(set);
        }
        known
    }

    /// Pages whose content is nobody's: called free and not sent since. Left out of digests.
    pub(crate) fn nobodys(&self) -> PageSet {
        let mut free = self.hinted.clone();
        free.union_with(&self.ballooned);
        free.union_with(&self.filled);
        free
    }

    /// Pages that were skipped because they lay in the balloon, and not sent since.
    pub(crate) fn ballooned(&self) -> &PageSet {
        &self.ballooned
    }

    /// The counts.
    pub(crate) fn report(&self) -> PagesReport {
        PagesReport {
            total: self.data.layout().total_pages(),
            sent: self.data.count(),
            resent: self.resent,
            zero: self.zero.count(),
            hole: self.hole.count(),
            hinted: self.hinted.count(),
            ballooned: self.ballooned.count(),
            filled: self.filled.count(),
            hinted_then_sent: self.data.intersection_count(&self.ever_free),
        }
    }

    fn all(&self) -> [&PageSet; 6] {
        [
            &self.data,
            &self.zero,
            &self.filled,
            &self.hole,
            &self.hinted,
            &self.ballooned,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pages::Pfn;

    fn r(start: u64, count: u64) -> PageRange {
        PageRange::new(Pfn(start), count).unwrap()
    }

    #[test]
    fn a_page_has_one_fate_the_last() {
        let layout = Arc::new(Layout::flat(100).unwrap());
        let mut fates = Fates::new(&layout);
        fates.skipped(r(0, 20), SkipReason::Hinted);
        fates.skipped(r(20, 10), SkipReason::Hole);
        fates.skipped(r(30, 10), SkipReason::Ballooned);
        fates.told(r(40, 50), RunKind::Data);
        fates.told_zero_among_data(&[r(40, 5)]);
        assert!(!fates.report().adds_up());
        fates.told(r(90, 10), RunKind::Fill);
        assert!(fates.report().adds_up());
        assert_eq!(fates.report().resent, 0);
        assert_eq!(fates.nobodys().count(), 40);

        // A later round: hinted, filled, ballooned and zero pages are written and sent with content.
        fates.told(r(10, 40), RunKind::Data);
        fates.told(r(95, 5), RunKind::Data);
        let report = fates.report();
        assert!(report.adds_up());
        assert_eq!((report.sent, report.zero, report.hole), (85, 0, 0));
        assert_eq!((report.hinted, report.ballooned, report.filled), (10, 0, 5));
        assert_eq!((report.resent, report.hinted_then_sent), (10 + 5, 10 + 5));
        assert_eq!(fates.known_in(r(0, 1000)), 100);
        assert_eq!(fates.known().count(), 100);
    }
}
