//! The one place where a clock is read for the brains.

use cleave_domain::Time;
use tokio::time::Instant;

/// Time since the body's start.
#[derive(Clone, Copy, Debug)]
pub struct BrainClock {
    start: Instant,
}

impl BrainClock {
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    pub fn now(&self) -> Time {
        let nanos = self.start.elapsed().as_nanos();
        Time::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// The brain's deadline on tokio's clock.
    pub(crate) fn instant(&self, at: Time) -> Instant {
        self.start + at.since(Time::ZERO)
    }
}

/// Waits until the deadline; without one, forever.
pub async fn deadline_reached(clock: BrainClock, deadline: Option<Time>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(clock.instant(at)).await,
        None => std::future::pending().await,
    }
}
