//! Tokens on their way to clients, past the router's brain.
//!
//! Owns: the stream of each flight, and the order of its tokens. Connections pass emissions in as
//! they arrive: a token of the decode worker may overtake one of the prefill worker, and while a
//! sequence migrates two workers emit; so early tokens wait here.
//! Never decides how a flight ends, or which attempts are over: the brain's outputs do.
//! Invariant: a client sees every index once, in order, and then one ending. The tokens that the
//! brain counts as given are exactly those that the client was given, since nothing of an attempt
//! below the fence goes out after it. A flight that is reported done while a token is missing ends
//! as failed, never as a shorter text.

use super::backlog::{ClientBacklog, ClientReceiver};
use cleave_api::FlightEvent;
use cleave_domain::{
    Emission, Ending, Failure, FlightId, HandoffId, Request, RequestStageTimes, TokenId, TokenUsage,
};
use cleave_fleet::EmissionSink;
use cleave_router::{RouterNote, TokenStream};
use cleave_telemetry::{
    AttemptChange, FlightOutcome, FlightSpan, RequestContext, RouterMeters, RouterOverhead, Traces,
};
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use std::sync::Arc;
use std::time::Instant;
use tracing::error;
use tracing::field::display;

/// All flights of one router. Shared by the connections, which emit, and the driver, which ends.
#[derive(Debug)]
pub(crate) struct OpenFlights {
    open: DashMap<FlightId, OpenFlight>,
    meters: RouterMeters,
    traces: Traces,
}

#[derive(Debug)]
struct OpenFlight {
    client: ClientBacklog,
    overhead: Arc<RouterOverhead>,
    /// The limit on its tokens; further ones from a worker neither wait nor go out.
    tokens_max: u32,
    /// Received tokens, each with the attempt that emitted it.
    tokens: TokenStream<(u32, Emission)>,
    /// All output tokens that the client was given.
    generated: Vec<TokenId>,
    /// The attempt that emitted the last of them, and when it went out.
    last: Option<(u32, Instant)>,
    prompt_tokens: u32,
    /// As found by the attempt that drew the first token.
    cached_tokens: u32,
    /// The request's id and trace, as logs and workers have them.
    context: Arc<RequestContext>,
    /// Its span, if its trace is recorded.
    span: Option<Box<FlightSpan>>,
}

/// How a flight ends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FlightEnd {
    pub(crate) ending: Ending,
    /// The number of tokens drawn, of a flight that is done.
    pub(crate) output_tokens: Option<u32>,
    pub(crate) timing: RequestStageTimes,
}

impl From<Ending> for FlightEnd {
    fn from(ending: Ending) -> Self {
        Self {
            ending,
            output_tokens: None,
            timing: RequestStageTimes::default(),
        }
    }
}

impl OpenFlights {
    pub(crate) fn new(meters: RouterMeters, traces: Traces) -> Self {
        Self {
            open: DashMap::new(),
            meters,
            traces,
        }
    }

    /// Flights that have not ended.
    pub(crate) fn count(&self) -> usize {
        self.open.len()
    }

    /// Opens a flight's stream, as part of its client's trace.
    pub(crate) fn open(
        &self,
        flight: FlightId,
        context: RequestContext,
        request: &Request,
        client: ClientBacklog,
        stream: ClientReceiver,
    ) -> (ClientReceiver, Arc<RouterOverhead>) {
        let added = self.meters.start_overhead();
        let opened = OpenFlight {
            client,
            overhead: Arc::clone(&added),
            tokens_max: request.stop.max_tokens,
            tokens: TokenStream::default(),
            generated: Vec::new(),
            last: None,
            prompt_tokens: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
            cached_tokens: 0,
            span: FlightSpan::begin(&self.traces, &context),
            context: Arc::new(context),
        };
        self.open.insert(flight, opened);
        (stream, added)
    }

    /// The request's id and trace, for logs.
    pub(crate) fn request_context(&self, flight: FlightId) -> Option<Arc<RequestContext>> {
        self.open.get(&flight).map(|open| Arc::clone(&open.context))
    }

    /// The request's id, and the span for an order of this attempt.
    pub(crate) fn order_context(&self, handoff: HandoffId) -> Option<Arc<RequestContext>> {
        let mut open = self.open.get_mut(&handoff.flight)?;
        let OpenFlight { context, span, .. } = &mut *open;
        Some(match span {
            Some(span) => Arc::new(span.order_context(context, handoff)),
            None => Arc::clone(context),
        })
    }

