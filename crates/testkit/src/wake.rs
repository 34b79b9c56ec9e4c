//! The next wake-up of a brain that is scheduled.

use cleave_domain::Time;

/// Schedules a wake-up only where a brain's deadline has moved to an earlier time. A deadline that
/// moved to a later time costs one early wake-up, which is harmless.
#[derive(Clone, Copy, Debug, Default)]
pub struct WakeTimer {
    planned: Option<Time>,
}

impl WakeTimer {
    /// The wake-up that is to be scheduled for this deadline, if it is earlier than the planned
    /// one.
    #[must_use]
    pub fn plan(&mut self, deadline: Option<Time>) -> Option<Time> {
        let wake = deadline.filter(|at| self.planned.is_none_or(|planned| *at < planned))?;
        self.planned = Some(wake);
        Some(wake)
    }

    /// Whether the planned wake-up is due; then none is planned any more.
    pub fn take_due(&mut self, now: Time) -> bool {
        self.planned.take_if(|at| *at <= now).is_some()
    }
}
