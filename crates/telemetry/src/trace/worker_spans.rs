//! Spans of a worker's legs: `prefill` with `transfer.send`, `decode` with `transfer.receive`.
//!
//! Owns: the spans of recorded requests, built from orders and the brain's outputs; and, for debug
//! logs, the id of every request here. Never influences a brain. Invariant: the entry of a hand-off
//! is removed at its `Released`, at its refusal, or at the loss of its router.

use super::{RequestContext, SpanBuilder, Traces};
use crate::observer::WorkerObserver;
use crate::outcome::{failure_name, refusal_name};
use cleave_domain::{Emission, HandoffId, Order, Report, RouterId, WorkerRef};
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
}

impl WorkerSpans {
    pub fn new(traces: Traces, worker: String) -> Self {
        Self {
            traces,
            worker,
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
        let (handoff, name, with) = match order {
            Order::Reserve(order) => (order.handoff, "decode", order.sender),
            Order::Prefill(order) => (order.handoff, "prefill", order.target.worker),
            Order::Migrate(order) => (order.handoff, "migrate", order.target.worker),
            _ => return,
        };
        let builder = recorded.then(|| self.leg(&context, name, order, with));
        let spans = self.open.entry(handoff).or_insert_with(|| HandoffSpans {
            context,
            prefill: None,
            decode: None,
            transfers: Vec::new(),
        });
        let leg = match name {
            "decode" => &mut spans.decode,
            _ => &mut spans.prefill,
        };
        if leg.is_none() {
            *leg = builder;
        }
    }

    fn leg(
        &self,
        context: &RequestContext,
        name: &'static str,
        order: &Order,
        peer: WorkerRef,
    ) -> SpanBuilder {
        let parent = context.trace.unwrap_or_default();
        let mut builder = SpanBuilder::under(parent, name, SystemTime::now());
        builder.kind = SpanKind::Server;
        builder.set("cleave.worker.name", self.worker.clone());
        builder.set("cleave.request_id", context.request_id.to_string());
        builder.set("cleave.peer", peer.to_string());
        let tokens = match order {
            Order::Reserve(order) => order.request.prompt.len() + order.request.generated.len(),
            Order::Prefill(order) => order.request.prompt.len() + order.request.generated.len(),
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
            } => {
                if let Some(builder) = self.decode(*handoff) {
                    let attributes = vec![
                        KeyValue::new("cleave.blocks.present", i64::from(*present)),
                        KeyValue::new("cleave.blocks.reserved", blocks.len() as i64),
                    ];
                    builder.add_event("reserved", attributes);
                }
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
            | Report::Relayed(_) => {}
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
        // A worker that holds the reservation and refuses the prompt keeps the reservation.
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
