//! A placement as a whole: the prompt on one worker, the stream on the same or on another.
//!
//! Owns: its stages, its misses of targets, its breaches of others' targets, and its rank. Never:
//! predicts a leg. Invariant: a placement that meets every target and breaks no other ranks before
//! all that do not.

use super::{
    FORECAST_MARGIN_PARTS, PlacementForecast, PlacementRank, PromptForecast, ROUNDING_MARGIN,
    RequestNeed, StreamForecast, TargetMiss, WorkerForecast, nanos, permille,
};
use crate::event::{PlacementReason, RequestForecast};
use cleave_domain::{RequestStageTimes, Role, SloMetric};
use cleave_planner::Predict;
use std::time::Duration;

/// A placement under comparison: the prompt on one worker, the stream on the same or on another.
pub(crate) struct PairForecast<'a> {
    pub(crate) prefill: &'a WorkerForecast<'a>,
    pub(crate) prompt: PromptForecast,
    pub(crate) decode: &'a WorkerForecast<'a>,
    pub(crate) stream: StreamForecast,
}

impl PairForecast<'_> {
    fn is_whole(&self) -> bool {
        self.prefill.snapshot.worker == self.decode.snapshot.worker
    }

    /// The part of the block transfer that the prompt's other chunks do not hide.
    fn exposed_transfer(&self, need: &RequestNeed) -> Duration {
        if self.is_whole() {
            return Duration::ZERO;
        }
        let bytes = self.decode.snapshot.blocks_to_send(&need.ask);
        let chunks = self.prompt.chunks.max(1);
        let to = self.decode.snapshot.worker.worker;
        let prices = self.prefill.prices;
        // Blocks of a chunk are sent while the next one computes; only the last chunk's blocks have
        // nothing to hide behind, and whatever exceeds the time of the other chunks.
        let last = prices.transfer(to, bytes / u64::from(chunks));
        let hidden = self.prompt.run / chunks * (chunks - 1);
        last.max(prices.transfer(to, bytes).saturating_sub(hidden))
    }

    fn stages(&self, need: &RequestNeed) -> (RequestStageTimes, Duration) {
        let StreamForecast { step, .. } = self.stream;
        let gaps = need.output.saturating_sub(1);
        let transfer = self.exposed_transfer(need);
        // A stream that arrives waits for half a step on average, and for a slot if all are taken.
        let decode_wait = if self.is_whole() {
            Duration::ZERO
        } else {
            step / 2 + self.stream.slot_wait
        };
        // Waiting prompts run among its steps, as far as a promised gap permits.
        let gap = [self.decode.tpot_least, need.tpot]
            .into_iter()
            .flatten()
            .min();
        let plain = transfer + decode_wait + step * gaps;
        // Assumes that the worker keeps the gap, as precisely as it did lately.
        let within_gap = |gap: Duration| need.shrink_tpot(gap - gap / 64) * gaps;
        // The backlog delays the stream only up to the time that its gap still permits.
        let time_left = gap.map_or(Duration::MAX, |gap| within_gap(gap).saturating_sub(plain));
        let behind = self.decode.backlog.min(time_left);
        let (first_decode, decode) = match gaps {
            0 => (Duration::ZERO, Duration::ZERO),
            gaps => (step, step * (gaps - 1) + behind),
        };
        let timing = RequestStageTimes {
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

    /// The first target that is missed, and the farthest excess over any target, in thousandths of
    /// it.
    fn miss(&self, timing: &RequestStageTimes, need: &RequestNeed) -> (Option<TargetMiss>, u64) {
        let prompt = timing.prefill_wait + timing.prefill;
        // An idle worker's times follow from its prices, which learn by themselves: a correction
        // learned in an overload must not refuse anything when the overload is over.
        let stretched = if self.prefill.idles() {
            prompt
        } else {
            need.ttft_by.stretch(prompt)
        };
        let ttft = need.counted_wait + stretched;
        let gaps = need.output.saturating_sub(1);
        // An answer of one token has no gap; one that may be longer has at least one step between
        // two tokens.
        let tpot = timing.tpot(need.output);
        let longer = (need.output_long > 1).then_some(self.stream.step);
        let tpot = tpot.or(longer).unwrap_or_default();
        let gap = need.stretch_tpot(tpot);
        let e2e = ttft + gap * gaps;
        let mut first = None;
        let mut off = 0;
        type TimeUntilMet<'a> = &'a dyn Fn() -> Option<Duration>;
        let mut check =
            |aim, target: Option<Duration>, predicted: Duration, clears: TimeUntilMet| {
                if let Some(target) = target.filter(|target| predicted > *target) {
                    off = off.max(permille(predicted, target));
                    first.get_or_insert_with(|| TargetMiss {
                        aim,
                        predicted,
                        met_after: clears(),
                    });
                }
            };
        // In the order in which a client notices them; the first miss is the answer.
        check(SloMetric::Ttft, need.ttft, ttft, &|| {
            self.ttft_met_after(prompt, need)
        });
        check(SloMetric::Tpot, need.tpot, gap, &|| {
            self.tpot_met_after(need)
        });
        check(SloMetric::EndToEnd, need.e2e, e2e, &|| {
            self.e2e_met_after(e2e, need)
        });
        // A placement that meets its own targets may still break those of others.
        if let (None, Some((aim, clears))) = (first, self.broken_target(need)) {
            let predicted = if aim == SloMetric::Ttft { ttft } else { gap };
            let clears = Some(clears);
            let miss = TargetMiss {
                aim,
                predicted,
                met_after: clears,
            };
            return (Some(miss), 1000);
        }
        (first, off)
    }

    /// The kind of other requests' target that it would break, and until when.
    fn broken_target(&self, need: &RequestNeed) -> Option<(SloMetric, Duration)> {
        if !self.prompt.lateness_caused.is_zero() {
            return Some((SloMetric::Ttft, self.prompt.lateness_caused));
        }
        let ends = self.stream.breaks_gaps;
        ends.then(|| (SloMetric::Tpot, self.decode.time_to_free_slot(need)))
    }

    /// Whether it breaks no target of other requests.
    pub(crate) fn breaks_nothing(&self) -> bool {
        self.prompt.lateness_caused.is_zero() && !self.stream.breaks_gaps
    }

    /// Time until the first token would be in time: work ahead is done at the speed of time, and
    /// streams that leave too little of their steps end.
    fn ttft_met_after(&self, prompt: Duration, need: &RequestNeed) -> Option<Duration> {
        let allowed = need.ttft_by.shrink(need.ttft?);
        let excess = prompt.saturating_sub(allowed);
        let ends = if self.prompt.run > allowed {
            self.prefill.time_to_free_slot(need)
        } else {
            Duration::ZERO
        };
        let clears = excess.max(ends) + ROUNDING_MARGIN + allowed / FORECAST_MARGIN_PARTS;
        (self.prefill.alone <= need.ttft?).then_some(clears)
    }

    /// Time until the gap would be met: the number of sequences that must end before steps are
    /// short enough.
    fn tpot_met_after(&self, need: &RequestNeed) -> Option<Duration> {
        let allowed = need.shrink_tpot(need.tpot?);
        let alone = WorkerForecast {
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
        Some(self.decode.time_to_free_slot(need).saturating_mul(ends))
    }

    fn e2e_met_after(&self, e2e: Duration, need: &RequestNeed) -> Option<Duration> {
        let excess = e2e.saturating_sub(need.e2e?);
        let drains = self.prompt.wait + self.decode.backlog;
        (excess <= need.ttft_by.stretch(drains)).then_some(excess + ROUNDING_MARGIN)
    }

    /// Placements that meet every target rank before all that do not. Among them the least cost to
    /// others is best, and the time until the first token is added, so that no request is placed
    /// close to its limit without need; without targets all of its time is added. Placements that
    /// miss a target rank by their excess.
    pub(crate) fn rank(&self, need: &RequestNeed) -> PlacementRank {
        let (timing, _) = self.stages(need);
        let (_, off) = self.miss(&timing, need);
        let own = if need.has_target() {
            timing.prefill_wait + timing.prefill
        } else {
            timing.total() - timing.router_queue
        };
        (
            off,
            nanos(own + self.prompt.cost_to_others + self.stream.cost_to_others),
        )
    }

    pub(crate) fn forecast(&self, need: &RequestNeed) -> PlacementForecast {
        let (stages, behind) = self.stages(need);
        let (miss, _) = self.miss(&stages, need);
        let request = RequestForecast {
            prefill: self.prefill.snapshot.worker,
            decode: self.decode.snapshot.worker,
            cached_tokens: self.prefill.snapshot.cached_tokens(&need.ask),
            ttft: stages.ttft(),
            tpot: stages.tpot(need.output).unwrap_or_default(),
            e2e: stages.total(),
            output_tokens: need.output,
        };
        let reason = match self.decode.snapshot.role {
            _ if !self.is_whole() => PlacementReason::Split,
            Role::Both => PlacementReason::Both,
            Role::Decode => PlacementReason::OnDecode,
            Role::Prefill => PlacementReason::OnPrefill,
        };
        PlacementForecast {
            request,
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