    /// Whether there is a trace collector.
    pub(crate) fn are_recorded(&self) -> bool {
        self.traces.has_collector()
    }

    /// Adds a note of the brain to the flight's span.
    pub(crate) fn record_note(&self, flight: FlightId, note: &RouterNote) {
        if let Some(mut open) = self.open.get_mut(&flight)
            && let Some(span) = &mut open.span
        {
            span.handle_note(note);
        }
    }

    /// Both legs of an attempt have a worker: the router's clock stops.
    pub(crate) fn placed(&self, flight: FlightId) {
        if let Some(open) = self.open.get(&flight) {
            open.overhead.pause();
        }
    }

    /// The flight waits for a place: the router's clock stops.
    pub(crate) fn queued(&self, flight: FlightId) {
        if let Some(open) = self.open.get(&flight) {
            open.overhead.pause();
        }
    }

    /// Adds the time since a worker's report was read, once everything that follows from it is
    /// done.
    pub(crate) fn add_overhead(&self, flight: FlightId, read: Instant) {
        if let Some(open) = self.open.get(&flight) {
            open.overhead.add(read.elapsed());
        }
    }

    /// Fences attempts up to this one. Gives the tokens that the client was given; tokens behind a
    /// gap are not among them.
    pub(crate) fn fence(&self, handoff: HandoffId) -> Option<Arc<[TokenId]>> {
        let mut open = self.open.get_mut(&handoff.flight)?;
        open.tokens.fence(handoff.attempt);
        Some(open.generated.as_slice().into())
    }

    /// The tokens that the client was given so far.
    pub(crate) fn tokens_given(&self, flight: FlightId) -> Option<Arc<[TokenId]>> {
        let open = self.open.get(&flight)?;
        Some(open.generated.as_slice().into())
    }

    /// The number of tokens that the client was given.
    pub(crate) fn tokens_given_count(&self, flight: FlightId) -> u32 {
        let open = self.open.get(&flight);
        open.map_or(0, |open| open.tokens.count())
    }

    /// Ends a flight, after the last token. Gives the ending that its client sees.
    pub(crate) fn end(&self, flight: FlightId, end: FlightEnd) -> Option<Ending> {
        let (_, mut open) = self.open.remove(&flight)?;
        let FlightEnd {
            ending,
            output_tokens,
            timing,
        } = end;
        let (ending, usage) = open.final_ending(flight, ending, output_tokens);
        // Before its client is notified, so that the request's span outlasts the flight's.
        if let Some(span) = open.span.take() {
            let outcome = FlightOutcome {
                ending: &ending,
                usage,
                timing,
            };
            span.send_spans(&self.traces, &outcome);
        }
        open.send_end(ending.clone(), usage, timing);
        self.meters.ended(&ending);
        Some(ending)
    }

    /// Ends all flights that are left.
    pub(crate) fn end_all(&self, ending: &Ending) {
        let flights: Vec<FlightId> = self.open.iter().map(|entry| *entry.key()).collect();
        for flight in flights {
            self.end(flight, ending.clone().into());
        }
    }
}

impl EmissionSink for OpenFlights {
    /// Takes a token from a worker. Tokens of fenced attempts, duplicates, and tokens of ended
    /// flights are dropped: two attempts draw equal tokens, and the first one that goes out counts.
    fn emit(&self, handoff: HandoffId, emission: Emission) {
        if let Entry::Occupied(mut entry) = self.open.entry(handoff.flight) {
            entry
                .get_mut()
                .accept(handoff.attempt, emission, &self.meters);
        }
    }
}

impl OpenFlight {
    fn accept(&mut self, attempt: u32, emission: Emission, meters: &RouterMeters) {
        let index = emission.index;
        if index >= self.tokens_max {
            meters.token_beyond_limit();
            return;
        }
        self.tokens.accept(attempt, index, (attempt, emission));
        while let Some((_, (attempt, mut emission))) = self.tokens.poll() {
            // Every attempt runs the prompt; only the facts that come with the first token count.
            match &emission.prompt {
                Some(facts) if emission.index == 0 => self.cached_tokens = facts.cached_tokens,
                _ => emission.prompt = None,
            }
            self.generated.push(emission.sampled.token);
            self.record_attempt_change(attempt, meters);
            // A client that has left is cancelled by its stream's drop.
            if emission.index == 0 {
                self.overhead.resume();
            }
            self.client.send(FlightEvent::Token(emission));
        }
    }

