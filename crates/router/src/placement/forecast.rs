//! Predictions for a request on one worker or two, and its cost to all others.
//!
//! Owns: the arithmetic of predictions, and the cost to others. Never: chooses, or knows a flight;
//! `planner` has the formulas of a single step. Invariant: more work ahead never means sooner.
//!
//! **Cost to others** (harm) is the device time that a placement consumes beyond what would have
//! been spent anyway. Each device's time is weighted by its scarcity: by the prompts that wait
//! behind the placement, and by how close its steps are to the tightest gap promised on it
//! (`1/(1-step/gap)`), or its slots or blocks to being full, if that is more. Where no gap was
//! promised, each running stream is delayed by that time, so it weighs as many times as there are
//! streams. Work that joins steps of others costs only the time by which it prolongs them, and an
//! idle worker's own step costs nothing.

mod pair;

pub(crate) use pair::PairForecast;

use crate::accounting::tally::PredictionStretch;
use crate::event::{PlacementReason, RequestForecast};
use crate::fleet::ledger::{StreamSpan, WorkerLedger};
use crate::placement::policy::{self, AttemptSize, WorkerSnapshot};
use cleave_domain::{Prices, RequestStageTimes, SloMetric, StepWork, Time};
use cleave_planner::{Predict, mul_div};
use std::time::Duration;

/// A prompt that would be cut into smaller chunks than this is not run there.
const CHUNK_LEAST: u32 = 16;
/// The backlog at which a worker's time becomes twice as scarce, where no target defines it.
const BACKLOG_DOUBLING: Duration = Duration::from_secs(1);
/// Added to computed times until a retry, to cover rounding.
const ROUNDING_MARGIN: Duration = Duration::from_millis(1);
/// Added to computed times until a retry, as a part of the allowed time, to cover errors of the
/// forecast: a client that waited for `retry_after` should not come exactly at the limit.
const FORECAST_MARGIN_PARTS: u32 = 64;
/// Upper limit of a device's scarcity: twenty times the value of idle time.
const SCARCITY_MAX: u64 = 20_000;

/// A worker as forecasts see it: its last report with later claims added.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerForecast<'a> {
    pub(crate) snapshot: WorkerSnapshot,
    pub(crate) prices: &'a Prices,
    /// Time of this prompt alone, and the time that it adds to full steps.
    pub(crate) alone: Duration,
    pub(crate) work: Duration,
    /// Index of its urgency in a backlog, one band after the other.
    pub(crate) urgency: usize,
    /// Prompt work ahead of its urgency, and in all.
    pub(crate) wait: Duration,
    pub(crate) backlog: Duration,
    /// Streams in its steps now.
    pub(crate) streams: u32,
    /// Present streams and expected ones, and the tokens of all of them; for a request with a
    /// target for its gap, streams without one do not count, since they make room.
    pub(crate) sequences: u32,
    pub(crate) context_tokens: u64,
    /// The part of these that belongs to other routers, known only by number.
    pub(crate) foreign_sequences: u32,
    /// The part of these whose prompts still run elsewhere: their slots are free until then.
    pub(crate) sequences_arriving: u32,
    pub(crate) ledger: &'a WorkerLedger,
    /// The tightest gap between tokens promised there.
    pub(crate) tpot_least: Option<Duration>,
    /// Lateness that this prompt would cause to others that wait there.
    pub(crate) lateness_caused: Duration,
}

/// A request's size and targets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestNeed {
    pub(crate) ask: AttemptSize,
    pub(crate) now: Time,
    pub(crate) priority: i32,
    /// Tokens that it is expected to draw yet; at least 1.
    pub(crate) output: u32,
    /// The same for a long answer: used where underestimating would block others.
    pub(crate) output_long: u32,
    /// Time since its arrival, and the part of it that counts towards its targets.
    pub(crate) waited: Duration,
    pub(crate) counted_wait: Duration,
    /// None where nothing can be refused any more.
    pub(crate) ttft: Option<Duration>,
    pub(crate) tpot: Option<Duration>,
    pub(crate) e2e: Option<Duration>,
    /// Corrections of predictions about its class.
    pub(crate) ttft_by: PredictionStretch,
    pub(crate) tpot_by: PredictionStretch,
    /// The largest correction of gaps of any class: it protects the targets of others.
    pub(crate) tpot_by_worst: PredictionStretch,
    pub(crate) priority_over_others: PlacementPriority,
    /// Most of the tightest gap that any class promises.
    pub(crate) gap_left_to_others: Option<Duration>,
}

