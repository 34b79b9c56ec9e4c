//! Lower bounds of costs, from a device's datasheet and a model's sizes.
//!
//! Owns: operations and bytes of work, and the prices that follow (the roofline: Williams, Waterman
//! and Patterson 2009). Never: measures. Invariant: a step takes as long as the slower of its
//! arithmetic and its memory.

use cleave_domain::{Prices, RowPrice, StepWork};
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

/// The sizes of a model that determine its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSizes {
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Width of the gate.
    pub intermediate: u32,
    pub query_heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// Bytes of all layers' weights as stored on the device: fewer than two for each weight where
    /// they are quantised.
    pub layer_bytes: u64,
    /// Bytes of the head's weights.
    pub head_bytes: u64,
    /// Bytes of a key's or a value's element.
    pub kv_element_bytes: u32,
    /// Bytes of the quantisation scale of a key or a value in every head, or 0.
    #[serde(default)]
    pub kv_scale_bytes: u32,
}

impl ModelSizes {
    /// The same model with weights, keys and values of `element_bytes` bytes each.
    pub fn stored_in(self, element_bytes: u32) -> Self {
        Self {
            layer_bytes: self.layer_weights() * u64::from(element_bytes),
            head_bytes: self.head_weights() * u64::from(element_bytes),
            kv_element_bytes: element_bytes,
            kv_scale_bytes: 0,
            ..self
        }
    }

    /// Weights of the layers, applied to every token of a step.
    pub fn layer_weights(&self) -> u64 {
        let wide = |a: u32, b: u32| u64::from(a) * u64::from(b);
        let (query, kv) = (self.query_heads, self.kv_heads);
        let attention = wide(self.hidden, self.head_dim) * u64::from(2 * query + 2 * kv);
        let gated = 3 * wide(self.hidden, self.intermediate);
        u64::from(self.layers) * (attention + gated)
    }

    /// Weights of the output head.
    pub fn head_weights(&self) -> u64 {
        u64::from(self.hidden) * u64::from(self.vocab)
    }

    /// Bytes of keys and values of a token.
    pub fn token_bytes(&self) -> u64 {
        let head = u64::from(self.head_dim) * u64::from(self.kv_element_bytes);
        let heads = 2 * u64::from(self.layers) * u64::from(self.kv_heads);
        heads * (head + u64::from(self.kv_scale_bytes))
    }

    /// Operations of one query token that attends to one token.
    fn pair_flops(&self) -> u64 {
        4 * u64::from(self.layers) * u64::from(self.query_heads) * u64::from(self.head_dim)
    }
}

/// Operations of this work, of one step or of many together.
pub fn flops(shape: &ModelSizes, work: &StepWork) -> f64 {
    let product = |weights: u64, rows: u32| 2.0 * weights as f64 * f64::from(rows);
    let attended = (work.pairs + work.context_tokens) as f64;
    product(shape.layer_weights(), work.rows)
        + product(shape.head_weights(), work.draws)
        + shape.pair_flops() as f64 * attended
}

/// Bytes of memory that `steps` steps with this work together read at least: every weight once in
/// each step, the head's in each step that draws, and the attended keys and values.
pub fn bytes(shape: &ModelSizes, work: &StepWork, steps: u64) -> f64 {
    let drawing = steps.min(u64::from(work.draws));
    let weights =
        shape.layer_bytes as f64 * steps as f64 + shape.head_bytes as f64 * drawing as f64;
    weights + shape.token_bytes() as f64 * work.context_tokens as f64
}

/// Share of a device's arithmetic (MFU) that `work` used in its busy time, 0 to 1.
pub fn flops_used(shape: &ModelSizes, device: &DeviceSpec, work: &StepWork, busy: Duration) -> f64 {
    part(flops(shape, work), device.flops_per_second, busy)
}

/// Share of a device's memory bandwidth (MBU) that `steps` steps used in its busy time, 0 to 1.
pub fn bytes_used(
    shape: &ModelSizes,
    device: &DeviceSpec,
    work: &StepWork,
    steps: u64,
    busy: Duration,
) -> f64 {
    part(bytes(shape, work, steps), device.bytes_per_second, busy)
}

fn part(used: f64, per_second: f64, busy: Duration) -> f64 {
    let most = per_second * busy.as_secs_f64();
    if most > 0.0 { used / most } else { 0.0 }
}

