//! Changes of the adapters that a worker serves, one after the other.
//!
//! Owns: the changes that wait. Never: carries one out.
//! Invariant: no change overtakes one that came before. A folder is opened beside the driver, so an
//! unload that did not wait would be undone by the opening before it.

use cleave_domain::{AdapterChangeId, AdapterCommand, RouterId};
use std::collections::VecDeque;

/// A change that a router ordered.
#[derive(Debug)]
pub(crate) struct QueuedAdapterChange {
    pub(crate) router: RouterId,
    /// The number that the answer names.
    pub(crate) request: u64,
    /// Its place among all changes.
    pub(crate) change: AdapterChangeId,
    pub(crate) command: AdapterCommand,
}

#[derive(Debug, Default)]
pub(crate) struct AdapterChangeQueue {
    waiting: VecDeque<QueuedAdapterChange>,
    is_opening: bool,
}

impl AdapterChangeQueue {
    pub(crate) fn push(&mut self, change: QueuedAdapterChange) {
        self.waiting.push_back(change);
    }

    /// The next change; `None` while a folder is opened.
    pub(crate) fn next(&mut self) -> Option<QueuedAdapterChange> {
        if self.is_opening {
            return None;
        }
        self.waiting.pop_front()
    }

    /// A folder is opened from now on.
    pub(crate) fn opening_began(&mut self) {
        self.is_opening = true;
    }

    /// The folder was opened, or refused.
    pub(crate) fn opening_ended(&mut self) {
        self.is_opening = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unload_waits_for_the_load_before_it() {
        let mut changes = AdapterChangeQueue::default();
        let name = "a".to_owned();
        let load = AdapterCommand::Load {
            name: name.clone(),
            folder: name.clone(),
            content: None,
        };
        for (number, command) in (1..).zip([load, AdapterCommand::Unload { name }]) {
            let router = RouterId(1);
            changes.push(QueuedAdapterChange {
                router,
                request: number,
                change: AdapterChangeId { number, router },
                command,
            });
        }
        let next = |changes: &mut AdapterChangeQueue| changes.next().map(|change| change.request);
        assert_eq!(next(&mut changes), Some(1));
        changes.opening_began();
        assert_eq!(next(&mut changes), None);
        changes.opening_ended();
        assert_eq!(next(&mut changes), Some(2));
        assert_eq!(next(&mut changes), None);
    }
}
