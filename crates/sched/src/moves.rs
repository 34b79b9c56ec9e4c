//! A running sequence that leaves for another decode worker.
//!
//! Owns: what `Order::Migrate` starts: the full blocks that leave while the sequence runs, the moment
//! from which it stands still, and whether it goes on here.
//! Never: lets two workers run one sequence: once the seal is sent, only the receiver's word takes it
//! back.
//! Invariant: each `Migrate` is answered by `Stayed`, or by `Prefilled` of the new attempt, which the
//! receiver's landing, `Stayed` or the old attempt's own end follows. The old attempt is a sequence of
//! this worker, the new one is only a name for what leaves: it has no lease and no release here.

use crate::close::Close;
use crate::past::Trace;
use crate::sequence::{Sequence, Stage};
use crate::settle::Ready;
use crate::{Brain, Note, Output};
use cleave_domain::{
    Cause, Failure, HandoffId, Migrate, PrefillTiming, Report, RouterId, Time, WorkerRef,
};
use cleave_kv::block_hash;
use cleave_kv::handoff::sender::{self, Sender};

/// What is known of one, by its new attempt. It is kept until no block is being read for it, which
/// may be after the sequence stayed.
#[derive(Clone, Debug)]
pub(crate) struct Move {
    /// The order that began it.
    pub(crate) order: Migrate,
    /// Sends the KV.
    pub(crate) sender: Sender,
    /// Leading blocks that the sender was told of.
    pub(crate) exported: u32,
    /// When it was ordered.
    pub(crate) ordered: Time,
    /// Since when the sequence stands still.
    pub(crate) still: Option<Time>,
}

/// What an end of the sending machine means for the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doubt {
    /// The receiver does not have the sequence, and never will.
    None,
    /// It may have it.
    MayRunThere,
}

impl Move {
    /// Blocks of the sequence that the receiver has room for.
    fn room(&self) -> u32 {
        room(&self.order)
    }
}

fn room(order: &Migrate) -> u32 {
    let blocks = u32::try_from(order.target.blocks.len()).unwrap_or(u32::MAX);
    order.target.present.saturating_add(blocks)
}

impl Brain {
    // === the order ===

    pub(crate) fn migrate(&mut self, router: RouterId, order: Migrate) {
        let handoff = order.handoff;
        let known = self.moves.get(&handoff);
        let repeated = known.is_some_and(|known| known.order == order)
            || self.past.trace(handoff) == Some(Trace::Over);
        let own = handoff.flight.router() == router;
        if own && repeated {
            return self.note(Note::Repeated { handoff });
        }
        if self.may_move(router, &order) {
            return self.start_move(order);
        }
        if own && known.is_none() {
            self.past.add(handoff, Trace::Over);
        }
        self.say_stayed(router, handoff, Failure::Rejected);
    }

    /// Whether the sequence can leave as the order says.
    fn may_move(&self, router: RouterId, order: &Migrate) -> bool {
        let Migrate {
            handoff,
            of,
            ref target,
            tokens,
        } = *order;
        let size = self.limits.capacity.block_tokens;
        let known = self.moves.contains_key(&handoff) || self.sequences.contains_key(&handoff);
        let sequence = self.sequences.get(&of).filter(|s| s.router == router);
        sequence.is_some_and(|sequence| {
            // What is drawn but not run needs no block there.
            let needed = tokens.max(sequence.len() - 1).div_ceil(size);
            !known
                && self.past.trace(handoff).is_none()
                && target.worker.worker != self.limits.me.worker
                && sequence.generates()
                && sequence.moving.is_none()
                && (sequence.prompt_count()..=sequence.len()).contains(&tokens)
                && u64::from(target.present) * u64::from(size) <= u64::from(tokens)
                && needed <= room(order)
        })
    }

    fn start_move(&mut self, order: Migrate) {
        let (handoff, of) = (order.handoff, order.of);
        if let Some(sequence) = self.sequences.get_mut(&of) {
            sequence.moving = Some(handoff);
        }
        let sender = Sender::new(handoff, order.target.clone());
        let started = Move {
            order,
            sender,
            exported: 0,
            ordered: self.now,
            still: None,
        };
        self.moves.insert(handoff, started);
        self.leave(of);
    }

    // === leaving ===

    /// Lets go what will not change any more of a sequence that moves, and has it stand still when
    /// the time has come.
    pub(crate) fn leave(&mut self, of: HandoffId) {
        self.export_move(of, Ready::FullBlocks);
        if self.may_stand_still(of) {
            self.stand_still(of);
        }
    }