/// The resources of other requests that a placement may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlacementPriority {
    /// Anything: its client waits for the rest of an answer.
    Resumed,
    /// Nothing that was promised to others.
    New,
    /// Only what others leave, after a reserve for those still to come.
    Yielding,
}

/// Forecast of the prompt on a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PromptForecast {
    pub(crate) wait: Duration,
    pub(crate) run: Duration,
    chunks: u32,
    cost_to_others: Duration,
    /// Lateness caused to others.
    lateness_caused: Duration,
}

/// A prompt cut into chunks that fit into the steps of streams.
struct ChunkedPrompt {
    count: u32,
    run: Duration,
    /// Time by which it prolongs the steps, in all.
    longer: Duration,
    /// Time of earlier prompts beside the streams, in thousandths of their time alone.
    slowed: u32,
}

/// Forecast of decoding on a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamForecast {
    /// Time of a step with it.
    step: Duration,
    /// Time by which it prolongs each step.
    longer: Duration,
    /// Time until a slot is free, if all are taken when it arrives.
    slot_wait: Duration,
    cost_to_others: Duration,
    /// Gaps of other streams would exceed their targets.
    breaks_gaps: bool,
}

/// Forecast of a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PlacementForecast {
    pub(crate) request: RequestForecast,
    pub(crate) stages: RequestStageTimes,
    /// Each gap between tokens, and the time that is added once.
    pub(crate) step: Duration,
    pub(crate) once: Duration,
    /// Mean tokens of the sequence over its time, and its output if it is long.
    pub(crate) tokens: u32,
    pub(crate) output_long: u32,
    /// Work that the prompt adds to its worker, and its urgency there.
    pub(crate) work: Duration,
    pub(crate) urgency: usize,
    pub(crate) reason: PlacementReason,
    pub(crate) miss: Option<TargetMiss>,
}

/// A target that would be missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TargetMiss {
    pub(crate) aim: SloMetric,
    pub(crate) predicted: Duration,
    /// Time until enough of the work ahead is done; none if it would be missed even then.
    pub(crate) met_after: Option<Duration>,
}

/// The order of placements; the least is the best.
pub(crate) type PlacementRank = (u64, u64);

impl RequestNeed {
    /// Corrects the mean gap by correcting the time of all tokens after the first.
    fn stretch_tpot(&self, gap: Duration) -> Duration {
        let gaps = self.output.saturating_sub(1).max(1);
        self.tpot_by.stretch(gap * gaps) / gaps
    }

    fn shrink_tpot(&self, gap: Duration) -> Duration {
        let gaps = self.output.saturating_sub(1).max(1);
        self.tpot_by.shrink(gap * gaps) / gaps
    }

    pub(crate) fn has_target(&self) -> bool {
        self.ttft.is_some() || self.tpot.is_some() || self.e2e.is_some()
    }

    /// Time left for the prompt.
    pub(crate) fn prompt_left(&self) -> Option<Duration> {
        let tail = self.tpot.unwrap_or_default() * self.output.saturating_sub(1);
        let by_end = self.e2e.map(|e2e| e2e.saturating_sub(tail));
        let target = self.ttft.into_iter().chain(by_end).min()?;
        Some(target.saturating_sub(self.counted_wait))
    }

    /// Latest start of a prompt that takes so long.
    pub(crate) fn slack(&self, run: Duration) -> Option<Duration> {
        Some(self.prompt_left()?.saturating_sub(run))
    }
}