/// Prices before any measurement, for steps of at most `step_tokens_max` tokens.
pub fn roofline(device: &DeviceSpec, shape: &ModelSizes, step_tokens_max: u32) -> Prices {
    let seconds = |amount: f64, per_second: f64| {
        if per_second > 0.0 {
            amount / per_second
        } else {
            0.0
        }
    };
    let nanos = |seconds: f64| (seconds * 1e9) as u64;
    let weights = shape.layer_weights() as f64;
    let read = seconds(shape.layer_bytes as f64, device.bytes_per_second);
    let row = seconds(2.0 * weights, device.flops_per_second);
    let head = shape.head_weights() as f64;
    let head_read = seconds(shape.head_bytes as f64, device.bytes_per_second);
    let step = u64::try_from(device.step.as_nanos()).unwrap_or(u64::MAX);
    // Steps with few rows are decode steps, which read the head; in large ones its share is
    // negligible.
    let price = |rows: u32| RowPrice {
        rows,
        nanos: step + nanos((read + head_read).max(row * f64::from(rows))),
    };
    let pair = seconds(shape.pair_flops() as f64, device.flops_per_second);
    let token = seconds(shape.token_bytes() as f64, device.bytes_per_second);
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

    /// Llama 3.1 8B in bf16: 8.03 billion weights, a billion of them in the two embeddings.
    fn llama_8b() -> ModelSizes {
        ModelSizes {
            layers: 32,
            hidden: 4096,
            intermediate: 14_336,
            query_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab: 128_256,
            ..ModelSizes::default()
        }
        .stored_in(2)
    }

    /// Four bits a weight, and one byte for each element of keys and values.
    #[test]
    fn quantised_weights_and_kv_cost_their_stored_bytes() {
        let narrow = ModelSizes {
            layer_bytes: llama_8b().layer_weights() / 2,
            kv_element_bytes: 1,
            ..llama_8b()
        };
        let (work, steps) = (StepWork::decode(1000), 1);
        let dense = bytes(&llama_8b(), &work, steps);
        let saved = dense - bytes(&narrow, &work, steps);
        let (weights, context) = (llama_8b().layer_weights() * 3 / 2, 1000 * (64 << 10));
        assert_eq!(saved, (weights + context) as f64);
        let scaled = ModelSizes {
            kv_scale_bytes: 4,
            ..narrow
        };
        assert_eq!(scaled.token_bytes(), 32 * 2 * 8 * (128 + 4));
    }

    #[test]
    fn weight_counts_match_the_model_card() {
        let shape = llama_8b();
        let norms = 4096 * 65;
        let all = shape.layer_weights() + 2 * shape.head_weights() + norms;
        assert_eq!(all, 8_030_261_248, "as its model card counts them");
        assert_eq!(shape.token_bytes(), 128 << 10);
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

    /// Sizes that can be counted by hand, stored in two bytes an element.
    fn tiny() -> ModelSizes {
        ModelSizes {
            layers: 2,
            hidden: 4,
            intermediate: 8,
            query_heads: 2,
            kv_heads: 1,
            head_dim: 2,
            vocab: 10,
            ..ModelSizes::default()
        }
        .stored_in(2)
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
    fn work_is_counted_in_operations_and_bytes() {
        let work = StepWork {
            rows: 3,
            pairs: 5,
            context_tokens: 7,
            draws: 2,
        };
        let shape = tiny();
        assert_eq!((shape.layer_weights(), shape.head_weights()), (288, 40));
        assert_eq!((shape.layer_bytes, shape.head_bytes), (576, 80));
        assert_eq!((shape.token_bytes(), shape.pair_flops()), (16, 32));
        let scaled = ModelSizes {
            kv_scale_bytes: 4,
            ..shape
        };
        assert_eq!(scaled.token_bytes(), 32);
        assert_eq!(scaled.stored_in(2), shape, "plain elements have no scale");
        let dense = 2.0 * 288.0 * 3.0 + 2.0 * 40.0 * 2.0;
        assert_eq!(flops(&shape, &work), dense + 32.0 * 12.0);
        // The head is read in each step that draws: in one of one, in two of four.
        assert_eq!(bytes(&shape, &work, 1), 576.0 + 80.0 + 16.0 * 7.0);
        assert_eq!(bytes(&shape, &work, 4), 4.0 * 576.0 + 2.0 * 80.0 + 112.0);
    }

    #[test]
    fn the_part_in_use_is_work_over_what_the_time_allows() {
        let (shape, device) = (tiny(), slow_device());
        let rows = StepWork {
            rows: 16,
            ..StepWork::default()
        };
        let busy = Duration::from_secs(18);
        assert_eq!(flops_used(&shape, &device, &rows, busy), 0.5);
        assert_eq!(bytes_used(&shape, &device, &rows, 16, busy), 0.5);
        assert_eq!(flops_used(&shape, &device, &rows, Duration::ZERO), 0.0);
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
