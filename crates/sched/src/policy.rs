//! Choices, as functions from what is the case to what is best, with the reason.
//!
//! Owns: the order in which sequences are served, how much of a prompt a step runs, who gives up
//! its blocks and how, when to come back. Never: changes anything, or sees the brain.
//! Invariant: the most important sequence is never a victim of another, so it always goes on.

use cleave_domain::{HandoffId, Request, Time};
use std::time::Duration;

/// A sequence's place among all others: by priority, then by what its
/// client was promised, then by age. Smaller is served first and
/// gives up its blocks last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Rank {
    /// The class's, then as the client set it; smaller is more urgent.
    pub(crate) priority: (i32, i32),
    /// When its first token is due. By deadline and not by when it must begin: a prompt can be left
    /// after any chunk, and then whoever is due first first meets every target that can be met
    /// (Liu and Layland 1973), and no long prompt holds up a short one.
    pub(crate) due: Time,
    /// When its client asked, as far as this worker's clock can tell: a retry keeps its place.
    pub(crate) since: Time,
    /// Counted by the worker; settles ties.
    pub(crate) arrival: u64,
    /// Which.
    pub(crate) handoff: HandoffId,
}

/// Whose blocks are taken when a sequence must grow and nothing is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victim {
    /// Of those that come after the one in need: the one with the most slack of the least important.
    LessImportant(HandoffId),
    /// Nobody comes after it: it waits itself, and what is more important goes on.
    Itself(HandoffId),
}

/// Chooses among sequences that hold blocks, could be recomputed here and are not in this step, each
/// with when its next token is due.
pub(crate) fn victim(
    in_need: Rank,
    candidates: impl Iterator<Item = (Rank, Option<Time>)>,
) -> Victim {
    match most_slack(candidates.filter(|(rank, _)| *rank > in_need)) {
        Some(rank) => Victim::LessImportant(rank.handoff),
        None => Victim::Itself(in_need.handoff),
    }
}

/// Of the least important priority the one whose next token is due last; one without a target before
/// any with one.
pub(crate) fn most_slack(candidates: impl Iterator<Item = (Rank, Option<Time>)>) -> Option<Rank> {
    let slack = |(rank, due): &(Rank, Option<Time>)| (rank.priority, due.is_none(), *due, *rank);
    candidates.max_by_key(slack).map(|(rank, _)| rank)
}

/// How a sequence gives up its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// They are copied to host memory, and back.
    Swap,
    /// They are computed again.
    Recompute,
}

/// What giving up blocks costs, as measured of late; `None` before the first time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct SwapPrices {
    /// To compute a token's KV.
    token: Option<Duration>,
    /// To copy a block to host memory.
    block_out: Option<Duration>,
    /// To copy it back.
    block_in: Option<Duration>,
}

impl SwapPrices {
    /// A step with prompt tokens ran: so many tokens in all.
    pub(crate) fn prefilled(&mut self, tokens: u32, took: Duration) {
        measure(&mut self.token, tokens, took);
    }

    /// To compute a token's KV, if it was ever measured.
    pub(crate) fn token(&self) -> Option<Duration> {
        self.token
    }

    /// So many blocks were copied to host memory.
    pub(crate) fn swapped_out(&mut self, blocks: u32, took: Duration) {
        measure(&mut self.block_out, blocks, took);
    }

    /// So many blocks were copied back.
    pub(crate) fn swapped_in(&mut self, blocks: u32, took: Duration) {
        measure(&mut self.block_in, blocks, took);
    }
}

/// A running mean over about eight measures.
fn measure(mean: &mut Option<Duration>, count: u32, took: Duration) {
    if count > 0 {
        let each = took / count;
        *mean = Some(mean.map_or(each, |mean| (mean * 7 + each) / 8));
    }
}

/// The cheaper way to give up `blocks` blocks with the KV of `tokens` tokens. Before anything was
/// measured that is to compute them again, which asks nothing of the host; then copying is tried, or
/// its price would never be known.
pub(crate) fn way(prices: &SwapPrices, blocks: u32, tokens: u32) -> Way {
    let Some(token) = prices.token else {
        return Way::Recompute;
    };
    let Some(block_out) = prices.block_out else {
        return Way::Swap;
    };
    let block = block_out + prices.block_in.unwrap_or(block_out);
    if block.saturating_mul(blocks) <= token.saturating_mul(tokens) {
        Way::Swap
    } else {
        Way::Recompute
    }
}

/// How much of a prompt to run now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chunk {
    /// All that is left: the step also draws the next token.
    Rest(u32),
    /// As many whole blocks as the step has room for: what is computed can leave at once.
    Blocks(u32),
    /// Less than a block: the room would go unused otherwise.
    Room(u32),
}

