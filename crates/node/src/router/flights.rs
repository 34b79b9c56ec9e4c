//! Tokens on their way to clients, past the router's brain.
//!
//! Owns: the stream of each flight, and the order of its tokens. Connections hand emissions in as
//! they come: a decode worker's token may overtake the prefill worker's, and while a sequence moves
//! two workers emit; so early ones wait here.
//! Never: decides how a flight ends, or which attempts are over; the brain's words do.
//! Invariant: a client sees every index once, in order, and then one ending. What the brain is told
//! the client was given is exactly that, for nothing of an attempt below the fence goes out after
//! it. A flight that is said to be done while a token is missing ends as failed, never as a shorter
//! text.

use super::added::Added;
use super::backlog::{Backlog, Receiver};
use crate::telemetry::RouterMeters;
use crate::trace::{Mark, Story, Told, Traces, Turn};
use cleave_api::FlightEvent;
use cleave_domain::{
    Emission, Ending, Failure, FlightId, HandoffId, Request, Timing, TokenId, Usage,
};
use cleave_router::{Note, TokenStream};
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use std::sync::Arc;
use std::time::Instant;
use tracing::error;
use tracing::field::display;

/// All flights of one router. Shared by the connections, which emit, and the driver, which ends.
#[derive(Debug)]
pub(crate) struct Flights {
    open: DashMap<FlightId, Flight>,
    meters: RouterMeters,
    traces: Traces,
}

#[derive(Debug)]
struct Flight {
    client: Backlog,
    added: Arc<Added>,
    /// It may have so many tokens; whatever a worker says, more do not wait or go out.
    tokens_max: u32,
    /// What came, each with the attempt that emitted it.
    tokens: TokenStream<(u32, Emission)>,
    /// All output tokens that the client was given.
    generated: Vec<TokenId>,
    /// The attempt that emitted the last of them, and when it went out.
    last: Option<(u32, Instant)>,
    prompt_tokens: u32,
    /// As the attempt that drew the first token found them.
    cached_tokens: u32,
    /// As logs and workers know its request.
    mark: Arc<Mark>,
    /// If its trace is recorded.
    story: Option<Box<Story>>,
}

/// How a flight ends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct End {
    pub(crate) ending: Ending,
    /// Of one that is done: the brain knows how many there were.
    pub(crate) output_tokens: Option<u32>,
    pub(crate) timing: Timing,
}

impl From<Ending> for End {
    fn from(ending: Ending) -> Self {
        Self {
            ending,
            output_tokens: None,
            timing: Timing::default(),
        }
    }
}

impl Flights {
    pub(crate) fn new(meters: RouterMeters, traces: Traces) -> Self {
        Self {
            open: DashMap::new(),
            meters,
            traces,
        }
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        self.open.len()
    }

    /// Opens a flight's stream; its client's trace goes on in the flight's.
    pub(crate) fn open(
        &self,
        (flight, mark): (FlightId, Mark),
        request: &Request,
        (client, stream): (Backlog, Receiver),
    ) -> (Receiver, Arc<Added>) {
        let added = self.meters.added();
        let opened = Flight {
            client,
            added: Arc::clone(&added),
            tokens_max: request.stop.max_tokens,
            tokens: TokenStream::default(),
            generated: Vec::new(),
            last: None,
            prompt_tokens: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
            cached_tokens: 0,
            story: Story::begin(&self.traces, &mark),
            mark: Arc::new(mark),
        };
        self.open.insert(flight, opened);
        (stream, added)
    }

    /// As its request is called in logs.
    pub(crate) fn mark(&self, flight: FlightId) -> Option<Arc<Mark>> {
        self.open.get(&flight).map(|open| Arc::clone(&open.mark))
    }

    /// What goes with an order for this attempt.
    pub(crate) fn mark_of(&self, handoff: HandoffId) -> Option<Arc<Mark>> {
        let mut open = self.open.get_mut(&handoff.flight)?;
        let Flight { mark, story, .. } = &mut *open;
        Some(match story {
            Some(story) => Arc::new(story.mark(mark, handoff)),
            None => Arc::clone(mark),
        })
    }

    /// Whether any trace may be recorded.
    pub(crate) fn are_recorded(&self) -> bool {
        self.traces.are_sent()
    }

