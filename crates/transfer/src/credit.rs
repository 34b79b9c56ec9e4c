//! The receiver's side of credit: the credit that payloads of a peer hold, and the credit that is
//! returned.
//!
//! Invariant: credit is returned exactly once, by dropping its [`CreditHold`]; a slot is never
//! taken while it is held.

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use tokio::sync::Notify;

/// The credit account of one incoming link.
#[derive(Debug)]
pub(crate) struct CreditAccount {
    window: u64,
    ledger: Mutex<CreditLedger>,
    changed: Notify,
}

#[derive(Debug)]
struct CreditLedger {
    held_bytes: u64,
    /// One entry for each slot of a ring; empty if payloads travel on the stream.
    slots: Vec<SlotCredit>,
    returned: ReturnedCredit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotCredit {
    Free,
    Held,
}

/// Credit returned since the last call of [`CreditAccount::returned`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ReturnedCredit {
    pub(crate) bytes: u64,
    pub(crate) slots: Vec<u32>,
}

/// Credit that is in use; dropping it returns the credit.
#[derive(Debug)]
pub(crate) struct CreditHold {
    account: Arc<CreditAccount>,
    bytes: u64,
    slot: Option<u32>,
}

impl CreditAccount {
    /// An account of bytes.
    pub(crate) fn of_bytes(window: u32) -> Arc<Self> {
        Self::new(u64::from(window), 0)
    }

    /// An account of slots.
    pub(crate) fn of_slots(slots_count: u32) -> Arc<Self> {
        Self::new(0, slots_count as usize)
    }

    fn new(window: u64, slots_count: usize) -> Arc<Self> {
        let ledger = CreditLedger {
            held_bytes: 0,
            slots: vec![SlotCredit::Free; slots_count],
            returned: ReturnedCredit::default(),
        };
        Arc::new(Self {
            window,
            ledger: Mutex::new(ledger),
            changed: Notify::new(),
        })
    }

    /// Takes `bytes` of the window; `None` if the peer sent more than it was granted.
    pub(crate) fn hold_bytes(self: &Arc<Self>, bytes: u64) -> Option<CreditHold> {
        let mut ledger = self.lock();
        if ledger.held_bytes.saturating_add(bytes) > self.window {
            return None;
        }
        ledger.held_bytes += bytes;
        Some(self.hold(bytes, None))
    }

    /// Takes a slot; `None` if its number is out of range or it is still held.
    pub(crate) fn hold_slot(self: &Arc<Self>, slot: u32) -> Option<CreditHold> {
        let mut ledger = self.lock();
        let state = ledger.slots.get_mut(slot as usize)?;
        if std::mem::replace(state, SlotCredit::Held) == SlotCredit::Held {
            return None;
        }
        Some(self.hold(0, Some(slot)))
    }

    fn hold(self: &Arc<Self>, bytes: u64, slot: Option<u32>) -> CreditHold {
        CreditHold {
            account: Arc::clone(self),
            bytes,
            slot,
        }
    }

    /// Waits until credit is returned, and takes all of it, to grant it to the peer again.
    pub(crate) async fn wait_returned(&self) -> ReturnedCredit {
        loop {
            let returned = std::mem::take(&mut self.lock().returned);
            if returned != ReturnedCredit::default() {
                return returned;
            }
            self.changed.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, CreditLedger> {
        self.ledger.lock()
    }
}

impl Drop for CreditHold {
    fn drop(&mut self) {
        let mut ledger = self.account.lock();
        ledger.held_bytes -= self.bytes;
        ledger.returned.bytes += self.bytes;
        if let Some(slot) = self.slot {
            ledger.slots[slot as usize] = SlotCredit::Free;
            ledger.returned.slots.push(slot);
        }
        drop(ledger);
        self.account.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dropped_hold_returns_its_credit_once() {
        let account = CreditAccount::of_bytes(100);
        let first = account.hold_bytes(60).unwrap();
        assert!(account.hold_bytes(50).is_none(), "more than the window");
        let second = account.hold_bytes(40).unwrap();
        drop(first);
        drop(second);
        assert_eq!(account.wait_returned().await.bytes, 100);
        assert!(account.hold_bytes(100).is_some());
    }

    // Lesson: 2.
    #[tokio::test]
    async fn a_held_slot_is_never_taken_twice() {
        let account = CreditAccount::of_slots(2);
        let first = account.hold_slot(1).unwrap();
        assert!(account.hold_slot(1).is_none(), "held");
        assert!(account.hold_slot(2).is_none(), "beyond the ring");
        drop(first);
        assert_eq!(account.wait_returned().await.slots, [1]);
        assert!(account.hold_slot(1).is_some());
    }
}
