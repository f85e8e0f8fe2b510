//! A progress bar, on a terminal only.

use engine::{Phase, Progress};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;
use tokio::task::JoinHandle;

const REFRESH: Duration = Duration::from_millis(200);
const TEMPLATE: &str = "{msg:<24} [{bar:40}] {percent:>3} %";

/// A bar that follows a migration until it is dropped. Draws nothing where stderr is no terminal or `quiet` is set.
#[derive(Debug)]
pub struct ProgressLine {
    bar: ProgressBar,
    task: Option<JoinHandle<()>>,
}

/// Shows how far a migration is. Needs a tokio runtime.
pub fn show_progress(quiet: bool, observe: impl Fn() -> Progress + Send + 'static) -> ProgressLine {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressLine {
            bar: ProgressBar::hidden(),
            task: None,
        };
    }
    let bar = ProgressBar::new(100);
    if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
        bar.set_style(style);
    }
    let drawn = bar.clone();
    let task = tokio::spawn(async move {
        loop {
            let (message, percent) = describe(&observe());
            drawn.set_message(message);
            drawn.set_position(percent);
            tokio::time::sleep(REFRESH).await;
        }
    });
    ProgressLine { bar, task: Some(task) }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        self.bar.finish_and_clear();
    }
}

/// What the bar says, and how full it is, in percent of the round under way.
fn describe(progress: &Progress) -> (String, u64) {
    let text = match progress.phase {
        Phase::Connecting => "connecting".to_owned(),
        Phase::Setup => "looking at RAM".to_owned(),
        Phase::Precopy => format!("round {}", progress.round),
        Phase::Switchover => "guest paused".to_owned(),
        Phase::Committed => "handing over".to_owned(),
        Phase::Undoing => "undoing".to_owned(),
        Phase::Finished => "done".to_owned(),
    };
    let percent = match (progress.phase, progress.total_pages) {
        (Phase::Connecting | Phase::Setup, _) | (_, 0) => 0,
        (Phase::Precopy, total) => 100 - 100 * progress.pending_pages.min(total) / total,
        _ => 100,
    };
    (text, percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_stays_within_its_frame() {
        let mut progress = Progress {
            phase: Phase::Precopy,
            round: 2,
            ..Progress::default()
        };
        assert_eq!(describe(&progress).1, 0);
        progress.total_pages = 1000;
        progress.pending_pages = 250;
        assert_eq!(describe(&progress), ("round 2".to_owned(), 75));
        progress.pending_pages = 5000;
        assert_eq!(describe(&progress).1, 0);
        progress.phase = Phase::Finished;
        assert_eq!(describe(&progress).1, 100);
    }
}
