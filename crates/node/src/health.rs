//! Whether a brain and its body make progress. Health means forward progress, not a process that
//! answers.

use futures::FutureExt;
use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// What a driver and its engine's thread are doing; read by `/health`.
#[derive(Debug)]
pub(crate) struct Pulse {
    step_limit: Duration,
    busy_since: Mutex<Option<Instant>>,
    broken: watch::Sender<Option<String>>,
}

impl Pulse {
    pub(crate) fn new(step_limit: Duration) -> Self {
        Self {
            step_limit,
            busy_since: Mutex::default(),
            broken: watch::Sender::new(None),
        }
    }

    /// The engine took something on.
    pub(crate) fn begin(&self) {
        self.set(Some(Instant::now()));
    }

    /// The engine is through with it.
    pub(crate) fn end(&self) {
        self.set(None);
    }

    /// Something panicked; nothing makes that good but a new process. The first reason stays.
    pub(crate) fn broke(&self, reason: &str) {
        self.broken.send_if_modified(|broken| {
            let first = broken.is_none();
            broken.get_or_insert_with(|| reason.to_owned());
            first
        });
    }

    /// Returns when something broke, with the reason.
    pub(crate) async fn broken(&self) -> String {
        let mut broken = self.broken.subscribe();
        let reason = broken.wait_for(Option::is_some).await;
        let reason = reason.ok().and_then(|reason| reason.clone());
        reason.expect("the sender lives as long as the pulse")
    }

    /// `Err` with the reason when there is no forward progress.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let Some(reason) = self.broken.borrow().as_ref() {
            return Err(reason.clone());
        }
        let busy = *self
            .busy_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match busy.map(|since| since.elapsed()) {
            Some(busy) if busy > self.step_limit => Err(format!(
                "the engine has been busy with one step for {busy:?}, more than {:?}",
                self.step_limit
            )),
            _ => Ok(()),
        }
    }

    /// Runs a driver; a panic in it, which is a broken invariant of a brain, is the end of health.
    pub(crate) async fn watch(&self, driver: impl Future<Output = ()>) {
        if let Err(panic) = AssertUnwindSafe(driver).catch_unwind().await {
            self.broke(&format!("a driver panicked: {}", words(panic.as_ref())));
        }
    }

    fn set(&self, busy: Option<Instant>) {
        *self
            .busy_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = busy;
    }
}

/// What a panic said.
pub(crate) fn words(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().map(ToString::to_string);
    let words = words.or_else(|| panic.downcast_ref::<String>().cloned());
    words.unwrap_or_else(|| "without words".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lesson_12_a_step_that_never_ends_is_not_healthy() {
        let pulse = Pulse::new(Duration::from_secs(60));
        pulse.begin();
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(pulse.check(), Ok(()));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(pulse.check().is_err());
        pulse.end();
        assert_eq!(pulse.check(), Ok(()));
    }

    #[tokio::test]
    async fn lesson_12_a_broken_invariant_is_not_healthy() {
        let pulse = Pulse::new(Duration::from_secs(60));
        pulse.watch(async {}).await;
        assert_eq!(pulse.check(), Ok(()));
        pulse
            .watch(async { panic!("block 7 has two owners") })
            .await;
        assert!(pulse.broken().await.contains("block 7 has two owners"));
        assert!(pulse.check().is_err());
    }
}
