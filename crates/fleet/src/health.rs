//! Whether a brain and its body make progress. Health means forward progress, not a process that
//! answers.

use futures::FutureExt;
use parking_lot::Mutex;
use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// The progress of a driver and its engine's thread, for `/health`.
#[derive(Debug)]
pub struct HealthMonitor {
    step_limit: Duration,
    busy_since: Mutex<Option<Instant>>,
    failure: watch::Sender<Option<String>>,
}

impl HealthMonitor {
    pub fn new(step_limit: Duration) -> Self {
        Self {
            step_limit,
            busy_since: Mutex::default(),
            failure: watch::Sender::new(None),
        }
    }

    /// The engine began a piece of work.
    pub fn step_began(&self) {
        self.set(Some(Instant::now()));
    }

    /// The engine ended its piece of work.
    pub fn step_ended(&self) {
        self.set(None);
    }

    /// Something failed that only a new process repairs, such as a panic. The first reason stays.
    pub fn report_failure(&self, reason: &str) {
        self.failure.send_if_modified(|broken| {
            let first = broken.is_none();
            broken.get_or_insert_with(|| reason.to_owned());
            first
        });
    }

    /// Returns when something broke, with the reason.
    pub async fn failed(&self) -> String {
        let mut broken = self.failure.subscribe();
        let reason = broken.wait_for(Option::is_some).await;
        let reason = reason.ok().and_then(|reason| reason.clone());
        reason.expect("the sender lives as long as the pulse")
    }

    /// `Err` with the reason when there is no forward progress.
    pub fn check(&self) -> Result<(), String> {
        if let Some(reason) = self.failure.borrow().as_ref() {
            return Err(reason.clone());
        }
        let busy = *self.busy_since.lock();
        match busy.map(|since| since.elapsed()) {
            Some(busy) if busy > self.step_limit => Err(format!(
                "the engine has been busy with one step for {busy:?}, more than {:?}",
                self.step_limit
            )),
            _ => Ok(()),
        }
    }

    /// Runs a driver. A panic in it means a broken invariant of a brain, and makes the process
    /// unhealthy.
    pub async fn watch(&self, driver: impl Future<Output = ()>) {
        if let Err(panic) = AssertUnwindSafe(driver).catch_unwind().await {
            self.report_failure(&format!(
                "a driver panicked: {}",
                panic_message(panic.as_ref())
            ));
        }
    }

    fn set(&self, busy: Option<Instant>) {
        *self.busy_since.lock() = busy;
    }
}

/// The message of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<&str>().map(ToString::to_string);
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    message.unwrap_or_else(|| "without words".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Lesson: 12.
    #[tokio::test(start_paused = true)]
    async fn a_step_over_its_time_limit_is_unhealthy() {
        let monitor = HealthMonitor::new(Duration::from_secs(60));
        monitor.step_began();
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(monitor.check(), Ok(()));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(monitor.check().is_err());
        monitor.step_ended();
        assert_eq!(monitor.check(), Ok(()));
    }

    // Lesson: 12.
    #[tokio::test]
    async fn a_panicked_driver_is_unhealthy() {
        let monitor = HealthMonitor::new(Duration::from_secs(60));
        monitor.watch(async {}).await;
        assert_eq!(monitor.check(), Ok(()));
        monitor
            .watch(async { panic!("block 7 has two owners") })
            .await;
        assert!(monitor.failed().await.contains("block 7 has two owners"));
        assert!(monitor.check().is_err());
    }
}
