//! Time as the brains know it: a number the body hands in, never a clock that is read.

use serde::{Deserialize, Serialize};
use std::ops::{Add, Sub};
use std::time::Duration;

/// No single span is taken or predicted to be longer: sums and products of such spans stay far from overflow,
/// whatever numbers a worker tells. No target is longer either.
pub const SPAN_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Nanoseconds since the body's own start; only differences mean anything.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Time(u64);

impl Time {
    /// The body's start.
    pub const ZERO: Self = Self(0);

    /// Later than anything: never.
    pub const END: Self = Self(u64::MAX);

    /// A time `nanos` nanoseconds after the body's start.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the body's start.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The span from `earlier` to `self`; zero if `earlier` is in fact later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    /// Saturates: a deadline past the end of time is the end of time.
    fn add(self, span: Duration) -> Self {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

impl Sub<Duration> for Time {
    type Output = Self;

    /// Saturates at the body's start.
    fn sub(self, span: Duration) -> Self {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(nanos))
    }
}