impl WorkerForecast<'_> {
    /// Whether a prompt that comes now is all that runs there.
    fn idles(&self) -> bool {
        self.wait.is_zero() && self.streams.max(self.sequences) == 0
    }

    fn chunk_max(&self) -> u32 {
        self.snapshot.capacity.step_tokens_max
    }

    /// Scarcity of the worker's time, in thousandths of an idle worker's value.
    fn scarcity(&self, need: &RequestNeed, in_slots: u32) -> u64 {
        let time_left = need
            .prompt_left()
            .unwrap_or(BACKLOG_DOUBLING)
            .max(BACKLOG_DOUBLING / 100);
        // Each waiting prompt is delayed by work ahead of it.
        let queue = 1000 + permille(self.backlog, time_left).min(SCARCITY_MAX);
        // Each stream is delayed too; near its tightest gap a step's time is worth many times more.
        let steps = match self.tpot_least {
            None => 1000 + 1000 * u64::from(self.sequences),
            Some(gap) => {
                let step = self.prices.decode(self.sequences, self.context_tokens);
                let used = if self.sequences == 0 {
                    0
                } else {
                    permille(step, gap)
                };
                scarcity_of(used)
            }
        };
        // Slots and blocks can run short before time does.
        let capacity = &self.snapshot.capacity;
        let slots_used = used_permille(in_slots, capacity.slots_count);
        let held = capacity
            .blocks_count
            .saturating_sub(self.snapshot.blocks_free);
        let filled = slots_used.max(used_permille(held, capacity.blocks_count));
        let steps = steps.max(scarcity_of(filled));
        (queue * steps / 1000).min(SCARCITY_MAX)
    }

    /// Cost of a prompt: it takes its slot before those that are still to come.
    fn prompt_cost_to_others(&self, took: Duration, need: &RequestNeed) -> Duration {
        let in_slots = self.sequences.saturating_sub(self.sequences_arriving);
        scaled(took, self.scarcity(need, in_slots))
    }

    /// Cost of a stream: it arrives together with them.
    fn stream_cost_to_others(&self, took: Duration, need: &RequestNeed) -> Duration {
        scaled(took, self.scarcity(need, self.sequences))
    }

    /// A first estimate of the worker's fitness for the prompt.
    pub(crate) fn prompt_rank(&self, need: &RequestNeed) -> u64 {
        nanos(self.wait + self.alone + self.prompt_cost_to_others(self.alone, need))
    }

    /// The same for decoding.
    pub(crate) fn stream_rank(&self, need: &RequestNeed) -> u64 {
        let own = u64::from(need.ask.prompt_tokens);
        let step = self.prices.decode(
            self.sequences.saturating_add(1),
            self.context_tokens.saturating_add(own),
        );
        let sent = self.snapshot.blocks_to_send(&need.ask);
        let transfer = cleave_planner::predict_link(&self.prices.link, sent);
        nanos(step * need.output + transfer)
    }

    /// Whether a prompt that stays would have a slot when its turn comes. On a decode worker,
    /// sequences whose KV lands earlier take their slot before it, and where all slots are taken
    /// there is always one that does; elsewhere the prompt waits better in the queue, where others
    /// may be placed before it. Sequences that land later find it in its slot.
    pub(crate) fn has_slot_for_prompt(&self, need: &RequestNeed) -> bool {
        let slots = self.snapshot.capacity.slots_count;
        let occupied = self.snapshot.sequences;
        if occupied < slots || occupied.saturating_sub(self.ledger.totals().arriving) >= slots {
            return occupied < slots;
        }
        let Some(prompt) = self.prompt(need) else {
            return false;
        };
        // Twice the predicted time until its turn: others may land earlier than predicted, too.
        let slot_at = need.now + (prompt.wait + self.alone) * 2;
        self.ledger.arrive_after(slot_at, occupied - slots + 1)
    }

    /// Whether a slot beyond the present number may be promised to a stream whose prompt is done
    /// elsewhere after `lead`. It takes that slot from a prompt that could stay whole: where such a
    /// prompt would be done sooner, even after waiting for a slot, this worker's time would go
    /// unused while that of others runs short.
    pub(crate) fn has_slot_for_stream(&self, need: &RequestNeed, lead: Duration) -> bool {
        let free = self.snapshot.sequences < self.snapshot.capacity.slots_count;
        let until_slot = || self.wait + self.slot_wait(self.sequences, need);
        if free
            || need.priority_over_others != PlacementPriority::New
            || lead <= until_slot() + self.alone
        {
            return true;
        }
        let fits_whole =
            policy::takes_whole(&self.snapshot, &need.ask) && self.has_slot_for_prompt(need);
        !fits_whole || self.prompt(need).is_none()
    }

    /// Forecast of the prompt among streams, in chunks that keep every step below the tightest gap
    /// promised. Streams still to come count with those that run now, since they will be there when
    /// its turn comes. None where no chunk would be worth its step.
    pub(crate) fn prompt(&self, need: &RequestNeed) -> Option<PromptForecast> {
        let cached = self.snapshot.cached_tokens(&need.ask);
        let tokens = need.ask.prompt_tokens - cached;
        let among = self.streams.max(self.sequences);
        if among == 0 {
            // Where others wait, its last tokens share a full step with theirs.
            let shares = !self.backlog.is_zero();
            let whole = tokens.next_multiple_of(self.chunk_max().max(1));
            let run = if shares {
                self.prices.prefill(cached, whole, self.chunk_max())
            } else {
                self.alone
            };
            return Some(PromptForecast {
                wait: self.wait,
                run,
                chunks: tokens.div_ceil(self.chunk_max().max(1)),
                cost_to_others: self.prompt_cost_to_others(self.alone, need),
                lateness_caused: self.lateness_caused,
            });
        }
        let pieces = self.chunked_prompt(need, among)?;
        let slot_wait = self.slot_wait(among.saturating_sub(self.sequences_arriving), need);
        Some(PromptForecast {
            wait: scaled(self.wait, u64::from(pieces.slowed)).max(slot_wait),
            run: pieces.run,
            chunks: pieces.count,
            cost_to_others: self.prompt_cost_to_others(pieces.longer, need),
            lateness_caused: self.lateness_caused,
        })
    }

    /// The prompt in chunks, beside so many streams of the mean length of those there.
    fn chunked_prompt(&self, need: &RequestNeed, streams: u32) -> Option<ChunkedPrompt> {
        let cached = self.snapshot.cached_tokens(&need.ask);
        let tokens = need.ask.prompt_tokens - cached;
        let streams = streams.min(self.snapshot.capacity.slots_count);
        let all = u64::from(self.streams.max(self.sequences).max(1));
        let beside = StepWork {
            rows: streams,
            pairs: 0,
            context_tokens: (self.context_tokens / all).saturating_mul(u64::from(streams)),
            draws: streams,
        };
        let step = |before: u32, piece: u32| {
            let own = StepWork::prefill(before, piece);
            self.prices.step(&(beside + own))
        };
        let most = self.chunk_max().saturating_sub(streams).min(tokens);
        let end = need.ask.prompt_tokens;
        // The largest chunk whose step, at the prompt's full length, still keeps the tightest gap.
        let piece = match self.tpot_least {
            Some(gap) => {
                let most_long = need.tpot_by_worst.shrink_step(gap);
                largest(most, |piece| step(end - piece, piece) <= most_long)
            }
            None => most,
        };
        if piece < CHUNK_LEAST.min(tokens) {
            return None;
        }
        let (whole, rest) = (tokens / piece, tokens % piece);
        // Each chunk attends to the tokens before it; on average that is half of the last one's
        // context.
        let mut run = step(cached + (tokens - piece) / 2, piece) * whole;
        if rest > 0 {
            run += step(end - rest, rest);
        }
        let count = tokens.div_ceil(piece);
        let plain = self.prices.step(&beside) * count;
        let block_tokens = self.snapshot.capacity.block_tokens;
        let quantum = cleave_planner::quantum(self.prices, self.chunk_max(), block_tokens);
        Some(ChunkedPrompt {
            count,
            run,
            longer: run.saturating_sub(plain),
            slowed: cleave_planner::slowdown_permille(
                self.prices,
                &beside,
                self.tpot_least,
                quantum,
                block_tokens,
            ),
        })
    }

    /// The largest number of streams expected at one time, with their tokens, while a stream runs
    /// that arrives after `lead`. If the worker never has more than fit, every stream keeps its
    /// gap.
    fn peak_streams(&self, lead: Duration, need: &RequestNeed) -> (u32, u64) {
        if self.sequences == 0 {
            return (0, 0);
        }
        // The interval in which the new stream runs, at its slowest permitted pace.
        let from = need.now + lead;
        let step = self.prices.decode(self.sequences, self.context_tokens);
        let until = from + step.max(need.tpot.unwrap_or_default()) * need.output_long;
        let spans = || {
            let all = self.ledger.spans(need.tpot.is_some(), need.now);
            all.filter(|other| other.from < until && from < other.until)
        };
        // Streams that are there at its arrival, and later arrivals.
        let mut there = (0, 0);
        let mut turns: Vec<(Time, i64, i64)> = Vec::new();
        for other in spans() {
            let tokens = i64::from(other.tokens);
            if other.from <= from {
                there = (there.0 + 1, there.1 + tokens);
            } else {
                turns.push((other.from, 1, tokens));
            }
        }
        // Ends matter only if another stream arrives later, and most streams are there from the
        // beginning.
        if let Some((last, ..)) = turns.iter().max().copied() {
            let leave = spans().filter(|other| other.until <= last);
            turns.extend(leave.map(|other| (other.until, -1, -i64::from(other.tokens))));
            turns.sort_unstable();
        }
        // Sweep over arrivals and ends for the largest number at one time.
        let mut most = there;
        for (_, one, tokens) in turns {
            there = (there.0 + one, there.1 + tokens);
            most = most.max(there);
        }
        // Streams of other routers are known by number only: they count as always there, with mean
        // length.
        let foreign = u64::from(self.foreign_sequences);
        let each = self.context_tokens / u64::from(self.sequences);
        let (own, tokens) = (most.0.unsigned_abs(), most.1.unsigned_abs());
        let all = (own + foreign).min(u64::from(self.sequences));
        (
            all as u32,
            tokens.saturating_add(foreign.saturating_mul(each)),
        )
    }

    /// Forecast of steps with one stream more, which arrives after `lead`.
    pub(crate) fn stream(&self, need: &RequestNeed, lead: Duration) -> StreamForecast {
        let (sequences, context_tokens) = self.peak_streams(lead, need);
        // Without other streams the step itself costs others nothing.
        let before = self.prices.decode(sequences, context_tokens);
        let own = u64::from(need.ask.prompt_tokens + need.output / 2);
        let step = self.prices.decode(
            sequences.saturating_add(1),
            context_tokens.saturating_add(own),
        );
        let longer = step.saturating_sub(before);
        let others = sequences > 0 && need.priority_over_others != PlacementPriority::Resumed;
        StreamForecast {
            step,
            longer,
            slot_wait: self.slot_wait(sequences, need),
            cost_to_others: self.stream_cost_to_others(longer * need.output, need),
            breaks_gaps: others && !self.keeps_gaps(step, need),
        }
    }

    /// Time until a slot is free where so many streams are there.
    fn slot_wait(&self, streams: u32, need: &RequestNeed) -> Duration {
        let over = streams.saturating_add(1);
        let over = over.saturating_sub(self.snapshot.capacity.slots_count);
        self.time_to_free_slot(need).saturating_mul(over)
    }

    /// Whether targets of other streams there still hold. A yielding request leaves room for
    /// streams that may come and have no claim yet.
    fn keeps_gaps(&self, step: Duration, need: &RequestNeed) -> bool {
        let spared = need
            .gap_left_to_others
            .filter(|_| need.priority_over_others == PlacementPriority::Yielding);
        let gap = self.tpot_least.into_iter().chain(spared).min();
        gap.is_none_or(|gap| need.tpot_by_worst.stretch_step(step) <= gap)
    }

    /// Mean time until one stream ends, for sequences of this length.
    pub(crate) fn time_to_free_slot(&self, need: &RequestNeed) -> Duration {
        let step = self
            .prices
            .decode(self.sequences.max(1), self.context_tokens);
        step * need.output / self.sequences.max(1)
    }
}

