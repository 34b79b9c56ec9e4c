//! The receiver's side of credit: what a peer's payloads hold here, and what goes back to it.
//!
//! Invariant: what is taken is given back exactly once, by the drop of its [`Hold`]; a slot is never
//! taken while it is held.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The account of one incoming link.
#[derive(Debug)]
pub(crate) struct Account {
    window: u64,
    book: Mutex<Book>,
    changed: Notify,
}

#[derive(Debug)]
struct Book {
    held_bytes: u64,
    /// One for each slot of a ring; none where payloads travel on the stream.
    slots: Vec<Slot>,
    returned: Returned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    Held,
}

/// What came back since it was last asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Returned {
    pub(crate) bytes: u64,
    pub(crate) slots: Vec<u32>,
}

/// Part of the window in use; it returns when this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    account: Arc<Account>,
    bytes: u64,
    slot: Option<u32>,
}

impl Account {
    /// Counts bytes.
    pub(crate) fn of_bytes(window: u32) -> Arc<Self> {
        Self::new(u64::from(window), 0)
    }

    /// Counts slots.
    pub(crate) fn of_slots(slots_count: u32) -> Arc<Self> {
        Self::new(0, slots_count as usize)
    }

    fn new(window: u64, slots_count: usize) -> Arc<Self> {
        let book = Book {
            held_bytes: 0,
            slots: vec![Slot::Free; slots_count],
            returned: Returned::default(),
        };
        Arc::new(Self {
            window,
            book: Mutex::new(book),
            changed: Notify::new(),
        })
    }

    /// Takes `bytes` of the window; `None` if the peer sent more than it was granted.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Option<Hold> {
        let mut book = self.lock();
        if book.held_bytes.saturating_add(bytes) > self.window {
            return None;
        }
        book.held_bytes += bytes;
        Some(self.hold(bytes, None))
    }

    /// Takes a slot; `None` if there is none of this number or it was not granted again.
    pub(crate) fn take_slot(self: &Arc<Self>, slot: u32) -> Option<Hold> {
        let mut book = self.lock();
        let state = book.slots.get_mut(slot as usize)?;
        if std::mem::replace(state, Slot::Held) == Slot::Held {
            return None;
        }
        Some(self.hold(0, Some(slot)))
    }

    fn hold(self: &Arc<Self>, bytes: u64, slot: Option<u32>) -> Hold {
        Hold {
            account: Arc::clone(self),
            bytes,
            slot,
        }
    }

    /// Waits until something has come back, and takes it all: it is to be granted again.
    pub(crate) async fn returned(&self) -> Returned {
        loop {
            let returned = std::mem::take(&mut self.lock().returned);
            if returned != Returned::default() {
                return returned;
            }
            self.changed.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut book = self.account.lock();
        book.held_bytes -= self.bytes;
        book.returned.bytes += self.bytes;
        if let Some(slot) = self.slot {
            book.slots[slot as usize] = Slot::Free;
            book.returned.slots.push(slot);
        }
        drop(book);
        self.account.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dropped_hold_comes_back_once() {
        let account = Account::of_bytes(100);
        let first = account.take(60).unwrap();
        assert!(account.take(50).is_none(), "more than the window");
        let second = account.take(40).unwrap();
        drop(first);
        drop(second);
        assert_eq!(account.returned().await.bytes, 100);
        assert!(account.take(100).is_some());
    }

    #[tokio::test]
    async fn lesson_02_a_slot_that_is_held_is_never_taken_twice() {
        let account = Account::of_slots(2);
        let first = account.take_slot(1).unwrap();
        assert!(account.take_slot(1).is_none(), "held");
        assert!(account.take_slot(2).is_none(), "beyond the ring");
        drop(first);
        assert_eq!(account.returned().await.slots, [1]);
        assert!(account.take_slot(1).is_some());
    }
}