    fn export_move(&mut self, of: HandoffId, ready: Ready) {
        let size = self.limits.capacity.block_tokens;
        let Some(sequence) = self.sequences.get(&of) else {
            return;
        };
        let Some(handoff) = sequence.moving else {
            return;
        };
        let Some(leaving) = self.moves.get_mut(&handoff) else {
            return;
        };
        // One that stands still has let go its last block too.
        let done = ready.blocks(sequence.computed, size).max(leaving.exported);
        let new = leaving.exported..done;
        leaving.exported = done;
        let table = &sequence.table[new.start as usize..new.end as usize];
        let blocks: Vec<_> = new.zip(table.iter().map(|block| block.block)).collect();
        for (ordinal, from) in blocks {
            self.send(handoff, sender::Input::Computed { ordinal, from });
        }
    }

    /// All full blocks have left, or the next token would need a block that the receiver did not set
    /// aside; and there is a token for the seal.
    fn may_stand_still(&self, of: HandoffId) -> bool {
        let size = self.limits.capacity.block_tokens;
        self.sequence_that_moves(of)
            .is_some_and(|(sequence, leaving)| {
                let full = sequence.computed / size;
                let left = leaving.exported >= full && leaving.sender.settled();
                let no_room = sequence.len().div_ceil(size) > leaving.room();
                sequence.len() > leaving.order.tokens && (left || no_room)
            })
    }

    /// A sequence that moves, and could stand still now.
    fn sequence_that_moves(&self, of: HandoffId) -> Option<(&Sequence, &Move)> {
        let sequence = self.sequences.get(&of)?;
        let leaving = self.moves.get(&sequence.moving?)?;
        (sequence.generates() && !sequence.stepping()).then_some((sequence, leaving))
    }

    /// For want of a block here: it would have to take another's, and leaves anyway.
    pub(crate) fn stand_still_early(&mut self, of: HandoffId) -> bool {
        let able = self.sequence_that_moves(of);
        let able = able.is_some_and(|(s, leaving)| s.len() > leaving.order.tokens);
        if able {
            self.stand_still(of);
        }
        able
    }

    fn stand_still(&mut self, of: HandoffId) {
        let now = self.now;
        let Some(sequence) = self.sequences.get_mut(&of) else {
            return;
        };
        let Some(handoff) = sequence.moving else {
            return;
        };
        let Some(leaving) = self.moves.get_mut(&handoff) else {
            return;
        };
        leaving.still = Some(now);
        let (told, drawn) = sequence.tokens.split_at(leaving.order.tokens as usize);
        let content = block_hash(sequence.request.cache_salt, None, told);
        let output = drawn.to_vec();
        let router = sequence.router;
        sequence.stage = Stage::Still;
        self.active.remove(&sequence.rank);
        sequence.unseat(&mut self.slots);
        self.stirred = true;
        self.tell(
            router,
            Report::Prefilled {
                handoff,
                timing: PrefillTiming::default(),
            },
        );
        self.export_move(of, Ready::All);
        self.send(handoff, sender::Input::Sampled { content, output });
    }

    // === how it ends ===

    /// Tells the sending end of a move; [`Brain::forget_move`] is to follow.
    pub(crate) fn send_move(&mut self, handoff: HandoffId, input: sender::Input) {
        let Some(leaving) = self.moves.get_mut(&handoff) else {
            return;
        };
        // A receiver that knows nothing of the seal may have forgotten that the sequence landed.
        let unknown = matches!(
            &input,
            sender::Input::LinkLost
                | sender::Input::Abandoned {
                    cause: Cause::Finished,
                    ..
                }
        );
        let doubt = if leaving.sender.sealed() && unknown {
            Doubt::MayRunThere
        } else {
            Doubt::None
        };
        let since = leaving.ordered;
        leaving.sender.handle(input);
        let said = self.say_sent(handoff, since);
        match said {
            Some(sender::Output::Done) => self.moved(handoff),
            Some(sender::Output::Ended(cause)) => self.ended_move(handoff, doubt, cause),
            _ => {}
        }
        self.watch(handoff);
    }

    fn moved(&mut self, handoff: HandoffId) {
        let Some(leaving) = self.moves.get(&handoff) else {
            return;
        };
        let of = leaving.order.of;
        let took = self.now.since(leaving.ordered);
        let still = self.now.since(leaving.still.unwrap_or(self.now));
        let (bytes, blocks) = (leaving.sender.bytes(), leaving.sender.blocks_count());
        if let Some(sequence) = self.sequences.get_mut(&of) {
            sequence.moving = None;
        }
        self.say(Output::Forget { handoff });
        self.note(Note::MovedOut {
            handoff,
            bytes,
            blocks,
            took,
            still,
        });
        self.close(of, Close::HandedOn);
    }

