//! The worker thread: calls a guest's traits, one call at a time, in the order that the engine gives.
//!
//! The calls may block (a pause waits for vCPUs, a harvest reads a log), so they are not the control loop's to make. A
//! call that panics is a call that failed: an embedding VMM's own fault must not leave the migration without an end.

mod destination;
mod digest;
mod source;

pub(crate) use destination::{DestinationWorker, Prepare, Said};
pub(crate) use source::SourceWorker;

use engine::Step;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A step that failed: which, and a clause that says why.
type Failure = (Step, String);

/// Makes a call; a panic in it becomes a failure of `step`.
fn guarded<T>(step: Step, call: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            Err((step, format!("the guest's side panicked: {text}")))
        }
    }
}

/// Names the step in which a trait's call failed.
fn at<T>(step: Step, result: machine::Result<T>) -> Result<T, Failure> {
    result.map_err(|e| (step, e.to_string()))
}