    /// Records that a token of this attempt goes out. If the one before came from another attempt,
    /// the gap between them is a pause that the client saw.
    fn record_attempt_change(&mut self, attempt: u32, meters: &RouterMeters) {
        let now = Instant::now();
        if let Some(span) = &mut self.span {
            span.token_sent();
        }
        let Some((before, at)) = self.last.replace((attempt, now)) else {
            return;
        };
        if before != attempt {
            let turn = if self.tokens.is_fenced(before) {
                AttemptChange::Resumed
            } else {
                AttemptChange::Migrated
            };
            let pause = now - at;
            meters.paused(turn, pause);
            let tokens = self.generated.len() - 1;
            if let Some(span) = &mut self.span {
                span.attempt_changed(turn, attempt, tokens, pause);
            }
        }
    }

    /// The ending that the client gets.
    fn final_ending(
        &self,
        flight: FlightId,
        ending: Ending,
        output_tokens: Option<u32>,
    ) -> (Ending, TokenUsage) {
        let passed = self.tokens.count();
        let lacks = self.tokens.has_gap() || output_tokens.is_some_and(|drawn| passed < drawn);
        let ending = match ending {
            Ending::Done { .. } if lacks => {
                let request_id = &*self.context.request_id;
                let trace_id = self.context.trace.map(display);
                error!(request_id, trace_id, %flight, passed, drawn = output_tokens, "a flight was reported done and lacks a token: it ends as failed");
                Ending::Failed(Failure::WorkerLost)
            }
            ending => ending,
        };
        let usage = TokenUsage {
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.tokens.count(),
            cached_tokens: self.cached_tokens,
        };
        (ending, usage)
    }

