//! How many workers some traffic takes.
//!
//! Owns: the formulas from traffic, prices and targets to workers. Never: remembers anything.
//! Invariant: more traffic never takes fewer workers; nothing but the exact operations of IEEE 754, so that
//! every router finds the same.
//!
//! Prompts queue: so many workers that the wait for one, as a queue with several servers has it (Erlang's
//! second formula, stretched for lengths that differ), leaves a prompt in time as often as its class
//! says. Streams fill seats: so many workers that those who are there at once (Little's law) and the
//! usual spread of their number find a seat in steps that keep the gap.

use crate::{Predict, quantum};
use cleave_domain::{Capacity, Prices, Work};
use std::time::Duration;

/// Above this share of their time workers are not planned to be busy.
const BUSY: f64 = 0.85;
/// Prompts differ in length and come in bursts: waits are so much longer than a queue of equals' without.
const VARIED: f64 = 1.5;
/// Of a gap so much is planned to be used, and of a pool of blocks.
const USED: f64 = 0.9;
/// Spreads of a number of streams that find a seat beside their mean.
const SPREADS: f64 = 2.0;
/// Nobody has more workers in one pool.
const WORKERS_MAX: u32 = 4096;

/// What comes, of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Traffic {
    /// Requests in a second.
    pub(super) rate: f64,
    /// Tokens of a prompt.
    pub(super) prompt: f64,
    /// Of these, what is not found cached.
    pub(super) fresh: f64,
    /// Pairs of a prompt's attention.
    pub(super) pairs: f64,
    /// Tokens of an answer.
    pub(super) output: f64,
}

/// What is to be kept.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Aims {
    pub(super) ttft: Option<Duration>,
    pub(super) tpot: Option<Duration>,
    pub(super) goal_permille: u32,
}

/// Seconds of a worker that the traffic's prompts take in a second.
pub(super) fn prompt_work(traffic: &Traffic, prices: &Prices, capacity: &Capacity) -> f64 {
    traffic.rate * prompt_seconds(traffic, prices, capacity)
}

/// Seconds that one prompt takes among others.
fn prompt_seconds(traffic: &Traffic, prices: &Prices, capacity: &Capacity) -> f64 {
    let chunk = quantum(prices, capacity.step_tokens_max, capacity.block_tokens);
    let rows = Work {
        rows: chunk,
        ..Work::default()
    };
    let token = prices.step(&rows).as_secs_f64() / f64::from(chunk.max(1));
    let pairs = traffic.pairs * prices.pair_picos as f64 / 1e12;
    traffic.fresh * token + pairs + prices.draw_nanos as f64 / 1e9
}

/// Prefill workers for so much work of prompts of that length; `factor` is what was learnt.
pub(super) fn prefill(
    traffic: &Traffic,
    aims: &Aims,
    (prices, capacity): &(Prices, Capacity),
    factor: f64,
) -> u32 {
    let service = prompt_seconds(traffic, prices, capacity);
    let work = traffic.rate * service * factor;
    if work <= 0.0 {
        return 0;
    }
    let allowed = aims.ttft.map(|ttft| {
        // A prompt of twice the mean is to be in time too.
        let left = ttft.as_secs_f64() - 2.0 * service;
        left.max(service / 4.0)
    });
    queue(work, service, allowed.map(|wait| wait / patience(aims)))
}

/// Least servers that are busy at most [`BUSY`] and keep the mean wait.
fn queue(work: f64, service: f64, wait_max: Option<f64>) -> u32 {
    let (mut servers, mut blocked) = (0, 1.0);
    while servers < WORKERS_MAX {
        servers += 1;
        let count = f64::from(servers);
        blocked = work * blocked / (count + work * blocked);
        if work > count * BUSY {
            continue;
        }
        let waits = blocked / (1.0 - work / count * (1.0 - blocked));
        let wait = VARIED * waits * service / (count - work);
        if wait_max.is_none_or(|most| wait <= most) {
            break;
        }
    }
    servers
}

/// How many mean waits are waited by all but those that may miss: of waits that are exponential.
fn patience(aims: &Aims) -> f64 {
    match aims.goal_permille {
        ..=900 => 2.3,
        901..=950 => 3.0,
        951..=990 => 4.6,
        _ => 6.9,
    }
}

