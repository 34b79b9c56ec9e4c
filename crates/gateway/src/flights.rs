//! The flights of one router: everything that it keeps of one is one entry, in parts.
//!
//! Owns: the entries, from a flight's submission to its end. Connections emit into them, the driver
//! adds the brain's notes, fences and ends, and the dashboard counts them.
//! Never decides how a flight ends, or which attempts are over: the brain's outputs do.
//! Invariant: a flight that is reported done while a token is missing ends as failed, never as a
//! shorter text; of one that has ended nothing is left here.

mod progress;
mod stream;

use self::progress::{FlightProgress, HandoffProgress};
use self::stream::{ClientTokens, NextToken};
use super::backlog::{ClientBacklog, ClientReceiver};
use cleave_api::{FlightStageCounts, ServingWorkers};
use cleave_domain::{
    Capacity, Emission, Ending, Failure, FlightId, HandoffId, Report, Request, RequestStageTimes,
    TokenId,
};
use cleave_fleet::EmissionSink;
use cleave_router::{DecisionOutcome, RouterNote};
use cleave_telemetry::{
    FlightOutcome, FlightSpan, HandoffLoss, NoteContext, RequestContext, RouterMeters,
    RouterObserver, RouterOverhead, SloSeries, TokenCounters, Traces,
};
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use std::sync::Arc;
use std::time::Instant;
use tracing::error;
use tracing::field::display;

/// All flights of one router. Shared by the connections, which emit, the driver, which ends, and
/// the HTTP server, which opens.
#[derive(Debug)]
pub(crate) struct FlightTable {
    open: DashMap<FlightId, FlightEntry>,
    meters: RouterMeters,
    slo: SloSeries,
    traces: Traces,
}

#[derive(Debug)]
struct FlightEntry {
    /// The served name of its model.
    model: Arc<str>,
    tokens: ClientTokens,
    /// The totals to which its tokens are added.
    totals: TokenCounters,
    /// Whether its output is a vector, which is no token.
    is_vector: bool,
    /// Shared with the client's stream, whose first read ends it: that may be after the flight's
    /// end.
    overhead: Arc<RouterOverhead>,
    /// The request's id and trace, as logs and workers have them.
    context: Arc<RequestContext>,
    /// The request's list of its workers.
    workers: ServingWorkers,
    /// Its span, if its trace is recorded.
    span: Option<Box<FlightSpan>>,
    progress: FlightProgress,
    /// The brain's note of its outcome, which comes right before its end.
    judged: Option<RouterNote>,
}

/// The request that a flight belongs to.
#[derive(Debug, Default)]
pub(crate) struct FlightOrigin {
    /// The served name of its model.
    pub(crate) model: Arc<str>,
    pub(crate) context: RequestContext,
    /// The request's list of its workers.
    pub(crate) workers: ServingWorkers,
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

/// A flight that has ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EndedFlight {
    /// The ending that its client sees.
    pub(crate) ending: Ending,
    /// The brain's note of its outcome.
    pub(crate) judged: Option<RouterNote>,
}

impl FlightTable {
    pub(crate) fn new(meters: RouterMeters, slo: SloSeries, traces: Traces) -> Self {
        Self {
            open: DashMap::new(),
            meters,
            slo,
            traces,
        }
    }

    /// Flights of a model that have not ended.
    pub(crate) fn count_of(&self, model: &str) -> usize {
        self.open
            .iter()
            .filter(|entry| *entry.model == *model)
            .count()
    }

    /// Flights that have not ended, by how far they have come.
    pub(crate) fn stage_counts(&self) -> FlightStageCounts {
        let mut counts = FlightStageCounts::default();
        for entry in &self.open {
            entry.progress.count_into(&mut counts);
        }
        counts
    }

