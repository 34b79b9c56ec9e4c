//! Prices learned from measured work.
//!
//! Owns: the estimate of every price, and the error of its predictions. Never: reads a clock, or
//! learns from work that took no time.
//! Invariant: the prices never fall with rows, and no single measurement, however wrong, moves them
//! by more than a bounded part.
//!
//! A step's time is linear in the prices, so the best estimate of them after each step is a Kalman
//! filter's (Kalman 1960). The filter estimates the ratios of the prices to the seed, not the
//! prices: the seed has the right shape, and its error is mostly common to all prices, so that a
//! few steps of one kind correct the others too. The ratios drift at two speeds: one factor common
//! to all prices is fast, because a shared machine is slower from one minute to the next, and a
//! factor of each price is slow.

use crate::predict::step_parts;
use cleave_domain::{LinkPrice, Prices, StepWork, WorkerId};
use std::time::Duration;

/// Steps whose errors are remembered.
const ERRORS_MAX: usize = 128;
/// The last of those; they distinguish an outlier from a machine that has changed.
const ERRORS_RECENT: usize = 15;
/// The first steps, among which none is treated as an outlier.
const STEPS_FIRST: usize = 8;
/// Standard deviations of the seed's errors: common to all prices, of the rows' curve, of each
/// price alone.
const COMMON_SPREAD: f64 = 1.0;
const CURVE_SPREAD: f64 = 0.25;
const EACH_SPREAD: f64 = 0.05;
/// Correlation of the curve's error between two neighbouring knots.
const NEIGHBOUR_CORRELATION: f64 = 0.7;
/// Drift with each step: of the common factor, and of each price alone.
const COMMON_DRIFT: f64 = 0.02;
const EACH_DRIFT: f64 = 0.01;
/// Spread of the time of equal steps. A larger error is lack of knowledge rather than noise, so it
/// must not make the filter trust measurements less.
const NOISE: std::ops::RangeInclusive<f64> = 0.08..=0.2;
/// Range of the ratios to the seed.
const RATIOS: std::ops::RangeInclusive<f64> = 0.001..=1000.0;
/// One measurement moves a link's price by one part in this many.
const LINK_PARTS: u64 = 8;

/// Prices, and the state from which they are learned.
#[derive(Clone, Debug)]
pub struct PriceLearner {
    prices: Prices,
    /// Created with the first step that took time.
    fit: Option<Box<PriceFilter>>,
}

/// Errors of recent predictions, in thousandths of the real time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PriceErrors {
    /// Half of the predictions had at most this error.
    pub median_permille: u32,
    /// Nineteen of twenty had at most this error.
    pub p95_permille: u32,
}

#[derive(Clone, Debug)]
struct PriceFilter {
    seed: Prices,
    /// Ratio of price to seed: of each knot, then of a pair, of a token of context, of a draw.
    ratios: Vec<f64>,
    /// Covariance of the ratios: `(ratios, ratios)`.
    covariance: Vec<f64>,
    /// The last errors, as a ring buffer.
    errors: Vec<u32>,
    steps: usize,
}

impl PriceLearner {
    /// Starts from seed prices. An empty seed never learns: the seed defines the knots.
    pub fn new(seed: Prices) -> Self {
        Self {
            prices: seed,
            fit: None,
        }
    }

    /// The prices learned so far.
    pub fn prices(&self) -> &Prices {
        &self.prices
    }

    /// Whether there are prices.
    pub fn has_prices(&self) -> bool {
        !self.prices.rows.is_empty()
    }

    /// Learns from a step of `work` that took `took`.
    pub fn observe(&mut self, work: &StepWork, took: Duration) {
        if took.is_zero() || !self.has_prices() {
            return;
        }
        let prices = &self.prices;
        let fit = self
            .fit
            .get_or_insert_with(|| Box::new(PriceFilter::new(prices)));
        fit.observe(work, took.as_nanos() as f64);
        fit.write_prices(&mut self.prices);
    }

    /// Errors of the predictions of the last steps.
    pub fn errors(&self) -> PriceErrors {
        self.fit
            .as_ref()
            .map_or(PriceErrors::default(), |fit| PriceErrors {
                median_permille: fit.error(500, ERRORS_MAX),
                p95_permille: fit.error(950, ERRORS_MAX),
            })
    }