/// Seats of a decode worker whose steps keep the gap, for streams of that length: at least one.
fn seats(traffic: &Traffic, aims: &Aims, prices: &Prices, capacity: &Capacity) -> u32 {
    let context = traffic.prompt + traffic.output / 2.0;
    let held = (traffic.prompt + traffic.output).max(1.0);
    let tokens = f64::from(capacity.blocks_count) * f64::from(capacity.block_tokens);
    let room = (tokens * USED / held) as u32;
    let most = capacity.slots_count.min(room).max(1);
    let Some(gap) = aims.tpot.map(|tpot| tpot.as_secs_f64() * USED) else {
        return most;
    };
    let keeps = |seats: u32| step(prices, seats, context) <= gap;
    let (mut keeps_at, mut breaks_at) = (1, most + 1);
    while breaks_at - keeps_at > 1 {
        let middle = keeps_at + (breaks_at - keeps_at) / 2;
        match keeps(middle) {
            true => keeps_at = middle,
            false => breaks_at = middle,
        }
    }
    keeps_at
}

fn step(prices: &Prices, seats: u32, context: f64) -> f64 {
    let tokens = (f64::from(seats) * context) as u64;
    prices.decode(seats, tokens).as_secs_f64()
}

/// Decode workers, as a real number, for the streams of such traffic.
pub(super) fn decode(
    traffic: &Traffic,
    aims: &Aims,
    (prices, capacity): &(Prices, Capacity),
    factor: f64,
) -> f64 {
    let seats = seats(traffic, aims, prices, capacity);
    let context = traffic.prompt + traffic.output / 2.0;
    let streams = traffic.rate * traffic.output * step(prices, seats, context) * factor;
    (streams + SPREADS * streams.sqrt()) / f64::from(seats)
}

/// Decode workers that hold so many tokens.
pub(super) fn memory(context_tokens: u64, capacity: &Capacity) -> f64 {
    let tokens = f64::from(capacity.blocks_count) * f64::from(capacity.block_tokens);
    context_tokens as f64 / (tokens * USED).max(1.0)
}

/// Workers that do both, for so much of each.
pub(super) fn both(prompt_work: f64, decode: f64) -> f64 {
    prompt_work / BUSY + decode
}

/// Rounded up, within reason.
pub(super) fn whole(workers: f64) -> u32 {
    (workers.ceil() as u32).min(WORKERS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::RowPrice;
    use proptest::prelude::*;

    /// 10 ms a step and 0.1 ms a row: a prompt of a thousand tokens takes about 0.11 s.
    fn worker() -> (Prices, Capacity) {
        let row = |(rows, nanos)| RowPrice { rows, nanos };
        let prices = Prices {
            rows: [(1, 10_100_000), (8192, 829_200_000)].map(row).to_vec(),
            pair_picos: 0,
            context_picos: 1000,
            draw_nanos: 0,
            ..Prices::default()
        };
        let capacity = Capacity {
            block_tokens: 16,
            block_bytes: 1,
            blocks_count: 10_000,
            slots_count: 256,
            step_tokens_max: 8192,
            context_tokens_max: 100_000,
        };
        (prices, capacity)
    }

    fn traffic(rate: f64) -> Traffic {
        Traffic {
            rate,
            prompt: 1000.0,
            fresh: 1000.0,
            pairs: 0.0,
            output: 200.0,
        }
    }

    fn aims(ttft_ms: u64, tpot_ms: u64) -> Aims {
        Aims {
            ttft: Some(Duration::from_millis(ttft_ms)),
            tpot: Some(Duration::from_millis(tpot_ms)),
            goal_permille: 900,
        }
    }

    /// With one server the mean wait is a known fraction (M/M/1): rho / (1 - rho) services.
    #[test]
    fn the_wait_of_a_queue_is_the_textbooks() {
        let service = 0.1;
        // Half busy: one mean service of wait, stretched by half.
        assert_eq!(queue(0.5, service, Some(0.151)), 1);
        assert_eq!(queue(0.5, service, Some(0.149)), 2);
        // Two servers, offered 1: Erlang's C is a third, the wait a third of a service.
        assert_eq!(queue(1.0, service, Some(0.0501)), 2);
        assert_eq!(queue(1.0, service, Some(0.0499)), 3);
        assert_eq!(queue(8.4, service, None), 10, "no target: only how busy");
    }

    #[test]
    fn a_tighter_promise_takes_more_workers_of_its_leg() {
        let worker = worker();
        let prefill = |ttft| prefill(&traffic(20.0), &aims(ttft, 50), &worker, 1.0);
        let decode = |tpot| whole(decode(&traffic(20.0), &aims(500, tpot), &worker, 1.0));
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
        fn more_traffic_never_takes_fewer(rate in 0.0..200.0f64, more in 0.0..50.0f64, ttft in 50u64..5000, tpot in 11u64..200) {
            let worker = worker();
            let aims = aims(ttft, tpot);
            let of = |rate| {
                let traffic = traffic(rate);
                (prefill(&traffic, &aims, &worker, 1.0), decode(&traffic, &aims, &worker, 1.0))
            };
            let (less, most) = (of(rate), of(rate + more));
            prop_assert!(less.0 <= most.0 && less.1 <= most.1);
        }
    }
}
