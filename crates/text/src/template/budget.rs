//! The budget of one rendering.
//!
//! Owns: the bytes and the time of a chat template's rendering, counted on the rendering thread.
//! Never: limits anything by itself: filters, operators and values ask. Invariant: bytes are
//! counted when they are made and never returned, so a template never keeps more than was counted.

use minijinja::{Error, ErrorKind};
use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    static BUDGET: Cell<Option<RenderBudget>> = const { Cell::new(None) };
}

/// The budget of the rendering on this thread.
#[derive(Clone, Copy, Debug)]
struct RenderBudget {
    bytes_left: usize,
    ends: Instant,
    exhausted: Option<BudgetLimit>,
}

/// The limit that a rendering reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BudgetLimit {
    Bytes,
    Time,
}

/// Runs `work` within these limits, and returns the limit that it reached, if any.
pub(super) fn with_budget<T>(
    bytes_max: usize,
    time_max: Duration,
    work: impl FnOnce() -> T,
) -> (T, Option<BudgetLimit>) {
    let meter = RenderBudget {
        bytes_left: bytes_max,
        ends: Instant::now() + time_max,
        exhausted: None,
    };
    let _unset = ClearBudgetOnDrop;
    BUDGET.set(Some(meter));
    let result = work();
    (result, BUDGET.get().and_then(|meter| meter.exhausted))
}

/// Ends the counting, even if the work panics.
struct ClearBudgetOnDrop;

impl Drop for ClearBudgetOnDrop {
    fn drop(&mut self) {
        BUDGET.set(None);
    }
}

/// Charges bytes that are about to be made. Outside of a rendering nothing is counted.
///
/// # Errors
/// If the bytes or the time are exhausted.
pub(crate) fn charge(bytes: usize) -> Result<(), Error> {
    let Some(mut meter) = BUDGET.get() else {
        return Ok(());
    };
    match meter.bytes_left.checked_sub(bytes) {
        Some(left) => meter.bytes_left = left,
        None => meter.exhausted = meter.exhausted.or(Some(BudgetLimit::Bytes)),
    }
    check_limits(meter)
}

/// Checks the time limit before a step that takes time.
///
/// # Errors
/// If the time is exhausted.
pub(crate) fn check_time() -> Result<(), Error> {
    BUDGET.get().map_or(Ok(()), check_limits)
}

fn check_limits(mut meter: RenderBudget) -> Result<(), Error> {
    if Instant::now() >= meter.ends {
        meter.exhausted = meter.exhausted.or(Some(BudgetLimit::Time));
    }
    BUDGET.set(Some(meter));
    match meter.exhausted {
        None => Ok(()),
        // The caller of the rendering reports the limit, so this text is never shown.
        Some(_) => Err(Error::new(ErrorKind::InvalidOperation, "too much")),
    }
}
