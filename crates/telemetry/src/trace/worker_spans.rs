//! Spans of a worker's legs: `prefill` with `transfer.send`, `decode` with `transfer.receive`.
//!
//! Owns: the spans of recorded requests, built from orders and the brain's outputs; and, for debug
//! logs, the id of every request here. Never influences a brain. Invariant: the entry of a hand-off
//! is removed at its `Released`, at its refusal, or at the loss of its router.

use super::{RequestContext, SpanBuilder, Traces};
use crate::observer::WorkerObserver;
use crate::outcome::{failure_name, refusal_name};
use cleave_domain::{Emission, HandoffId, Order, Report, Request, RouterId, WorkerRef};
use cleave_sched::WorkerNote;
use opentelemetry::KeyValue;
use opentelemetry::trace::SpanKind;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tracing::Level;

#[derive(Debug)]
pub struct WorkerSpans {
    traces: Traces,
    /// The worker's name in spans.
    worker: String,
    /// The served name of its model.
    model: String,
    open: HashMap<HandoffId, HandoffSpans>,
}

/// The spans of one hand-off.
#[derive(Debug)]
struct HandoffSpans {
    context: Arc<RequestContext>,
    prefill: Option<SpanBuilder>,
    decode: Option<SpanBuilder>,
    /// Transfers of blocks; children of the legs.
    transfers: Vec<SpanBuilder>,
    /// Both legs came by one order, and are refused by one answer.
    is_whole: bool,
}

impl WorkerSpans {
    pub fn new(traces: Traces, worker: String, model: String) -> Self {
        Self {
            traces,
            worker,
            model,
            open: HashMap::new(),
        }
    }

    /// The id and trace of a request, if it is recorded or logged.
    pub fn request_context(&self, handoff: HandoffId) -> Option<&Arc<RequestContext>> {
        self.open.get(&handoff).map(|spans| &spans.context)
    }

    /// A router ordered something for a request.
    pub fn order_received(&mut self, order: &Order, context: Option<Arc<RequestContext>>) {
        let Some(context) = context else {
            return;
        };
        let recorded = self.traces.records(context.trace);
        if !recorded && !tracing::enabled!(target: "note", Level::DEBUG) {
            return;
        }
        let (handoff, names, peer): (_, &[_], _) = match order {
            Order::Reserve(order) => (order.handoff, &["decode"], Some(order.sender)),
            Order::Prefill(order) => (order.handoff, &["prefill"], Some(order.target.worker)),
            Order::Migrate(order) => (order.handoff, &["migrate"], Some(order.target.worker)),
            Order::Run(order) => (order.handoff, &["decode", "prefill"], None),
            _ => return,
        };
        let legs = names.iter().filter(|_| recorded);
        let legs = legs.map(|name| (*name, self.leg(&context, name, order, peer)));
        let legs: Vec<_> = legs.collect();
        let spans = self.open.entry(handoff).or_insert_with(|| HandoffSpans {
            context,
            prefill: None,
            decode: None,
            transfers: Vec::new(),
            is_whole: matches!(order, Order::Run(_)),
        });
        for (name, builder) in legs {
            let leg = match name {
                "decode" => &mut spans.decode,
                _ => &mut spans.prefill,
            };
            leg.get_or_insert(builder);
        }
    }

    /// The span of a leg; one that has its other leg here has no `peer`.
    fn leg(
        &self,
        context: &RequestContext,
        name: &'static str,
        order: &Order,
        peer: Option<WorkerRef>,
    ) -> SpanBuilder {
        let parent = context.trace.unwrap_or_default();
        let mut builder = SpanBuilder::under(parent, name, SystemTime::now());
        builder.kind = SpanKind::Server;
        builder.set("cleave.worker.name", self.worker.clone());
        builder.set("gen_ai.request.model", self.model.clone());
        builder.set("cleave.request_id", context.request_id.to_string());
        if let Some(peer) = peer {
            builder.set("cleave.peer", peer.to_string());
        }
        let length = |request: &Request| request.prompt.len() + request.generated.len();
        let tokens = match order {
            Order::Reserve(order) => length(&order.request),
            Order::Prefill(order) => length(&order.request),
            Order::Run(order) => length(&order.request),
            Order::Migrate(order) => order.tokens as usize,
            _ => 0,
        };
        builder.set_count("cleave.tokens", tokens);
        builder
    }

