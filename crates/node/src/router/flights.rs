//! Tokens on their way to clients, past the router's brain.
//!
//! Owns: the stream of each flight, and the order of its tokens. Connections hand emissions in as
//! they come: a decode worker's token may overtake the prefill worker's, so early ones wait here.
//! Never: decides how a flight ends; the brain's word closes it.
//! Invariant: a client sees every index once, in order, and then one ending. A flight that is said
//! to be done while a token is missing ends as failed, never as a shorter text.

use crate::telemetry::RouterMeters;
use crate::trace::{Story, Traces};
use cleave_api::FlightEvent;
use cleave_domain::{Emission, Ending, Failure, FlightId, HandoffId, Request, Usage, WorkerRef};
use cleave_router::TokenStream;
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use tokio::sync::mpsc;
use tracing::error;

/// All flights of one router. Shared by the connections, which emit, and the driver, which ends.
#[derive(Debug)]
pub(crate) struct Flights {
    open: DashMap<FlightId, Flight>,
    meters: RouterMeters,
    traces: Traces,
}

#[derive(Debug)]
struct Flight {
    /// Holds at most `max_tokens` and an ending, however slowly the client reads.
    client: mpsc::UnboundedSender<FlightEvent>,
    attempt: u32,
    tokens: TokenStream<Emission>,
    prompt_tokens: u32,
    cached_tokens: u32,
    story: Story,
}

impl Flights {
    pub(crate) fn new(meters: RouterMeters, traces: Traces) -> Self {
        Self {
            open: DashMap::new(),
            meters,
            traces,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.open.len()
    }

    /// Opens a flight's stream.
    pub(crate) fn open(
        &self,
        flight: FlightId,
        request: &Request,
    ) -> mpsc::UnboundedReceiver<FlightEvent> {
        let (client, stream) = mpsc::unbounded_channel();
        let count = |tokens: &[u32]| u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let opened = Flight {
            client,
            attempt: 0,
            tokens: TokenStream::default(),
            prompt_tokens: count(&request.prompt),
            cached_tokens: 0,
            story: Story::begin(),
        };
        self.open.insert(flight, opened);
        stream
    }

    /// Both legs of an attempt have a worker.
    pub(crate) fn placed(&self, flight: FlightId, prefill: WorkerRef, decode: WorkerRef) {
        if let Some(mut open) = self.open.get_mut(&flight) {
            open.story.placed(prefill, decode);
        }
    }

    /// Takes a token from a worker. Past attempts, doubled tokens and ended flights are silence: a
    /// retry draws the same tokens from the start again, and only the new ones go on.
    pub(crate) fn emit(&self, handoff: HandoffId, emission: Emission) {
        if let Entry::Occupied(mut entry) = self.open.entry(handoff.flight) {
            entry.get_mut().take(handoff.attempt, emission);
        }
    }

    /// Ends a flight, after the last token.
    pub(crate) fn end(&self, flight: FlightId, ending: Ending) {
        if let Some((_, open)) = self.open.remove(&flight) {
            let story = open.story.clone();
            let (ending, usage) = open.close(flight, ending);
            self.meters.ended(&ending);
            self.traces.tell(flight, &story, (&ending, usage));
        }
    }

    /// Ends all that is left.
    pub(crate) fn end_all(&self, ending: &Ending) {
        let flights: Vec<FlightId> = self.open.iter().map(|entry| *entry.key()).collect();
        for flight in flights {
            self.end(flight, ending.clone());
        }
    }
}

impl Flight {
    fn take(&mut self, attempt: u32, emission: Emission) {
        if attempt < self.attempt {
            return;
        }
        if attempt > self.attempt {
            self.attempt = attempt;
            self.tokens.restart();
        }
        self.tokens.accept(emission.index, emission);
        while let Some((_, emission)) = self.tokens.poll() {
            if let Some(facts) = &emission.prompt {
                self.cached_tokens = facts.cached_tokens;
            }
            self.story.token();
            // A client that has left is cancelled by its stream's drop.
            let _ = self.client.send(FlightEvent::Token(emission));
        }
    }

