//! From prices to times.
//!
//! Owns: the formulas. Never: learns. Invariant: monotone in every amount; nothing is known where
//! prices are empty, and then everything costs zero; nothing takes longer than [`SPAN_MAX`], whatever the
//! prices say.

use cleave_domain::{LinkPrice, Prices, RowPrice, SPAN_MAX, Work, WorkerId};
use std::time::Duration;

/// What can be told from prices.
pub trait Predict {
    /// How long a step with so much work takes.
    fn step(&self, work: &Work) -> Duration;

    /// How long a prompt takes of which `cached` tokens are there and `tokens` are not, alone on its
    /// worker, in chunks of at most `chunk` tokens; the draw of its first token included.
    fn prefill(&self, cached: u32, tokens: u32, chunk: u32) -> Duration;

    /// What such a prompt adds to steps that others fill up to `chunk` tokens: less than it takes alone.
    fn adds(&self, cached: u32, tokens: u32, chunk: u32) -> Duration;

    /// How long a step takes in which so many sequences of so many tokens in all draw one token each.
    fn decode(&self, sequences: u32, context_tokens: u64) -> Duration;

    /// How long `bytes` take to that worker once they are ready to leave.
    fn transfer(&self, to: WorkerId, bytes: u64) -> Duration;
}

impl Predict for Prices {
    fn step(&self, work: &Work) -> Duration {
        let nanos = of_rows(&self.rows, work.rows)
            .saturating_add(self.draw_nanos.saturating_mul(u64::from(work.draws)))
            .saturating_add(picos(self.pair_picos, work.pairs))
            .saturating_add(picos(self.context_picos, work.context_tokens));
        span(nanos)
    }

    fn prefill(&self, cached: u32, tokens: u32, chunk: u32) -> Duration {
        let chunk = chunk.max(1);
        let (whole, rest) = (tokens / chunk, tokens % chunk);
        let rows = of_rows(&self.rows, chunk)
            .saturating_mul(u64::from(whole))
            .saturating_add(if rest > 0 {
                of_rows(&self.rows, rest)
            } else {
                0
            });
        let pairs = Work::prefill(cached, tokens).pairs;
        let nanos = rows
            .saturating_add(picos(self.pair_picos, pairs))
            .saturating_add(self.draw_nanos);
        span(nanos)
    }

    fn adds(&self, cached: u32, tokens: u32, chunk: u32) -> Duration {
        let chunk = chunk.max(1);
        let rows = share(
            of_rows(&self.rows, chunk),
            u64::from(tokens),
            u64::from(chunk),
        );
        let nanos = rows
            .saturating_add(picos(self.pair_picos, Work::prefill(cached, tokens).pairs))
            .saturating_add(self.draw_nanos);
        span(nanos)
    }

    fn decode(&self, sequences: u32, context_tokens: u64) -> Duration {
        self.step(&Work {
            rows: sequences,
            pairs: 0,
            context_tokens,
            draws: sequences,
        })
    }

    fn transfer(&self, to: WorkerId, bytes: u64) -> Duration {
        let known = self.links.binary_search_by_key(&to, |(worker, _)| *worker);
        let link = known.map_or(&self.link, |found| &self.links[found].1);
        predict_link(link, bytes)
    }
}

/// How long `bytes` take over a link.
pub fn predict_link(link: &LinkPrice, bytes: u64) -> Duration {
    span(
        link.latency_nanos
            .saturating_add(picos(link.byte_picos, bytes)),
    )
}

fn span(nanos: u64) -> Duration {
    Duration::from_nanos(nanos).min(SPAN_MAX)
}

/// `count` times so many picoseconds, in nanoseconds.
fn picos(each: u64, count: u64) -> u64 {
    share(each, count, 1000)
}

/// `all * part / of`, or the largest number; `of` is not 0. Forecasts ask for millions in a second: nearly always 64 bits hold
/// the product, and dividing 128 takes many times as long.
pub fn share(all: u64, part: u64, of: u64) -> u64 {
    match all.checked_mul(part) {
        Some(product) => product / of,
        None => {
            let product = u128::from(all) * u128::from(part);
            u64::try_from(product / u128::from(of)).unwrap_or(u64::MAX)
        }
    }
}

/// Straight lines between the knots; below the first one its own price, for a step reads every
/// weight however few rows it has; beyond the last one the last line goes on.
fn of_rows(knots: &[RowPrice], rows: u32) -> u64 {
    let above = knots.partition_point(|knot| knot.rows < rows);
    let (Some(first), Some(last)) = (knots.first(), knots.last()) else {
        return 0;
    };
    if above == 0 {
        return first.nanos;
    }
    if knots.len() == 1 {
        return last.nanos;
    }
    let right = above.min(knots.len() - 1);
    let (left, right) = (knots[right - 1], knots[right]);
    let rise = right.nanos.saturating_sub(left.nanos);
    let run = right.rows.saturating_sub(left.rows).max(1);
    let along = rows - left.rows;
    let risen = share(rise, u64::from(along), u64::from(run));
    left.nanos.saturating_add(risen)
}

