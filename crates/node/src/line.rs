//! The line between one router and one worker, whatever carries it.
//!
//! Invariant: what a worker emits and reports travels in one order; a line that cannot take more is
//! cut, never blocked on, because a brain's driver waits for nobody.

use crate::trace::Mark;
use cleave_api::ModelFiles;
use cleave_domain::{
    Emission, HandoffId, Order, PrefillTiming, Report, RouterId, WorkerDescription, WorkerRef,
};
use cleave_transfer::Pass;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::time::Instant;
use tokio::sync::mpsc;

/// Things that wait on one line, each direction; a peer that is so far behind is lost.
pub(crate) const LINE_ITEMS_MAX: usize = 1 << 16;

/// From a router to a worker.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Downward {
    /// Where another worker is; before the first order that needs it.
    Peer {
        worker: WorkerRef,
        data_address: String,
    },
    /// That life of a worker is over, or lost to this router.
    PeerGone { worker: WorkerRef },
    /// A worker of the same name that started later is connected, and this line ends.
    NameTaken { data_address: String },
    Order {
        order: Order,
        /// How the request that it is about is known.
        mark: Option<Arc<Mark>>,
    },
    /// What lets it write to what another worker reserved; before the order that needs it.
    Pass { handoff: HandoffId, pass: Pass },
}

/// From a worker to a router.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Upward {
    Report(Report),
    /// Tokens drawn at one go; what one step gives travels together.
    Emissions(Vec<(HandoffId, Emission)>),
    /// What lets a sender write to what is reserved here; before the reservation is answered.
    Pass {
        handoff: HandoffId,
        pass: Pass,
    },
    /// For operators; the router's brain does not hear it.
    Link(LinkState),
}

/// A link to another worker, as it was measured at its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LinkState {
    pub(crate) peer: WorkerRef,
    /// What carries it, for people.
    pub(crate) transport: String,
    pub(crate) bytes_per_second: u64,
    pub(crate) latency: Duration,
}

/// Who joins.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Introduction {
    pub(crate) worker: WorkerRef,
    /// For people: logs and metrics.
    pub(crate) name: String,
    pub(crate) description: WorkerDescription,
    /// `host:port` of its data listener; empty for a worker that is reached in process.
    pub(crate) data_address: String,
    pub(crate) files: Arc<ModelFiles>,
    /// A connection on which it hears nothing for so long is over.
    pub(crate) silence: Duration,
}

/// A router, as a worker's driver knows it.
#[derive(Clone, Debug)]
pub(crate) struct RouterLine {
    pub(crate) router: RouterId,
    /// Tells two connections to the same router apart.
    pub(crate) serial: u64,
    pub(crate) out: mpsc::Sender<Upward>,
}

/// A worker, as a router's driver knows it.
#[derive(Clone, Debug)]
pub(crate) struct WorkerLine {
    pub(crate) introduction: Introduction,
    /// Tells two connections of the same life apart.
    pub(crate) serial: u64,
    pub(crate) out: mpsc::Sender<Downward>,
    /// What it says, counted where it comes in.
    pub(crate) activity: Arc<Activity>,
}

/// What came of one connection of a worker, for whoever looks: numbers that nobody waits for.
#[derive(Debug)]
pub(crate) struct Activity {
    since: Instant,
    tokens: AtomicU64,
    /// Microseconds since `since` at which it said something last; 0 before that.
    heard: AtomicU64,
    /// Likewise, of tokens.
    emitted: AtomicU64,
    /// Microseconds that its last step took; 0 before there was one.
    step: AtomicU64,
}

impl Default for Activity {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            tokens: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            emitted: AtomicU64::new(0),
            step: AtomicU64::new(0),
        }
    }
}

/// Words of tokens that are further apart are of two times that the worker was busy.
const STEP_MAX: Duration = Duration::from_secs(2);

impl Activity {
    /// So many tokens came at one go.
    pub(crate) fn emitted(&self, tokens: usize) {
        let now = self.hear();
        self.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        let before = self.emitted.swap(now, Ordering::Relaxed);
        let gap = now.saturating_sub(before);
        if before > 0 && u128::from(gap) < STEP_MAX.as_micros() {
            self.step.store(gap.max(1), Ordering::Relaxed);
        }
    }

    /// A report came.
    pub(crate) fn reported(&self, report: &Report) {
        self.hear();
        if let Report::Prefilled { timing, .. } = report {
            let PrefillTiming { wait: _, run } = timing;
            let run = u64::try_from(run.as_micros()).unwrap_or(u64::MAX);
            if run > 0 {
                self.step.store(run, Ordering::Relaxed);
            }
        }
    }

    fn hear(&self) -> u64 {
        let now = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        let now = now.max(1);
        self.heard.store(now, Ordering::Relaxed);
        now
    }

    /// Tokens so far.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    /// How long the last step took: between two words of tokens, or a whole prompt.
    pub(crate) fn step(&self) -> Option<Duration> {
        let micros = self.step.load(Ordering::Relaxed);
        (micros > 0).then(|| Duration::from_micros(micros))
    }

    /// Since the last word.
    pub(crate) fn silence(&self) -> Option<Duration> {
        let heard = self.heard.load(Ordering::Relaxed);
        let heard = (heard > 0).then(|| Duration::from_micros(heard));
        heard.map(|heard| self.since.elapsed().saturating_sub(heard))
    }
}
