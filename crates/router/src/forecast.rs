//! What a request would meet at one worker or two, and what that would cost everybody else.
//!
//! Owns: the arithmetic of predictions, and the harm of a placement. Never: chooses, or knows a flight;
//! `planner` has the formulas of a single step. Invariant: more work ahead never means sooner.
//!
//! **Harm** is the time of devices that a placement consumes beyond what they would have spent anyway,
//! each device's time weighted by how scarce it is there: by the prompts that wait behind it, and by how
//! close its steps are to the tightest gap between tokens that was promised on it (1 / (1 - step/gap)), or
//! its seats or blocks to being all taken, if that is more.
//! Where no gap was promised, each running stream is delayed by that time, so it weighs as many times
//! as there are streams. What rides along in others' steps costs only what it makes them longer, and an
//! idle worker's own step costs nobody anything.

mod pair;

pub(crate) use pair::Pair;

use crate::event::{Forecast, PlaceReason};
use crate::ledger::{Ledger, Span};
use crate::policy::{self, Ask, Candidate};
use crate::tally::Stretch;
use cleave_domain::{Aim, Prices, Time, Timing, Work};
use cleave_planner::{Predict, share};
use std::time::Duration;

/// A prompt that would be cut into smaller pieces than this is not run there.
const CHUNK_LEAST: u32 = 16;
/// By how long a backlog the time of a worker becomes twice as dear, where no target says it.
const PATIENCE: Duration = Duration::from_secs(1);
/// What a client is told to wait beyond what is computed, for what is rounded on the way.
const SOON: Duration = Duration::from_millis(1);
/// And one in so many parts of the time it may take, for what a forecast is off: who waited as long as it was told
/// should not come at the edge.
const OFF_PARTS: u32 = 64;
/// The scarcest that a device's time gets: twenty times its worth.
const SCARCITY_MAX: u64 = 20_000;

/// A worker as forecasts see it: its last report, with what was promised since on top.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prospect<'a> {
    pub(crate) seat: Candidate,
    pub(crate) prices: &'a Prices,
    /// How long this prompt would run there if nothing else did, and what it adds to full steps.
    pub(crate) alone: Duration,
    pub(crate) work: Duration,
    /// How urgent it would be there, as an entry of a backlog, one band after the other.
    pub(crate) urgency: usize,
    /// What goes before a prompt of its slack, and all prompts there.
    pub(crate) wait: Duration,
    pub(crate) backlog: Duration,
    /// Streams in its steps now.
    pub(crate) streams: u32,
    /// Streams there now and those promised that are yet to come, and the tokens of all of them; but for
    /// one that was promised a gap those that were promised none do not count: they make room.
    pub(crate) sequences: u32,
    pub(crate) context_tokens: u64,
    /// Of these, those that this router knows nothing of but their number.
    pub(crate) strangers: u32,
    /// And those whose prompts run elsewhere: until they come their seats are free.
    pub(crate) away: u32,
    pub(crate) ledger: &'a Ledger,
    /// The tightest gap between tokens promised there.
    pub(crate) tpot_least: Option<Duration>,
    /// By how much this prompt would make others late that wait there.
    pub(crate) crowds: Duration,
}

/// What a request needs, and what it was promised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub(crate) ask: Ask,
    pub(crate) now: Time,
    /// Its class's.
    pub(crate) priority: i32,
    /// Tokens that it is expected to draw yet; at least 1.
    pub(crate) output: u32,
    /// The same for one that is longer than most: what is in the way of others is counted with it.
    pub(crate) output_long: u32,
    /// Since it arrived, and since its promise counts.
    pub(crate) waited: Duration,
    pub(crate) counted: Duration,
    /// None where nothing can be refused any more.
    pub(crate) ttft: Option<Duration>,
    pub(crate) tpot: Option<Duration>,
    pub(crate) e2e: Option<Duration>,
    /// What predictions about its class are multiplied with.
    pub(crate) ttft_by: Stretch,
    pub(crate) tpot_by: Stretch,
    /// How far gaps between tokens of any class exceed predictions: what others were promised is at
    /// stake too.
    pub(crate) others: Stretch,
    pub(crate) manners: Manners,
    /// Most of the tightest gap that any class promises.
    pub(crate) spares: Option<Duration>,
}

/// What it may take from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manners {
    /// Anything: its client has been promised the rest of an answer.
    Resumed,
    /// Nothing that was promised to anybody.
    New,
    /// Only what is left when others have taken what they may need.
    GivesWay,
}

/// What the prompt's way through a worker would be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt {
    pub(crate) wait: Duration,
    pub(crate) run: Duration,
    chunks: u32,
    harm: Duration,
    /// By how much others would be late.
    crowds: Duration,
}

