//! The number of workers that some traffic takes.
//!
//! Owns: the formulas from traffic, prices and targets to workers. Never: remembers anything.
//! Invariant: more traffic never takes fewer workers; only the exact operations of IEEE 754 are
//! used, so that every router computes the same.
//!
//! Prompts queue: as many workers as are needed so that the wait in a queue with several servers
//! (Erlang C, stretched for varying lengths) leaves a prompt in time as often as its class demands.
//! Streams run concurrently: as many workers as are needed so that the mean number of streams
//! (Little's law) and its usual deviation fit into steps that keep the gap.

use crate::{Predict, quantum};
use cleave_domain::{Capacity, Prices, StepWork};
use std::time::Duration;

/// Planned share of busy time of a worker, at most.
const UTILISATION_MAX: f64 = 0.85;
/// Prompts vary in length and arrive in bursts: waits are longer by this factor than with equal
/// prompts.
const WAIT_STRETCH: f64 = 1.5;
/// Planned share of a gap, and of a pool's blocks, at most.
const USABLE_SHARE: f64 = 0.9;
/// Standard deviations of the number of streams for which there is room above its mean.
const DEVIATIONS: f64 = 2.0;
/// Limit of workers in one pool.
const WORKERS_MAX: u32 = 4096;

/// Traffic at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Traffic {
    /// Arrivals, in requests per second.
    pub(super) rate: f64,
    /// Tokens of a prompt.
    pub(super) prompt: f64,
    /// Tokens of a prompt that are not found in the cache.
    pub(super) fresh: f64,
    /// Query-key pairs of a prompt's attention.
    pub(super) pairs: f64,
    /// Tokens of an answer.
    pub(super) output: f64,
}

/// SLO targets that the fleet's size must meet.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct LegTargets {
    pub(super) ttft: Option<Duration>,
    pub(super) tpot: Option<Duration>,
    pub(super) goal_permille: u32,
}

/// Seconds of worker time that the traffic's prompts take per second.
pub(super) fn prompt_work(traffic: &Traffic, prices: &Prices, capacity: &Capacity) -> f64 {
    traffic.rate * prompt_seconds(traffic, prices, capacity)
}

/// Seconds that one prompt adds among others.
fn prompt_seconds(traffic: &Traffic, prices: &Prices, capacity: &Capacity) -> f64 {
    let chunk = quantum(prices, capacity.step_tokens_max, capacity.block_tokens);
    let rows = StepWork {
        rows: chunk,
        ..StepWork::default()
    };
    let token = prices.step(&rows).as_secs_f64() / f64::from(chunk.max(1));
    let pairs = traffic.pairs * prices.pair_picos as f64 / 1e12;
    traffic.fresh * token + pairs + prices.draw_nanos as f64 / 1e9
}

/// Prefill workers for this traffic; `factor` is the learned correction.
pub(super) fn prefill_workers(
    traffic: &Traffic,
    aims: &LegTargets,
    (prices, capacity): &(Prices, Capacity),
    factor: f64,
) -> u32 {
    let service = prompt_seconds(traffic, prices, capacity);
    let work = traffic.rate * service * factor;
    if work <= 0.0 {
        return 0;
    }
    let allowed = aims.ttft.map(|ttft| {
        // A prompt of twice the mean length is to be in time too.
        let left = ttft.as_secs_f64() - 2.0 * service;
        left.max(service / 4.0)
    });
    servers_for_queue(
        work,
        service,
        allowed.map(|wait| wait / wait_quantile_factor(aims)),
    )
}

/// The least number of servers that are busy at most [`UTILISATION_MAX`] and keep the mean wait.
fn servers_for_queue(work: f64, service: f64, wait_max: Option<f64>) -> u32 {
    let (mut servers, mut blocked) = (0, 1.0);
    while servers < WORKERS_MAX {
        servers += 1;
        let count = f64::from(servers);
        // Erlang B by recursion; Erlang C and the mean wait follow from it.
        blocked = work * blocked / (count + work * blocked);
        if work > count * UTILISATION_MAX {
            continue;
        }
        let waits = blocked / (1.0 - work / count * (1.0 - blocked));
        let wait = WAIT_STRETCH * waits * service / (count - work);
        if wait_max.is_none_or(|most| wait <= most) {
            break;
        }
    }
    servers
}

/// How many mean waits cover all but the permitted share of misses, for exponentially distributed
/// waits.
fn wait_quantile_factor(aims: &LegTargets) -> f64 {
    match aims.goal_permille {
        ..=900 => 2.3,
        901..=950 => 3.0,
        951..=990 => 4.6,
        _ => 6.9,
    }
}