    /// Records a measurement of the link to a worker.
    pub fn link_measured(&mut self, to: WorkerId, price: LinkPrice) {
        let links = &mut self.prices.links;
        match links.binary_search_by_key(&to, |(worker, _)| *worker) {
            Ok(found) => links[found].1 = price,
            Err(place) => links.insert(place, (to, price)),
        }
        if self.prices.link == LinkPrice::default() {
            self.prices.link = price;
        }
    }

    /// Forgets a worker's link: it may be another worker when it comes back.
    pub fn link_lost(&mut self, to: WorkerId) {
        self.prices.links.retain(|(worker, _)| *worker != to);
    }

    /// Learns from `bytes` bytes sent to a worker one after the other in `took`.
    pub fn observe_transfer(&mut self, to: WorkerId, bytes: u64, took: Duration) {
        if bytes == 0 || took.is_zero() || !self.has_prices() {
            return;
        }
        let picos = took.as_nanos().saturating_mul(1000) / u128::from(bytes);
        let picos = u64::try_from(picos).unwrap_or(u64::MAX);
        let links = &mut self.prices.links;
        let position = links.binary_search_by_key(&to, |(worker, _)| *worker);
        let link = match position {
            Ok(found) => &mut links[found].1,
            Err(place) => {
                let byte_picos = picos;
                let link = LinkPrice {
                    byte_picos,
                    ..self.prices.link
                };
                links.insert(place, (to, link));
                &mut links[place].1
            }
        };
        link.byte_picos = moved_towards(link.byte_picos, picos);
        let all = &mut self.prices.link.byte_picos;
        *all = if *all == 0 {
            picos
        } else {
            moved_towards(*all, picos)
        };
    }

    /// The state as numbers that distinguish two learners; empty before anything was learned.
    pub fn fingerprint(&self) -> Vec<u64> {
        self.fit.as_ref().map_or(Vec::new(), |fit| {
            let numbers = fit.ratios.iter().chain(&fit.covariance);
            let errors = fit.errors.iter().map(|error| u64::from(*error));
            let numbers = numbers.map(|number| number.to_bits()).chain(errors);
            numbers.chain([fit.steps as u64]).collect()
        })
    }
}

/// Moves a price one part in [`LINK_PARTS`] towards a measurement. A measurement above four times
/// the price counts as that much: the block may have waited for a step.
fn moved_towards(price: u64, measured: u64) -> u64 {
    let measured = measured.min(price.saturating_mul(4));
    (price / LINK_PARTS)
        .saturating_mul(LINK_PARTS - 1)
        .saturating_add(price % LINK_PARTS)
        .saturating_add(measured / LINK_PARTS)
}

impl PriceFilter {
    fn new(seed: &Prices) -> Self {
        let knots = seed.rows.len();
        let count = knots + 3;
        let mut covariance = vec![COMMON_SPREAD * COMMON_SPREAD; count * count];
        for i in 0..count {
            for j in 0..count {
                let apart = i32::try_from(i.abs_diff(j)).expect("few knots");
                if i < knots && j < knots {
                    covariance[i * count + j] +=
                        CURVE_SPREAD * CURVE_SPREAD * NEIGHBOUR_CORRELATION.powi(apart);
                } else if i == j {
                    covariance[i * count + j] += CURVE_SPREAD * CURVE_SPREAD;
                }
            }
            covariance[i * count + i] += EACH_SPREAD * EACH_SPREAD;
        }
        let mut seed = seed.clone();
        // A ratio to zero cannot be learned.
        seed.pair_picos = seed.pair_picos.max(1);
        seed.context_picos = seed.context_picos.max(1);
        seed.draw_nanos = seed.draw_nanos.max(1);
        Self {
            seed,
            ratios: vec![1.0; count],
            covariance,
            errors: Vec::with_capacity(ERRORS_MAX),
            steps: 0,
        }
    }