    /// The brain noted something of it.
    pub(crate) fn noted(&self, flight: FlightId, note: &Note) {
        if let Some(mut open) = self.open.get_mut(&flight)
            && let Some(story) = &mut open.story
        {
            story.hear(note);
        }
    }

    /// Both legs of an attempt have a worker.
    pub(crate) fn placed(&self, flight: FlightId) {
        if let Some(open) = self.open.get(&flight) {
            open.added.rest();
        }
    }

    /// It waits for a place.
    pub(crate) fn waits(&self, flight: FlightId) {
        if let Some(open) = self.open.get(&flight) {
            open.added.rest();
        }
    }

    /// A worker's word for the flight was read then, and all that follows from it is done.
    pub(crate) fn answered(&self, flight: FlightId, read: Instant) {
        if let Some(open) = self.open.get(&flight) {
            open.added.add(read.elapsed());
        }
    }

    /// Takes a token from a worker. Attempts below the fence, doubled tokens and ended flights are
    /// silence: what two attempts draw is the same, and what goes out first is what counts.
    pub(crate) fn emit(&self, handoff: HandoffId, emission: Emission) {
        if let Entry::Occupied(mut entry) = self.open.entry(handoff.flight) {
            entry
                .get_mut()
                .take((handoff.attempt, emission), &self.meters);
        }
    }

    /// Attempts up to this one are over. Says what the client was given; what waited behind a gap
    /// was not.
    pub(crate) fn fence(&self, handoff: HandoffId) -> Option<Arc<[TokenId]>> {
        let mut open = self.open.get_mut(&handoff.flight)?;
        open.tokens.fence(handoff.attempt);
        Some(open.generated.as_slice().into())
    }

    /// Says what the client was given so far.
    pub(crate) fn given(&self, flight: FlightId) -> Option<Arc<[TokenId]>> {
        let open = self.open.get(&flight)?;
        Some(open.generated.as_slice().into())
    }

    /// How many tokens that is.
    pub(crate) fn given_count(&self, flight: FlightId) -> u32 {
        let open = self.open.get(&flight);
        open.map_or(0, |open| open.tokens.count())
    }

    /// Ends a flight, after the last token. Gives the ending that its client sees.
    pub(crate) fn end(&self, flight: FlightId, end: End) -> Option<Ending> {
        let (_, mut open) = self.open.remove(&flight)?;
        let End {
            ending,
            output_tokens,
            timing,
        } = end;
        let (ending, usage) = open.sum_up(flight, (ending, output_tokens));
        // Before its client hears of it, so that the request's span outlasts the flight's.
        if let Some(story) = open.story.take() {
            let told = Told {
                ending: &ending,
                usage,
                timing,
            };
            story.tell(&self.traces, &told);
        }
        open.close(ending.clone(), (usage, timing));
        self.meters.ended(&ending);
        Some(ending)
    }

    /// Ends all that is left.
    pub(crate) fn end_all(&self, ending: &Ending) {
        let flights: Vec<FlightId> = self.open.iter().map(|entry| *entry.key()).collect();
        for flight in flights {
            self.end(flight, ending.clone().into());
        }
    }
}

impl Flight {
    fn take(&mut self, (attempt, emission): (u32, Emission), meters: &RouterMeters) {
        let index = emission.index;
        if index >= self.tokens_max {
            meters.exceeded();
            return;
        }
        self.tokens.accept(attempt, index, (attempt, emission));
        while let Some((_, (attempt, mut emission))) = self.tokens.poll() {
            // Every attempt runs the prompt; what the first token brings is what the client is told.
            match &emission.prompt {
                Some(facts) if emission.index == 0 => self.cached_tokens = facts.cached_tokens,
                _ => emission.prompt = None,
            }
            self.generated.push(emission.sampled.token);
            self.turn(attempt, meters);
            // A client that has left is cancelled by its stream's drop.
            if emission.index == 0 {
                self.added.pass_on();
            }
            self.client.send(FlightEvent::Token(emission));
        }
    }