/// Streams of this length that a decode worker runs within the gap: at least one.
fn streams_per_worker(
    traffic: &Traffic,
    aims: &LegTargets,
    prices: &Prices,
    capacity: &Capacity,
) -> u32 {
    let context = traffic.prompt + traffic.output / 2.0;
    let held = (traffic.prompt + traffic.output).max(1.0);
    let tokens = f64::from(capacity.blocks_count) * f64::from(capacity.block_tokens);
    let by_blocks = (tokens * USABLE_SHARE / held) as u32;
    let most = capacity.slots_count.min(by_blocks).max(1);
    let Some(gap) = aims.tpot.map(|tpot| tpot.as_secs_f64() * USABLE_SHARE) else {
        return most;
    };
    let keeps = |streams: u32| step(prices, streams, context) <= gap;
    let (mut keeps_at, mut breaks_at) = (1, most + 1);
    while breaks_at - keeps_at > 1 {
        let middle = keeps_at + (breaks_at - keeps_at) / 2;
        if keeps(middle) {
            keeps_at = middle
        } else {
            breaks_at = middle
        }
    }
    keeps_at
}

fn step(prices: &Prices, streams: u32, context: f64) -> f64 {
    let tokens = (f64::from(streams) * context) as u64;
    prices.decode(streams, tokens).as_secs_f64()
}

/// Decode workers, as a real number, for the streams of this traffic.
pub(super) fn decode_workers(
    traffic: &Traffic,
    aims: &LegTargets,
    (prices, capacity): &(Prices, Capacity),
    factor: f64,
) -> f64 {
    let per_worker = streams_per_worker(traffic, aims, prices, capacity);
    let context = traffic.prompt + traffic.output / 2.0;
    let streams = traffic.rate * traffic.output * step(prices, per_worker, context) * factor;
    (streams + DEVIATIONS * streams.sqrt()) / f64::from(per_worker)
}

/// Decode workers whose pools hold so many tokens.
pub(super) fn workers_for_memory(context_tokens: u64, capacity: &Capacity) -> f64 {
    let tokens = f64::from(capacity.blocks_count) * f64::from(capacity.block_tokens);
    context_tokens as f64 / (tokens * USABLE_SHARE).max(1.0)
}

/// Mixed workers, for this load of each leg.
pub(super) fn mixed_workers_for(prompt_work: f64, decode: f64) -> f64 {
    prompt_work / UTILISATION_MAX + decode
}

