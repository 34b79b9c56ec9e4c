//! Choices, as pure functions from a snapshot to the best option, with the reason.
//!
//! Owns: the order in which sequences are served, how much of a prompt a step runs, which sequence
//! gives up its blocks and how, when to retry. Never: changes anything, or sees the brain.
//! Invariant: the most important sequence is never a victim of another, so it always progresses.

use cleave_domain::{HandoffId, Time};
use std::time::Duration;

/// A sequence's place among all others: by priority, then by the deadline of its first token, then
/// by age. The smaller is served first and gives up its blocks last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ServiceRank {
    /// Priority of the class, then of the request; smaller is more urgent.
    pub(crate) priority: (i32, i32),
    /// Deadline of its first token. Deadline order rather than latest-start order: a prompt can be
    /// interrupted after any chunk, and then serving the earliest deadline first meets every target
    /// that can be met (Liu and Layland 1973), and no long prompt holds up a short one.
    pub(crate) due: Time,
    /// When its client sent the request, as far as this worker's clock can tell: a retry keeps its
    /// place.
    pub(crate) since: Time,
    /// Counted by the worker; breaks ties.
    pub(crate) arrival: u64,
    pub(crate) handoff: HandoffId,
}

/// The sequence that gives up its blocks when another must grow and none is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PreemptionVictim {
    /// The sequence with the most slack among the least important ones that rank after the one in
    /// need.
    LessImportant(HandoffId),
    /// None ranks after it: it waits itself, and more important ones go on.
    Itself(HandoffId),
}

/// Chooses among sequences that hold blocks, could be recomputed here and are not in this step,
/// each with the deadline of its next token.
pub(crate) fn victim(
    in_need: ServiceRank,
    candidates: impl Iterator<Item = (ServiceRank, Option<Time>)>,
) -> PreemptionVictim {
    match most_slack(candidates.filter(|(rank, _)| *rank > in_need)) {
        Some(rank) => PreemptionVictim::LessImportant(rank.handoff),
        None => PreemptionVictim::Itself(in_need.handoff),
    }
}

/// The sequence of the least important priority whose next token is due last; one without a target
/// before any with one.
pub(crate) fn most_slack(
    candidates: impl Iterator<Item = (ServiceRank, Option<Time>)>,
) -> Option<ServiceRank> {
    let slack =
        |(rank, due): &(ServiceRank, Option<Time>)| (rank.priority, due.is_none(), *due, *rank);
    candidates.max_by_key(slack).map(|(rank, _)| rank)
}

/// How a sequence gives up its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PreemptionMethod {
    /// Copied to host memory, and back.
    Swap,
    /// Dropped and computed again.
    Recompute,
}

/// Costs of giving up blocks, as measured lately; `None` before the first measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct SwapPrices {
    /// To compute the KV of one token.
    recompute_token: Option<Duration>,
    /// To copy one block to host memory.
    block_out: Option<Duration>,
    /// To copy one block back.
    block_in: Option<Duration>,
}

impl SwapPrices {
    /// Records a step with prompt tokens, of `tokens` tokens in all.
    pub(crate) fn prefilled(&mut self, tokens: u32, took: Duration) {
        measure(&mut self.recompute_token, tokens, took);
    }

    /// Time to compute one token's KV, if it was ever measured.
    pub(crate) fn recompute_token(&self) -> Option<Duration> {
        self.recompute_token
    }

    /// Records that `blocks` blocks were copied to host memory.
    pub(crate) fn swapped_out(&mut self, blocks: u32, took: Duration) {
        measure(&mut self.block_out, blocks, took);
    }

    /// Records that `blocks` blocks were copied back.
    pub(crate) fn swapped_in(&mut self, blocks: u32, took: Duration) {
        measure(&mut self.block_in, blocks, took);
    }
}

/// Running mean over about eight measurements.
fn measure(mean: &mut Option<Duration>, count: u32, took: Duration) {
    if count > 0 {
        let each = took / count;
        *mean = Some(mean.map_or(each, |mean| (mean * 7 + each) / 8));
    }
}

/// The cheaper way to give up `blocks` blocks with the KV of `tokens` tokens. Before any
/// measurement that is recomputing, which needs no host memory; once its price is known, one copy
/// is tried, because its price would otherwise never be measured.
pub(crate) fn preemption_method(prices: &SwapPrices, blocks: u32, tokens: u32) -> PreemptionMethod {
    let Some(token) = prices.recompute_token else {
        return PreemptionMethod::Recompute;
    };
    let Some(block_out) = prices.block_out else {
        return PreemptionMethod::Swap;
    };
    let block = block_out + prices.block_in.unwrap_or(block_out);
    if block.saturating_mul(blocks) <= token.saturating_mul(tokens) {
        PreemptionMethod::Swap
    } else {
        PreemptionMethod::Recompute
    }
}

/// How much of a prompt to run now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkSize {
    /// All that is left: the step also draws the next token.
    Rest(u32),
    /// As many whole blocks as the step has room for: full blocks can be sent at once.
    Blocks(u32),
    /// Less than a block: the room would go unused otherwise.
    PartOfBlock(u32),
}

