//! Times predicted from prices.
//!
//! Owns: the formulas. Never: learns. Invariant: monotone in every amount; with empty prices
//! everything costs zero; nothing takes longer than [`SPAN_MAX`], whatever the prices are.

use cleave_domain::{LinkPrice, Prices, RowPrice, SPAN_MAX, StepWork, WorkerId};
use std::time::Duration;

/// Predicts times of work from a worker's prices.
pub trait Predict {
    /// Time of a step with this work.
    fn step(&self, work: &StepWork) -> Duration;

    /// Time of a prompt with `cached` tokens present and `tokens` to compute, alone on its worker,
    /// in chunks of at most `chunk` tokens; the draw of its first token included.
    fn prefill(&self, cached: u32, tokens: u32, chunk: u32) -> Duration;

    /// Time that such a prompt adds to steps that others fill up to `chunk` tokens: less than it
    /// takes alone.
    fn prefill_added(&self, cached: u32, tokens: u32, chunk: u32) -> Duration;

    /// Time of a step in which so many sequences of so many tokens in all draw one token each.
    fn decode(&self, sequences: u32, context_tokens: u64) -> Duration;

    /// Time that `bytes` take to that worker once they are ready to be sent.
    fn transfer(&self, to: WorkerId, bytes: u64) -> Duration;
}

impl Predict for Prices {
    fn step(&self, work: &StepWork) -> Duration {
        let nanos = rows_nanos(&self.rows, work.rows)
            .saturating_add(self.draw_nanos.saturating_mul(u64::from(work.draws)))
            .saturating_add(picos(self.pair_picos, work.pairs))
            .saturating_add(picos(self.context_picos, work.context_tokens));
        span(nanos)
    }

    fn prefill(&self, cached: u32, tokens: u32, chunk: u32) -> Duration {
        let chunk = chunk.max(1);
        let (whole, rest) = (tokens / chunk, tokens % chunk);
        let rows = rows_nanos(&self.rows, chunk)
            .saturating_mul(u64::from(whole))
            .saturating_add(if rest > 0 {
                rows_nanos(&self.rows, rest)
            } else {
                0
            });
        let pairs = StepWork::prefill(cached, tokens).pairs;
        let nanos = rows
            .saturating_add(picos(self.pair_picos, pairs))
            .saturating_add(self.draw_nanos);
        span(nanos)
    }

    fn prefill_added(&self, cached: u32, tokens: u32, chunk: u32) -> Duration {
        let chunk = chunk.max(1);
        let rows = mul_div(
            rows_nanos(&self.rows, chunk),
            u64::from(tokens),
            u64::from(chunk),
        );
        let nanos = rows
            .saturating_add(picos(
                self.pair_picos,
                StepWork::prefill(cached, tokens).pairs,
            ))
            .saturating_add(self.draw_nanos);
        span(nanos)
    }

    fn decode(&self, sequences: u32, context_tokens: u64) -> Duration {
        self.step(&StepWork {
            rows: sequences,
            pairs: 0,
            context_tokens,
            draws: sequences,
        })
    }

    fn transfer(&self, to: WorkerId, bytes: u64) -> Duration {
        let position = self.links.binary_search_by_key(&to, |(worker, _)| *worker);
        let link = position.map_or(&self.link, |found| &self.links[found].1);
        predict_link(link, bytes)
    }
}

/// Time that `bytes` take over a link.
pub fn predict_link(link: &LinkPrice, bytes: u64) -> Duration {
    span(
        link.latency_nanos
            .saturating_add(picos(link.byte_picos, bytes)),
    )
}

fn span(nanos: u64) -> Duration {
    Duration::from_nanos(nanos).min(SPAN_MAX)
}

/// `count` times `each` picoseconds, in nanoseconds.
fn picos(each: u64, count: u64) -> u64 {
    mul_div(each, count, 1000)
}

/// `all * part / of`, or the largest number; `of` is not 0. Forecasts call it millions of times a
/// second, and dividing 128 bits takes many times as long: 64 bits nearly always hold the product.
pub fn mul_div(all: u64, part: u64, of: u64) -> u64 {
    match all.checked_mul(part) {
        Some(product) => product / of,
        None => {
            let product = u128::from(all) * u128::from(part);
            u64::try_from(product / u128::from(of)).unwrap_or(u64::MAX)
        }
    }
}

/// Linear interpolation between the knots. Below the first knot its price holds, since a step reads
/// every weight however few rows it has; beyond the last one the last line continues.
fn rows_nanos(knots: &[RowPrice], rows: u32) -> u64 {
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
    let risen = mul_div(rise, u64::from(along), u64::from(run));
    left.nanos.saturating_add(risen)
}

