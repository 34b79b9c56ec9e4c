//! Blocks and states that leave while their sequence is computed.
//!
//! Owns: which of them will not change any more. Never: exports one twice.

use super::Handoffs;
use crate::memory::SequenceWindow;
use crate::sequences::WorkerSequence;
use cleave_domain::{BlockIndex, Capacity, HandoffId, KvPlane, KvUnit, WindowTable};
use cleave_kv::handoff::sender::SenderInput;
use std::ops::Range;

/// Blocks of a sequence that will not change any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadyBlocks {
    /// The full ones: more of the prompt is to come.
    FullBlocks,
    /// The last one too: nothing more is run here.
    All,
}

impl ReadyBlocks {
    /// Number of leading blocks.
    fn blocks(self, computed: u32, block_tokens: u32) -> u32 {
        match self {
            Self::FullBlocks => computed / block_tokens,
            Self::All => computed.div_ceil(block_tokens),
        }
    }
}

impl Handoffs<'_> {
    /// Gives the sender, if there is one, the blocks that will not change any more.
    pub(crate) fn export(&mut self, handoff: HandoffId, ready: ReadyBlocks) {
        let size = self.context.block_tokens();
        let Some(sequence) = self.sequences.get_mut(handoff) else {
            return;
        };
        if sequence.outgoing.is_none() {
            return;
        }
        let done = ready.blocks(sequence.kv.computed(), size);
        if done <= sequence.exported {
            // Computed again, it has sent these blocks before, and may not have them all again yet.
            return;
        }
        let new = sequence.exported..done;
        sequence.exported = done;
        let units = ready_units(&self.context.limits().capacity, sequence, new);
        self.send_units(handoff, units);
    }

    /// Gives the sender of a moving sequence's move the blocks that will not change any more.
    pub(super) fn export_move(&mut self, of: HandoffId, ready: ReadyBlocks) {
        let size = self.context.block_tokens();
        let Some(sequence) = self.sequences.get(of) else {
            return;
        };
        let Some(handoff) = sequence.moving else {
            return;
        };
        let Some(outbound) = self.peers.outbound_mut(handoff) else {
            return;
        };
        // A paused sequence has sent its last block too.
        let done = ready
            .blocks(sequence.kv.computed(), size)
            .max(outbound.exported);
        let new = outbound.exported..done;
        outbound.exported = done;
        let units = ready_units(&self.context.limits().capacity, sequence, new);
        self.send_units(handoff, units);
    }

    /// Gives the sender of a hand-off blocks and pieces, each with its place in the pool.
    fn send_units(&mut self, handoff: HandoffId, units: Vec<(KvUnit, BlockIndex)>) {
        for (unit, from) in units {
            self.send(handoff, SenderInput::Computed { unit, from });
        }
    }

    /// Gives the sender of a hand-off the state of sequence `of`, which no step changes any more.
    pub(crate) fn export_state(&mut self, handoff: HandoffId, of: HandoffId) {
        let Some(state) = self.sequences.get(of).and_then(|s| s.kv.state()) else {
            return;
        };
        let from = state.live.block;
        for ordinal in 0..self.context.limits().capacity.state_pieces() {
            let plane = KvPlane::State;
            let unit = KvUnit { plane, ordinal };
            self.send(handoff, SenderInput::Computed { unit, from });
        }
    }
}

/// The blocks of these ordinals, and the pieces of those of the window that are still here.
fn ready_units(
    capacity: &Capacity,
    sequence: &WorkerSequence,
    ordinals: Range<u32>,
) -> Vec<(KvUnit, BlockIndex)> {
    let table = &sequence.kv.table()[ordinals.start as usize..ordinals.end as usize];
    let blocks = table.iter().map(|held| held.block);
    let blocks = ordinals.clone().map(KvUnit::block).zip(blocks);
    let window = sequence.kv.window().map(SequenceWindow::table);
    let window = window.iter().flat_map(WindowTable::entries);
    let window = window.filter(|(ordinal, _)| ordinals.contains(ordinal));
    let pieces = window.flat_map(|(ordinal, block)| {
        let units = capacity.window_units(ordinal);
        units.map(move |unit| (unit, block))
    });
    blocks.chain(pieces).collect()
}