/// What each price contributes to a step, in nanoseconds: of every knot, then of pairs, context and
/// draws. Their sum is what [`Predict::step`] says, but for rounding.
pub(crate) fn parts(prices: &Prices, work: &Work) -> Vec<f64> {
    let knots = &prices.rows;
    let mut parts = vec![0.0; knots.len()];
    let above = knots.partition_point(|knot| knot.rows < work.rows);
    if above == 0 || knots.len() == 1 {
        parts[0] = knots[0].nanos as f64;
    } else {
        let right = above.min(knots.len() - 1);
        let run = f64::from(knots[right].rows - knots[right - 1].rows);
        let along = f64::from(work.rows - knots[right - 1].rows) / run;
        parts[right - 1] = knots[right - 1].nanos as f64 * (1.0 - along);
        parts[right] = knots[right].nanos as f64 * along;
    }
    parts.extend([
        prices.pair_picos as f64 * work.pairs as f64 / 1000.0,
        prices.context_picos as f64 * work.context_tokens as f64 / 1000.0,
        prices.draw_nanos as f64 * f64::from(work.draws),
    ]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prices() -> Prices {
        let knot = |(rows, nanos)| RowPrice { rows, nanos };
        Prices {
            rows: [(1, 1000), (8, 1000), (64, 3800)].map(knot).to_vec(),
            pair_picos: 2000,
            context_picos: 500,
            draw_nanos: 10,
            ..Prices::default()
        }
    }

    #[test]
    fn a_step_costs_the_sum_of_its_parts() {
        let nanos = |work: Work| prices().step(&work).as_nanos();
        assert_eq!(nanos(Work::default()), 1000);
        assert_eq!(nanos(Work::decode(100)), 1000 + 10 + 50);
        assert_eq!(nanos(Work::prefill(0, 36)), 2400 + 2 * 36 * 37 / 2);
        let beyond = Work {
            rows: 72,
            ..Work::default()
        };
        assert_eq!(nanos(beyond), 3800 + 8 * 50);
    }

    #[test]
    fn chunks_of_a_prompt_cost_what_their_steps_cost() {
        let prices = prices();
        let steps = [(10, 64), (74, 64), (138, 8)]
            .map(|(before, tokens)| prices.step(&Work::prefill(before, tokens)));
        let whole = prices.prefill(10, 136, 64);
        let draw = Duration::from_nanos(10);
        assert_eq!(whole, steps.into_iter().sum::<Duration>() + draw);
        assert_eq!(prices.adds(10, 128, 64), prices.prefill(10, 128, 64));
        let small = [prices.adds(0, 8, 64), prices.prefill(0, 8, 64)];
        assert!(
            small[0] < small[1] * 2 / 3,
            "{small:?}: others pay for the step"
        );
    }

    #[test]
    fn the_parts_of_a_step_add_up_to_it() {
        for (rows, pairs) in [(1, 0), (5, 7), (64, 0), (100, 3000)] {
            let work = Work {
                rows,
                pairs,
                context_tokens: 4000,
                draws: 3,
            };
            let sum: f64 = parts(&prices(), &work).iter().sum();
            let step = prices().step(&work).as_nanos() as f64;
            assert!((sum - step).abs() < 4.0, "{sum} {step}");
        }
    }

    /// Whoever adds such spans up, or takes them some billion times, need not fear an overflow.
    #[test]
    fn prices_of_a_liar_took_centuries() {
        let most = RowPrice {
            rows: 1,
            nanos: u64::MAX,
        };
        let prices = Prices {
            rows: vec![most],
            ..Prices::default()
        };
        let alone = prices.prefill(u32::MAX, u32::MAX, 1);
        let adds = prices.adds(u32::MAX, u32::MAX, 1);
        let step = prices.decode(u32::MAX, u64::MAX);
        assert_eq!([alone, adds, step], [SPAN_MAX; 3]);
        let link = LinkPrice {
            latency_nanos: u64::MAX,
            byte_picos: u64::MAX,
        };
        assert_eq!(predict_link(&link, u64::MAX), SPAN_MAX);
    }

    #[test]
    fn nothing_known_costs_nothing() {
        assert_eq!(Prices::default().step(&Work::decode(5)), Duration::ZERO);
    }
}
