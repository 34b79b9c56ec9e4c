//! Turns of requests for vectors.
//!
//! Owns: the number of inputs that all these requests have in the router at a time, and the number
//! of requests that wait. Never: submits a sequence. Invariant: all turns together fit into the
//! router's queue of the default length, and no request waits for one with more than a window of
//! inputs unless it has as many.

use crate::error::{ApiError, RETRY_AFTER};
use cleave_domain::Refusal;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Limit of the inputs that one request for vectors has in the router at a time.
pub(crate) const INPUT_WINDOW: usize = 64;
/// Limit of the inputs in the router of each of the two kinds of requests: together as many as the
/// default length of the router's queue.
const KIND_INPUTS_MAX: usize = 512;
/// Limit of the waiting requests of each kind. Each holds its tokens.
const WAITS_MAX: usize = 1024;

/// Requests up to a window of inputs, and longer ones, wait for their own kind alone.
pub(crate) struct InputTurns {
    short: TurnQueue,
    long: TurnQueue,
}

impl InputTurns {
    pub(crate) fn new() -> Self {
        Self {
            short: TurnQueue::new(KIND_INPUTS_MAX, WAITS_MAX),
            long: TurnQueue::new(KIND_INPUTS_MAX, WAITS_MAX),
        }
    }

    /// Waits for the turn of a request, until its permit is dropped.
    ///
    /// # Errors
    /// 429 after `wait_max`, or at once if too many wait.
    pub(crate) async fn wait(
        &self,
        inputs_count: usize,
        wait_max: Duration,
    ) -> Result<OwnedSemaphorePermit, ApiError> {
        if inputs_count > INPUT_WINDOW {
            self.long.wait(INPUT_WINDOW, wait_max).await
        } else {
            self.short.wait(inputs_count, wait_max).await
        }
    }
}

/// Requests that wait in the order of their arrival.
struct TurnQueue {
    inputs_free: Arc<Semaphore>,
    waits_free: Semaphore,
}

impl TurnQueue {
    fn new(inputs_max: usize, waits_max: usize) -> Self {
        Self {
            inputs_free: Arc::new(Semaphore::new(inputs_max)),
            waits_free: Semaphore::new(waits_max),
        }
    }

    async fn wait(
        &self,
        inputs_count: usize,
        wait_max: Duration,
    ) -> Result<OwnedSemaphorePermit, ApiError> {
        let inputs_count = inputs_count as u32;
        let inputs_free = || Arc::clone(&self.inputs_free);
        if let Ok(turn) = inputs_free().try_acquire_many_owned(inputs_count) {
            return Ok(turn);
        }
        let full = || {
            let retry_after = RETRY_AFTER;
            ApiError::from(&Refusal::QueueFull { retry_after })
        };
        let _waiting = self.waits_free.try_acquire().map_err(|_| full())?;
        let turn = inputs_free().acquire_many_owned(inputs_count);
        let waited = timeout(wait_max, turn).await;
        waited.ok().and_then(Result::ok).ok_or_else(full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::poll;
    use std::pin::pin;

    #[tokio::test(start_paused = true)]
    async fn requests_that_wait_for_a_turn_have_a_limit() {
        let turns = TurnQueue::new(64, 2);
        let turn = || turns.wait(40, Duration::from_secs(30));
        let first = turn().await.unwrap();
        let (mut second, mut third) = (pin!(turn()), pin!(turn()));
        assert!(poll!(second.as_mut()).is_pending());
        assert!(poll!(third.as_mut()).is_pending());
        let refused = turn().await.unwrap_err();
        let refusal = (refused.status().as_u16(), refused.code());
        assert_eq!(refusal, (429, Some("queue_full")));
        drop(first);
        // A request whose turn came waits no more, and leaves its place to another.
        let _second = second.await.unwrap();
        let mut fourth = pin!(turn());
        assert!(poll!(fourth.as_mut()).is_pending());
        assert!(turn().await.is_err());
        let late = third.await.unwrap_err();
        assert_eq!(late.code(), Some("queue_full"), "after 30 s");
    }
}
