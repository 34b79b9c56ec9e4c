//! What work must cost at least, from a device's datasheet and a model's shape.
//!
//! Owns: operations and bytes of work, and the prices that follow (the roofline: Williams, Waterman
//! and Patterson 2009). Never: measures. Invariant: a step takes as long as the slower of its
//! arithmetic and its memory.

use cleave_domain::{Prices, RowPrice, Work};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a device can do, as measured or from its datasheet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// Operations of dense products per second, a multiplication and its addition being two.
    pub flops_per_second: f64,
    /// Bytes of memory read per second.
    pub bytes_per_second: f64,
    /// What any step takes, however little there is to do.
    pub step: Duration,
}

/// The sizes of a model that its cost depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Width of the gate.
    pub intermediate: u32,
    /// Query heads.
    pub query_heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// Bytes of all the layers' weights where they are multiplied: fewer than two for each where they are quantised.
    pub layer_bytes: u64,
    /// Bytes of the head's weights.
    pub head_bytes: u64,
    /// Bytes of a key's or a value's element.
    pub kv_element_bytes: u32,
    /// Bytes of the scale that a key or a value has in every head, where it has one.
    #[serde(default)]
    pub kv_scale_bytes: u32,
}

impl Shape {
    /// With weights, keys and values of so many bytes an element.
    pub fn stored_in(self, element_bytes: u32) -> Self {
        Self {
            layer_bytes: self.layer_weights() * u64::from(element_bytes),
            head_bytes: self.head_weights() * u64::from(element_bytes),
            kv_element_bytes: element_bytes,
            kv_scale_bytes: 0,
            ..self
        }
    }

    /// Weights that every token of a step goes through.
    pub fn layer_weights(&self) -> u64 {
        let wide = |a: u32, b: u32| u64::from(a) * u64::from(b);
        let (query, kv) = (self.query_heads, self.kv_heads);
        let attention = wide(self.hidden, self.head_dim) * u64::from(2 * query + 2 * kv);
        let gated = 3 * wide(self.hidden, self.intermediate);
        u64::from(self.layers) * (attention + gated)
    }

    /// Weights of the last product.
    pub fn head_weights(&self) -> u64 {
        u64::from(self.hidden) * u64::from(self.vocab)
    }

    /// Bytes of keys and values of a token.
    pub fn token_bytes(&self) -> u64 {
        let head = u64::from(self.head_dim) * u64::from(self.kv_element_bytes);
        let heads = 2 * u64::from(self.layers) * u64::from(self.kv_heads);
        heads * (head + u64::from(self.kv_scale_bytes))
    }

    /// Operations of a query token attending to one token.
    fn pair_flops(&self) -> u64 {
        4 * u64::from(self.layers) * u64::from(self.query_heads) * u64::from(self.head_dim)
    }
}

/// Operations of so much work, of one step or of many together.
pub fn flops(shape: &Shape, work: &Work) -> f64 {
    let product = |weights: u64, rows: u32| 2.0 * weights as f64 * f64::from(rows);
    let attended = (work.pairs + work.context_tokens) as f64;
    product(shape.layer_weights(), work.rows)
        + product(shape.head_weights(), work.draws)
        + shape.pair_flops() as f64 * attended
}

/// Bytes of memory that `steps` steps of so much work together read at least: every weight once in
/// each step, the head's in each that draws, and what is attended to.
pub fn bytes(shape: &Shape, work: &Work, steps: u64) -> f64 {
    let drawing = steps.min(u64::from(work.draws));
    let weights =
        shape.layer_bytes as f64 * steps as f64 + shape.head_bytes as f64 * drawing as f64;
    weights + shape.token_bytes() as f64 * work.context_tokens as f64
}

/// The part of a device's arithmetic (MFU) that `work` used in the time that it was busy, 0 to 1.
pub fn flops_used(shape: &Shape, device: &Device, work: &Work, busy: Duration) -> f64 {
    part(flops(shape, work), device.flops_per_second, busy)
}