/// A prompt cut so that it fits into the steps of streams.
struct Pieces {
    count: u32,
    run: Duration,
    /// By how much it makes the steps longer, all together.
    longer: Duration,
    /// How long what waits before it takes beside the streams, in thousandths of what it takes alone.
    slowed: u32,
}

/// What generating on a worker would be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    /// A step with it.
    step: Duration,
    /// How much longer it makes each.
    longer: Duration,
    /// Until somebody leaves it a seat, if all are taken when it comes.
    seat_wait: Duration,
    harm: Duration,
    /// Others' gaps would be longer than they were promised.
    drags: bool,
}

/// What was predicted of a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Outlook {
    pub(crate) forecast: Forecast,
    pub(crate) stages: Timing,
    /// Each gap between tokens, and what comes on top of them once.
    pub(crate) step: Duration,
    pub(crate) once: Duration,
    /// Tokens of the sequence in the mean of its time, and those that it may come to draw.
    pub(crate) tokens: u32,
    pub(crate) output_long: u32,
    /// What the prompt adds to its worker's work, and how urgent that is there.
    pub(crate) work: Duration,
    pub(crate) urgency: usize,
    pub(crate) reason: PlaceReason,
    pub(crate) miss: Option<Miss>,
}

/// A target that would be missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Miss {
    pub(crate) aim: Aim,
    pub(crate) predicted: Duration,
    /// Until enough of what is ahead has drained; none if it would be missed even then.
    pub(crate) clears: Option<Duration>,
}

/// By what placements are ranked; the least is the best.
pub(crate) type Rank = (u64, u64);

impl Need {
    /// Of the mean gap as of all that comes after the first token.
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

    /// How long the prompt may take from now on.
    pub(crate) fn prompt_left(&self) -> Option<Duration> {
        let tail = self.tpot.unwrap_or_default() * self.output.saturating_sub(1);
        let by_end = self.e2e.map(|e2e| e2e.saturating_sub(tail));
        let target = self.ttft.into_iter().chain(by_end).min()?;
        Some(target.saturating_sub(self.counted))
    }

    /// How soon a prompt must begin that takes so long.
    pub(crate) fn slack(&self, run: Duration) -> Option<Duration> {
        Some(self.prompt_left()?.saturating_sub(run))
    }
}

