//! What a processor would take at least for the same work.
//!
//! Owns: the ceilings, measured just before and after each sample, because machines are shared and their memory's speed
//! changes within minutes. Never: computes a model.
//! Invariant: the floor of a sample is the longer of its operations at the rate of its products and its bytes at the rate of its
//! reads; both counts are `planner`'s, so every weight counts once a step, and caches are left out. Where the rate of products is not
//! known there is none.

use super::sample::Sampled;
use cleave_cpu::{Dot, Isa, Reader, operations_per_second};
use cleave_planner::{Shape, bytes, flops};

/// How a processor's products are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Products {
    pub(crate) isa: Isa,
    pub(crate) dot: Dot,
}

/// Measures ceilings.
pub(super) struct Ceilings {
    reader: Reader,
    products: Products,
    threads: usize,
    shape: Shape,
}

/// What the machine could do at a moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    operations_per_second: Option<f64>,
    pub(super) bytes_per_second: f64,
}

impl Rates {
    fn mean(self, other: Self) -> Self {
        let both = self
            .operations_per_second
            .zip(other.operations_per_second)
            .map(|(one, two)| one.max(two));
        Self {
            // Nobody changes a processor's products; what is smaller was disturbed.
            operations_per_second: both,
            bytes_per_second: f64::midpoint(self.bytes_per_second, other.bytes_per_second),
        }
    }
}

/// A sample beside its floor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floor {
    /// Tokens per second that the machine could do then; `None` where no loop measures its products.
    pub(super) tokens_per_second: Option<f64>,
    /// Read then.
    pub(super) bytes_per_second: f64,
}

impl Ceilings {
    /// # Errors
    /// If memory is short.
    pub(super) fn new(products: Products, threads: usize, shape: Shape) -> anyhow::Result<Self> {
        Ok(Self {
            reader: Reader::new(threads)?,
            products,
            threads,
            shape,
        })
    }

    pub(super) fn now(&self) -> Rates {
        let Products { isa, dot } = self.products;
        Rates {
            operations_per_second: operations_per_second(isa, dot, self.threads),
            bytes_per_second: self.reader.bytes_per_second(),
        }
    }

    /// Of a sample between two moments.
    pub(super) fn floor(&self, sample: &Sampled, before: Rates, after: Rates) -> Floor {
        let rates = before.mean(after);
        let seconds = least_seconds(&self.shape, sample, rates);
        Floor {
            tokens_per_second: seconds.map(|seconds| f64::from(sample.tokens_count) / seconds),
            bytes_per_second: rates.bytes_per_second,
        }
    }
}

fn least_seconds(shape: &Shape, sample: &Sampled, rates: Rates) -> Option<f64> {
    let steps = sample.works.iter();
    let read: f64 = steps.clone().map(|work| bytes(shape, work, 1)).sum();
    let done: f64 = steps.map(|work| flops(shape, work)).sum();
    let computing = done / rates.operations_per_second?;
    Some(computing.max(read / rates.bytes_per_second))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::Work;

    /// Llama-3.2-1B in bf16 at the ceilings of two cores with 1,102 GFLOP/s of bf16 products: what was reckoned by hand.
    #[test]
    fn a_floor_is_that_of_a_known_model() {
        let shape = Shape {
            layers: 16,
            hidden: 2048,
            intermediate: 8192,
            query_heads: 32,
            kv_heads: 8,
            head_dim: 64,
            vocab: 128_256,
            ..Shape::default()
        }
        .stored_in(2);
        let known = Rates {
            operations_per_second: Some(1102e9),
            bytes_per_second: 45e9,
        };
        let speed_at = |rates: Rates, tokens_count: u32, works: Vec<Work>| {
            let sample = Sampled {
                tokens_count,
                works,
                seconds: Vec::new(),
                idle_seconds: Vec::new(),
            };
            least_seconds(&shape, &sample, rates).map(|seconds| f64::from(tokens_count) / seconds)
        };
        let speed = |tokens_count, works| speed_at(known, tokens_count, works).unwrap_or_default();
        let prompt = |position, tokens, draws| Work {
            draws,
            ..Work::prefill(position, tokens)
        };
        assert_eq!(speed(512, vec![prompt(0, 512, 1)]).round(), 556.0);
        let chunks = (0..4).map(|i| prompt(512 * i, 512, u32::from(i == 3)));
        assert_eq!(speed(2048, chunks.collect()).round(), 530.0);
        assert_eq!(speed(1, vec![Work::decode(129)]).round(), 18.0);
        let all = (0..32).map(|_| Work::decode(129));
        let all = all.fold(Work::default(), |mut sum, work| {
            sum += work;
            sum
        });
        assert_eq!((speed(32, vec![all]) / 10.0).round(), 44.0);
        let unknown = Rates {
            operations_per_second: None,
            ..known
        };
        assert_eq!(speed_at(unknown, 1, vec![Work::decode(129)]), None);
    }
}
