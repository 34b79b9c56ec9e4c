//! What the HTTP face needs of whatever serves behind it.

use cleave_domain::{Ending, Request, Sampled};
use futures::stream::BoxStream;

/// The serving side, as the HTTP face sees it.
pub trait Frontend: Send + Sync + 'static {
    /// Starts one sequence. Dropping the stream before its end cancels the sequence.
    fn submit(&self, request: Request) -> FlightStream;

    /// Whether a request sent now would find a worker.
    fn readiness(&self) -> Readiness;

    /// Metrics of the serving side in the OpenMetrics text format, without the closing `# EOF`.
    fn metrics(&self) -> String;
}

/// Tokens in order, then exactly one [`FlightEvent::Ended`].
pub type FlightStream = BoxStream<'static, FlightEvent>;

/// What a sequence's stream carries.
#[derive(Clone, Debug, PartialEq)]
pub enum FlightEvent {
    /// The next output token.
    Token(Token),
    /// The last event.
    Ended(Ending),
}

/// An output token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Counted from 0, without gaps.
    pub index: u32,
    /// The token with its scores.
    pub sampled: Sampled,
    /// With the first token, when asked for: scores of prompt tokens 1.. .
    pub prompt_scores: Vec<Sampled>,
}

/// See [`Frontend::readiness`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Requests can be served.
    Ready,
    /// Not yet or no longer, and why.
    NotReady(String),
}
