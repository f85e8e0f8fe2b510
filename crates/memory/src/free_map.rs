//! A free map: which pages a paused guest called free when it was saved, as a bitmap in a file beside its RAM.
//!
//! One bit a 4 KiB page in RAM order, least significant bit of byte 0 first, `total_pages / 8` bytes rounded up.

use crate::error::{Error, Result};
use machine::{Answer, AnswerSink, BalloonCounts, FreePages, GuestMemoryStats};
use pages::{Layout, PageRange, PageSet};

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// Ranges of one answer at most.
const RANGES: usize = 4096;

/// The guest's word on its free pages, read from a file. Asked, it answers all at once.
#[derive(Debug)]
pub struct FreeMap {
    free: PageSet,
    counts: BalloonCounts,
}

impl FreeMap {
    /// Reads the map of a guest with this layout.
    ///
    /// # Errors
    /// [`Error::Format`] for a map of another length; it names both lengths.
    pub fn load(path: impl AsRef<Path>, layout: &Arc<Layout>) -> Result<FreeMap> {
        let path = path.as_ref();
        let failed = |e| Error::sys(format!("reading free map {}", path.display()), e);
        let file = crate::backing::open_regular(path, "free map")?;
        // One byte more than there should be, to notice a longer one without reading it whole.
        let expected = layout.total_pages().div_ceil(8);
        let length = file.metadata().map_err(failed)?.len();
        let mut bitmap = Vec::new();
        file.take(expected + 1).read_to_end(&mut bitmap).map_err(failed)?;
        let free = PageSet::from_bitmap(layout, &bitmap).map_err(|mut e| {
            e.got = e.got.max(length);
            Error::Format {
                path: path.to_owned(),
                what: format!("this free map does not belong to the RAM: {e}"),
            }
        })?;
        Ok(FreeMap::new(free))
    }

    /// A map that says these pages are free.
    pub fn new(free: PageSet) -> FreeMap {
        FreeMap {
            free,
            counts: BalloonCounts::default(),
        }
    }

    /// The pages that the map calls free.
    pub fn free(&self) -> &PageSet {
        &self.free
    }
}

impl FreePages for FreeMap {
    fn dialect(&self) -> &'static str {
        "free-map"
    }

    fn can_ask(&self) -> std::result::Result<(), String> {
        Ok(())
    }

    fn allocates(&self) -> bool {
        false
    }

    fn stats(&mut self) -> Option<GuestMemoryStats> {
        Some(GuestMemoryStats {
            free_pages: self.free.count(),
            total_pages: self.free.layout().total_pages(),
        })
    }

    fn ballooned(&mut self) -> Option<PageSet> {
        None
    }

    fn begin(&mut self, session: u32, sink: AnswerSink) -> machine::Result<()> {
        if session == 0 {
            return Err(machine::Error::Refused("a free map was asked in session 0".to_owned()));
        }
        let mut runs = self.free.runs();
        loop {
            let batch: Vec<PageRange> = runs.by_ref().take(RANGES).collect();
            if batch.is_empty() {
                break;
            }
            self.counts.answers += 1;
            sink(session, Answer::Free(batch));
        }
        for region in self.free.layout().regions() {
            sink(session, Answer::Covered(*region));
        }
        sink(session, Answer::Finished);
        Ok(())
    }

    fn end(&mut self, _session: u32) -> machine::Result<()> {
        // Everything was said inside begin.
        Ok(())
    }

    fn counts(&self) -> BalloonCounts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pages::Pfn;
    use std::sync::Mutex;

    fn layout() -> Arc<Layout> {
        let r = |start, count| PageRange::new(Pfn(start), count).unwrap();
        Arc::new(Layout::new(vec![r(0, 13), r(100, 7)]).unwrap())
    }

    #[test]
    fn a_pipe_in_its_place_is_refused_and_waits_for_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        assert!(matches!(FreeMap::load(&pipe, &layout()), Err(Error::NotRegular(_))));
        assert!(matches!(crate::layout_file::load(&pipe), Err(Error::NotRegular(_))));
    }

    #[test]
    fn answers_everything_at_once_in_ram_order() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // Pages 0, 1 of RAM; place 13 is page 100; bits past place 19 are ignored.
        std::fs::write(file.path(), [0b0000_0011, 0b0010_0000, 0b1111_1000]).unwrap();
        let mut map = FreeMap::load(file.path(), &layout()).unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&heard);
        map.begin(7, Arc::new(move |s, a| sink.lock().unwrap().push((s, a))))
            .unwrap();
        map.end(7).unwrap();
        let r = |start, count| PageRange::new(Pfn(start), count).unwrap();
        assert_eq!(
            *heard.lock().unwrap(),
            [
                (7, Answer::Free(vec![r(0, 2), r(100, 1), r(106, 1)])),
                (7, Answer::Covered(r(0, 13))),
                (7, Answer::Covered(r(100, 7))),
                (7, Answer::Finished),
            ]
        );
        assert_eq!(map.counts().answers, 1);
        assert_eq!(map.stats().unwrap().free_pages, 4);
        assert!(map.begin(0, Arc::new(|_, _| {})).is_err());
    }

    #[test]
    fn case_28_a_map_of_another_length_is_refused_with_both_lengths() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for wrong in [2usize, 4, 900] {
            std::fs::write(file.path(), vec![0u8; wrong]).unwrap();
            let text = FreeMap::load(file.path(), &layout()).unwrap_err().to_string();
            assert!(
                text.contains(" 3 bytes") && text.contains(&format!("has {wrong}")),
                "{text}"
            );
        }
    }
}