    /// Says the ending; the one that is said comes back.
    fn close(self, flight: FlightId, ending: Ending) -> (Ending, Usage) {
        let ending = match ending {
            Ending::Done { .. } if self.tokens.has_gap() => {
                error!(%flight, missing = self.tokens.count(), "a flight is done and lacks a token");
                Ending::Failed(Failure::WorkerLost)
            }
            ending => ending,
        };
        let usage = Usage {
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.tokens.count(),
            cached_tokens: self.cached_tokens,
        };
        let event = FlightEvent::Ended {
            ending: ending.clone(),
            usage,
        };
        let _ = self.client.send(event);
        (ending, usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Telemetry;
    use cleave_domain::{FinishReason, PromptFacts, Sampled, Sampling, Slo, StopRules};

    const FLIGHT: FlightId = FlightId(7);

    fn flights() -> Flights {
        let meters = RouterMeters::new(&Telemetry::default().router);
        Flights::new(meters, Traces::default())
    }

    fn request() -> Request {
        Request {
            prompt: [1, 2, 3].into(),
            generated: [].into(),
            sampling: Sampling::greedy(),
            stop: StopRules {
                max_tokens: 9,
                min_tokens: 0,
                stop_tokens: [].into(),
            },
            priority: 0,
            cache_salt: 0,
            slo: Slo::default(),
        }
    }

    fn emission(index: u32) -> Emission {
        Emission {
            index,
            sampled: Sampled {
                token: 100 + index,
                scores: None,
            },
            prompt: (index == 0).then(|| PromptFacts {
                cached_tokens: 2,
                scores: Vec::new(),
            }),
        }
    }

    fn attempt(attempt: u32) -> HandoffId {
        HandoffId {
            flight: FLIGHT,
            attempt,
        }
    }

    fn heard(
        mut stream: mpsc::UnboundedReceiver<FlightEvent>,
    ) -> (Vec<u32>, Option<Ending>, Usage) {
        let (mut tokens, mut ended, mut used) = (Vec::new(), None, Usage::default());
        while let Ok(event) = stream.try_recv() {
            assert!(ended.is_none(), "nothing follows the ending");
            match event {
                FlightEvent::Token(emission) => tokens.push(emission.sampled.token),
                FlightEvent::Ended { ending, usage } => {
                    ended = Some(ending);
                    used = usage;
                }
            }
        }
        (tokens, ended, used)
    }

    const DONE: Ending = Ending::Done {
        reason: FinishReason::Length,
    };

    #[test]
    fn a_decode_token_that_overtakes_the_first_one_waits() {
        let flights = flights();
        let stream = flights.open(FLIGHT, &request());
        for index in [2, 1, 0, 1, 3] {
            flights.emit(attempt(0), emission(index));
        }
        flights.end(FLIGHT, DONE);
        flights.emit(attempt(0), emission(4));
        let (tokens, ending, usage) = heard(stream);
        assert_eq!(tokens, [100, 101, 102, 103]);
        assert_eq!(ending, Some(DONE));
        let expected = Usage {
            prompt_tokens: 3,
            output_tokens: 4,
            cached_tokens: 2,
        };
        assert_eq!(usage, expected);
        assert_eq!(flights.count(), 0);
    }

    #[test]
    fn a_retry_repeats_no_token_and_past_attempts_are_silent() {
        let flights = flights();
        let stream = flights.open(FLIGHT, &request());
        flights.emit(attempt(0), emission(0));
        flights.emit(attempt(0), emission(2));
        flights.emit(attempt(1), emission(0));
        flights.emit(attempt(0), emission(1));
        flights.emit(attempt(1), emission(1));
        flights.end(FLIGHT, DONE);
        assert_eq!(heard(stream).0, [100, 101]);
    }

    #[test]
    fn lesson_16_a_gap_at_the_end_is_a_failure_and_not_a_shorter_text() {
        let flights = flights();
        let stream = flights.open(FLIGHT, &request());
        flights.emit(attempt(0), emission(1));
        flights.end(FLIGHT, DONE);
        let (tokens, ending, _) = heard(stream);
        assert!(tokens.is_empty());
        assert!(matches!(ending, Some(Ending::Failed(_))), "{ending:?}");
    }
}