impl Prospect<'_> {
    /// Whether a prompt that comes now is all that runs there.
    fn idles(&self) -> bool {
        self.wait.is_zero() && self.streams.max(self.sequences) == 0
    }

    fn chunk_max(&self) -> u32 {
        self.seat.capacity.step_tokens_max
    }

    /// How scarce the worker's time is, in thousandths of one that idles.
    fn scarcity(&self, need: &Need, seated: u32) -> u64 {
        let patience = need.prompt_left().unwrap_or(PATIENCE).max(PATIENCE / 100);
        let queue = 1000 + permille(self.backlog, patience).min(SCARCITY_MAX);
        let steps = match self.tpot_least {
            None => 1000 + 1000 * u64::from(self.sequences),
            Some(gap) => {
                let step = self.prices.decode(self.sequences, self.context_tokens);
                let used = if self.sequences == 0 {
                    0
                } else {
                    permille(step, gap)
                };
                per_idle(used)
            }
        };
        let capacity = &self.seat.capacity;
        let seats = taken(seated, capacity.slots_count);
        let held = capacity.blocks_count.saturating_sub(self.seat.blocks_free);
        let filled = seats.max(taken(held, capacity.blocks_count));
        let steps = steps.max(per_idle(filled));
        (queue * steps / 1000).min(SCARCITY_MAX)
    }

    /// Of a prompt: it sits down before those that are yet to come.
    fn prompt_harm(&self, took: Duration, need: &Need) -> Duration {
        let seated = self.sequences.saturating_sub(self.away);
        scaled(took, self.scarcity(need, seated))
    }

    /// Of a stream: it comes when they do.
    fn stream_harm(&self, took: Duration, need: &Need) -> Duration {
        scaled(took, self.scarcity(need, self.sequences))
    }

    /// A first guess at how good the worker is for the prompt.
    pub(crate) fn prompt_rank(&self, need: &Need) -> u64 {
        nanos(self.wait + self.alone + self.prompt_harm(self.alone, need))
    }

    /// The same for generating.
    pub(crate) fn stream_rank(&self, need: &Need) -> u64 {
        let own = u64::from(need.ask.prompt_tokens);
        let step = self.prices.decode(
            self.sequences.saturating_add(1),
            self.context_tokens.saturating_add(own),
        );
        let sent = self.seat.blocks_to_send(&need.ask);
        let way = cleave_planner::predict_link(&self.prices.link, sent);
        nanos(step * need.output + way)
    }

    /// Whether a prompt that is to stay would have a seat when it is its turn. On a decode worker those whose
    /// KV lands before go before it, and where all seats are taken there is always one that does; elsewhere
    /// it waits better in line, where others may be placed before it. Those that land later find it seated.
    pub(crate) fn seats_prompt(&self, need: &Need) -> bool {
        let slots = self.seat.capacity.slots_count;
        let taken = self.seat.sequences;
        if taken < slots || taken.saturating_sub(self.ledger.totals().away) >= slots {
            return taken < slots;
        }
        let Some(prompt) = self.prompt(need) else {
            return false;
        };
        // Twice as long as its turn takes to come: others land sooner than was thought, too.
        let seated = need.now + (prompt.wait + self.alone) * 2;
        self.ledger.come_after(seated, taken - slots + 1)
    }

    /// Whether one seat more than there are may be promised to a stream whose prompt is done elsewhere after
    /// `lead`. It takes that seat from a prompt that could stay: where such a one would be done sooner, even if
    /// it waited until somebody leaves, the worker's time would be left over while others' runs short.
    pub(crate) fn seats_stream(&self, need: &Need, lead: Duration) -> bool {
        let free = self.seat.sequences < self.seat.capacity.slots_count;
        let seated = || self.wait + self.seat_wait(self.sequences, need);
        if free || need.manners != Manners::New || lead <= seated() + self.alone {
            return true;
        }
        let stays = policy::takes_whole(&self.seat, &need.ask) && self.seats_prompt(need);
        !stays || self.prompt(need).is_none()
    }

    /// How the prompt would run among streams: in pieces that keep every step below the tightest gap
    /// promised. Those that are yet to come count with those that run now: they will be there when it is
    /// its turn. None where no piece would be worth its step.
    pub(crate) fn prompt(&self, need: &Need) -> Option<Prompt> {
        let cached = self.seat.cached_tokens(&need.ask);
        let tokens = need.ask.prompt_tokens - cached;
        let among = self.streams.max(self.sequences);
        if among == 0 {
            // Where others wait its last tokens share a full step with theirs.
            let shares = !self.backlog.is_zero();
            let whole = tokens.next_multiple_of(self.chunk_max().max(1));
            let run = match shares {
                true => self.prices.prefill(cached, whole, self.chunk_max()),
                false => self.alone,
            };
            return Some(Prompt {
                wait: self.wait,
                run,
                chunks: tokens.div_ceil(self.chunk_max().max(1)),
                harm: self.prompt_harm(self.alone, need),
                crowds: self.crowds,
            });
        }
        let pieces = self.pieces(need, among)?;
        let seated = self.seat_wait(among.saturating_sub(self.away), need);
        Some(Prompt {
            wait: scaled(self.wait, u64::from(pieces.slowed)).max(seated),
            run: pieces.run,
            chunks: pieces.count,
            harm: self.prompt_harm(pieces.longer, need),
            crowds: self.crowds,
        })
    }

    /// The prompt in pieces, beside so many streams of the mean length of those there.
    fn pieces(&self, need: &Need, streams: u32) -> Option<Pieces> {
        let cached = self.seat.cached_tokens(&need.ask);
        let tokens = need.ask.prompt_tokens - cached;
        let streams = streams.min(self.seat.capacity.slots_count);
        let all = u64::from(self.streams.max(self.sequences).max(1));
        let beside = Work {
            rows: streams,
            pairs: 0,
            context_tokens: (self.context_tokens / all).saturating_mul(u64::from(streams)),
            draws: streams,
        };
        let step = |before: u32, piece: u32| {
            let own = Work::prefill(before, piece);
            self.prices.step(&(beside + own))
        };
        let most = self.chunk_max().saturating_sub(streams).min(tokens);
        let end = need.ask.prompt_tokens;
        let piece = match self.tpot_least {
            Some(gap) => {
                let most_long = need.others.shrink_step(gap);
                largest(most, |piece| step(end - piece, piece) <= most_long)
            }
            None => most,
        };
        if piece < CHUNK_LEAST.min(tokens) {
            return None;
        }
        let (whole, rest) = (tokens / piece, tokens % piece);
        // Each piece attends to what is before it; on average that is half of what the last one does.
        let mut run = step(cached + (tokens - piece) / 2, piece) * whole;
        if rest > 0 {
            run += step(end - rest, rest);
        }
        let count = tokens.div_ceil(piece);
        let plain = self.prices.step(&beside) * count;
        let block_tokens = self.seat.capacity.block_tokens;
        let quantum = cleave_planner::quantum(self.prices, self.chunk_max(), block_tokens);
        let sizes = (quantum, block_tokens);
        Some(Pieces {
            count,
            run,
            longer: run.saturating_sub(plain),
            slowed: cleave_planner::beside(self.prices, &beside, self.tpot_least, sizes),
        })
    }

    /// The most streams that are expected to be there, and how many tokens they then have, while one
    /// runs that comes after `lead`. If there are never more than fit, every stream keeps its gap.
    fn beside(&self, lead: Duration, need: &Need) -> (u32, u64) {
        if self.sequences == 0 {
            return (0, 0);
        }
        let from = need.now + lead;
        let step = self.prices.decode(self.sequences, self.context_tokens);
        let until = from + step.max(need.tpot.unwrap_or_default()) * need.output_long;
        let spans = || {
            let all = self.ledger.spans(need.tpot.is_some(), need.now);
            all.filter(|other| other.from < until && from < other.until)
        };
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
        // Who leaves matters only to those who come after: most are there from the beginning.
        if let Some((last, ..)) = turns.iter().max().copied() {
            let leave = spans().filter(|other| other.until <= last);
            turns.extend(leave.map(|other| (other.until, -1, -i64::from(other.tokens))));
            turns.sort_unstable();
        }
        let mut most = there;
        for (_, one, tokens) in turns {
            there = (there.0 + one, there.1 + tokens);
            most = most.max(there);
        }
        let strangers = u64::from(self.strangers);
        let each = self.context_tokens / u64::from(self.sequences);
        let (known, tokens) = (most.0.unsigned_abs(), most.1.unsigned_abs());
        let all = (known + strangers).min(u64::from(self.sequences));
        (
            all as u32,
            tokens.saturating_add(strangers.saturating_mul(each)),
        )
    }

    /// Steps with one stream more, which comes after `lead`.
    pub(crate) fn stream(&self, need: &Need, lead: Duration) -> Stream {
        let (sequences, context_tokens) = self.beside(lead, need);
        // Where nothing else is to be done the step itself costs nobody anything.
        let before = self.prices.decode(sequences, context_tokens);
        let own = u64::from(need.ask.prompt_tokens + need.output / 2);
        let step = self.prices.decode(
            sequences.saturating_add(1),
            context_tokens.saturating_add(own),
        );
        let longer = step.saturating_sub(before);
        let others = sequences > 0 && need.manners != Manners::Resumed;
        Stream {
            step,
            longer,
            seat_wait: self.seat_wait(sequences, need),
            harm: self.stream_harm(longer * need.output, need),
            drags: others && !self.keeps_pace(step, need),
        }
    }

    /// Until somebody leaves it a seat where so many streams are there.
    fn seat_wait(&self, streams: u32, need: &Need) -> Duration {
        let over = streams.saturating_add(1);
        let over = over.saturating_sub(self.seat.capacity.slots_count);
        self.relief(need).saturating_mul(over)
    }

    /// Whether what was promised to others there still holds. Who gives way leaves room for those that
    /// may come and were not promised anything yet.
    fn keeps_pace(&self, step: Duration, need: &Need) -> bool {
        let spared = need.spares.filter(|_| need.manners == Manners::GivesWay);
        let gap = self.tpot_least.into_iter().chain(spared).min();
        gap.is_none_or(|gap| need.others.stretch_step(step) <= gap)
    }

    /// After how long somebody will have left, at the pace at which sequences of that length do.
    pub(crate) fn relief(&self, need: &Need) -> Duration {
        let step = self
            .prices
            .decode(self.sequences.max(1), self.context_tokens);
        step * need.output / self.sequences.max(1)
    }
}

impl Outlook {
    /// When its stream is expected to run, if it is placed now: as slowly as it may, for others will
    /// come.
    pub(crate) fn span(&self, now: Time, gap: Duration) -> Span {
        let Timing {
            prefill_wait,
            prefill,
            transfer,
            ..
        } = self.stages;
        let from = now + prefill_wait + prefill + transfer;
        let lasts = self.step.max(gap) * self.output_long;
        Span {
            from,
            until: from + lasts,
            tokens: self.tokens,
        }
    }

    /// The mean gap that was predicted, had it been known how many tokens there would be.
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
    share(nanos(part), 1000, nanos(of).max(1))
}

fn taken(part: u32, of: u32) -> u64 {
    u64::from(part) * 1000 / u64::from(of.max(1))
}

/// How many times its worth is what is used up to so many thousandths: 1 / (1 - used), in thousandths.
fn per_idle(used: u64) -> u64 {
    1_000_000 / 1000_u64.saturating_sub(used).max(50)
}

fn scaled(span: Duration, permille: u64) -> Duration {
    Duration::from_nanos(share(nanos(span), permille, 1000))
}
