//! A placement as a whole: the prompt on one worker, the stream on the same or on another.
//!
//! Owns: its stages, whether and by how much it misses a target or breaks others', and its rank. Never:
//! predicts a leg. Invariant: what meets every target and harms nobody ranks before all that does not.

use super::{
    Miss, Need, OFF_PARTS, Outlook, Prompt, Prospect, Rank, SOON, Stream, nanos, permille,
};
use crate::event::{Forecast, PlaceReason};
use cleave_domain::{Aim, Role, Timing};
use cleave_planner::Predict;
use std::time::Duration;

/// A placement being judged: the prompt on one, the stream on the same or on another.
pub(crate) struct Pair<'a> {
    pub(crate) prefill: &'a Prospect<'a>,
    pub(crate) prompt: Prompt,
    pub(crate) decode: &'a Prospect<'a>,
    pub(crate) stream: Stream,
}

impl Pair<'_> {
    fn whole(&self) -> bool {
        self.prefill.seat.worker == self.decode.seat.worker
    }

    /// The part of the way of its blocks that the prompt's other chunks do not hide.
    fn exposed(&self, need: &Need) -> Duration {
        if self.whole() {
            return Duration::ZERO;
        }
        let bytes = self.decode.seat.blocks_to_send(&need.ask);
        let chunks = self.prompt.chunks.max(1);
        let to = self.decode.seat.worker.worker;
        let prices = self.prefill.prices;
        let last = prices.transfer(to, bytes / u64::from(chunks));
        let hidden = self.prompt.run / chunks * (chunks - 1);
        last.max(prices.transfer(to, bytes).saturating_sub(hidden))
    }

    fn stages(&self, need: &Need) -> (Timing, Duration) {
        let Stream { step, .. } = self.stream;
        let gaps = need.output.saturating_sub(1);
        let transfer = self.exposed(need);
        let decode_wait = match self.whole() {
            true => Duration::ZERO,
            false => step / 2 + self.stream.seat_wait,
        };
        // Prompts that wait there run among its steps, as far as a promised gap lets them.
        let gap = [self.decode.tpot_least, need.tpot]
            .into_iter()
            .flatten()
            .min();
        let plain = transfer + decode_wait + step * gaps;
        // The worker keeps the gap, as well as it has of late.
        let kept = |gap: Duration| need.shrink_tpot(gap - gap / 64) * gaps;
        let room = gap.map_or(Duration::MAX, |gap| kept(gap).saturating_sub(plain));
        let behind = self.decode.backlog.min(room);
        let (first_decode, decode) = match gaps {
            0 => (Duration::ZERO, Duration::ZERO),
            gaps => (step, step * (gaps - 1) + behind),
        };
        let timing = Timing {
            router_queue: need.waited,
            retry: Duration::ZERO,
            prefill_wait: self.prompt.wait,
            prefill: self.prompt.run,
            transfer: if gaps > 0 { transfer } else { Duration::ZERO },
            decode_wait: if gaps > 0 {
                decode_wait
            } else {
                Duration::ZERO
            },
            first_decode,
            decode,
        };
        (timing, behind)
    }

    /// Which target is missed first, and how far off the farthest is, in thousandths of it.
    fn miss(&self, timing: &Timing, need: &Need) -> (Option<Miss>, u64) {
        let prompt = timing.prefill_wait + timing.prefill;
        // What a worker does that has nothing else to do follows from its prices, which learn by themselves:
        // what an overload taught must not refuse anybody when it is over.
        let stretched = match self.prefill.idles() {
            true => prompt,
            false => need.ttft_by.stretch(prompt),
        };
        let ttft = need.counted + stretched;
        let gaps = need.output.saturating_sub(1);
        // An answer of one token has no gap; one that may be longer has at least a step between two.
        let tpot = timing.tpot(need.output);
        let longer = (need.output_long > 1).then_some(self.stream.step);
        let tpot = tpot.or(longer).unwrap_or_default();
        let gap = need.stretch_tpot(tpot);
        let e2e = ttft + gap * gaps;
        let mut first = None;
        let mut off = 0;
        type Clears<'a> = &'a dyn Fn() -> Option<Duration>;
        let mut check = |aim, target: Option<Duration>, predicted: Duration, clears: Clears| {
            if let Some(target) = target.filter(|target| predicted > *target) {
                off = off.max(permille(predicted, target));
                first.get_or_insert_with(|| Miss {
                    aim,
                    predicted,
                    clears: clears(),
                });
            }
        };
        check(Aim::Ttft, need.ttft, ttft, &|| {
            self.ttft_clears(prompt, need)
        });
        check(Aim::Tpot, need.tpot, gap, &|| self.tpot_clears(need));
        check(Aim::EndToEnd, need.e2e, e2e, &|| self.e2e_clears(e2e, need));
        if let (None, Some((aim, clears))) = (first, self.harms(need)) {
            let predicted = if aim == Aim::Ttft { ttft } else { gap };
            let clears = Some(clears);
            let miss = Miss {
                aim,
                predicted,
                clears,
            };
            return (Some(miss), 1000);
        }
        (first, off)
    }

    /// Whose promise it would break, and until when.
    fn harms(&self, need: &Need) -> Option<(Aim, Duration)> {
        if !self.prompt.crowds.is_zero() {
            return Some((Aim::Ttft, self.prompt.crowds));
        }
        let ends = self.stream.drags;
        ends.then(|| (Aim::Tpot, self.decode.relief(need)))
    }

    /// Whether it leaves everybody else what was promised.
    pub(crate) fn harmless(&self) -> bool {
        self.prompt.crowds.is_zero() && !self.stream.drags
    }

    /// Work ahead of it drains at the speed of time, and streams that leave it too little of their steps end.
    fn ttft_clears(&self, prompt: Duration, need: &Need) -> Option<Duration> {
        let allowed = need.ttft_by.shrink(need.ttft?);
        let excess = prompt.saturating_sub(allowed);
        let ends = match self.prompt.run > allowed {
            true => self.prefill.relief(need),
            false => Duration::ZERO,
        };
        let clears = excess.max(ends) + SOON + allowed / OFF_PARTS;
        (self.prefill.alone <= need.ttft?).then_some(clears)
    }

    /// So many sequences have to end before the steps are short enough.
    fn tpot_clears(&self, need: &Need) -> Option<Duration> {
        let allowed = need.shrink_tpot(need.tpot?);
        let alone = Prospect {
            sequences: 0,
            context_tokens: 0,
            ..*self.decode
        };
        if alone.stream(need, Duration::ZERO).step > allowed {
            return None;
        }
        let each = self.stream.longer.max(Duration::from_nanos(1));
        let over = self.stream.step.saturating_sub(allowed);
        let ends = nanos(over) / nanos(each) + 1;
        let ends = u32::try_from(ends).unwrap_or(u32::MAX);
        Some(self.decode.relief(need).saturating_mul(ends))
    }

    fn e2e_clears(&self, e2e: Duration, need: &Need) -> Option<Duration> {
        let excess = e2e.saturating_sub(need.e2e?);
        let drains = self.prompt.wait + self.decode.backlog;
        (excess <= need.ttft_by.stretch(drains)).then_some(excess + SOON)
    }

    /// Placements that meet every target go before all that do not. Among them the least harm is
    /// best, and the time until the first token counts with it, so that nobody is cut close for
    /// nothing; without targets all of its time does. Those that miss go by how far.
    pub(crate) fn rank(&self, need: &Need) -> Rank {
        let (timing, _) = self.stages(need);
        let (_, off) = self.miss(&timing, need);
        let own = match need.has_target() {
            true => timing.prefill_wait + timing.prefill,
            false => timing.total() - timing.router_queue,
        };
        (off, nanos(own + self.prompt.harm + self.stream.harm))
    }

    pub(crate) fn outlook(&self, need: &Need) -> Outlook {
        let (stages, behind) = self.stages(need);
        let (miss, _) = self.miss(&stages, need);
        let forecast = Forecast {
            prefill: self.prefill.seat.worker,
            decode: self.decode.seat.worker,
            cached_tokens: self.prefill.seat.cached_tokens(&need.ask),
            ttft: stages.ttft(),
            tpot: stages.tpot(need.output).unwrap_or_default(),
            e2e: stages.total(),
            output_tokens: need.output,
        };
        let reason = match self.decode.seat.role {
            _ if !self.whole() => PlaceReason::Split,
            Role::Both => PlaceReason::Both,
            Role::Decode => PlaceReason::OnDecode,
            Role::Prefill => PlaceReason::OnPrefill,
        };
        Outlook {
            forecast,
            stages,
            step: self.stream.step,
            tokens: need.ask.prompt_tokens + need.output / 2,
            output_long: need.output_long,
            once: stages.transfer + stages.decode_wait + behind,
            work: self.prefill.work,
            urgency: self.prefill.urgency,
            reason,
            miss,
        }
    }
}
