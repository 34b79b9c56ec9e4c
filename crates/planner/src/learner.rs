//! From what work cost to prices.
//!
//! Owns: the estimate of every price, and how far its predictions were off. Never: reads a clock, or
//! learns from what took no time.
//! Invariant: the prices given out never fall with rows, and no single measurement, however wild,
//! moves them by more than a bounded part.
//!
//! A step's time is linear in the prices, so the best estimate of them after each step is a Kalman
//! filter's (Kalman 1960). What it estimates is not the prices but their ratios to the seed: the seed
//! knows the shape, and what is mostly wrong with it is wrong with all of it, so that a few steps of
//! one kind correct the others too. Its randomly walking part is of two speeds: one factor common to
//! all prices, because a machine that is shared is slower this minute, and a slow one of each.

use crate::predict::parts;
use cleave_domain::{LinkPrice, Prices, Work, WorkerId};
use std::time::Duration;

/// Steps whose errors are remembered.
const ERRORS_MAX: usize = 128;
/// Of those, so many of the last tell an outlier from a machine that has changed.
const ERRORS_LATE: usize = 15;
/// Before so many steps were seen, none is taken for an outlier.
const STEPS_FIRST: usize = 8;
/// What is unknown of the seed: of everything together, of the rows' curve, of each price alone.
const COMMON: f64 = 1.0;
const CURVE: f64 = 0.25;
const EACH: f64 = 0.05;
/// How much of the curve's error two neighbouring knots share.
const NEIGHBOURS: f64 = 0.7;
/// How far everything together, and each price alone, drifts with each step.
const COMMON_DRIFT: f64 = 0.02;
const EACH_DRIFT: f64 = 0.01;
/// Two steps of the same work differ by so much. What errs by more is not noisy but unknown, and
/// must not be doubted for it.
const NOISE: std::ops::RangeInclusive<f64> = 0.08..=0.2;
/// No ratio to the seed leaves this range.
const RATIOS: std::ops::RangeInclusive<f64> = 0.001..=1000.0;
/// Of a link's price, one measurement moves so much: one part in this many.
const LINK_PARTS: u64 = 8;

/// Prices, and what they are learned from.
#[derive(Clone, Debug)]
pub struct Learner {
    prices: Prices,
    /// Made with the first step that took time.
    fit: Option<Box<Fit>>,
}

/// How far predictions were off of late, in thousandths of what was real.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Errors {
    /// Half of them were off by no more.
    pub median_permille: u32,
    /// Nineteen of twenty were off by no more.
    pub p95_permille: u32,
}

#[derive(Clone, Debug)]
struct Fit {
    seed: Prices,
    /// Price over seed: of each knot, then of a pair, of a token of context, of a draw.
    ratios: Vec<f64>,
    /// How uncertain they are, together: `(ratios, ratios)`.
    covariance: Vec<f64>,
    /// The last errors, the oldest overwritten first.
    errors: Vec<u32>,
    steps: usize,
}

impl Learner {
    /// Starts from what is thought to be true. From nothing, nothing is learned: a seed says which
    /// knots there are.
    pub fn new(seed: Prices) -> Self {
        Self {
            prices: seed,
            fit: None,
        }
    }

    /// As learned so far.
    pub fn prices(&self) -> &Prices {
        &self.prices
    }

    /// Whether anything is known.
    pub fn knows(&self) -> bool {
        !self.prices.rows.is_empty()
    }

    /// A step of so much work took so long.
    pub fn observe(&mut self, work: &Work, took: Duration) {
        if took.is_zero() || !self.knows() {
            return;
        }
        let prices = &self.prices;
        let fit = self.fit.get_or_insert_with(|| Box::new(Fit::new(prices)));
        fit.observe(work, took.as_nanos() as f64);
        fit.write(&mut self.prices);
    }

    /// How far predictions of the last steps were off.
    pub fn errors(&self) -> Errors {
        self.fit.as_ref().map_or(Errors::default(), |fit| Errors {
            median_permille: fit.error(500, ERRORS_MAX),
            p95_permille: fit.error(950, ERRORS_MAX),
        })
    }

    /// The link to a worker was measured.
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

    /// The worker at a link's other end is gone, and may be another when it comes back.
    pub fn link_lost(&mut self, to: WorkerId) {
        self.prices.links.retain(|(worker, _)| *worker != to);
    }