/// Contribution of each price to a step, in nanoseconds: of every knot, then of pairs, context and
/// draws. Their sum is [`Predict::step`], but for rounding.
pub(crate) fn step_parts(prices: &Prices, work: &StepWork) -> Vec<f64> {
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
        let nanos = |work: StepWork| prices().step(&work).as_nanos();
        assert_eq!(nanos(StepWork::default()), 1000);
        assert_eq!(nanos(StepWork::decode(100)), 1000 + 10 + 50);
        assert_eq!(nanos(StepWork::prefill(0, 36)), 2400 + 2 * 36 * 37 / 2);
        let beyond = StepWork {
            rows: 72,
            ..StepWork::default()
        };
        assert_eq!(nanos(beyond), 3800 + 8 * 50);
    }

    #[test]
    fn a_prompt_costs_the_sum_of_its_chunks() {
        let prices = prices();
        let steps = [(10, 64), (74, 64), (138, 8)]
            .map(|(before, tokens)| prices.step(&StepWork::prefill(before, tokens)));
        let whole = prices.prefill(10, 136, 64);
        let draw = Duration::from_nanos(10);
        assert_eq!(whole, steps.into_iter().sum::<Duration>() + draw);
        assert_eq!(
            prices.prefill_added(10, 128, 64),
            prices.prefill(10, 128, 64)
        );
        let small = [prices.prefill_added(0, 8, 64), prices.prefill(0, 8, 64)];
        assert!(
            small[0] < small[1] * 2 / 3,
            "{small:?}: others pay for the step"
        );
    }

    #[test]
    fn the_parts_of_a_step_add_up() {
        for (rows, pairs) in [(1, 0), (5, 7), (64, 0), (100, 3000)] {
            let work = StepWork {
                rows,
                pairs,
                context_tokens: 4000,
                draws: 3,
            };
            let sum: f64 = step_parts(&prices(), &work).iter().sum();
            let step = prices().step(&work).as_nanos() as f64;
            assert!((sum - step).abs() < 4.0, "{sum} {step}");
        }
    }

    /// Sums of such spans, or their product with a billion, do not overflow.
    #[test]
    fn extreme_prices_saturate_at_span_max() {
        let most = RowPrice {
            rows: 1,
            nanos: u64::MAX,
        };
        let prices = Prices {
            rows: vec![most],
            ..Prices::default()
        };
        let alone = prices.prefill(u32::MAX, u32::MAX, 1);
        let adds = prices.prefill_added(u32::MAX, u32::MAX, 1);
        let step = prices.decode(u32::MAX, u64::MAX);
        assert_eq!([alone, adds, step], [SPAN_MAX; 3]);
        let link = LinkPrice {
            latency_nanos: u64::MAX,
            byte_picos: u64::MAX,
        };
        assert_eq!(predict_link(&link, u64::MAX), SPAN_MAX);
    }

    #[test]
    fn empty_prices_predict_zero() {
        assert_eq!(Prices::default().step(&StepWork::decode(5)), Duration::ZERO);
    }

    #[test]
    fn rows_between_knots_and_beyond_lie_on_straight_lines() {
        let knot = |(rows, nanos)| RowPrice { rows, nanos };
        let knots = [(4, 1000), (8, 1400), (64, 3800)].map(knot);
        let nanos = [1, 4, 5, 8, 22, 64, 71].map(|rows| rows_nanos(&knots, rows));
        assert_eq!(nanos, [1000, 1000, 1100, 1400, 2000, 3800, 4100]);
        let single = [4, 5, 100].map(|rows| rows_nanos(&knots[..1], rows));
        assert_eq!(single, [1000; 3], "one knot is a constant");
    }

    #[test]
    fn a_share_is_exact_where_its_product_is_too_large() {
        assert_eq!(
            [mul_div(7, 3, 2), mul_div(0, 3, 2), mul_div(9, 3, 1)],
            [10, 0, 27]
        );
        assert_eq!(mul_div(u64::MAX - 1, 10, 20), (u64::MAX - 1) / 2);
        assert_eq!(mul_div(u64::MAX, 3, 2), u64::MAX);
    }

    #[test]
    fn a_prompt_costs_its_whole_chunks_and_its_rest() {
        // Chunks of 64 take 3800, a rest of 8 takes 1000, a pair takes 2 and the draw 10.
        let pairs = |tokens: u128| tokens * (tokens + 1);
        let nanos = |tokens| prices().prefill(0, tokens, 64).as_nanos();
        assert_eq!(nanos(128), 2 * 3800 + pairs(128) + 10);
        assert_eq!(nanos(136), 2 * 3800 + 1000 + pairs(136) + 10);
        assert_eq!(nanos(8), 1000 + pairs(8) + 10);
        let shared = prices().prefill_added(0, 16, 64).as_nanos();
        assert_eq!(shared, 3800 / 4 + pairs(16) + 10, "a quarter of a chunk");
    }

    #[test]
    fn a_transfer_costs_the_price_of_its_own_link() {
        let link = |latency_nanos, byte_picos| LinkPrice {
            latency_nanos,
            byte_picos,
        };
        let prices = Prices {
            link: link(7_000, 3_000),
            links: vec![
                (WorkerId(2), link(50_000, 100)),
                (WorkerId(5), link(20_000, 500)),
            ],
            ..Prices::default()
        };
        let nanos = [2, 5, 3].map(|to| prices.transfer(WorkerId(to), 10_000).as_nanos());
        assert_eq!(nanos, [51_000, 25_000, 37_000]);
    }

    #[test]
    fn each_part_of_a_step_has_its_own_price() {
        let work = |rows| StepWork {
            rows,
            pairs: 50,
            context_tokens: 400,
            draws: 3,
        };
        assert_eq!(
            step_parts(&prices(), &work(1)),
            [1000.0, 0.0, 0.0, 100.0, 200.0, 30.0]
        );
        // A quarter of the way from 8 rows to 64.
        assert_eq!(
            step_parts(&prices(), &work(22)),
            [0.0, 750.0, 950.0, 100.0, 200.0, 30.0]
        );
        // The last line goes on: half as far again as from 8 rows to 64.
        assert_eq!(
            step_parts(&prices(), &work(92))[..3],
            [0.0, -500.0, 5700.0],
            "beyond the last knot"
        );
    }
}