impl PlacementForecast {
    /// The interval in which its stream is expected to run, if it is placed now: as slowly as its
    /// target permits, since others will come.
    pub(crate) fn span(&self, now: Time, gap: Duration) -> StreamSpan {
        let RequestStageTimes {
            prefill_wait,
            prefill,
            transfer,
            ..
        } = self.stages;
        let from = now + prefill_wait + prefill + transfer;
        let lasts = self.step.max(gap) * self.output_long;
        StreamSpan {
            from,
            until: from + lasts,
            tokens: self.tokens,
        }
    }

    /// The mean gap that would have been predicted for so many tokens.
    pub(crate) fn tpot_of(&self, output_tokens: u32) -> Option<Duration> {
        let gaps = output_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some(self.step + self.once / gaps)
    }
}

/// The largest number up to `most` that fits, where all smaller ones do.
fn largest(most: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

pub(crate) fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

fn permille(part: Duration, of: Duration) -> u64 {
    mul_div(nanos(part), 1000, nanos(of).max(1))
}

fn used_permille(part: u32, of: u32) -> u64 {
    u64::from(part) * 1000 / u64::from(of.max(1))
}

/// Scarcity of a resource used to so many thousandths: 1 / (1 - used), in thousandths.
fn scarcity_of(used: u64) -> u64 {
    1_000_000 / 1000_u64.saturating_sub(used).max(50)
}

fn scaled(span: Duration, permille: u64) -> Duration {
    Duration::from_nanos(mul_div(nanos(span), permille, 1000))
}