    fn observe(&mut self, work: &StepWork, took: f64) {
        let mut shares = step_parts(&self.seed, work);
        let parts = shares.iter().zip(&self.ratios);
        let predicted: f64 = parts.map(|(part, ratio)| part * ratio).sum();
        if predicted <= 0.0 {
            return;
        }
        // Relative to the prediction, so that short steps count as much as long ones.
        for share in &mut shares {
            *share /= predicted;
        }
        let usual = f64::from(self.error(500, ERRORS_MAX)) / 1000.0;
        // After the first steps an outlier is cut to three times the recent median error, so that
        // one stall does not spoil the prices, while a lasting change widens the limit by itself.
        let off = took / predicted - 1.0;
        let off = if self.steps < STEPS_FIRST {
            off
        } else {
            let late = f64::from(self.error(500, ERRORS_RECENT)) / 1000.0;
            let most = (3.0 * late).clamp(0.1, 1.0);
            off.clamp(-most, most)
        };
        self.record_error((predicted / took - 1.0).abs());
        self.update(&shares, off, usual.clamp(*NOISE.start(), *NOISE.end()));
    }

    /// One update of the filter.
    fn update(&mut self, shares: &[f64], off: f64, noise: f64) {
        let count = self.ratios.len();
        // Prediction: uncertainty grows by the drift, common and of each price.
        for (i, row) in self.covariance.chunks_exact_mut(count).enumerate() {
            for entry in row.iter_mut() {
                *entry += COMMON_DRIFT * COMMON_DRIFT;
            }
            row[i] += EACH_DRIFT * EACH_DRIFT;
        }
        // Correction: each ratio moves by its share of the error, in proportion to its uncertainty.
        let rows = self.covariance.chunks_exact(count);
        let gains: Vec<f64> = rows.map(|row| dot(row, shares)).collect();
        let spread = dot(&gains, shares) + noise * noise;
        for (ratio, gain) in self.ratios.iter_mut().zip(&gains) {
            *ratio = (*ratio + gain / spread * off).clamp(*RATIOS.start(), *RATIOS.end());
        }
        for (i, row) in self.covariance.chunks_exact_mut(count).enumerate() {
            for (entry, gain) in row.iter_mut().zip(&gains) {
                // Bounded: the drift must not make a price that is never measured more uncertain
                // than the seed was.
                *entry = (*entry - gains[i] * gain / spread).clamp(-2.0, 2.0);
            }
        }
    }

    fn record_error(&mut self, error: f64) {
        let permille = (error * 1000.0).min(1e6) as u32;
        if self.errors.len() < ERRORS_MAX {
            self.errors.push(permille);
        } else {
            self.errors[self.steps % ERRORS_MAX] = permille;
        }
        self.steps += 1;
    }

    /// The error that so many thousandths of the last `count` steps did not exceed.
    fn error(&self, permille: usize, count: usize) -> u32 {
        let count = count.min(self.errors.len());
        let of_step = |step: usize| self.errors[step % ERRORS_MAX];
        let mut errors: Vec<u32> = (self.steps - count..self.steps).map(of_step).collect();
        if errors.is_empty() {
            return 0;
        }
        let place = (errors.len() - 1) * permille / 1000;
        *errors.select_nth_unstable(place).1
    }

    fn write_prices(&self, prices: &mut Prices) {
        let whole = |seed: u64, ratio: f64| (seed as f64 * ratio).max(0.0) as u64;
        let knots = self.seed.rows.len();
        // The curve is made monotone, as every user of prices assumes.
        let mut least = 0;
        for (i, knot) in prices.rows.iter_mut().enumerate() {
            least = least.max(whole(self.seed.rows[i].nanos, self.ratios[i]));
            knot.nanos = least;
        }
        prices.pair_picos = whole(self.seed.pair_picos, self.ratios[knots]);
        prices.context_picos = whole(self.seed.context_picos, self.ratios[knots + 1]);
        prices.draw_nanos = whole(self.seed.draw_nanos, self.ratios[knots + 2]);
        prices.error_permille = self.error(500, ERRORS_MAX);
    }
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Predict;
    use cleave_domain::{RowPrice, SplitMix64};

    fn prices(rows: &[(u32, u64)], [pair, context, draw]: [u64; 3]) -> Prices {
        let knots = rows.iter().map(|&(rows, nanos)| RowPrice { rows, nanos });
        Prices {
            rows: knots.collect(),
            pair_picos: pair,
            context_picos: context,
            draw_nanos: draw,
            ..Prices::default()
        }
    }