    /// A token of this attempt goes out now. If the one before it came of another attempt, the gap
    /// between them is a pause that its client saw.
    fn turn(&mut self, attempt: u32, meters: &RouterMeters) {
        let now = Instant::now();
        if let Some(story) = &mut self.story {
            story.token();
        }
        let Some((before, at)) = self.last.replace((attempt, now)) else {
            return;
        };
        if before != attempt {
            let turn = match self.tokens.is_fenced(before) {
                true => Turn::Resumed,
                false => Turn::Migrated,
            };
            let pause = now - at;
            meters.paused(turn, pause);
            let tokens = self.generated.len() - 1;
            if let Some(story) = &mut self.story {
                story.turned(turn, (attempt, tokens, pause));
            }
        }
    }

    /// The ending that its client is to hear.
    fn sum_up(
        &self,
        flight: FlightId,
        (ending, output_tokens): (Ending, Option<u32>),
    ) -> (Ending, Usage) {
        let passed = self.tokens.count();
        let lacks = self.tokens.has_gap() || output_tokens.is_some_and(|drawn| passed < drawn);
        let ending = match ending {
            Ending::Done { .. } if lacks => {
                let request_id = &*self.mark.request_id;
                let trace_id = self.mark.trace.map(display);
                error!(request_id, trace_id, %flight, passed, drawn = output_tokens, "a flight is done and lacks a token");
                Ending::Failed(Failure::WorkerLost)
            }
            ending => ending,
        };
        let usage = Usage {
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.tokens.count(),
            cached_tokens: self.cached_tokens,
        };
        (ending, usage)
    }