    /// So many bytes went to a worker in so long, one after the other.
    pub fn sent(&mut self, to: WorkerId, bytes: u64, took: Duration) {
        if bytes == 0 || took.is_zero() || !self.knows() {
            return;
        }
        let picos = took.as_nanos().saturating_mul(1000) / u128::from(bytes);
        let picos = u64::try_from(picos).unwrap_or(u64::MAX);
        let links = &mut self.prices.links;
        let known = links.binary_search_by_key(&to, |(worker, _)| *worker);
        let link = match known {
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
        link.byte_picos = nearer(link.byte_picos, picos);
        let all = &mut self.prices.link.byte_picos;
        *all = if *all == 0 {
            picos
        } else {
            nearer(*all, picos)
        };
    }

    /// What is learned, in numbers that tell two learners apart; empty before anything is.
    pub fn state(&self) -> Vec<u64> {
        self.fit.as_ref().map_or(Vec::new(), |fit| {
            let numbers = fit.ratios.iter().chain(&fit.covariance);
            let errors = fit.errors.iter().map(|error| u64::from(*error));
            let numbers = numbers.map(|number| number.to_bits()).chain(errors);
            numbers.chain([fit.steps as u64]).collect()
        })
    }
}

/// One part in [`LINK_PARTS`] of the way. What is four times as far counts as that: a block may have
/// waited for a step.
fn nearer(price: u64, measured: u64) -> u64 {
    let measured = measured.min(price.saturating_mul(4));
    (price / LINK_PARTS)
        .saturating_mul(LINK_PARTS - 1)
        .saturating_add(price % LINK_PARTS)
        .saturating_add(measured / LINK_PARTS)
}

impl Fit {
    fn new(seed: &Prices) -> Self {
        let knots = seed.rows.len();
        let count = knots + 3;
        let mut covariance = vec![COMMON * COMMON; count * count];
        for i in 0..count {
            for j in 0..count {
                let apart = i32::try_from(i.abs_diff(j)).expect("few knots");
                if i < knots && j < knots {
                    covariance[i * count + j] += CURVE * CURVE * NEIGHBOURS.powi(apart);
                } else if i == j {
                    covariance[i * count + j] += CURVE * CURVE;
                }
            }
            covariance[i * count + i] += EACH * EACH;
        }
        let mut seed = seed.clone();
        // A ratio to nothing cannot be learned.
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

    fn observe(&mut self, work: &Work, took: f64) {
        let mut shares = parts(&self.seed, work);
        let parts = shares.iter().zip(&self.ratios);
        let predicted: f64 = parts.map(|(part, ratio)| part * ratio).sum();
        if predicted <= 0.0 {
            return;
        }
        // In parts of what was predicted, so that short steps count as much as long ones.
        for share in &mut shares {
            *share /= predicted;
        }
        let usual = f64::from(self.error(500, ERRORS_MAX)) / 1000.0;
        let off = took / predicted - 1.0;
        let off = match self.steps < STEPS_FIRST {
            true => off,
            false => {
                let late = f64::from(self.error(500, ERRORS_LATE)) / 1000.0;
                let most = (3.0 * late).clamp(0.1, 1.0);
                off.clamp(-most, most)
            }
        };
        self.remember((predicted / took - 1.0).abs());
        self.learn(&shares, off, usual.clamp(*NOISE.start(), *NOISE.end()));
    }

    /// One step of the filter.
    fn learn(&mut self, shares: &[f64], off: f64, noise: f64) {
        let count = self.ratios.len();
        for (i, row) in self.covariance.chunks_exact_mut(count).enumerate() {
            for entry in row.iter_mut() {
                *entry += COMMON_DRIFT * COMMON_DRIFT;
            }
            row[i] += EACH_DRIFT * EACH_DRIFT;
        }
        let rows = self.covariance.chunks_exact(count);
        let gains: Vec<f64> = rows.map(|row| dot(row, shares)).collect();
        let spread = dot(&gains, shares) + noise * noise;
        for (ratio, gain) in self.ratios.iter_mut().zip(&gains) {
            *ratio = (*ratio + gain / spread * off).clamp(*RATIOS.start(), *RATIOS.end());
        }
        for (i, row) in self.covariance.chunks_exact_mut(count).enumerate() {
            for (entry, gain) in row.iter_mut().zip(&gains) {
                // What was never measured does not become more uncertain than it was at first.
                *entry = (*entry - gains[i] * gain / spread).clamp(-2.0, 2.0);
            }
        }
    }

    fn remember(&mut self, error: f64) {
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

    fn write(&self, prices: &mut Prices) {
        let whole = |seed: u64, ratio: f64| (seed as f64 * ratio).max(0.0) as u64;
        let knots = self.seed.rows.len();
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
    use cleave_domain::RowPrice;

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

    /// A machine of a million nanoseconds a step, whose curve bends at 64 rows.
    fn real() -> Prices {
        let rows = [(1, 1_000_000), (64, 1_400_000), (512, 9_000_000)];
        prices(&rows, [4_000, 30_000, 5_000])
    }

    /// All that a datasheet would have said: three times too fast, and of another shape.
    fn seed() -> Prices {
        let knots = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
        let rows = knots.map(|rows| (rows, (400_000).max(u64::from(rows) * 5_000)));
        prices(&rows, [1_000, 10_000, 1_000])
    }

    /// A counter-based draw below `bound`.
    fn draw(seed: u64, bound: u64) -> u64 {
        let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % bound
    }

    /// The `i`-th of a mix of decode batches and prompt chunks.
    fn step(i: u64) -> Work {
        let mut work = Work::default();
        for sequence in 0..draw(i, 32) {
            work += Work::decode(1 + draw(i * 100 + sequence, 4000));
        }
        if work.rows == 0 || draw(i + 7, 2) == 0 {
            let before = u32::try_from(draw(i + 11, 2000)).unwrap();
            let tokens = 1 + u32::try_from(draw(i + 13, 460)).unwrap();
            work += Work::prefill(before, tokens);
        }
        work
    }

    /// The median and p95 of what `learner` errs by on steps that it has not seen.
    fn held_out(learner: &Learner, real: &Prices) -> (u64, u64) {
        let error = |i| {
            let work = step(i);
            let (told, is) = (learner.prices().step(&work), real.step(&work));
            let (told, is) = (told.as_nanos() as f64, is.as_nanos() as f64);
            ((told / is - 1.0).abs() * 1000.0) as u64
        };
        let mut errors: Vec<u64> = (100_000..100_200).map(error).collect();
        errors.sort_unstable();
        (errors[100], errors[190])
    }

    #[test]
    fn held_out_steps_were_predicted_by_the_datasheet_alone() {
        let mut learner = Learner::new(seed());
        assert!(held_out(&learner, &real()).0 > 500, "the seed is far off");
        for i in 0..64 {
            learner.observe(&step(i), real().step(&step(i)));
        }
        let (median, p95) = held_out(&learner, &real());
        assert!(median <= 30 && p95 <= 100, "{median} {p95}: {learner:?}");
    }

    #[test]
    fn lesson_29_one_slow_step_in_eight_did_not_spoil_the_prices() {
        let mut learner = Learner::new(seed());
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
    fn a_machine_that_became_slower_is_believed_within_some_steps() {
        let mut learner = Learner::new(seed());
        for i in 0..100 {
            learner.observe(&step(i), real().step(&step(i)));
        }
        for i in 100..160 {
            learner.observe(&step(i), real().step(&step(i)) * 2);
        }
        let slower = step(999);
        let told = learner.prices().step(&slower).as_nanos() as f64;
        let is = (real().step(&slower) * 2).as_nanos() as f64;
        assert!((told / is - 1.0).abs() < 0.1, "{told} {is}");
    }

    #[test]
    fn more_rows_never_cost_less_whatever_was_measured() {
        let mut learner = Learner::new(seed());
        for i in 0..300 {
            let took = Duration::from_micros(1 + draw(i, 20_000));
            learner.observe(&step(i), took);
            let rows = &learner.prices().rows;
            assert!(rows.windows(2).all(|two| two[0].nanos <= two[1].nanos));
        }
    }

    #[test]
    fn nothing_is_learned_from_no_time_or_from_no_seed() {
        let mut learner = Learner::new(seed());
        learner.observe(&step(1), Duration::ZERO);
        assert_eq!(learner.prices(), &seed());
        assert!(learner.state().is_empty());
        let mut blank = Learner::new(Prices::default());
        blank.observe(&step(1), Duration::from_millis(1));
        blank.sent(WorkerId(1), 10, Duration::from_millis(1));
        assert_eq!(blank.prices(), &Prices::default());
    }

    #[test]
    fn a_link_is_priced_by_what_went_over_it() {
        let mut learner = Learner::new(seed());
        let price = LinkPrice {
            latency_nanos: 50_000,
            byte_picos: 100,
        };
        learner.link_measured(WorkerId(2), price);
        for _ in 0..64 {
            learner.sent(WorkerId(2), 1_000_000, Duration::from_micros(400));
        }
        let took = learner.prices().transfer(WorkerId(2), 1_000_000);
        assert!(took > Duration::from_micros(420) && took < Duration::from_micros(470));
        let unknown = learner.prices().transfer(WorkerId(3), 1_000_000);
        assert!(unknown > Duration::from_micros(400), "as others of late");
        learner.link_lost(WorkerId(2));
        assert!(learner.prices().links.is_empty(), "it is gone");
    }
}