    fn send_end(self, ending: Ending, usage: TokenUsage, timing: RequestStageTimes) {
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
    use crate::backlog;
    use cleave_domain::{
        FinishReason, PrefillTiming, PromptFacts, RequestSlo, SampledToken, SamplingParams,
        StopRules,
    };
    use cleave_telemetry::Telemetry;
    use tokio::sync::mpsc;

    const FLIGHT: FlightId = FlightId(7);

    struct OpenFlightsFixture {
        flights: OpenFlights,
        stream: ClientReceiver,
        telemetry: Telemetry,
    }

    fn open_flight() -> OpenFlightsFixture {
        let telemetry = Telemetry::default();
        let flights = OpenFlights::new(RouterMeters::new(&telemetry.router), Traces::default());
        let (driver, _) = mpsc::unbounded_channel();
        let (client, stream) = backlog::client_channel(FLIGHT, u32::MAX, driver);
        let (stream, _) = flights.open(
            FLIGHT,
            RequestContext::default(),
            &request(),
            client,
            stream,
        );
        OpenFlightsFixture {
            flights,
            stream,
            telemetry,
        }
    }

    fn request() -> Request {
        Request {
            prompt: [1, 2, 3].into(),
            generated: [].into(),
            sampling: SamplingParams::greedy(),
            stop: StopRules {
                max_tokens: 9,
                min_tokens: 0,
                stop_tokens: [].into(),
            },
            priority: 0,
            cache_salt: 0,
            slo: RequestSlo::default(),
        }
    }

    /// A token of a worker that found two prompt tokens cached.
    fn emission(index: u32) -> Emission {
        Emission {
            index,
            sampled: SampledToken {
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

    fn given(flights: &OpenFlights) -> Vec<u32> {
        flights.tokens_given(FLIGHT).unwrap().to_vec()
    }

    fn received(mut stream: ClientReceiver) -> (Vec<u32>, Option<Ending>, TokenUsage) {
        let (mut tokens, mut ended, mut used) = (Vec::new(), None, TokenUsage::default());
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

    fn drawn(tokens: u32) -> FlightEnd {
        FlightEnd {
            output_tokens: Some(tokens),
            ..DONE.into()
        }
    }

    const DONE: Ending = Ending::Done {
        reason: FinishReason::Length,
    };

    // Invariant: I12.
    #[test]
    fn a_decode_token_that_overtakes_the_first_one_waits() {
        let OpenFlightsFixture {
            flights, stream, ..
        } = open_flight();
        for index in [2, 1, 0, 1, 3] {
            flights.emit(attempt(0), emission(index));
        }
        flights.end(FLIGHT, DONE.into());
        flights.emit(attempt(0), emission(4));
        let (tokens, ending, usage) = received(stream);
        assert_eq!(tokens, [100, 101, 102, 103]);
        assert_eq!(ending, Some(DONE));
        let expected = TokenUsage {
            prompt_tokens: 3,
            output_tokens: 4,
            cached_tokens: 2,
        };
        assert_eq!(usage, expected);
        assert_eq!(flights.count(), 0);
    }

    // Invariant: I12.
    #[test]
    fn a_retry_repeats_no_token_and_fences_past_attempts() {
        let OpenFlightsFixture {
            flights, stream, ..
        } = open_flight();
        flights.emit(attempt(0), emission(0));
        flights.emit(attempt(0), emission(2));
        // A token behind the gap was not given, and does not go out later.
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
        let (tokens, _, usage) = received(stream);
        assert_eq!(tokens, [100, 101]);
        assert_eq!(usage.cached_tokens, 2, "the first facts count");
    }

    #[test]
    fn both_workers_of_a_migration_may_emit() {
        let OpenFlightsFixture {
            flights,
            stream,
            telemetry,
        } = open_flight();
        flights.emit(attempt(0), emission(0));
        assert_eq!(given(&flights), [100]);
        // The new worker's first token overtakes the old one's last.
        flights.emit(attempt(1), emission(2));
        flights.emit(attempt(0), emission(1));
        flights.emit(attempt(1), emission(3));
        flights.end(FLIGHT, DONE.into());
        assert_eq!(received(stream).0, [100, 101, 102, 103]);
        let text = telemetry.text();
        for line in [
            "cleave_stream_pause_seconds_count{kind=\"migrated\"} 1",
            "cleave_stream_pause_seconds_count{kind=\"resumed\"} 0",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn a_retry_before_the_first_token_is_no_pause() {
        let OpenFlightsFixture {
            flights,
            stream,
            telemetry,
        } = open_flight();
        flights.fence(attempt(0));
        flights.emit(attempt(1), emission(0));
        flights.fence(attempt(1));
        flights.emit(attempt(2), emission(1));
        flights.end(FLIGHT, DONE.into());
        assert_eq!(received(stream).0, [100, 101]);
        let text = telemetry.text();
        assert!(text.contains("cleave_stream_pause_seconds_count{kind=\"resumed\"} 1"));
    }

    #[test]
    fn tokens_beyond_max_tokens_are_dropped_and_counted() {
        let OpenFlightsFixture {
            flights,
            stream,
            telemetry,
        } = open_flight();
        for index in [0, 9, 10, 1 << 20] {
            flights.emit(attempt(0), emission(index));
        }
        let waits = flights.open.get(&FLIGHT).unwrap().tokens.has_gap();
        assert!(!waits, "nine tokens were asked for");
        flights.end(FLIGHT, drawn(1));
        assert_eq!(received(stream).0, [100]);
        let text = telemetry.text();
        assert!(
            text.contains("cleave_tokens_beyond_limit_total 3"),
            "{text}"
        );
    }

    #[test]
    fn a_flight_cut_by_a_drain_reports_its_tokens() {
        let OpenFlightsFixture {
            flights, stream, ..
        } = open_flight();
        // The token behind the gap was not given.
        for index in [0, 1, 2, 4] {
            flights.emit(attempt(0), emission(index));
        }
        flights.end_all(&Ending::Failed(Failure::Draining));
        let (tokens, ending, usage) = received(stream);
        assert_eq!(tokens, [100, 101, 102]);
        assert_eq!(ending, Some(Ending::Failed(Failure::Draining)));
        assert_eq!(usage.output_tokens, 3);
    }

    // Lesson: 16.
    #[test]
    fn a_missing_last_token_fails_the_flight() {
        let OpenFlightsFixture {
            flights, stream, ..
        } = open_flight();
        flights.emit(attempt(0), emission(0));
        flights.end(FLIGHT, drawn(2));
        let (tokens, ending, _) = received(stream);
        assert_eq!(tokens, [100]);
        assert_eq!(ending, Some(Ending::Failed(Failure::WorkerLost)));
        assert_eq!(flights.fence(attempt(0)), None, "it is over");
    }

    // Lesson: 16.
    #[test]
    fn a_gap_at_the_end_fails_the_flight() {
        let OpenFlightsFixture {
            flights, stream, ..
        } = open_flight();
        flights.emit(attempt(0), emission(1));
        flights.end(FLIGHT, DONE.into());
        let (tokens, ending, _) = received(stream);
        assert!(tokens.is_empty());
        assert!(matches!(ending, Some(Ending::Failed(_))), "{ending:?}");
    }
}
