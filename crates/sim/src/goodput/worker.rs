//! A worker: a production brain over an engine that is nothing but prices.
//!
//! Owns: what a step takes and which tokens it draws. Never: holds a cell; that blocks arrive whole is
//! what the links of this world promise.
//! Invariant: a token is a function of its request and its position, so any worker continues any stream.

use super::Device;
use super::scenario::VOCAB_SIZE;
use super::wire::whole_grains;
use crate::dice::{Dice, mix};
use cleave_domain::{HandoffId, Sampled, StepPlan, StepResult, Time, TokenId, Work};
use cleave_kv::BlockPart;
use cleave_kv::handoff::Digest;
use cleave_planner::Predict;
use cleave_sched::{Brain, Export, ExportOutcome, Input};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// How imperfect steps are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flaws {
    pub(crate) noise_permille: u32,
    pub(crate) grain: Duration,
}

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) brain: Brain,
    pub(crate) life: Life,
    /// It said that nothing is left of it.
    pub(crate) left: bool,
    /// When it is to be woken.
    pub(crate) wake: Option<Time>,
    /// Answers that the brain is owed before anything else.
    pub(crate) owed: VecDeque<Input>,
    /// Blocks that it asked to be sent since it was last told something.
    pub(crate) leaving: Vec<Export>,
    /// Copies to or from host memory that are not wanted any more.
    pub(crate) unwanted: BTreeSet<HandoffId>,
    /// When the steps that it was asked for are over.
    pub(crate) free_at: Time,
    /// Seeds of the slots' sequences.
    seeds: Vec<u64>,
    dice: Dice,
}

/// How far a worker's life has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// It loads its weights.
    Starting,
    /// It serves.
    Up,
    /// It was asked to leave, and holds something.
    Leaving,
    /// It is no more.
    Gone,
}

impl Life {
    /// Whether whoever starts workers counts on it.
    pub(crate) fn counts(self) -> bool {
        matches!(self, Self::Starting | Self::Up)
    }

    /// Whether it hears and answers.
    pub(crate) fn runs(self) -> bool {
        matches!(self, Self::Up | Self::Leaving)
    }
}

impl Worker {
    pub(crate) fn new(device: &Device, seed: u64) -> Self {
        Self {
            brain: Brain::new(device.limits.clone()),
            life: Life::Up,
            left: false,
            wake: None,
            owed: VecDeque::new(),
            leaving: Vec::new(),
            unwanted: BTreeSet::new(),
            free_at: Time::ZERO,
            seeds: vec![0; device.limits.capacity.slots_count as usize],
            dice: Dice::new(mix(seed ^ device.me().worker.0)),
        }
    }

    /// What a step gives, and how long it takes.
    pub(crate) fn step(
        &mut self,
        plan: &StepPlan,
        device: &Device,
        flaws: Flaws,
    ) -> (StepResult, Duration) {
        for open in &plan.opens {
            self.seeds[open.slot.0 as usize] = open.sampling.seed;
        }
        let samples = plan.segments.iter().filter(|s| s.logits.samples());
        let sampled = samples.map(|segment| {
            let position = segment.position + segment.len;
            let token = token(self.seeds[segment.slot.0 as usize], position);
            let scores = None;
            (segment.slot, Sampled { token, scores })
        });
        let result = StepResult {
            step: plan.step,
            sampled: sampled.collect(),
            prompt_scores: Vec::new(),
        };
        let takes = device.real.step(&Work::of(plan));
        let noise = flaws.noise_permille.min(999);
        let share = match noise {
            0 => 1000,
            noise => self.dice.count(1000 - noise, 1000 + noise),
        };
        (result, whole_grains(takes * share / 1000, flaws.grain))
    }
}

/// The token that a request draws at a position.
pub(crate) fn token(seed: u64, position: u32) -> TokenId {
    (mix(mix(seed) ^ u64::from(position)) % u64::from(VOCAB_SIZE)) as TokenId
}

/// The one frame of a block.
pub(crate) fn part(export: &Export, block_bytes: u32) -> BlockPart {
    BlockPart {
        ordinal: export.ordinal,
        offset: 0,
        len: block_bytes,
    }
}

/// Stands for the checksum of a payload that there is not; both ends name the same one.
pub(crate) fn checksum(export: &Export) -> u64 {
    mix(export.handoff.flight.0 ^ u64::from(export.ordinal) << 40)
}

/// The answer to an export whose block has left.
pub(crate) fn sent(export: &Export, block_bytes: u32) -> Input {
    let mut digest = Digest::default();
    digest.add(part(export, block_bytes), checksum(export));
    export.answer(ExportOutcome::Sent {
        digest: digest.value(),
        bytes: u64::from(block_bytes),
    })
}