impl ChunkSize {
    pub(crate) fn tokens(self) -> u32 {
        let (Self::Rest(tokens) | Self::Blocks(tokens) | Self::PartOfBlock(tokens)) = self;
        tokens
    }
}

/// Cuts a chunk from a sequence with `computed` tokens done and `rest` tokens left, for a step with
/// room for `tokens_max` tokens. All in tokens; `rest` and `tokens_max` are at least 1.
pub(crate) fn chunk(computed: u32, rest: u32, tokens_max: u32, block_tokens: u32) -> ChunkSize {
    if rest <= tokens_max {
        return ChunkSize::Rest(rest);
    }
    let end = (computed + tokens_max) / block_tokens * block_tokens;
    if end > computed {
        ChunkSize::Blocks(end - computed)
    } else {
        ChunkSize::PartOfBlock(tokens_max)
    }
}

/// Time until a retry makes sense after `steps` steps of recent length. At least 10 ms, so that
/// clients do not spin, and at most 10 s, because by then the estimate is stale.
pub(crate) fn retry_after(steps: u32, step_mean: Duration) -> Duration {
    clamp_retry_after(step_mean.saturating_mul(steps))
}

/// The same, for a change that is expected after `span`.
pub(crate) fn clamp_retry_after(span: Duration) -> Duration {
    span.clamp(Duration::from_millis(10), Duration::from_secs(10))
}

#[cfg(test)]
mod tests {
    use super::{
        ChunkSize, PreemptionMethod, PreemptionVictim, ServiceRank, SwapPrices, chunk,
        preemption_method, victim,
    };
    use cleave_domain::{FlightId, HandoffId, Time};
    use std::time::Duration;

    fn rank(priority: i32, arrival: u64) -> ServiceRank {
        let flight = FlightId(arrival);
        let handoff = HandoffId { flight, attempt: 0 };
        ServiceRank {
            priority: (0, priority),
            due: Time::ZERO,
            since: Time::ZERO,
            arrival,
            handoff,
        }
    }

    #[test]
    fn the_victim_is_less_important_than_the_needy() {
        let all = [rank(0, 1), rank(0, 4), rank(1, 2), rank(-1, 3)].map(|rank| (rank, None));
        let chosen = victim(rank(0, 1), all.into_iter());
        assert_eq!(chosen, PreemptionVictim::LessImportant(rank(1, 2).handoff));
        let itself = PreemptionVictim::Itself(rank(1, 2).handoff);
        assert_eq!(victim(rank(1, 2), all.into_iter()), itself);
        let chosen = victim(rank(0, 1), [(rank(0, 4), None)].into_iter());
        assert_eq!(chosen, PreemptionVictim::LessImportant(rank(0, 4).handoff));
    }

    #[test]
    fn most_slack_yields_among_the_least_important() {
        let due = |nanos| Some(Time::from_nanos(nanos));
        let all = [
            (rank(0, 2), due(300)),
            (rank(0, 3), due(500)),
            (rank(0, 4), due(400)),
        ];
        let chosen = victim(rank(0, 1), all.into_iter());
        assert_eq!(chosen, PreemptionVictim::LessImportant(rank(0, 3).handoff));
        let free = [(rank(0, 2), None), (rank(0, 3), due(500))];
        let chosen = victim(rank(0, 1), free.into_iter());
        assert_eq!(chosen, PreemptionVictim::LessImportant(rank(0, 2).handoff));
        let important = [(rank(-1, 2), None), (rank(1, 3), due(5))];
        let chosen = victim(rank(0, 1), important.into_iter());
        assert_eq!(chosen, PreemptionVictim::LessImportant(rank(1, 3).handoff));
    }

    #[test]
    fn preemption_tries_swapping_once_to_learn_its_price() {
        let micros = Duration::from_micros;
        let mut prices = SwapPrices::default();
        assert_eq!(
            preemption_method(&prices, 4, 64),
            PreemptionMethod::Recompute
        );
        prices.prefilled(100, micros(1000));
        assert_eq!(preemption_method(&prices, 4, 64), PreemptionMethod::Swap);
        // 64 tokens cost 640 µs, and 4 blocks as much each way.
        prices.swapped_out(2, micros(160));
        assert_eq!(preemption_method(&prices, 4, 64), PreemptionMethod::Swap);
        prices.swapped_in(2, micros(162));
        assert_eq!(
            preemption_method(&prices, 4, 64),
            PreemptionMethod::Recompute
        );
        assert_eq!(preemption_method(&prices, 4, 65), PreemptionMethod::Swap);
    }

    #[test]
    fn chunks_end_at_blocks_where_they_can() {
        assert_eq!(chunk(0, 10, 10, 4), ChunkSize::Rest(10));
        assert_eq!(chunk(0, 10, 9, 4), ChunkSize::Blocks(8));
        assert_eq!(chunk(3, 10, 2, 4), ChunkSize::Blocks(1));
        assert_eq!(chunk(0, 10, 3, 4), ChunkSize::PartOfBlock(3));
    }
}