    /// Says it.
    fn close(self, ending: Ending, (usage, timing): (Usage, Timing)) {
        let event = FlightEvent::Ended {
            ending,
            usage,
            timing,
        };
        self.client.send(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::backlog;
    use crate::telemetry::Telemetry;
    use cleave_domain::{
        FinishReason, PrefillTiming, PromptFacts, Sampled, Sampling, Slo, StopRules,
    };
    use tokio::sync::mpsc;

    const FLIGHT: FlightId = FlightId(7);

    struct Desk {
        flights: Flights,
        stream: Receiver,
        telemetry: Telemetry,
    }

    /// One open flight.
    fn desk() -> Desk {
        let telemetry = Telemetry::default();
        let flights = Flights::new(RouterMeters::new(&telemetry.router), Traces::default());
        let (driver, _) = mpsc::unbounded_channel();
        let line = backlog::line(FLIGHT, u32::MAX, driver);
        let (stream, _) = flights.open((FLIGHT, Mark::default()), &request(), line);
        Desk {
            flights,
            stream,
            telemetry,
        }
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

    /// Of a worker that found two tokens of the prompt cached.
    fn emission(index: u32) -> Emission {
        Emission {
            index,
            sampled: Sampled {
                token: 100 + index,
                scores: None,
            },
            prompt: (index == 0).then(|| facts(2)),
        }
    }

    fn facts(cached_tokens: u32) -> PromptFacts {
        PromptFacts {
            cached_tokens,
            scores: Vec::new(),
            timing: PrefillTiming::default(),
        }
    }

    fn attempt(attempt: u32) -> HandoffId {
        HandoffId {
            flight: FLIGHT,
            attempt,
        }
    }

    fn given(flights: &Flights) -> Vec<u32> {
        flights.given(FLIGHT).unwrap().to_vec()
    }

    fn heard(mut stream: Receiver) -> (Vec<u32>, Option<Ending>, Usage) {
        let (mut tokens, mut ended, mut used) = (Vec::new(), None, Usage::default());
        while let Some(event) = stream.try_recv() {
            assert!(ended.is_none(), "nothing follows the ending");
            match event {
                FlightEvent::Token(emission) => {
                    assert_eq!(emission.prompt.is_some(), tokens.is_empty());
                    tokens.push(emission.sampled.token);
                }
                FlightEvent::Ended { ending, usage, .. } => {
                    ended = Some(ending);
                    used = usage;
                }
            }
        }
        (tokens, ended, used)
    }

    fn drawn(tokens: u32) -> End {
        End {
            output_tokens: Some(tokens),
            ..DONE.into()
        }
    }

    const DONE: Ending = Ending::Done {
        reason: FinishReason::Length,
    };

    #[test]
    fn a_decode_token_that_overtakes_the_first_one_waits() {
        let Desk {
            flights, stream, ..
        } = desk();
        for index in [2, 1, 0, 1, 3] {
            flights.emit(attempt(0), emission(index));
        }
        flights.end(FLIGHT, DONE.into());
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
        let Desk {
            flights, stream, ..
        } = desk();
        flights.emit(attempt(0), emission(0));
        flights.emit(attempt(0), emission(2));
        // What waited behind the gap was not given, and does not go out later.
        assert_eq!(flights.fence(attempt(0)).as_deref(), Some(&[100][..]));
        assert_eq!(given(&flights), [100]);
        flights.emit(attempt(0), emission(1));
        assert_eq!(given(&flights), [100]);
        let mut resumed = emission(1);
        resumed.prompt = Some(facts(99));
        flights.emit(attempt(1), resumed);
        flights.emit(attempt(0), emission(2));
        assert_eq!(given(&flights), [100, 101]);
        flights.end(FLIGHT, DONE.into());
        let (tokens, _, usage) = heard(stream);
        assert_eq!(tokens, [100, 101]);
        assert_eq!(usage.cached_tokens, 2, "the first facts count");
    }

    #[test]
    fn while_a_sequence_moves_both_workers_are_heard() {
        let Desk {
            flights,
            stream,
            telemetry,
        } = desk();
        flights.emit(attempt(0), emission(0));
        assert_eq!(given(&flights), [100]);
        // The new worker's first token overtakes the old one's last.
        flights.emit(attempt(1), emission(2));
        flights.emit(attempt(0), emission(1));
        flights.emit(attempt(1), emission(3));
        flights.end(FLIGHT, DONE.into());
        assert_eq!(heard(stream).0, [100, 101, 102, 103]);
        let text = telemetry.text();
        for line in [
            "cleave_stream_pause_seconds_count{kind=\"migrated\"} 1",
            "cleave_stream_pause_seconds_count{kind=\"resumed\"} 0",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn a_pause_is_told_apart_from_a_retry_that_nobody_saw() {
        let Desk {
            flights,
            stream,
            telemetry,
        } = desk();
        flights.fence(attempt(0));
        flights.emit(attempt(1), emission(0));
        flights.fence(attempt(1));
        flights.emit(attempt(2), emission(1));
        flights.end(FLIGHT, DONE.into());
        assert_eq!(heard(stream).0, [100, 101]);
        let text = telemetry.text();
        assert!(text.contains("cleave_stream_pause_seconds_count{kind=\"resumed\"} 1"));
    }

    #[test]
    fn a_worker_that_says_more_than_was_asked_for_filled_the_memory() {
        let Desk {
            flights,
            stream,
            telemetry,
        } = desk();
        for index in [0, 9, 10, 1 << 20] {
            flights.emit(attempt(0), emission(index));
        }
        let waits = flights.open.get(&FLIGHT).unwrap().tokens.has_gap();
        assert!(!waits, "nine tokens were asked for");
        flights.end(FLIGHT, drawn(1));
        assert_eq!(heard(stream).0, [100]);
        let text = telemetry.text();
        assert!(
            text.contains("cleave_tokens_beyond_limit_total 3"),
            "{text}"
        );
    }

    #[test]
    fn lesson_16_a_missing_tail_is_a_failure_and_not_a_shorter_text() {
        let Desk {
            flights, stream, ..
        } = desk();
        flights.emit(attempt(0), emission(0));
        flights.end(FLIGHT, drawn(2));
        let (tokens, ending, _) = heard(stream);
        assert_eq!(tokens, [100]);
        assert_eq!(ending, Some(Ending::Failed(Failure::WorkerLost)));
        assert_eq!(flights.fence(attempt(0)), None, "it is over");
    }

    #[test]
    fn lesson_16_a_gap_at_the_end_is_a_failure_and_not_a_shorter_text() {
        let Desk {
            flights, stream, ..
        } = desk();
        flights.emit(attempt(0), emission(1));
        flights.end(FLIGHT, DONE.into());
        let (tokens, ending, _) = heard(stream);
        assert!(tokens.is_empty());
        assert!(matches!(ending, Some(Ending::Failed(_))), "{ending:?}");
    }
}