    /// A machine of 1 ms a step, whose curve bends at 64 rows.
    fn real() -> Prices {
        let rows = [(1, 1_000_000), (64, 1_400_000), (512, 9_000_000)];
        prices(&rows, [4_000, 30_000, 5_000])
    }

    /// A seed as from a datasheet: three times too fast, and of another shape.
    fn seed() -> Prices {
        let knots = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
        let rows = knots.map(|rows| (rows, (400_000).max(u64::from(rows) * 5_000)));
        prices(&rows, [1_000, 10_000, 1_000])
    }

    /// A counter-based draw below `bound`.
    fn draw(seed: u64, bound: u64) -> u64 {
        SplitMix64::nth(0, seed) % bound
    }

    /// The `i`-th of a mix of decode batches and prompt chunks.
    fn step(i: u64) -> StepWork {
        let mut work = StepWork::default();
        for sequence in 0..draw(i, 32) {
            work += StepWork::decode(1 + draw(i * 100 + sequence, 4000));
        }
        if work.rows == 0 || draw(i + 7, 2) == 0 {
            let before = u32::try_from(draw(i + 11, 2000)).unwrap();
            let tokens = 1 + u32::try_from(draw(i + 13, 460)).unwrap();
            work += StepWork::prefill(before, tokens);
        }
        work
    }

    /// Median and p95 of the errors of `learner` on steps that it has not seen.
    fn held_out(learner: &PriceLearner, real: &Prices) -> (u64, u64) {
        let error = |i| {
            let work = step(i);
            let (predicted, actual) = (learner.prices().step(&work), real.step(&work));
            let (predicted, actual) = (predicted.as_nanos() as f64, actual.as_nanos() as f64);
            ((predicted / actual - 1.0).abs() * 1000.0) as u64
        };
        let mut errors: Vec<u64> = (100_000..100_200).map(error).collect();
        errors.sort_unstable();
        (errors[100], errors[190])
    }

    #[test]
    fn prices_learned_from_steps_predict_held_out_steps() {
        let mut learner = PriceLearner::new(seed());
        assert!(held_out(&learner, &real()).0 > 500, "the seed is far off");
        for i in 0..64 {
            learner.observe(&step(i), real().step(&step(i)));
        }
        let (median, p95) = held_out(&learner, &real());
        assert!(median <= 30 && p95 <= 100, "{median} {p95}: {learner:?}");
    }

    // Lesson: 29.
    /// Lesson 29: samples of slow starts must not make the predictions oscillate.
    #[test]
    fn one_slow_step_in_eight_does_not_spoil_prices() {
        let mut learner = PriceLearner::new(seed());
        for i in 0..400 {
            let took = real().step(&step(i));
            let noise = u32::try_from(950 + draw(i + 31, 100)).unwrap();
            let stall = if draw(i + 17, 8) == 0 && i > 20 { 5 } else { 1 };
            learner.observe(&step(i), took * noise / 1000 * stall);
        }
        let (median, p95) = held_out(&learner, &real());
        assert!(median <= 80 && p95 <= 200, "{median} {p95}");
    }

    #[test]
    fn prices_follow_a_slower_machine_within_sixty_steps() {
        let mut learner = PriceLearner::new(seed());
        for i in 0..100 {
            learner.observe(&step(i), real().step(&step(i)));
        }
        for i in 100..160 {
            learner.observe(&step(i), real().step(&step(i)) * 2);
        }
        let slower = step(999);
        let predicted = learner.prices().step(&slower).as_nanos() as f64;
        let actual = (real().step(&slower) * 2).as_nanos() as f64;
        assert!(
            (predicted / actual - 1.0).abs() < 0.1,
            "{predicted} {actual}"
        );
    }

    #[test]
    fn learned_prices_never_fall_with_more_rows() {
        let mut learner = PriceLearner::new(seed());
        for i in 0..300 {
            let took = Duration::from_micros(1 + draw(i, 20_000));
            learner.observe(&step(i), took);
            let rows = &learner.prices().rows;
            assert!(rows.windows(2).all(|two| two[0].nanos <= two[1].nanos));
        }
    }