    /// Opens a flight's stream, as part of its client's trace.
    pub(crate) fn open(
        &self,
        flight: FlightId,
        origin: FlightOrigin,
        request: &Request,
        client: ClientBacklog,
        stream: ClientReceiver,
    ) -> (ClientReceiver, Arc<RouterOverhead>) {
        let FlightOrigin {
            model,
            context,
            workers,
        } = origin;
        let added = self.meters.start_overhead();
        let opened = FlightEntry {
            span: FlightSpan::begin(&self.traces, &context, &model),
            totals: self.slo.token_counters(&request.slo.class, &model),
            is_vector: request.pooling.is_some(),
            model,
            tokens: ClientTokens::new(request, client),
            overhead: Arc::clone(&added),
            context: Arc::new(context),
            workers,
            progress: FlightProgress::default(),
            judged: None,
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
        let FlightEntry { context, span, .. } = &mut *open;
        Some(match span {
            Some(span) => Arc::new(span.order_context(context, handoff)),
            None => Arc::clone(context),
        })
    }

    /// Handles a worker's report on a hand-off. Gives the KV bytes of one that landed by it, in
    /// blocks of the receiver's size.
    pub(crate) fn handle_report(&self, report: &Report, receiver: &Capacity) -> Option<u64> {
        let (handoff, progress) = HandoffProgress::of(report)?;
        let mut open = self.open.get_mut(&handoff.flight)?;
        let blocks_present = open.progress.advance(handoff.attempt, progress)?;
        let usage = open.tokens.usage();
        // The token drawn last has no KV yet.
        let tokens =
            u64::from(usage.prompt_tokens) + u64::from(usage.output_tokens.saturating_sub(1));
        let blocks = tokens.div_ceil(u64::from(receiver.block_tokens.max(1)));
        let sent = blocks.saturating_sub(u64::from(blocks_present));
        Some(sent * u64::from(receiver.block_bytes))
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
        Some(open.tokens.given())
    }

    /// The tokens that the client was given so far.
    pub(crate) fn tokens_given(&self, flight: FlightId) -> Option<Arc<[TokenId]>> {
        self.open.get(&flight).map(|open| open.tokens.given())
    }

    /// Ends a flight, after the last token.
    pub(crate) fn end(&self, flight: FlightId, end: FlightEnd) -> Option<EndedFlight> {
        let (_, open) = self.open.remove(&flight)?;
        let FlightEnd {
            ending,
            output_tokens,
            timing,
        } = end;
        let ending = open.final_ending(flight, ending, output_tokens);
        // Before its client is notified, so that the request's span outlasts the flight's.
        if let Some(span) = open.span {
            let outcome = FlightOutcome {
                ending: &ending,
                usage: open.tokens.usage(),
                timing,
            };
            span.send_spans(&self.traces, &outcome);
        }
        open.tokens.send_end(ending.clone(), timing);
        self.meters.ended(&ending, &open.model);
        if let Some(loss) = open.progress.loss_at_end(&ending) {
            self.meters.handoff_lost(loss);
        }
        let judged = open.judged;
        Some(EndedFlight { ending, judged })
    }

    /// Ends all flights that are left.
    pub(crate) fn end_all(&self, ending: &Ending) {
        let flights: Vec<FlightId> = self.open.iter().map(|entry| *entry.key()).collect();
        for flight in flights {
            self.end(flight, ending.clone().into());
        }
    }
}

impl RouterObserver for FlightTable {
    fn handle_note(&self, note: &RouterNote, context: NoteContext<'_>) {
        let open = context.flight.and_then(|flight| self.open.get_mut(&flight));
        if let Some(loss) = open.and_then(|mut open| open.handle_note(note, context)) {
            self.meters.handoff_lost(loss);
        }
    }
}

impl EmissionSink for FlightTable {
    /// Takes a token from a worker; one of a flight that has ended is dropped.
    fn emit(&self, handoff: HandoffId, emission: Emission) {
        if let Entry::Occupied(mut entry) = self.open.entry(handoff.flight) {
            entry
                .get_mut()
                .accept(handoff.attempt, emission, &self.meters);
        }
    }
}

impl FlightEntry {
    fn accept(&mut self, attempt: u32, emission: Emission, meters: &RouterMeters) {
        if self.tokens.is_beyond_limit(&emission) {
            meters.token_beyond_limit();
            return;
        }
        self.tokens.accept(attempt, emission);
        while let Some(NextToken { emission, pause }) = self.tokens.poll() {
            if let Some(span) = &mut self.span {
                span.token_sent();
            }
            if let Some(pause) = pause {
                meters.paused(pause.change, pause.took);
                if let Some(span) = &mut self.span {
                    span.attempt_changed(pause.change, pause.attempt, pause.tokens, pause.took);
                }
            }
            if emission.index == 0 {
                self.overhead.resume();
                self.totals.prompt_done(self.tokens.usage());
            }
            if !self.is_vector {
                self.totals.token_sent();
            }
            self.tokens.send(emission);
        }
    }

