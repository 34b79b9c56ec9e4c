//! The machines of a worker's brain, and which of them each rule may touch.
//!
//! Owns: the machines. Never: decides, or changes one of them: a rule borrows the machines that it
//! needs, to change or to read, and no others.
//! Invariant: see [`WorkerMachines::check`].

use crate::WorkerLimits;
use crate::admission::Admission;
use crate::batch::{StepAhead, StepPipeline, StepPlanner, StepResults};
use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::handoff::{Handoffs, PeerTraffic};
use crate::memory::{KvMemory, MemoryPressure};
use crate::report::RouterReports;
use crate::sequences::SequenceTable;
use crate::snapshot::LoadSnapshot;
use crate::speculate::DraftAcceptance;

#[derive(Clone, Debug)]
pub(crate) struct WorkerMachines {
    /// The time, the limits and the outputs.
    pub(crate) context: WorkerContext,
    /// Every hand-off accepted and not released, with slots and leases.
    pub(crate) sequences: SequenceTable,
    /// Pools, tiers below them, and the costs of copies.
    pub(crate) memory: KvMemory,
    /// Moves to other workers, deadlines of hand-offs, and those that ended lately.
    pub(crate) peers: PeerTraffic,
    /// Steps given to the engine and not answered.
    pub(crate) steps: StepPipeline,
    /// Prices of this worker's work, and predictions.
    pub(crate) forecast: WorkForecast,
    /// Share of drafts that were accepted, over all sequences.
    pub(crate) acceptance: DraftAcceptance,
    /// Routers, and what they were sent last.
    pub(crate) reports: RouterReports,
    /// The last request to a router that a sequence be moved.
    pub(crate) pressure: MemoryPressure,
}

impl WorkerMachines {
    /// Machines that hold nothing and know no router.
    pub(crate) fn new(limits: WorkerLimits) -> Self {
        Self {
            sequences: SequenceTable::new(&limits),
            memory: KvMemory::new(&limits),
            peers: PeerTraffic::default(),
            steps: StepPipeline::default(),
            forecast: WorkForecast::new(&limits),
            acceptance: DraftAcceptance::default(),
            reports: RouterReports::new(&limits),
            pressure: MemoryPressure::default(),
            context: WorkerContext::new(limits),
        }
    }

    // === rules, each with the machines that it may touch ===

    pub(crate) fn snapshot(&self) -> LoadSnapshot<'_> {
        LoadSnapshot {
            context: &self.context,
            sequences: &self.sequences,
            memory: &self.memory,
            steps: &self.steps,
            forecast: &self.forecast,
        }
    }

    pub(crate) fn admission(&mut self) -> Admission<'_> {
        Admission {
            context: &mut self.context,
            sequences: &mut self.sequences,
            memory: &mut self.memory,
            peers: &self.peers,
            steps: &self.steps,
            forecast: &self.forecast,
            reports: &self.reports,
        }
    }

    pub(crate) fn handoffs(&mut self) -> Handoffs<'_> {
        Handoffs {
            context: &mut self.context,
            sequences: &mut self.sequences,
            memory: &mut self.memory,
            peers: &mut self.peers,
            forecast: &mut self.forecast,
        }
    }

    pub(crate) fn step_planner(&mut self) -> StepPlanner<'_> {
        StepPlanner {
            context: &mut self.context,
            sequences: &mut self.sequences,
            memory: &mut self.memory,
            peers: &mut self.peers,
            steps: &mut self.steps,
            forecast: &mut self.forecast,
            acceptance: &self.acceptance,
        }
    }

    pub(crate) fn step_ahead(&mut self) -> StepAhead<'_> {
        StepAhead {
            context: &mut self.context,
            sequences: &mut self.sequences,
            memory: &mut self.memory,
            steps: &mut self.steps,
            forecast: &self.forecast,
        }
    }

    pub(crate) fn step_results(&mut self) -> StepResults<'_> {
        StepResults {
            context: &mut self.context,
            sequences: &mut self.sequences,
            memory: &mut self.memory,
            peers: &mut self.peers,
            steps: &mut self.steps,
            forecast: &mut self.forecast,
            acceptance: &mut self.acceptance,
        }
    }
}