/// Rounds up, with a limit.
pub(super) fn round_up(workers: f64) -> u32 {
    (workers.ceil() as u32).min(WORKERS_MAX)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use cleave_domain::RowPrice;
    use proptest::prelude::*;

    /// 10 ms a step and 0.1 ms a row: a prompt of a thousand tokens takes about 0.11 s. Room for
    /// 160,000 tokens.
    pub(crate) fn worker() -> (Prices, Capacity) {
        let row = |(rows, nanos)| RowPrice { rows, nanos };
        let prices = Prices {
            rows: [(1, 10_100_000), (8192, 829_200_000)].map(row).to_vec(),
            context_picos: 1000,
            ..Prices::default()
        };
        let capacity = Capacity {
            block_tokens: 16,
            block_bytes: 1,
            blocks_count: 10_000,
            slots_count: 256,
            step_tokens_max: 8192,
            context_tokens_max: 100_000,
            states: None,
            windows: None,
        };
        (prices, capacity)
    }

    pub(crate) fn traffic(rate: f64) -> Traffic {
        Traffic {
            rate,
            prompt: 1000.0,
            fresh: 1000.0,
            pairs: 0.0,
            output: 200.0,
        }
    }

    pub(crate) fn aims(ttft_ms: u64, tpot_ms: u64) -> LegTargets {
        LegTargets {
            ttft: Some(Duration::from_millis(ttft_ms)),
            tpot: Some(Duration::from_millis(tpot_ms)),
            goal_permille: 900,
        }
    }

    /// With one server the mean wait has a closed form (M/M/1): rho / (1 - rho) services.
    #[test]
    fn queue_waits_match_erlang_c() {
        let service = 0.1;
        // Half busy: the wait is one mean service time, stretched by half.
        assert_eq!(servers_for_queue(0.5, service, Some(0.151)), 1);
        assert_eq!(servers_for_queue(0.5, service, Some(0.149)), 2);
        // Two servers, offered load 1: Erlang C gives a third, the wait is a third of a service
        // time.
        assert_eq!(servers_for_queue(1.0, service, Some(0.0501)), 2);
        assert_eq!(servers_for_queue(1.0, service, Some(0.0499)), 3);
        assert_eq!(
            servers_for_queue(8.4, service, None),
            10,
            "no target: only how busy"
        );
    }

    // Lesson: 28.
    #[test]
    fn a_tighter_target_takes_more_workers_of_its_leg() {
        let worker = worker();
        let prefill = |ttft| prefill_workers(&traffic(20.0), &aims(ttft, 50), &worker, 1.0);
        let decode = |tpot| {
            round_up(decode_workers(
                &traffic(20.0),
                &aims(500, tpot),
                &worker,
                1.0,
            ))
        };
        assert!(
            prefill(300) > prefill(3000),
            "{} {}",
            prefill(300),
            prefill(3000)
        );
        assert!(decode(20) > decode(60), "{} {}", decode(20), decode(60));
        assert!(
            prefill(3000) >= 3,
            "2.2 workers' worth, and less than all of it"
        );
    }

    proptest! {
        #[test]
        fn more_traffic_never_takes_fewer_workers(rate in 0.0..200.0f64, more in 0.0..50.0f64, ttft in 50u64..5000, tpot in 11u64..200) {
            let worker = worker();
            let aims = aims(ttft, tpot);
            let of = |rate| {
                let traffic = traffic(rate);
                (prefill_workers(&traffic, &aims, &worker, 1.0), decode_workers(&traffic, &aims, &worker, 1.0))
            };
            let (less, most) = (of(rate), of(rate + more));
            prop_assert!(less.0 <= most.0 && less.1 <= most.1);
        }
    }

    fn close(is: f64, expected: f64) {
        assert!((is - expected).abs() < 1e-6, "{is}, and not {expected}");
    }

    #[test]
    fn a_prompt_takes_its_rows_its_pairs_and_its_draw() {
        let (prices, capacity) = worker();
        // In chunks of 2048 tokens a token takes 214.8 ms / 2048.
        close(prompt_work(&traffic(20.0), &prices, &capacity), 2.09765625);
        let priced = Prices {
            pair_picos: 2000,
            draw_nanos: 500_000,
            ..prices
        };
        let half_cached = Traffic {
            fresh: 512.0,
            pairs: 1e6,
            ..traffic(10.0)
        };
        // 53.7 ms of rows, 2 ms of pairs and half a millisecond for the draw.
        close(prompt_work(&half_cached, &priced, &capacity), 0.562);
    }

    #[test]
    fn prefill_workers_follow_targets_and_factors() {
        let worker = worker();
        let least = |rate, ttft: u64, factor| {
            let aims = aims(ttft, 50);
            prefill_workers(&traffic(rate), &aims, &worker, factor)
        };
        assert_eq!(least(0.0, 3000, 1.0), 0);
        // 2.1 workers' worth, busy for 0.85 of their time at most; twice that is 4.2.
        assert_eq!([least(20.0, 3000, 1.0), least(20.0, 3000, 2.0)], [3, 5]);
        // A target shorter than two prompts leaves a quarter of one to wait.
        assert_eq!(least(20.0, 1, 1.0), least(20.0, 200, 1.0));
        let rarely = LegTargets {
            goal_permille: 999,
            ..aims(450, 50)
        };
        let often = prefill_workers(&traffic(20.0), &aims(450, 50), &worker, 1.0);
        assert!(prefill_workers(&traffic(20.0), &rarely, &worker, 1.0) > often);
    }

    #[test]
    fn rarer_misses_take_more_mean_waits() {
        let waits = |goal_permille| {
            let aims = LegTargets {
                goal_permille,
                ..LegTargets::default()
            };
            wait_quantile_factor(&aims)
        };
        assert_eq!([waits(0), waits(900), waits(901)], [2.3, 2.3, 3.0]);
        assert_eq!([waits(950), waits(951), waits(990)], [3.0, 4.6, 4.6]);
        assert_eq!([waits(991), waits(1000)], [6.9, 6.9]);
    }

    #[test]
    fn streams_are_limited_by_slots_blocks_and_the_gap() {
        let (prices, capacity) = worker();
        let of = |aims: &LegTargets, capacity: &Capacity| {
            streams_per_worker(&traffic(1.0), aims, &prices, capacity)
        };
        let slots = |slots_count| Capacity {
            slots_count,
            ..capacity
        };
        // 144,000 tokens of the pool are planned with, 1200 of each stream.
        let none = LegTargets::default();
        assert_eq!([of(&none, &capacity), of(&none, &slots(64))], [120, 64]);
        assert_eq!(of(&none, &slots(0)), 1);
        // A step of n streams takes 10 ms and n times 101.1 us; 0.9 of the gap is used.
        assert_eq!(of(&aims(500, 20), &capacity), 79);
        assert_eq!(of(&aims(500, 5), &capacity), 1, "one at least");
        assert_eq!(of(&aims(500, 200), &capacity), 120);
        let held = Traffic {
            prompt: 600.0,
            output: 1800.0,
            ..traffic(1.0)
        };
        let per_worker = streams_per_worker(&held, &none, &prices, &capacity);
        assert_eq!(per_worker, 60, "the whole answer is held in the end");
    }

    #[test]
    fn decode_workers_fit_the_mean_and_two_deviations() {
        let of = |rate, factor| decode_workers(&traffic(rate), &aims(500, 20), &worker(), factor);
        // 79 seats; a step with all of them taken lasts 17.9869 ms.
        let streams: f64 = 20.0 * 200.0 * 0.0179869;
        close(of(20.0, 1.0), (streams + 2.0 * streams.sqrt()) / 79.0);
        let more = 1.5 * streams;
        close(of(20.0, 1.5), (more + 2.0 * more.sqrt()) / 79.0);
        close(of(0.0, 1.0), 0.0);
    }

    #[test]
    fn workers_are_added_up_and_rounded_up() {
        let (_, capacity) = worker();
        close(workers_for_memory(216_000, &capacity), 1.5);
        close(mixed_workers_for(1.7, 0.25), 2.25);
        assert_eq!([round_up(0.0), round_up(1.0), round_up(1.01)], [0, 1, 2]);
        assert_eq!([round_up(1e9), round_up(f64::INFINITY)], [WORKERS_MAX; 2]);
    }
}
