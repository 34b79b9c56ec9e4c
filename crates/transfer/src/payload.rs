//! Payloads that arrived and wait for the brain's word: import, discard or forget.
//!
//! Invariant: dropping a [`Payload`], for whatever reason, gives its credit back; so no payload
//! path can strand a peer's credit.

use crate::credit::Hold;
use bytes::Bytes;
use cleave_domain::HandoffId;
use cleave_kv::BlockPart;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;

/// Bytes of a frame, and the credit they hold.
#[derive(Debug)]
pub struct Payload {
    bytes: Bytes,
    _hold: Hold,
}

impl Payload {
    pub(crate) fn new(bytes: Bytes, hold: Hold) -> Self {
        Self { bytes, _hold: hold }
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Payloads by the frame that brought them. A frame that came twice is kept twice until one of
/// them is discarded: the brain imports the first and discards the later one.
#[derive(Debug, Default)]
pub struct Payloads {
    kept: BTreeMap<HandoffId, BTreeMap<BlockPart, VecDeque<Payload>>>,
}

impl Payloads {
    /// Keeps a frame's bytes.
    pub fn keep(&mut self, handoff: HandoffId, part: BlockPart, payload: Payload) {
        let parts = self.kept.entry(handoff).or_default();
        parts.entry(part).or_default().push_back(payload);
    }

    /// Takes the earliest payload of this frame, to import it.
    pub fn import(&mut self, handoff: HandoffId, part: BlockPart) -> Option<Payload> {
        self.take(handoff, part, VecDeque::pop_front)
    }

    /// Drops the latest payload of this frame; whether there was one.
    pub fn discard(&mut self, handoff: HandoffId, part: BlockPart) -> bool {
        self.take(handoff, part, VecDeque::pop_back).is_some()
    }

    /// Drops every payload of the hand-off.
    pub fn forget(&mut self, handoff: HandoffId) {
        self.kept.remove(&handoff);
    }

    /// Frames kept, of all hand-offs.
    pub fn frames_count(&self) -> usize {
        let parts = self.kept.values().flat_map(BTreeMap::values);
        parts.map(VecDeque::len).sum()
    }

    fn take(
        &mut self,
        handoff: HandoffId,
        part: BlockPart,
        pick: fn(&mut VecDeque<Payload>) -> Option<Payload>,
    ) -> Option<Payload> {
        let parts = self.kept.get_mut(&handoff)?;
        let queue = parts.get_mut(&part)?;
        let payload = pick(queue);
        if queue.is_empty() {
            parts.remove(&part);
        }
        if parts.is_empty() {
            self.kept.remove(&handoff);
        }
        payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credit::Account;

    fn part(ordinal: u32) -> BlockPart {
        BlockPart {
            ordinal,
            offset: 0,
            len: 4,
        }
    }

    #[tokio::test]
    async fn lesson_02_a_doubled_frame_discards_the_later_one_and_all_credit_returns() {
        let account = Account::new(64);
        let handoff = HandoffId::default();
        let mut payloads = Payloads::default();
        for bytes in [b"real", b"late"] {
            let hold = account.take(4).unwrap();
            payloads.keep(
                handoff,
                part(0),
                Payload::new(Bytes::from_static(bytes), hold),
            );
        }
        assert!(payloads.discard(handoff, part(0)));
        assert_eq!(&*payloads.import(handoff, part(0)).unwrap(), b"real");
        assert!(payloads.import(handoff, part(0)).is_none());

        let hold = account.take(4).unwrap();
        payloads.keep(
            handoff,
            part(1),
            Payload::new(Bytes::from_static(b"gone"), hold),
        );
        payloads.forget(handoff);
        assert_eq!(payloads.frames_count(), 0);
        assert_eq!(account.returned().await, 12);
    }
}