    /// Adds a note of the brain. Gives the outcome of a hand-off that this ends without a landing.
    fn handle_note(&mut self, note: &RouterNote, context: NoteContext<'_>) -> Option<HandoffLoss> {
        if let Some(span) = &mut self.span {
            span.handle_note(note);
        }
        match note {
            // Both legs of an attempt have a worker.
            RouterNote::Placed {
                prefill, decode, ..
            } => {
                self.overhead.pause();
                self.workers.add((context.worker_name)(prefill));
                self.workers.add((context.worker_name)(decode));
            }
            RouterNote::Moving { to, .. } => self.workers.add((context.worker_name)(to)),
            RouterNote::Decided(decision) if decision.outcome == DecisionOutcome::Waits => {
                self.overhead.pause();
            }
            RouterNote::Judged { .. } => self.judged = Some(note.clone()),
            _ => {}
        }
        self.progress.handle_note(note)
    }

    /// The ending that the client gets.
    fn final_ending(&self, flight: FlightId, ending: Ending, drawn: Option<u32>) -> Ending {
        match ending {
            Ending::Done { .. } if self.tokens.lacks_tokens(drawn) => {
                let request_id = &*self.context.request_id;
                let trace_id = self.context.trace.map(display);
                let passed = self.tokens.usage().output_tokens;
                error!(request_id, trace_id, %flight, passed, drawn, "a flight was reported done and lacks a token: it ends as failed");
                Ending::Failed(Failure::WorkerLost)
            }
            ending => ending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backlog;
    use cleave_api::FlightEvent;
    use cleave_domain::{
        FinishReason, PrefillTiming, PromptFacts, RequestSlo, SampledToken, SamplingParams,
        StopRules, TokenUsage, WorkerId, WorkerRef,
    };
    use cleave_router::MoveReason;
    use cleave_telemetry::Telemetry;
    use std::time::Duration;
    use tokio::sync::mpsc;

    const FLIGHT: FlightId = FlightId(7);

    struct FlightTableFixture {
        flights: FlightTable,
        stream: ClientReceiver,
        telemetry: Telemetry,
    }

    fn open_flight() -> FlightTableFixture {
        open_flight_of(&request(3, 9))
    }

    fn open_flight_of(request: &Request) -> FlightTableFixture {
        let telemetry = Telemetry::default();
        let meters = RouterMeters::new(&telemetry.router);
        let flights = FlightTable::new(meters, telemetry.slo.clone(), Traces::default());
        let (driver, _) = mpsc::unbounded_channel();
        let (client, stream) = backlog::client_channel(FLIGHT, u32::MAX, driver);
        let (stream, _) = flights.open(
            FLIGHT,
            FlightOrigin {
                model: Arc::from("m"),
                ..FlightOrigin::default()
            },
            request,
            client,
            stream,
        );
        FlightTableFixture {
            flights,
            stream,
            telemetry,
        }
    }

    fn request(prompt_tokens: u32, max_tokens: u32) -> Request {
        Request {
            prompt: (1..=prompt_tokens).collect(),
            generated: [].into(),
            sampling: SamplingParams::greedy(),
            stop: StopRules {
                max_tokens,
                min_tokens: 0,
                stop_tokens: [].into(),
            },
            priority: 0,
            cache_salt: 0,
            adapter: None,
            pooling: None,
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
            pooled: None,
        }
    }

    fn attempt(attempt: u32) -> HandoffId {
        HandoffId {
            flight: FLIGHT,
            attempt,
        }
    }

    fn handle_note(flights: &FlightTable, note: &RouterNote) {
        let context = NoteContext {
            flight: note.flight(),
            model: "m",
            request: None,
            worker_name: &|worker| worker.to_string(),
        };
        flights.handle_note(note, context);
    }

    fn given(flights: &FlightTable) -> Vec<u32> {
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
        let FlightTableFixture {
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
        assert_eq!(flights.count_of("m"), 0);
    }

    // Invariant: I12.
    #[test]
    fn a_retry_repeats_no_token_and_fences_past_attempts() {
        let FlightTableFixture {
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
        let FlightTableFixture {
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
        let FlightTableFixture {
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
        let FlightTableFixture {
            flights,
            stream,
            telemetry,
        } = open_flight();
        for index in [0, 9, 10, 1 << 20] {
            flights.emit(attempt(0), emission(index));
        }
        let waits = flights.open.get(&FLIGHT).unwrap().tokens.lacks_tokens(None);
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
        let FlightTableFixture {
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

    #[test]
    fn a_flight_has_one_stage_and_landings_count_once() {
        let FlightTableFixture {
            flights,
            stream: _stream,
            telemetry,
        } = open_flight_of(&request(100, 99));
        let worker = |number| WorkerRef {
            worker: WorkerId(number),
            ..WorkerRef::default()
        };
        let placed = |number, prefill, decode| {
            let placed = RouterNote::Placed {
                handoff: attempt(number),
                prefill: worker(prefill),
                decode: worker(decode),
                cached_tokens: 0,
                waited: Duration::ZERO,
            };
            handle_note(&flights, &placed);
        };
        let receiver = Capacity {
            block_tokens: 16,
            block_bytes: 1_000,
            blocks_count: 100,
            slots_count: 1,
            step_tokens_max: 16,
            context_tokens_max: 1_000,
            states: None,
            windows: None,
        };
        let handle_report = |report: &Report| flights.handle_report(report, &receiver);
        let reserved = |number, present| {
            handle_report(&Report::Reserved {
                handoff: attempt(number),
                present,
                blocks: Vec::new(),
                state: None,
                window: None,
            })
        };
        let prefilled = |number| {
            handle_report(&Report::Prefilled {
                handoff: attempt(number),
                timing: PrefillTiming::default(),
            })
        };
        let landed = |number| {
            handle_report(&Report::Landed {
                handoff: attempt(number),
            })
        };
        let stages = || {
            let now = flights.stage_counts();
            let before_landing = [now.reserved, now.prefill, now.transfer];
            (now.queued, before_landing, now.decode)
        };
        assert_eq!(stages(), (1, [0, 0, 0], 0));
        placed(0, 1, 2);
        assert_eq!(stages(), (0, [1, 0, 0], 0));
        assert_eq!(reserved(0, 2), None);
        assert_eq!(stages(), (0, [0, 1, 0], 0));
        flights.emit(attempt(0), emission(0));
        assert_eq!(prefilled(0), None);
        assert_eq!(stages(), (0, [0, 0, 1], 0));
        assert_eq!(landed(0), Some(5_000), "seven blocks, two were there");
        assert_eq!(stages(), (0, [0, 0, 0], 1));
        // Its worker is lost, and the tokens it had are computed again, on one worker.
        let retried = RouterNote::Retried {
            handoff: attempt(0),
            failure: Failure::WorkerLost,
            generated_tokens: 1,
        };
        handle_note(&flights, &retried);
        assert_eq!(stages(), (1, [0, 0, 0], 0));
        placed(1, 3, 3);
        let running = Report::Running {
            handoff: attempt(1),
            present: 0,
        };
        assert_eq!(handle_report(&running), None);
        assert_eq!(stages(), (0, [0, 1, 0], 0));
        assert_eq!(landed(0), None, "a late report of the attempt before");
        assert_eq!(prefilled(1), None);
        assert_eq!(stages(), (0, [0, 0, 0], 1));
        // It moves: ten blocks for a hundred tokens and sixty more, and the last one drawn.
        for index in 1..=60 {
            flights.emit(attempt(1), emission(index));
        }
        let moving = RouterNote::Moving {
            handoff: attempt(2),
            from: worker(3),
            to: worker(4),
            why: MoveReason::Drain,
        };
        handle_note(&flights, &moving);
        assert_eq!((reserved(2, 0), prefilled(2)), (None, None));
        assert_eq!(stages(), (0, [0, 0, 0], 1));
        assert_eq!(flights.stage_counts().moving, 1);
        assert_eq!((landed(2), landed(2)), (Some(10_000), None));
        assert_eq!(flights.stage_counts().moving, 0);
        flights.end(FLIGHT, DONE.into());
        assert_eq!(stages(), (0, [0, 0, 0], 0));
        let text = telemetry.text();
        let lost = "cleave_router_handoffs_total{outcome=\"lost\"} 0";
        assert!(text.contains(lost), "{text}");
    }

    #[test]
    fn a_failure_during_a_hand_off_is_a_lost_hand_off() {
        let FlightTableFixture {
            flights,
            stream: _stream,
            telemetry,
        } = open_flight();
        let placed = RouterNote::Placed {
            handoff: attempt(0),
            prefill: WorkerRef::default(),
            decode: WorkerRef {
                worker: WorkerId(2),
                ..WorkerRef::default()
            },
            cached_tokens: 0,
            waited: Duration::ZERO,
        };
        let passed_over = RouterNote::PassedOver {
            handoff: attempt(0),
            worker: WorkerRef::default(),
            refusal: None,
        };
        for note in [&placed, &passed_over, &placed] {
            handle_note(&flights, note);
        }
        let ended = flights.end(FLIGHT, Ending::Failed(Failure::WorkerLost).into());
        assert_eq!(ended.unwrap().judged, None);
        let text = telemetry.text();
        let lost = "cleave_router_handoffs_total{outcome=\"lost\"} 2";
        assert!(text.contains(lost), "{text}");
    }

    #[test]
    fn each_token_counts_once_whatever_attempts_drew_it() {
        let FlightTableFixture {
            flights, telemetry, ..
        } = open_flight();
        flights.emit(attempt(0), emission(0));
        flights.emit(attempt(0), emission(1));
        flights.fence(attempt(0));
        for index in 0..4 {
            flights.emit(attempt(1), emission(index));
        }
        flights.end(FLIGHT, drawn(4));
        let text = telemetry.text();
        for (name, count) in [("prompt", 3), ("cached", 2), ("output", 4)] {
            let labels = r#"{class="other",model="m"}"#;
            let line = format!("cleave_router_{name}_tokens_total{labels} {count}\n");
            assert!(text.contains(&line), "{line} is not in\n{text}");
        }
    }

    // Lesson: 16.
    #[test]
    fn a_missing_last_token_fails_the_flight() {
        let FlightTableFixture {
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
        let FlightTableFixture {
            flights, stream, ..
        } = open_flight();
        flights.emit(attempt(0), emission(1));
        flights.end(FLIGHT, DONE.into());
        let (tokens, ending, _) = received(stream);
        assert!(tokens.is_empty());
        assert!(matches!(ending, Some(Ending::Failed(_))), "{ending:?}");
    }
}
