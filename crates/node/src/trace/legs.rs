//! A worker's legs as it tells them: `prefill` with `transfer.send`, `decode` with `transfer.receive`.
//!
//! Owns: from orders and what the brain says, the spans of recorded requests; and of every request here, for
//! logs that say so much, its name. Never: is asked by a brain. Invariant: what is kept of a hand-off goes
//! with its `Released`, its refusal or its router.

use super::{Mark, Piece, Traces};
use crate::telemetry::{failure_name, refusal_name};
use cleave_domain::{Emission, HandoffId, Order, Report, RouterId, WorkerRef};
use cleave_sched::Note;
use opentelemetry::KeyValue;
use opentelemetry::trace::SpanKind;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tracing::Level;

/// See the module.
#[derive(Debug)]
pub(crate) struct Legs {
    traces: Traces,
    /// As spans name it.
    worker: String,
    open: HashMap<HandoffId, Kept>,
}

/// Of one hand-off.
#[derive(Debug)]
struct Kept {
    mark: Arc<Mark>,
    prefill: Option<Piece>,
    decode: Option<Piece>,
    /// What blocks were carried; children of the legs.
    carried: Vec<Piece>,
}

impl Legs {
    pub(crate) fn new(traces: Traces, worker: String) -> Self {
        Self {
            traces,
            worker,
            open: HashMap::new(),
        }
    }

    /// How a request is called in logs, as far as anybody asks.
    pub(crate) fn mark(&self, handoff: HandoffId) -> Option<&Arc<Mark>> {
        self.open.get(&handoff).map(|kept| &kept.mark)
    }

    /// A router ordered something for a request of this name.
    pub(crate) fn ordered(&mut self, order: &Order, mark: Option<Arc<Mark>>) {
        let Some(mark) = mark else {
            return;
        };
        let recorded = self.traces.records(mark.trace);
        if !recorded && !tracing::enabled!(Level::DEBUG) {
            return;
        }
        let (handoff, name, with) = match order {
            Order::Reserve(order) => (order.handoff, "decode", order.sender),
            Order::Prefill(order) => (order.handoff, "prefill", order.target.worker),
            Order::Migrate(order) => (order.handoff, "migrate", order.target.worker),
            _ => return,
        };
        let piece = recorded.then(|| self.leg(&mark, name, (order, with)));
        let kept = self.open.entry(handoff).or_insert_with(|| Kept {
            mark,
            prefill: None,
            decode: None,
            carried: Vec::new(),
        });
        let leg = match name {
            "decode" => &mut kept.decode,
            _ => &mut kept.prefill,
        };
        if leg.is_none() {
            *leg = piece;
        }
    }

    fn leg(&self, mark: &Mark, name: &'static str, (order, with): (&Order, WorkerRef)) -> Piece {
        let parent = mark.trace.unwrap_or_default();
        let mut piece = Piece::under(parent, name, SystemTime::now());
        piece.kind = SpanKind::Server;
        piece.put("cleave.worker.name", self.worker.clone());
        piece.put("cleave.request_id", mark.request_id.to_string());
        piece.put("cleave.peer", with.to_string());
        let tokens = match order {
            Order::Reserve(order) => order.request.prompt.len() + order.request.generated.len(),
            Order::Prefill(order) => order.request.prompt.len() + order.request.generated.len(),
            Order::Migrate(order) => order.tokens as usize,
            _ => 0,
        };
        piece.count("cleave.tokens", tokens);
        piece
    }

    /// A token left.
    pub(crate) fn emitted(&mut self, handoff: HandoffId, emission: &Emission) {
        if self.open.is_empty() {
            return;
        }
        let Some(facts) = &emission.prompt else {
            return;
        };
        let kept = self.open.get_mut(&handoff);
        if let Some(piece) = kept.and_then(|kept| kept.prefill.as_mut()) {
            let cached = facts.cached_tokens;
            piece.count("gen_ai.usage.cache_read.input_tokens", cached);
            piece.note("first_token", Vec::new());
        }
    }

    /// A router is about to be told this.
    pub(crate) fn reported(&mut self, report: &Report) {
        if self.open.is_empty() {
            return;
        }
        match report {
            Report::Reserved {
                handoff,
                present,
                blocks,
            } => {
                if let Some(piece) = self.decode(*handoff) {
                    let said = vec![
                        KeyValue::new("cleave.blocks.present", i64::from(*present)),
                        KeyValue::new("cleave.blocks.reserved", blocks.len() as i64),
                    ];
                    piece.note("reserved", said);
                }
            }
            Report::Refused { handoff, refusal } => self.refuse(*handoff, refusal_name(refusal)),
            Report::Prefilled { handoff, timing } => {
                if let Some(piece) = self.prefill(*handoff) {
                    piece.put("cleave.prefill.wait_seconds", timing.wait.as_secs_f64());
                    piece.put("cleave.prefill.run_seconds", timing.run.as_secs_f64());
                    piece.ended = SystemTime::now();
                }
            }
            Report::Finished {
                handoff,
                reason: _,
                output_tokens,
                timing,
                prefill: _,
            } => self.each(*handoff, |piece, name| {
                piece.ended = SystemTime::now();
                if name == "decode" {
                    piece.count("gen_ai.usage.output_tokens", *output_tokens);
                    piece.put("cleave.decode.wait_seconds", timing.wait.as_secs_f64());
                }
            }),
            Report::LegFailed { handoff, failure } | Report::Stayed { handoff, failure } => {
                let reason = failure_name(failure);
                self.each(*handoff, |piece, _| {
                    piece.fail(reason);
                    piece.ended = SystemTime::now();
                });
            }
            Report::Released { handoff } => self.tell(*handoff),
            Report::Landed { .. }
            | Report::Crowded { .. }
            | Report::Load(_)
            | Report::Prices(_)
            | Report::Draining
            | Report::Serves { .. }
            | Report::Prefix { .. }
            | Report::PassedOn(_) => {}
        }
    }

