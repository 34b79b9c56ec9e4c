//! What the HTTP face needs of whatever serves behind it.

use crate::admin::Operator;
use cleave_domain::{Emission, Ending, Request, Usage};
use futures::stream::BoxStream;

/// The serving side, as the HTTP face sees it.
pub trait Frontend: Operator {
    /// Starts one sequence. Dropping the stream before its end cancels the sequence.
    fn submit(&self, request: Request) -> FlightStream;

    /// Whether a request sent now would find a worker.
    fn readiness(&self) -> Readiness;

    /// Whether what was accepted moves on. A frontend that cannot stall need not say.
    fn progress(&self) -> Progress {
        Progress::Moving
    }

    /// Metrics of the serving side in the OpenMetrics text format, without the closing `# EOF`.
    fn metrics(&self) -> String;
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
