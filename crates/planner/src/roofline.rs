//! Lower bounds of costs, from a device's datasheet and a model's operations and bytes.
//!
//! Owns: the prices that follow from both (the roofline: Williams, Waterman and Patterson 2009).
//! Never: measures.
//! Invariant: a step takes as long as the slower of its arithmetic and its memory.

use cleave_domain::{Prices, RowPrice, StepWork};
use cleave_models::ModelCost;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Speed of a device, as measured or from its datasheet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceSpec {
    /// Operations of dense products per second; a multiplication and its addition count as two.
    pub flops_per_second: f64,
    /// Bytes of memory read per second.
    pub bytes_per_second: f64,
    /// Fixed time of any step.
    pub step: Duration,
}

/// Share of a device's arithmetic (MFU) that `work` used in its busy time, 0 to 1.
pub fn flops_used(model: &ModelCost, device: &DeviceSpec, work: &StepWork, busy: Duration) -> f64 {
    part(model.flops(work), device.flops_per_second, busy)
}

/// Share of a device's memory bandwidth (MBU) that `steps` steps used in its busy time, 0 to 1.
pub fn bytes_used(
    model: &ModelCost,
    device: &DeviceSpec,
    work: &StepWork,
    steps: u64,
    busy: Duration,
) -> f64 {
    part(model.bytes(work, steps), device.bytes_per_second, busy)
}

fn part(used: f64, per_second: f64, busy: Duration) -> f64 {
    let most = per_second * busy.as_secs_f64();
    if most > 0.0 { used / most } else { 0.0 }
}

/// Prices before any measurement, for steps of at most `step_tokens_max` tokens.
pub fn roofline(device: &DeviceSpec, model: &ModelCost, step_tokens_max: u32) -> Prices {
    let seconds = |amount: f64, per_second: f64| {
        if per_second > 0.0 {
            amount / per_second
        } else {
            0.0
        }
    };
    let nanos = |seconds: f64| (seconds * 1e9) as u64;
    let weights = model.layer_weights as f64;
    let read = |rows: u32| {
        let bytes = model.layer_bytes_read(f64::from(rows));
        seconds(bytes, device.bytes_per_second)
    };
    let row = seconds(2.0 * weights, device.flops_per_second);
    let head = model.head_weights as f64;
    let head_read = seconds(model.head_bytes as f64, device.bytes_per_second);
    let step = u64::try_from(device.step.as_nanos()).unwrap_or(u64::MAX);
    // Steps with few rows are decode steps, which read the head; in large ones its share is
    // negligible.
    let price = |rows: u32| RowPrice {
        rows,
        nanos: step + nanos((read(rows) + head_read).max(row * f64::from(rows))),
    };
    let pair = seconds(model.pair_flops as f64, device.flops_per_second);
    let token = seconds(model.token_bytes as f64, device.bytes_per_second);
    Prices {
        rows: knots(step_tokens_max).map(price).collect(),
        pair_picos: (pair * 1e12) as u64,
        context_picos: (token.max(pair) * 1e12) as u64,
        draw_nanos: nanos(seconds(2.0 * head, device.flops_per_second)),
        ..Prices::default()
    }
}