    pub fn token_emitted(&mut self, handoff: HandoffId, emission: &Emission) {
        if self.open.is_empty() {
            return;
        }
        let Some(facts) = &emission.prompt else {
            return;
        };
        let spans = self.open.get_mut(&handoff);
        if let Some(builder) = spans.and_then(|spans| spans.prefill.as_mut()) {
            let cached = facts.cached_tokens;
            builder.set_count("gen_ai.usage.cache_read.input_tokens", cached);
            builder.add_event("first_token", Vec::new());
        }
    }

    /// A report is about to be sent to a router.
    pub fn report_sent(&mut self, report: &Report) {
        if self.open.is_empty() {
            return;
        }
        match report {
            Report::Reserved {
                handoff,
                present,
                blocks,
                state: _,
                window: _,
            } => {
                if let Some(builder) = self.decode(*handoff) {
                    let attributes = vec![
                        KeyValue::new("cleave.blocks.present", i64::from(*present)),
                        KeyValue::new("cleave.blocks.reserved", blocks.len() as i64),
                    ];
                    builder.add_event("reserved", attributes);
                }
            }
            Report::Running { handoff, present } => {
                self.add_event(
                    *handoff,
                    "running",
                    ("cleave.blocks.present", i64::from(*present)),
                );
            }
            Report::Refused { handoff, refusal } => self.refuse(*handoff, refusal_name(refusal)),
            Report::Prefilled { handoff, timing } => {
                if let Some(builder) = self.prefill(*handoff) {
                    builder.set("cleave.prefill.wait_seconds", timing.wait.as_secs_f64());
                    builder.set("cleave.prefill.run_seconds", timing.run.as_secs_f64());
                    builder.ended = SystemTime::now();
                }
            }
            Report::Finished {
                handoff,
                reason: _,
                output_tokens,
                timing,
                prefill: _,
            } => self.each_open(*handoff, |builder, name| {
                builder.ended = SystemTime::now();
                if name == "decode" {
                    builder.set_count("gen_ai.usage.output_tokens", *output_tokens);
                    builder.set("cleave.decode.wait_seconds", timing.wait.as_secs_f64());
                }
            }),
            Report::LegFailed { handoff, failure }
            | Report::MigrationAborted { handoff, failure } => {
                let reason = failure_name(failure);
                self.each_open(*handoff, |builder, _| {
                    builder.fail(reason);
                    builder.ended = SystemTime::now();
                });
            }
            Report::Released { handoff } => self.send_spans(*handoff),
            Report::Landed { .. }
            | Report::MemoryPressure { .. }
            | Report::Load(_)
            | Report::Prices(_)
            | Report::Draining
            | Report::Serves { .. }
            | Report::Prefix { .. }
            | Report::Relayed(_)
            | Report::Adapters(_) => {}
        }
    }

    /// Ends the spans of a lost router's requests.
    pub fn router_lost(&mut self, router: RouterId) {
        let gone = self.open.keys().filter(|one| one.flight.router() == router);
        for handoff in gone.copied().collect::<Vec<_>>() {
            self.each_open(handoff, |builder, _| builder.fail("router_lost"));
            self.send_spans(handoff);
        }
    }

    fn prefill(&mut self, handoff: HandoffId) -> Option<&mut SpanBuilder> {
        self.open.get_mut(&handoff)?.prefill.as_mut()
    }