/// The part of a device's memory bandwidth (MBU) that `steps` steps used in the time that it was
/// busy, 0 to 1.
pub fn bytes_used(
    shape: &Shape,
    device: &Device,
    (work, steps): (&Work, u64),
    busy: Duration,
) -> f64 {
    part(bytes(shape, work, steps), device.bytes_per_second, busy)
}

fn part(used: f64, per_second: f64, busy: Duration) -> f64 {
    let most = per_second * busy.as_secs_f64();
    if most > 0.0 { used / most } else { 0.0 }
}

/// Prices before anything was measured, for steps of at most `step_tokens_max` tokens.
pub fn roofline(device: &Device, shape: &Shape, step_tokens_max: u32) -> Prices {
    let seconds = |amount: f64, per_second: f64| match per_second > 0.0 {
        true => amount / per_second,
        false => 0.0,
    };
    let nanos = |seconds: f64| (seconds * 1e9) as u64;
    let weights = shape.layer_weights() as f64;
    let read = seconds(shape.layer_bytes as f64, device.bytes_per_second);
    let row = seconds(2.0 * weights, device.flops_per_second);
    let head = shape.head_weights() as f64;
    let head_read = seconds(shape.head_bytes as f64, device.bytes_per_second);
    let step = u64::try_from(device.step.as_nanos()).unwrap_or(u64::MAX);
    // Few rows are sequences that draw, so the head is read; of many it hardly shows.
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

/// Where the curve of rows may bend: every doubling, and the most.
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
    fn llama_8b() -> Shape {
        Shape {
            layers: 32,
            hidden: 4096,
            intermediate: 14_336,
            query_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab: 128_256,
            ..Shape::default()
        }
        .stored_in(2)
    }

    /// Four bits a weight, and bytes for keys and values.
    #[test]
    fn what_is_read_are_the_bytes_that_are_stored() {
        let narrow = Shape {
            layer_bytes: llama_8b().layer_weights() / 2,
            kv_element_bytes: 1,
            ..llama_8b()
        };
        let (work, steps) = (Work::decode(1000), 1);
        let dense = bytes(&llama_8b(), &work, steps);
        let saved = dense - bytes(&narrow, &work, steps);
        let (weights, context) = (llama_8b().layer_weights() * 3 / 2, 1000 * (64 << 10));
        assert_eq!(saved, (weights + context) as f64);
        let scaled = Shape {
            kv_scale_bytes: 4,
            ..narrow
        };
        assert_eq!(scaled.token_bytes(), 32 * 2 * 8 * (128 + 4));
    }

    #[test]
    fn weights_are_those_of_the_published_model() {
        let shape = llama_8b();
        let norms = 4096 * 65;
        let all = shape.layer_weights() + 2 * shape.head_weights() + norms;
        assert_eq!(all, 8_030_261_248, "as its model card counts them");
        assert_eq!(shape.token_bytes(), 128 << 10);
    }

    #[test]
    fn one_sequence_is_bound_by_memory_and_a_prompt_by_arithmetic() {
        let device = Device {
            flops_per_second: 989e12,
            bytes_per_second: 3.35e12,
            step: Duration::ZERO,
        };
        let prices = roofline(&device, &llama_8b(), 8192);
        let decode = prices.decode(1, 1000).as_secs_f64();
        assert!((0.0044..0.0047).contains(&decode), "15 GB: {decode}");
        let prefill = prices.prefill(0, 8192, 8192).as_secs_f64();
        assert!((0.115..0.150).contains(&prefill), "125 TFLOP: {prefill}");
        let work = Work::prefill(0, 8192);
        let busy = Duration::from_secs_f64(prefill * 2.0);
        let used = flops_used(&llama_8b(), &device, &work, busy);
        assert!((0.45..=0.51).contains(&used), "half: {used}");
        let decode = (&Work::decode(1000), 1);
        let busy = prices.decode(1, 1000);
        let used = bytes_used(&llama_8b(), &device, decode, busy);
        assert!((0.95..=1.01).contains(&used), "all: {used}");
    }
}
