//! The least time that a processor would take for the same work.
//!
//! Owns: the ceilings, measured just before and after each sample, because machines are shared and
//! their memory speed changes within minutes. Never: computes a model. Invariant: the floor of a
//! sample is the longer of two times: its operations at the measured rate of products, and its
//! bytes at the measured rate of reads. Both counts come from `models`, so every weight counts
//! once a step, and caches are ignored. Where the rate of products is unknown there is no floor.

use super::sample::BenchSample;
use cleave_cpu::{BandwidthReader, DotType, Isa, operations_per_second};
use cleave_models::ModelCost;

/// Kind of a processor's matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessorProducts {
    pub(crate) isa: Isa,
    pub(crate) dot: DotType,
}

pub(super) struct CeilingMeter {
    reader: BandwidthReader,
    products: ProcessorProducts,
    threads: usize,
    model: ModelCost,
}

/// Speed of the machine at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct MachineRates {
    operations_per_second: Option<f64>,
    pub(super) bytes_per_second: f64,
}

impl MachineRates {
    fn mean(self, other: Self) -> Self {
        let both = self
            .operations_per_second
            .zip(other.operations_per_second)
            .map(|(one, two)| one.max(two));
        Self {
            // Another process can only lower the measured rate of products, so the larger one is
            // right.
            operations_per_second: both,
            bytes_per_second: f64::midpoint(self.bytes_per_second, other.bytes_per_second),
        }
    }
}

/// The floor of a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleFloor {
    /// Tokens per second that the machine could have reached; `None` where the rate of products is
    /// unknown.
    pub(super) tokens_per_second: Option<f64>,
    /// Measured rate of reads.
    pub(super) bytes_per_second: f64,
}

impl CeilingMeter {
    /// # Errors
    /// If memory is short.
    pub(super) fn new(
        products: ProcessorProducts,
        threads: usize,
        model: ModelCost,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            reader: BandwidthReader::new(threads)?,
            products,
            threads,
            model,
        })
    }

    pub(super) fn measure(&self) -> MachineRates {
        let ProcessorProducts { isa, dot } = self.products;
        MachineRates {
            operations_per_second: operations_per_second(isa, dot, self.threads),
            bytes_per_second: self.reader.bytes_per_second(),
        }
    }

    /// Computes the floor of a sample between two measurements.
    pub(super) fn floor(
        &self,
        sample: &BenchSample,
        before: MachineRates,
        after: MachineRates,
    ) -> SampleFloor {
        let rates = before.mean(after);
        let seconds = least_seconds(&self.model, sample, rates);
        SampleFloor {
            tokens_per_second: seconds.map(|seconds| f64::from(sample.tokens_count) / seconds),
            bytes_per_second: rates.bytes_per_second,
        }
    }
}

fn least_seconds(model: &ModelCost, sample: &BenchSample, rates: MachineRates) -> Option<f64> {
    let steps = sample.works.iter();
    let read: f64 = steps.clone().map(|work| model.bytes(work, 1)).sum();
    let done: f64 = steps.map(|work| model.flops(work)).sum();
    let computing = done / rates.operations_per_second?;
    Some(computing.max(read / rates.bytes_per_second))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::StepWork;
    use cleave_models::ExpertsCost;

    /// Llama-3.2-1B in bf16 at the ceilings of two cores with 1,102 GFLOP/s of bf16 products,
    /// computed by hand.
    #[test]
    fn the_floor_of_a_1b_model_equals_the_one_by_hand() {
        let layer_weights = 16 * (2048 * 64 * (2 * 32 + 2 * 8) + 3 * 2048 * 8192);
        let head_weights = 2048 * 128_256;
        let model = ModelCost {
            layer_weights,
            head_weights,
            pair_flops: 4 * 16 * 32 * 64,
            layer_bytes: 2 * layer_weights,
            experts: ExpertsCost::NONE,
            head_bytes: 2 * head_weights,
            token_bytes: 2 * 2 * 16 * 8 * 64,
        };
        let rates = MachineRates {
            operations_per_second: Some(1102e9),
            bytes_per_second: 45e9,
        };
        let speed_at = |rates: MachineRates, tokens_count: u32, works: Vec<StepWork>| {
            let sample = BenchSample {
                tokens_count,
                works,
                seconds: Vec::new(),
                idle_seconds: Vec::new(),
            };
            least_seconds(&model, &sample, rates).map(|seconds| f64::from(tokens_count) / seconds)
        };
        let speed = |tokens_count, works| speed_at(rates, tokens_count, works).unwrap_or_default();
        let prompt = |position, tokens, draws| StepWork {
            draws,
            ..StepWork::prefill(position, tokens)
        };
        assert_eq!(speed(512, vec![prompt(0, 512, 1)]).round(), 556.0);
        let chunks = (0..4).map(|i| prompt(512 * i, 512, u32::from(i == 3)));
        assert_eq!(speed(2048, chunks.collect()).round(), 530.0);
        assert_eq!(speed(1, vec![StepWork::decode(129)]).round(), 18.0);
        let all = (0..32).map(|_| StepWork::decode(129));
        let all = all.fold(StepWork::default(), |mut sum, work| {
            sum += work;
            sum
        });
        assert_eq!((speed(32, vec![all]) / 10.0).round(), 44.0);
        let unknown = MachineRates {
            operations_per_second: None,
            ..rates
        };
        assert_eq!(speed_at(unknown, 1, vec![StepWork::decode(129)]), None);
    }
}
