//! The receiver's side of credit: what a peer's payloads hold here, and what goes back to it.
//!
//! Invariant: bytes taken are given back exactly once, by the drop of their [`Hold`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Notify;

/// The account of one incoming link.
#[derive(Debug)]
pub(crate) struct Account {
    window: u64,
    held: AtomicU64,
    returned: AtomicU64,
    changed: Notify,
}

/// Bytes of the window in use; they return when it is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    account: Arc<Account>,
    bytes: u64,
}

impl Account {
    pub(crate) fn new(window: u32) -> Arc<Self> {
        Arc::new(Self {
            window: u64::from(window),
            held: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            changed: Notify::new(),
        })
    }

    /// Takes `bytes` of the window; `None` if the peer sent more than it was granted.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Option<Hold> {
        // One reader per link takes; drops only lower `held`, so the sum cannot pass the window.
        let held = self.held.load(Ordering::Acquire);
        if held.saturating_add(bytes) > self.window {
            return None;
        }
        self.held.fetch_add(bytes, Ordering::AcqRel);
        Some(Hold {
            account: Arc::clone(self),
            bytes,
        })
    }

    /// Waits until bytes have come back, and takes them all: they are to be granted again.
    pub(crate) async fn returned(&self) -> u64 {
        loop {
            let bytes = self.returned.swap(0, Ordering::AcqRel);
            if bytes > 0 {
                return bytes;
            }
            self.changed.notified().await;
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.account.held.fetch_sub(self.bytes, Ordering::AcqRel);
        self.account
            .returned
            .fetch_add(self.bytes, Ordering::AcqRel);
        self.account.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dropped_hold_comes_back_once() {
        let account = Account::new(100);
        let first = account.take(60).unwrap();
        assert!(account.take(50).is_none(), "more than the window");
        let second = account.take(40).unwrap();
        drop(first);
        drop(second);
        assert_eq!(account.returned().await, 100);
        assert!(account.take(100).is_some());
    }
}