    /// The brain noted this.
    pub(crate) fn noted(&mut self, note: &Note) {
        if self.open.is_empty() {
            return;
        }
        match note {
            Note::Sealed {
                handoff,
                bytes,
                blocks,
                took,
            } => self.carry(*handoff, "transfer.send", (*bytes, *blocks, *took)),
            Note::Landed {
                handoff,
                bytes,
                blocks,
                took,
                exposed,
            } => {
                self.carry(*handoff, "transfer.receive", (*bytes, *blocks, *took));
                if let Some(piece) = self.decode(*handoff) {
                    let exposed = exposed.as_secs_f64();
                    piece.put("cleave.transfer.exposed_seconds", exposed);
                }
            }
            Note::MovedOut {
                handoff,
                bytes,
                blocks,
                took,
                still: _,
            } => self.carry(*handoff, "transfer.send", (*bytes, *blocks, *took)),
            Note::Preempted {
                handoff,
                recomputed_tokens,
            } => {
                let tokens = i64::from(*recomputed_tokens);
                self.happened(*handoff, "preempted", ("cleave.tokens", tokens));
            }
            Note::Fetched { handoff, came, .. } => {
                self.happened(*handoff, "fetched", ("cleave.blocks", i64::from(*came)));
            }
            Note::SwappedOut {
                handoff, blocks, ..
            } => self.happened(
                *handoff,
                "swapped_out",
                ("cleave.blocks", i64::from(*blocks)),
            ),
            Note::SwappedIn {
                handoff, blocks, ..
            } => self.happened(
                *handoff,
                "swapped_in",
                ("cleave.blocks", i64::from(*blocks)),
            ),
            _ => {}
        }
    }

    /// Its requests are nobody's any more.
    pub(crate) fn router_lost(&mut self, router: RouterId) {
        let gone = self.open.keys().filter(|one| one.flight.router() == router);
        for handoff in gone.copied().collect::<Vec<_>>() {
            self.each(handoff, |piece, _| piece.fail("router_lost"));
            self.tell(handoff);
        }
    }

    fn prefill(&mut self, handoff: HandoffId) -> Option<&mut Piece> {
        self.open.get_mut(&handoff)?.prefill.as_mut()
    }

    fn decode(&mut self, handoff: HandoffId) -> Option<&mut Piece> {
        self.open.get_mut(&handoff)?.decode.as_mut()
    }

    fn each(&mut self, handoff: HandoffId, mut act: impl FnMut(&mut Piece, &str)) {
        let Some(kept) = self.open.get_mut(&handoff) else {
            return;
        };
        for piece in [&mut kept.prefill, &mut kept.decode].into_iter().flatten() {
            // What is over, as a prompt that was handed on, stays as it was.
            if piece.ended == piece.began {
                let name = piece.name.clone();
                act(piece, &name);
            }
        }
    }

    fn happened(&mut self, handoff: HandoffId, name: &'static str, said: (&'static str, i64)) {
        if let Some(piece) = self.decode(handoff) {
            piece.note(name, vec![KeyValue::new(said.0, said.1)]);
        }
    }

    /// Blocks were carried, up to now.
    fn carry(&mut self, handoff: HandoffId, name: &'static str, moved: (u64, u32, Duration)) {
        let Some(kept) = self.open.get_mut(&handoff) else {
            return;
        };
        let sends = name == "transfer.send";
        let leg = match sends {
            true => &mut kept.prefill,
            false => &mut kept.decode,
        };
        let Some(leg) = leg else {
            return;
        };
        let now = SystemTime::now();
        let (bytes, blocks, took) = moved;
        let began = now.checked_sub(took).unwrap_or(now).max(leg.began);
        let mut piece = Piece::under(leg.span, name, began);
        piece.kind = match sends {
            true => SpanKind::Producer,
            false => SpanKind::Consumer,
        };
        piece.ended = now;
        piece.count("cleave.transfer.bytes", bytes);
        piece.count("cleave.transfer.blocks", blocks);
        if sends {
            // The seal may follow the word that the prompt has run.
            leg.ended = now;
        }
        kept.carried.push(piece);
    }

    /// The order that it answers changed nothing.
    fn refuse(&mut self, handoff: HandoffId, reason: &'static str) {
        let Some(kept) = self.open.get_mut(&handoff) else {
            return;
        };
        // A worker that holds the reservation and refuses the prompt keeps the reservation.
        let refused = kept.prefill.take().or_else(|| kept.decode.take());
        if kept.decode.is_none() {
            self.open.remove(&handoff);
        }
        if let Some(mut piece) = refused {
            piece.put("cleave.refusal", reason);
            piece.ended = SystemTime::now();
            self.traces.send(piece);
        }
    }

    /// Nothing of it is here any more.
    fn tell(&mut self, handoff: HandoffId) {
        let Some(kept) = self.open.remove(&handoff) else {
            return;
        };
        for mut piece in [kept.prefill, kept.decode].into_iter().flatten() {
            if piece.ended == piece.began {
                piece.ended = SystemTime::now();
            }
            self.traces.send(piece);
        }
        for piece in kept.carried {
            self.traces.send(piece);
        }
    }
}