    /// It goes on here, unless it may run there.
    fn ended_move(&mut self, handoff: HandoffId, doubt: Doubt, cause: Cause) {
        let Some(of) = self.moves.get(&handoff).map(|leaving| leaving.order.of) else {
            return;
        };
        let Some(sequence) = self.sequences.get_mut(&of) else {
            return;
        };
        if sequence.moving != Some(handoff) {
            return;
        }
        sequence.moving = None;
        if doubt == Doubt::MayRunThere {
            self.say(Output::Forget { handoff });
            return self.close(of, Close::Failed(Failure::LinkLost));
        }
        if sequence.stage == Stage::Still {
            sequence.stage = Stage::Active;
            self.active.insert(sequence.rank);
        }
        let router = sequence.router;
        self.stirred = true;
        let failure = match cause {
            Cause::Failed(failure) => failure,
            Cause::Finished | Cause::Cancelled => Failure::Rejected,
        };
        self.say(Output::Forget { handoff });
        self.say_stayed(router, handoff, failure);
    }

    /// Gives a move up, if there is one and its seal is not sent.
    pub(crate) fn stay(&mut self, of: HandoffId, failure: Failure) {
        let moving = self.sequences.get(&of).and_then(|s| s.moving);
        let unsealed = |handoff: &HandoffId| !self.moves[handoff].sender.sealed();
        if let Some(handoff) = moving.filter(unsealed) {
            let cause = Cause::Failed(failure);
            self.send(handoff, sender::Input::GivenUp { cause });
        }
    }

    /// The router no longer wants the move. Once it is sealed, that is for the receiver to say.
    pub(crate) fn cancel_move(&mut self, router: RouterId, handoff: HandoffId) {
        let of = self.moves.get(&handoff).map(|leaving| leaving.order.of);
        let own = |of: &HandoffId| {
            let sequence = self.sequences.get(of);
            sequence.is_some_and(|s| s.router == router && s.moving == Some(handoff))
        };
        if let Some(of) = of.filter(own) {
            self.stay(of, Failure::Rejected);
        }
    }

    /// The sequence is over here, and with it its move. What may have landed is not said to have
    /// stayed.
    pub(crate) fn part_move(&mut self, of: HandoffId, cause: Cause) {
        let Some(sequence) = self.sequences.get_mut(&of) else {
            return;
        };
        let Some(handoff) = sequence.moving.take() else {
            return;
        };
        let router = sequence.router;
        let sealed = self.moves[&handoff].sender.sealed();
        self.stalls.end(handoff);
        self.resends.end(handoff);
        self.send_move(handoff, sender::Input::GivenUp { cause });
        self.say(Output::Forget { handoff });
        if !sealed {
            self.say_stayed(router, handoff, Failure::Rejected);
        }
        self.forget_move(handoff);
    }

    fn say_stayed(&mut self, router: RouterId, handoff: HandoffId, failure: Failure) {
        let known = failure.clone();
        self.tell(router, Report::Stayed { handoff, failure });
        self.note(Note::Stayed {
            handoff,
            failure: known,
        });
    }

    /// Drops what is known of a move that is over, once no block is being read for it.
    pub(crate) fn forget_move(&mut self, handoff: HandoffId) {
        let Some(leaving) = self.moves.get(&handoff) else {
            return;
        };
        if leaving.sender.open() || !leaving.sender.settled() {
            return;
        }
        let of = leaving.order.of;
        self.moves.remove(&handoff);
        self.past.add(handoff, Trace::Over);
        self.stirred = true;
        self.release_if_settled(of);
    }

    // === looking ===

    /// Whether a block of the sequence is being read for a move, which may be over.
    pub(crate) fn read_for_a_move(&self, of: HandoffId) -> bool {
        let mut moves = self.moves.values();
        moves.any(|leaving| leaving.order.of == of && !leaving.sender.settled())
    }

    /// Whether the block that the sequence writes to next is being read for a move that is over.
    pub(crate) fn last_block_is_read(&self, sequence: &Sequence) -> bool {
        let ordinal = sequence.computed / self.limits.capacity.block_tokens;
        let mut moves = self.moves.values();
        moves.any(|leaving| {
            leaving.order.of == sequence.rank.handoff && leaving.sender.reads(ordinal)
        })
    }

    /// Moves with `peer` that are open.
    pub(crate) fn moves_to(&self, peer: WorkerRef) -> Vec<HandoffId> {
        let open = self
            .moves
            .iter()
            .filter(|(_, leaving)| leaving.sender.open() && leaving.sender.receiver() == peer);
        open.map(|(handoff, _)| *handoff).collect()
    }
}