impl Chunk {
    /// How many tokens that is.
    pub(crate) fn tokens(self) -> u32 {
        let (Self::Rest(tokens) | Self::Blocks(tokens) | Self::Room(tokens)) = self;
        tokens
    }
}

/// Cuts a chunk from a sequence of which `computed` tokens are done and `rest` are not, for a step
/// with room for `room` tokens. All three in tokens; `rest` and `room` at least 1.
pub(crate) fn chunk(computed: u32, rest: u32, room: u32, block_tokens: u32) -> Chunk {
    if rest <= room {
        return Chunk::Rest(rest);
    }
    let end = (computed + room) / block_tokens * block_tokens;
    if end > computed {
        Chunk::Blocks(end - computed)
    } else {
        Chunk::Room(room)
    }
}

/// Whether an engine of this vocabulary would run the request at all.
pub(crate) fn runnable(request: &Request, vocab_size: u32) -> bool {
    let mut tokens = request.prompt.iter().chain(request.generated.iter());
    tokens.all(|token| *token < vocab_size) && request.sampling.check(vocab_size).is_ok()
}

/// When to try again after `steps` steps of the length of late. Not below 10 ms, so that nobody
/// spins, and not above 10 s, because by then the answer is stale.
pub(crate) fn retry_after(steps: u32, step_mean: Duration) -> Duration {
    worth_retrying(step_mean.saturating_mul(steps))
}

/// The same, for what will have changed after `span`.
pub(crate) fn worth_retrying(span: Duration) -> Duration {
    span.clamp(Duration::from_millis(10), Duration::from_secs(10))
}

#[cfg(test)]
mod tests {
    use super::{Chunk, Rank, SwapPrices, Victim, Way, chunk, victim, way};
    use cleave_domain::{FlightId, HandoffId, Time};
    use std::time::Duration;

    fn rank(priority: i32, arrival: u64) -> Rank {
        let flight = FlightId(arrival);
        let handoff = HandoffId { flight, attempt: 0 };
        Rank {
            priority: (0, priority),
            due: Time::ZERO,
            since: Time::ZERO,
            arrival,
            handoff,
        }
    }

    #[test]
    fn the_least_important_gives_way_and_never_to_a_lesser_one() {
        let all = [rank(0, 1), rank(0, 4), rank(1, 2), rank(-1, 3)].map(|rank| (rank, None));
        let chosen = victim(rank(0, 1), all.into_iter());
        assert_eq!(chosen, Victim::LessImportant(rank(1, 2).handoff));
        let itself = Victim::Itself(rank(1, 2).handoff);
        assert_eq!(victim(rank(1, 2), all.into_iter()), itself);
        let chosen = victim(rank(0, 1), [(rank(0, 4), None)].into_iter());
        assert_eq!(chosen, Victim::LessImportant(rank(0, 4).handoff));
    }

    #[test]
    fn of_the_least_important_the_one_with_the_most_slack_gives_way() {
        let due = |nanos| Some(Time::from_nanos(nanos));
        let all = [
            (rank(0, 2), due(300)),
            (rank(0, 3), due(500)),
            (rank(0, 4), due(400)),
        ];
        let chosen = victim(rank(0, 1), all.into_iter());
        assert_eq!(chosen, Victim::LessImportant(rank(0, 3).handoff));
        let free = [(rank(0, 2), None), (rank(0, 3), due(500))];
        let chosen = victim(rank(0, 1), free.into_iter());
        assert_eq!(chosen, Victim::LessImportant(rank(0, 2).handoff));
        let important = [(rank(-1, 2), None), (rank(1, 3), due(5))];
        let chosen = victim(rank(0, 1), important.into_iter());
        assert_eq!(chosen, Victim::LessImportant(rank(1, 3).handoff));
    }

    #[test]
    fn the_cheaper_way_is_measured_before_it_is_chosen() {
        let micros = Duration::from_micros;
        let mut prices = SwapPrices::default();
        assert_eq!(way(&prices, 4, 64), Way::Recompute);
        prices.prefilled(100, micros(1000));
        assert_eq!(way(&prices, 4, 64), Way::Swap);
        // 64 tokens cost 640 µs, and 4 blocks as much each way.
        prices.swapped_out(2, micros(160));
        assert_eq!(way(&prices, 4, 64), Way::Swap);
        prices.swapped_in(2, micros(162));
        assert_eq!(way(&prices, 4, 64), Way::Recompute);
        assert_eq!(way(&prices, 4, 65), Way::Swap);
    }

    #[test]
    fn chunks_end_at_blocks_where_they_can() {
        assert_eq!(chunk(0, 10, 10, 4), Chunk::Rest(10));
        assert_eq!(chunk(0, 10, 9, 4), Chunk::Blocks(8));
        assert_eq!(chunk(3, 10, 2, 4), Chunk::Blocks(1));
        assert_eq!(chunk(0, 10, 3, 4), Chunk::Room(3));
    }
}