/// Rows at which the curve may bend: every power of two, and the maximum.
fn knots(step_tokens_max: u32) -> impl Iterator<Item = u32> {
    let most = step_tokens_max.max(1);
    let doublings = (0..31).map(|power| 1 << power);
    doublings.take_while(move |rows| *rows < most).chain([most])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Predict;
    use cleave_models::ExpertsCost;

    /// Llama 3.1 8B in bf16: 8.03 billion weights, a billion of them in the two embeddings.
    fn llama_8b() -> ModelCost {
        ModelCost {
            layer_weights: 6_979_321_856,
            head_weights: 525_336_576,
            pair_flops: 4 * 32 * 4096,
            layer_bytes: 2 * 6_979_321_856,
            experts: ExpertsCost::NONE,
            head_bytes: 2 * 525_336_576,
            token_bytes: 128 << 10,
        }
    }

    #[test]
    fn decode_is_memory_bound_and_prefill_compute_bound() {
        let device = DeviceSpec {
            flops_per_second: 989e12,
            bytes_per_second: 3.35e12,
            step: Duration::ZERO,
        };
        let prices = roofline(&device, &llama_8b(), 8192);
        let decode = prices.decode(1, 1000).as_secs_f64();
        assert!((0.0044..0.0047).contains(&decode), "15 GB: {decode}");
        let prefill = prices.prefill(0, 8192, 8192).as_secs_f64();
        assert!((0.115..0.150).contains(&prefill), "125 TFLOP: {prefill}");
        let work = StepWork::prefill(0, 8192);
        let busy = Duration::from_secs_f64(prefill * 2.0);
        let used = flops_used(&llama_8b(), &device, &work, busy);
        assert!((0.45..=0.51).contains(&used), "half: {used}");
        let decode = StepWork::decode(1000);
        let busy = prices.decode(1, 1000);
        let used = bytes_used(&llama_8b(), &device, &decode, 1, busy);
        assert!((0.95..=1.01).contains(&used), "all: {used}");
    }

    /// A model of two layers, counted by hand.
    fn tiny() -> ModelCost {
        ModelCost {
            layer_weights: 288,
            head_weights: 40,
            pair_flops: 32,
            layer_bytes: 576,
            experts: ExpertsCost::NONE,
            head_bytes: 80,
            token_bytes: 16,
        }
    }

    /// 1024 operations and 1024 bytes in a second: all times are exact.
    fn slow_device() -> DeviceSpec {
        DeviceSpec {
            flops_per_second: 1024.0,
            bytes_per_second: 1024.0,
            step: Duration::from_millis(1),
        }
    }

    #[test]
    fn utilisation_is_work_over_what_the_time_allows() {
        let (model, device) = (tiny(), slow_device());
        let rows = StepWork {
            rows: 16,
            ..StepWork::default()
        };
        let busy = Duration::from_secs(18);
        assert_eq!(flops_used(&model, &device, &rows, busy), 0.5);
        assert_eq!(bytes_used(&model, &device, &rows, 16, busy), 0.5);
        assert_eq!(flops_used(&model, &device, &rows, Duration::ZERO), 0.0);
    }

    #[test]
    fn a_step_takes_the_longer_of_reading_and_arithmetic() {
        let prices = roofline(&slow_device(), &tiny(), 6);
        let rows = prices.rows.iter().map(|knot| (knot.rows, knot.nanos));
        // One row reads 656 bytes; each further row is 576 operations.
        let expected = [
            (1, 641_625_000),
            (2, 1_126_000_000),
            (4, 2_251_000_000),
            (6, 3_376_000_000),
        ];
        assert_eq!(rows.collect::<Vec<_>>(), expected);
        assert_eq!(prices.pair_picos, 31_250_000_000);
        assert_eq!(prices.draw_nanos, 78_125_000);
        assert_eq!(prices.context_picos, 31_250_000_000, "bound by arithmetic");
        let starved = DeviceSpec {
            bytes_per_second: 128.0,
            ..slow_device()
        };
        let prices = roofline(&starved, &tiny(), 6);
        assert_eq!(prices.context_picos, 125_000_000_000, "bound by memory");
        assert_eq!(prices.rows[1].nanos, 5_126_000_000, "bound by memory");
    }

    #[test]
    fn an_unknown_device_takes_its_step_and_nothing_else() {
        let unknown = DeviceSpec {
            step: Duration::from_micros(5),
            ..DeviceSpec::default()
        };
        let prices = roofline(&unknown, &tiny(), 2);
        let nanos = prices.rows.iter().map(|knot| knot.nanos);
        assert_eq!(nanos.collect::<Vec<_>>(), [5_000, 5_000]);
        let rest = (prices.pair_picos, prices.context_picos, prices.draw_nanos);
        assert_eq!(rest, (0, 0, 0));
    }

    #[test]
    fn knots_are_the_doublings_and_the_most() {
        let of = |most| knots(most).collect::<Vec<_>>();
        assert_eq!([of(0), of(1)], [[1], [1]]);
        assert_eq!(of(4), [1, 2, 4]);
        assert_eq!(of(6), [1, 2, 4, 6]);
    }
}
