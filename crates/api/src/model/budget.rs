//! How much one rendering may take.
//!
//! Owns: the bytes and the time that a chat template has, counted on the thread that renders. Never: limits
//! anything by itself: filters, operators and values ask. Invariant: bytes are counted when they are made and
//! never given back, so that whatever a template keeps is less.

use minijinja::{Error, ErrorKind};
use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    static METER: Cell<Option<Meter>> = const { Cell::new(None) };
}

/// The budget left to the rendering on this thread.
#[derive(Clone, Copy, Debug)]
struct Meter {
    bytes_left: usize,
    ends: Instant,
    spent: Option<Spent>,
}

/// The limit that a rendering reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spent {
    Bytes,
    Time,
}

/// Does `work` within these limits; what was spent, if anything was, is told beside its result.
pub(super) fn within<T>(
    bytes_max: usize,
    time_max: Duration,
    work: impl FnOnce() -> T,
) -> (T, Option<Spent>) {
    let meter = Meter {
        bytes_left: bytes_max,
        ends: Instant::now() + time_max,
        spent: None,
    };
    let _unset = Unset;
    METER.set(Some(meter));
    let result = work();
    (result, METER.get().and_then(|meter| meter.spent))
}

/// Ends the counting, also when the work panics.
struct Unset;

impl Drop for Unset {
    fn drop(&mut self) {
        METER.set(None);
    }
}

/// Counts bytes that are about to be made. Outside of a rendering nothing is counted.
///
/// # Errors
/// If so many are not left, or no time is.
pub(crate) fn charge(bytes: usize) -> Result<(), Error> {
    let Some(mut meter) = METER.get() else {
        return Ok(());
    };
    match meter.bytes_left.checked_sub(bytes) {
        Some(left) => meter.bytes_left = left,
        None => meter.spent = meter.spent.or(Some(Spent::Bytes)),
    }
    checked(meter)
}

/// Asks for the time before something that takes some.
///
/// # Errors
/// If none is left.
pub(crate) fn look() -> Result<(), Error> {
    METER.get().map_or(Ok(()), checked)
}

fn checked(mut meter: Meter) -> Result<(), Error> {
    if Instant::now() >= meter.ends {
        meter.spent = meter.spent.or(Some(Spent::Time));
    }
    METER.set(Some(meter));
    match meter.spent {
        None => Ok(()),
        // Its text is made from what was spent, after the rendering.
        Some(_) => Err(Error::new(ErrorKind::InvalidOperation, "too much")),
    }
}