    fn decode(&mut self, handoff: HandoffId) -> Option<&mut SpanBuilder> {
        self.open.get_mut(&handoff)?.decode.as_mut()
    }

    fn each_open(&mut self, handoff: HandoffId, mut act: impl FnMut(&mut SpanBuilder, &str)) {
        let Some(spans) = self.open.get_mut(&handoff) else {
            return;
        };
        for builder in [&mut spans.prefill, &mut spans.decode]
            .into_iter()
            .flatten()
        {
            // A leg that is over, such as a prompt that was handed on, stays as it was.
            if builder.ended == builder.began {
                let name = builder.name.clone();
                act(builder, &name);
            }
        }
    }

    fn add_event(
        &mut self,
        handoff: HandoffId,
        name: &'static str,
        attribute: (&'static str, i64),
    ) {
        if let Some(builder) = self.decode(handoff) {
            builder.add_event(name, vec![KeyValue::new(attribute.0, attribute.1)]);
        }
    }

    /// Adds a transfer of blocks that ends now.
    fn add_transfer(
        &mut self,
        handoff: HandoffId,
        name: &'static str,
        moved: (u64, u32, Duration),
    ) {
        let Some(spans) = self.open.get_mut(&handoff) else {
            return;
        };
        let sends = name == "transfer.send";
        let leg = if sends {
            &mut spans.prefill
        } else {
            &mut spans.decode
        };
        let Some(leg) = leg else {
            return;
        };
        let now = SystemTime::now();
        let (bytes, blocks, took) = moved;
        let began = now.checked_sub(took).unwrap_or(now).max(leg.began);
        let mut builder = SpanBuilder::under(leg.span, name, began);
        builder.kind = if sends {
            SpanKind::Producer
        } else {
            SpanKind::Consumer
        };
        builder.ended = now;
        builder.set_count("cleave.transfer.bytes", bytes);
        builder.set_count("cleave.transfer.blocks", blocks);
        if sends {
            // The seal may follow the report that the prompt has run.
            leg.ended = now;
        }
        spans.transfers.push(builder);
    }

    /// Removes the leg whose order was refused.
    fn refuse(&mut self, handoff: HandoffId, reason: &'static str) {
        let Some(spans) = self.open.get_mut(&handoff) else {
            return;
        };
        if spans.is_whole {
            // The decode leg's span says it for both.
            spans.prefill = None;
        }
        // A worker that holds the reservation and refuses a prompt keeps the reservation.
        let refused = spans.prefill.take().or_else(|| spans.decode.take());
        if spans.decode.is_none() {
            self.open.remove(&handoff);
        }
        if let Some(mut builder) = refused {
            builder.set("cleave.refusal", reason);
            builder.ended = SystemTime::now();
            self.traces.send(builder);
        }
    }

    /// Sends the spans of a hand-off that is over here.
    fn send_spans(&mut self, handoff: HandoffId) {
        let Some(spans) = self.open.remove(&handoff) else {
            return;
        };
        for mut builder in [spans.prefill, spans.decode].into_iter().flatten() {
            if builder.ended == builder.began {
                builder.ended = SystemTime::now();
            }
            self.traces.send(builder);
        }
        for builder in spans.transfers {
            self.traces.send(builder);
        }
    }
}

impl WorkerObserver for WorkerSpans {
    fn handle_note(&mut self, note: &WorkerNote) {
        if self.open.is_empty() {
            return;
        }
        match note {
            WorkerNote::Sealed {
                handoff,
                bytes,
                blocks,
                took,
            } => self.add_transfer(*handoff, "transfer.send", (*bytes, *blocks, *took)),
            WorkerNote::Landed {
                handoff,
                bytes,
                blocks,
                took,
                exposed,
            } => {
                self.add_transfer(*handoff, "transfer.receive", (*bytes, *blocks, *took));
                if let Some(builder) = self.decode(*handoff) {
                    let exposed = exposed.as_secs_f64();
                    builder.set("cleave.transfer.exposed_seconds", exposed);
                }
            }
            WorkerNote::MigratedOut {
                handoff,
                bytes,
                blocks,
                took,
                still: _,
            } => self.add_transfer(*handoff, "transfer.send", (*bytes, *blocks, *took)),
            WorkerNote::Preempted {
                handoff,
                recomputed_tokens,
            } => {
                let tokens = i64::from(*recomputed_tokens);
                self.add_event(*handoff, "preempted", ("cleave.tokens", tokens));
            }
            WorkerNote::Fetched { handoff, came, .. } => {
                self.add_event(*handoff, "fetched", ("cleave.blocks", i64::from(*came)));
            }
            WorkerNote::SwappedOut {
                handoff, blocks, ..
            } => self.add_event(
                *handoff,
                "swapped_out",
                ("cleave.blocks", i64::from(*blocks)),
            ),
            WorkerNote::SwappedIn {
                handoff, blocks, ..
            } => self.add_event(
                *handoff,
                "swapped_in",
                ("cleave.blocks", i64::from(*blocks)),
            ),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::SpanQueue;
    use super::super::span_queue::TraceSeries;
    use super::*;
    use crate::MetricRegistry;
    use cleave_api::TraceParent;
    use cleave_domain::{FlightId, Refusal, RunOrder};
    use cleave_testkit::build;
    use opentelemetry_sdk::trace::InMemorySpanExporter;

    const HANDOFF: HandoffId = HandoffId {
        flight: FlightId(7),
        attempt: 0,
    };

    fn run() -> Order {
        let request = build::request([1, 2, 3], 9);
        Order::Run(RunOrder {
            handoff: HANDOFF,
            request: Arc::new(request),
            expected_output_tokens: 9,
            waited: Duration::ZERO,
            due: None,
        })
    }

    /// The spans of a request that one worker is ordered to run, by name, after these reports.
    async fn spans_after(reports: &[Report]) -> Vec<(String, Vec<String>)> {
        let mut registry = MetricRegistry::default();
        let exporter = InMemorySpanExporter::default();
        let queue = SpanQueue::with(exporter.clone(), &TraceSeries::register(&mut registry));
        let traces = Traces {
            queue: Some(Arc::new(queue)),
            ..Traces::default()
        };
        let mut spans = WorkerSpans::new(traces.clone(), "w".to_owned(), "m".to_owned());
        let context = RequestContext {
            request_id: "r".into(),
            trace: Some(TraceParent {
                trace: 1,
                span: 2,
                flags: 1,
            }),
        };
        spans.order_received(&run(), Some(Arc::new(context)));
        for report in reports {
            spans.report_sent(report);
        }
        assert!(spans.open.is_empty(), "{:?}", spans.open);
        traces.flush().await;
        let sent = exporter.get_finished_spans().expect("in memory");
        let events = |span: &opentelemetry_sdk::trace::SpanData| {
            let events = span.events.events.iter();
            events.map(|event| event.name.to_string()).collect()
        };
        let named = sent
            .iter()
            .map(|span| (span.name.to_string(), events(span)));
        named.collect()
    }

    #[tokio::test]
    async fn one_worker_of_both_legs_sends_a_span_for_each() {
        let running = Report::Running {
            handoff: HANDOFF,
            present: 1,
        };
        let released = Report::Released { handoff: HANDOFF };
        let spans = spans_after(&[running, released]).await;
        let prefill = ("prefill".to_owned(), Vec::new());
        let decode = ("decode".to_owned(), vec!["running".to_owned()]);
        assert_eq!(spans, [prefill, decode]);
    }

    #[tokio::test]
    async fn a_refused_order_to_run_sends_one_span() {
        let refused = Report::Refused {
            handoff: HANDOFF,
            refusal: Refusal::Draining,
        };
        let spans = spans_after(&[refused]).await;
        assert_eq!(spans, [("decode".to_owned(), Vec::new())]);
    }
}
