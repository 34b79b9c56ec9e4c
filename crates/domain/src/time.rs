//! The time of brains: a number that the body passes in; a brain never reads a clock.

use serde::{Deserialize, Serialize};
use std::ops::{Add, Sub};
use std::time::Duration;

/// The limit of a single duration, and of a target: sums and products of such durations stay far
/// from overflow, whatever numbers a worker reports.
pub const SPAN_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Nanoseconds since the start of the body; only differences are meaningful.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Time(u64);

impl Time {
    /// The start of the body.
    pub const ZERO: Self = Self(0);

    /// Never: later than any other time.
    pub const END: Self = Self(u64::MAX);

    /// The time `nanos` nanoseconds after the start of the body.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the start of the body.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to `self`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    /// The sum, at most [`Time::END`].
    fn add(self, span: Duration) -> Self {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

impl Sub<Duration> for Time {
    type Output = Self;

    /// The difference, at least [`Time::ZERO`].
    fn sub(self, span: Duration) -> Self {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(nanos))
    }
}