    #[test]
    fn zero_time_or_an_empty_seed_teaches_nothing() {
        let mut learner = PriceLearner::new(seed());
        learner.observe(&step(1), Duration::ZERO);
        assert_eq!(learner.prices(), &seed());
        assert!(learner.fingerprint().is_empty());
        let mut blank = PriceLearner::new(Prices::default());
        blank.observe(&step(1), Duration::from_millis(1));
        blank.observe_transfer(WorkerId(1), 10, Duration::from_millis(1));
        assert_eq!(blank.prices(), &Prices::default());
    }

    #[test]
    fn transfers_set_the_price_of_their_link() {
        let mut learner = PriceLearner::new(seed());
        let price = LinkPrice {
            latency_nanos: 50_000,
            byte_picos: 100,
        };
        learner.link_measured(WorkerId(2), price);
        for _ in 0..64 {
            learner.observe_transfer(WorkerId(2), 1_000_000, Duration::from_micros(400));
        }
        let took = learner.prices().transfer(WorkerId(2), 1_000_000);
        assert!(took > Duration::from_micros(420) && took < Duration::from_micros(470));
        let unknown = learner.prices().transfer(WorkerId(3), 1_000_000);
        assert!(unknown > Duration::from_micros(400), "as others of late");
        learner.link_lost(WorkerId(2));
        assert!(learner.prices().links.is_empty(), "it is gone");
    }

    #[test]
    fn a_link_price_moves_by_an_eighth_and_no_further() {
        assert_eq!(
            [moved_towards(800, 1600), moved_towards(803, 800)],
            [900, 803]
        );
        assert_eq!(
            moved_towards(800, 8000),
            1100,
            "what is far off counts as fourfold"
        );
    }

    #[test]
    fn errors_are_those_of_the_last_steps() {
        let mut fit = PriceFilter::new(&seed());
        assert_eq!(fit.error(500, ERRORS_MAX), 0);
        let record = |fit: &mut PriceFilter, errors: std::ops::RangeInclusive<u32>| {
            errors.for_each(|error| fit.record_error(f64::from(error) / 1000.0 + 1e-6));
        };
        record(&mut fit, 1..=100);
        let of =
            |fit: &PriceFilter| [(500, 128), (950, 128), (500, 15)].map(|(p, n)| fit.error(p, n));
        assert_eq!(of(&fit), [50, 95, 93]);
        record(&mut fit, 101..=200);
        assert_eq!(of(&fit), [136, 193, 193]);
    }

    #[test]
    fn prices_are_the_seed_times_its_ratios_and_never_fall() {
        let seed = prices(&[(1, 1000), (8, 2000), (64, 3000)], [10, 20, 30]);
        let mut fit = PriceFilter::new(&seed);
        fit.ratios = vec![4.0, 0.5, 2.0, 3.0, 0.5, 2.0];
        fit.record_error(0.25);
        let mut written = seed.clone();
        fit.write_prices(&mut written);
        let expected = prices(&[(1, 4000), (8, 4000), (64, 6000)], [30, 10, 60]);
        let error_permille = 250;
        assert_eq!(
            written,
            Prices {
                error_permille,
                ..expected
            }
        );
    }

    #[test]
    fn a_link_never_measured_is_priced_as_the_first_one() {
        let mut learner = PriceLearner::new(seed());
        let sent = |learner: &mut PriceLearner, to, micros| {
            learner.observe_transfer(WorkerId(to), 1_000_000, Duration::from_micros(micros));
            let links = learner.prices().links.iter();
            let links: Vec<_> = links.map(|(to, link)| (to.0, link.byte_picos)).collect();
            (learner.prices().link.byte_picos, links)
        };
        assert_eq!(sent(&mut learner, 4, 800), (800, vec![(4, 800)]));
        assert_eq!(
            sent(&mut learner, 2, 1600),
            (900, vec![(2, 1600), (4, 800)])
        );
        assert_eq!(
            sent(&mut learner, 4, 1600),
            (988, vec![(2, 1600), (4, 900)])
        );
        learner.observe_transfer(WorkerId(4), 0, Duration::from_micros(1));
        learner.observe_transfer(WorkerId(4), 1, Duration::ZERO);
        assert_eq!(learner.prices().link.byte_picos, 988);
    }
}
