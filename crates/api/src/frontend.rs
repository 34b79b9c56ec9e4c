//! What the HTTP face needs of whatever serves behind it.

use crate::admin::Operator;
use crate::record::RequestSpan;
use crate::trace_parent::TraceParent;
use crate::ui::Board;
use cleave_domain::{Emission, Ending, Request, SloPolicy, Timing, Usage};
use futures::stream::BoxStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The serving side, as the HTTP face sees it.
pub trait Frontend: Operator {
    /// Starts one sequence. Dropping the stream before its end cancels the sequence.
    fn submit(&self, request: Request) -> FlightStream;

    /// As [`Self::submit`], for this caller. A frontend that makes no difference need not say.
    fn submit_for(&self, request: Request, caller: Caller) -> FlightStream {
        drop(caller);
        self.submit(request)
    }

    /// What is promised to whom, as it stands. A frontend without promises need not say.
    fn policy(&self) -> Arc<SloPolicy> {
        Arc::default()
    }

    /// Whether a request sent now would find a worker.
    fn readiness(&self) -> Readiness;

    /// How long a request may wait for a worker that somebody is told to start; none where nobody is. A
    /// frontend whose workers are as they are need not say.
    fn patience(&self) -> Option<Duration> {
        None
    }

    /// So many requests wait for the first worker to bring a model. A frontend without `patience` need not
    /// listen.
    fn wait_outside(&self, count: u32) {
        let _ = count;
    }

    /// Whether what was accepted moves on. A frontend that cannot stall need not say.
    fn progress(&self) -> Progress {
        Progress::Moving
    }

    /// How many sequences are open, and how many may be. A frontend without a limit need not say.
    fn streams(&self) -> Streams {
        Streams::default()
    }

    /// The span that an HTTP request's work belongs to: one of ours in its client's trace, or in a new one, and
    /// whether it is recorded. A frontend without traces need not make one.
    fn begin_span(&self, client: Option<TraceParent>) -> Option<TraceParent> {
        client
    }

    /// A recorded request is over. A frontend without traces need not hear it.
    fn end_span(&self, span: RequestSpan) {
        drop(span);
    }

    /// How the fleet stands, for `/ui`; none where nothing is shown, or nothing runs any more. A frontend
    /// without a fleet need not say.
    fn board(&self) -> Option<Board> {
        None
    }

    /// Metrics of the serving side in the OpenMetrics text format, without the closing `# EOF`.
    fn metrics(&self) -> String;
}

/// Who wants a sequence, as far as it concerns whoever serves it.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    /// A stream dropped after this was said has not been left by its client, who has all that it wanted.
    pub enough: Enough,
    /// As logs name the request.
    pub request_id: Arc<str>,
    /// The span that the sequence belongs to.
    pub trace: Option<TraceParent>,
}

/// See [`Frontend::streams`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Sequences submitted whose clients have not let go of them.
    pub open: usize,
    /// With so many open the next one is refused; `None`: never.
    pub max: Option<usize>,
}

/// Said when a sequence's text has met its end before its tokens did: at a stop string. Clones are the
/// same word.
#[derive(Clone, Debug, Default)]
pub struct Enough(Arc<AtomicBool>);

impl Enough {
    /// Says it.
    pub fn say(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was said.
    pub fn is_said(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Tokens in order, then exactly one [`FlightEvent::Ended`].
pub type FlightStream = BoxStream<'static, FlightEvent>;

/// What a sequence's stream carries.
#[derive(Clone, Debug, PartialEq)]
pub enum FlightEvent {
    /// The next output token; indices count from 0 without gaps.
    Token(Emission),
    /// The last event.
    Ended {
        /// How.
        ending: Ending,
        /// What it took so far.
        usage: Usage,
        /// Where its time went.
        timing: Timing,
    },
}

/// See [`Frontend::readiness`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Requests can be served.
    Ready,
    /// Not now, and why; waiting may help.
    NotReady(String),
    /// Shutting down: waiting does not help.
    Draining,
}

/// See [`Frontend::progress`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Work is done, or there is none.
    Moving,
    /// Work waits and nothing happens, and since when or why.
    Stalled(String),
}
