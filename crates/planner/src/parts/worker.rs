//! A worker from parts: the times of its steps.
//!
//! Owns: the time of each kind of operation, and their sums as prices. Never: learns; reckons with
//! operations that overlap. Invariant: times grow with every amount; the devices of a
//! tensor-parallel group work at the same time, the stages of a pipeline one after the other.

use super::formats::{KvFormat, WeightFormat};
use super::hardware::{Arithmetic, DeviceLink, Hardware, ProductFormat};
use cleave_domain::{LinkPrice, Prices, RowPrice, StepWork};
use cleave_models::ModelParts;

/// Bytes of an element between products.
const ROW_ELEMENT_BYTES: f64 = 2.0;
/// Reads and writes of a row's `hidden` elements in a layer, beside its products: two norms with
/// their sums take six, attention's input and output two.
const HIDDEN_MOVES: f64 = 8.0;
/// Reads and writes of a row's elements within an MLP: both factors, and their product.
const MLP_MOVES: f64 = 3.0;
/// Rows of the product with the head, whose time for one row is a share of the time for so many.
const HEAD_ROWS: f64 = 512.0;
const NANOS: f64 = 1e9;
const PICOS: f64 = 1e12;

/// A worker: devices of one kind with a model.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSetup {
    pub hardware: Hardware,
    pub model: ModelParts,
    /// Format of the projections, but for experts.
    pub weights: WeightFormat,
    pub expert_weights: WeightFormat,
    pub kv: KvFormat,
    /// Devices that divide each layer.
    pub tensor_parallel: u32,
    /// Groups of devices that divide the layers.
    pub pipeline_parallel: u32,
    pub limits: StepLimits,
}

/// Limits of a worker's steps and memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLimits {
    /// Tokens of a step (`max_num_batched_tokens`).
    pub step_tokens_max: u32,
    /// Sequences of a step (`max_num_seqs`).
    pub sequences_max: u32,
    /// Share of a device's memory that the worker may use (`gpu_memory_utilization`).
    pub memory_share: f64,
}

impl WorkerSetup {
    /// Checks that the devices can hold the model so.
    ///
    /// # Errors
    /// Names the degree or the limit that does not fit.
    pub fn check(&self) -> Result<(), String> {
        let (tensor, pipeline) = (self.tensor_parallel, self.pipeline_parallel);
        let name = &self.hardware.name;
        if tensor == 0 || tensor > self.hardware.devices_per_node {
            let most = self.hardware.devices_per_node;
            return Err(format!(
                "tensor-parallel size {tensor}: a node of {name} has {most} devices"
            ));
        }
        if pipeline == 0 || pipeline > self.model.layers_count {
            let layers = self.model.layers_count;
            return Err(format!(
                "pipeline-parallel size {pipeline}: the model has {layers} layers"
            ));
        }
        let StepLimits {
            step_tokens_max,
            sequences_max,
            memory_share,
        } = self.limits;
        if step_tokens_max == 0 || sequences_max == 0 {
            return Err("a step needs room for a token and a sequence".to_owned());
        }
        if !(memory_share > 0.0 && memory_share <= 1.0) {
            return Err(format!("memory share {memory_share}: expected up to 1"));
        }
        self.hardware.check()
    }

    /// Devices of the worker.
    pub fn devices_count(&self) -> u32 {
        self.tensor_parallel * self.pipeline_parallel
    }

    /// Bytes of a token's keys and values, of all devices together.
    pub fn token_bytes(&self) -> u64 {
        self.model.kv_elements() * self.kv.element_bytes()
    }

    /// Seconds of a step.
    pub fn step_seconds(&self, work: &StepWork) -> f64 {
        self.rows_seconds(f64::from(work.rows))
            + self.pair_seconds() * work.pairs as f64
            + self.context_seconds() * work.context_tokens as f64
            + self.draw_seconds() * f64::from(work.draws)
    }

    /// The same as prices, with links to workers of other nodes.
    pub fn prices(&self) -> Prices {
        let mut longest = 0_u64;
        let rows = self.knots().map(|rows| {
            let nanos = (self.rows_seconds(f64::from(rows)) * NANOS).round() as u64;
            longest = longest.max(nanos);
            RowPrice {
                rows,
                nanos: longest,
            }
        });
        let rows = rows.collect();
        Prices {
            rows,
            pair_picos: (self.pair_seconds() * PICOS).round() as u64,
            context_picos: (self.context_seconds() * PICOS).round() as u64,
            draw_nanos: (self.draw_seconds() * NANOS).round() as u64,
            link: self.link_price(self.hardware.network_link),
            ..Prices::default()
        }
    }

    /// Price of the link between the worker's pool and host memory.
    pub fn host_link(&self) -> LinkPrice {
        self.link_price(self.hardware.host_link)
    }

    /// Price of one of the devices' links; each device sends its part of the keys and values.
    fn link_price(&self, link: DeviceLink) -> LinkPrice {
        let together = link.bytes_per_second * f64::from(self.devices_count());
        LinkPrice {
            latency_nanos: link.latency_nanos,
            byte_picos: ((PICOS / together).ceil() as u64).max(1),
        }
    }

    /// Rows at which the curve may bend: every power of two, and the maximum.
    fn knots(&self) -> impl Iterator<Item = u32> + use<> {
        let most = self.limits.step_tokens_max.max(1);
        let doublings = (0..31).map(|power| 1 << power);
        doublings.take_while(move |rows| *rows < most).chain([most])
    }

    // === the kinds of operations ===

    /// Seconds of everything that depends on rows alone.
    fn rows_seconds(&self, rows: f64) -> f64 {
        let shares = &self.hardware.shares;
        let layers = f64::from(self.model.layers_count);
        let fixed = layers * shares.layer_nanos as f64 + shares.step_nanos as f64;
        fixed / NANOS
            + self.dense_seconds(rows)
            + self.experts_seconds(rows)
            + self.head_read_seconds()
            + self.moves_seconds(rows)
            + self.windowed_pair_seconds() * rows
            + self.collectives_seconds(rows)
            + self.stages_seconds(rows)
    }

    /// The products that every row has, or the reading of their weights.
    fn dense_seconds(&self, rows: f64) -> f64 {
        let weights = self.model.dense_weights;
        let products = self.hardware.products(self.weights.product());
        let reading = self.reading_seconds(self.weights.bytes(weights));
        reading.max(self.product_seconds(weights, rows, products.speed(rows)))
    }

    /// The products of experts, or the reading of those that some row chose. Rows are few for each.
    fn experts_seconds(&self, rows: f64) -> f64 {
        let experts = self.model.experts;
        if experts.count == 0 || rows <= 0.0 {
            return 0.0;
        }
        let read = experts.share_read(rows);
        let bytes = self.expert_weights.bytes(experts.weights()) * read;
        let rows_each = rows * f64::from(experts.chosen) / (f64::from(experts.count) * read);
        let products = self.hardware.products(self.expert_weights.product());
        let speed = products.speed(rows_each) * self.hardware.shares.experts;
        let chosen = experts.weights_each * u64::from(experts.chosen);
        self.reading_seconds(bytes)
            .max(self.product_seconds(chosen, rows, speed))
    }

    fn product_seconds(&self, weights: u64, rows: f64, speed: f64) -> f64 {
        2.0 * weights as f64 * rows / (speed * f64::from(self.tensor_parallel))
    }

    /// Each device of a tensor-parallel group reads its part, at the same time as the others.
    fn reading_seconds(&self, bytes: f64) -> f64 {
        bytes / (self.bytes_per_second() * f64::from(self.tensor_parallel))
    }

    fn bytes_per_second(&self) -> f64 {
        self.hardware.memory_bytes_per_second * self.hardware.shares.weights_read
    }

    fn head_read_seconds(&self) -> f64 {
        self.reading_seconds(WeightFormat::Bf16.bytes(self.model.head_weights))
    }

    /// The time in which rows move through memory between products. Every device of a group has
    /// whole rows, and a part of an MLP's elements.
    fn moves_seconds(&self, rows: f64) -> f64 {
        let ModelParts {
            layers_count,
            hidden,
            mlp_elements,
            ..
        } = &self.model;
        let whole = f64::from(*layers_count) * *hidden as f64 * HIDDEN_MOVES;
        let parted = *mlp_elements as f64 * MLP_MOVES / f64::from(self.tensor_parallel);
        rows * (whole + parted) * ROW_ELEMENT_BYTES / self.bytes_per_second()
    }

    /// Two sums over the group for each layer, after attention and after the MLP. In a ring each
    /// device sends nearly all of its rows twice.
    fn collectives_seconds(&self, rows: f64) -> f64 {
        if self.tensor_parallel == 1 {
            return 0.0;
        }
        let DeviceLink {
            latency_nanos,
            bytes_per_second,
        } = self.hardware.node_link;
        let group = f64::from(self.tensor_parallel);
        let sent = 2.0 * (group - 1.0) / group * self.row_bytes() * rows;
        let each = latency_nanos as f64 / NANOS
            + sent / (bytes_per_second * self.hardware.shares.collectives);
        2.0 * f64::from(self.model.layers_count) * each
    }

    /// Rows go from stage to stage, a part from each device of a group.
    fn stages_seconds(&self, rows: f64) -> f64 {
        let DeviceLink {
            latency_nanos,
            bytes_per_second,
        } = self.hardware.network_link;
        let each = latency_nanos as f64 / NANOS
            + self.row_bytes() * rows / (bytes_per_second * f64::from(self.tensor_parallel));
        f64::from(self.pipeline_parallel - 1) * each
    }

    fn row_bytes(&self) -> f64 {
        self.model.hidden as f64 * ROW_ELEMENT_BYTES
    }

    /// Attention of a prompt's row to one token.
    fn pair_seconds(&self) -> f64 {
        self.attention_seconds(self.model.whole.pair_flops)
    }

    /// Attention of a row to its windows, as if each were full.
    fn windowed_pair_seconds(&self) -> f64 {
        self.attention_seconds(self.model.windowed.pair_flops)
    }

    fn attention_seconds(&self, operations: u64) -> f64 {
        let Arithmetic {
            operations_per_second,
            ..
        } = self.hardware.products(ProductFormat::Bf16);
        let speed = operations_per_second * self.hardware.shares.prefill_attention;
        operations as f64 / (speed * f64::from(self.tensor_parallel))
    }

    /// Attention of a decoding row to one token: its keys and values are read, or it is bound by
    /// arithmetic as a prompt's is.
    fn context_seconds(&self) -> f64 {
        let reading = self.kv_read_seconds(self.model.whole.kv_elements);
        reading.max(self.pair_seconds())
    }

    /// Devices beyond the KV heads have copies, and read as much as the others.
    fn kv_read_seconds(&self, elements: u64) -> f64 {
        let parts = self.tensor_parallel.min(self.model.kv_heads.max(1));
        let bytes = (elements * self.kv.element_bytes()) as f64 / f64::from(parts);
        let share = self.hardware.shares.decode_attention;
        bytes / (self.hardware.memory_bytes_per_second * share)
    }

    /// A row that draws: its product with the head, and the reading of its windows.
    fn draw_seconds(&self) -> f64 {
        let speed = self.hardware.products(ProductFormat::Bf16).speed(HEAD_ROWS);
        self.product_seconds(self.model.head_weights, 1.0, speed)
            + self.kv_read_seconds(self.model.windowed.kv_elements)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::Predict;

    /// A model of the table on devices of the catalogue, in 16 bits.
    pub(crate) fn worker(hardware: &str, model: &str, tensor_parallel: u32) -> WorkerSetup {
        WorkerSetup {
            hardware: Hardware::named(hardware).unwrap(),
            model: ModelParts::published(model).unwrap(),
            weights: WeightFormat::Bf16,
            expert_weights: WeightFormat::Bf16,
            kv: KvFormat::Bf16,
            tensor_parallel,
            pipeline_parallel: 1,
            limits: StepLimits {
                step_tokens_max: 8192,
                sequences_max: 256,
                memory_share: 0.9,
            },
        }
    }

    fn decode(worker: &WorkerSetup, sequences: u32, context: u64) -> f64 {
        worker.step_seconds(&StepWork {
            rows: sequences,
            pairs: 0,
            context_tokens: u64::from(sequences) * context,
            draws: sequences,
        }) * 1e3
    }

    fn prefill(worker: &WorkerSetup, tokens: u32) -> f64 {
        worker.prices().prefill(0, tokens, 8192).as_secs_f64() * 1e3
    }

    #[test]
    fn prices_and_seconds_agree_at_knots() {
        let worker = worker("h100", "gpt-oss-20b", 2);
        let prices = worker.prices();
        for work in [StepWork::decode(900), StepWork::prefill(64, 4096)] {
            let (seconds, priced) = (worker.step_seconds(&work), prices.step(&work).as_secs_f64());
            assert!((priced / seconds - 1.0).abs() < 0.01, "{seconds} {priced}");
        }
        assert!(prices.rows.is_sorted_by_key(|knot| (knot.rows, knot.nanos)));
    }

    /// By hand, in milliseconds: 13.96 GB of layers and 1.05 GB of the head at 0.8 of 3.35 TB/s
    /// take 5.601, 32 layers of 18 us and the step 0.876, moves 0.002, 1024 tokens of 131,072 bytes
    /// at 0.8 take 0.050, the draw 0.001. A prompt of 2048 has 28.59 TFLOP, at 0.837 of 989.
    #[test]
    fn times_are_the_sums_of_their_kinds() {
        let worker = worker("h100", "llama-3.1-8b", 1);
        let step = decode(&worker, 1, 1024);
        assert!((step - 6.531).abs() < 0.005, "{step}");
        let products = worker.dense_seconds(2048.0) * 1e3;
        assert!((products - 34.53).abs() < 0.05, "{products}");
        let read = worker.experts_seconds(2048.0);
        assert_eq!(read, 0.0);
    }

    /// A group of two halves products and reads, and pays two sums for each layer.
    #[test]
    fn a_group_divides_work_and_pays_for_sums() {
        let (one, two) = (
            worker("h100", "llama-3.1-8b", 1),
            worker("h100", "llama-3.1-8b", 2),
        );
        assert_eq!(two.dense_seconds(1.0), one.dense_seconds(1.0) / 2.0);
        assert_eq!(one.collectives_seconds(8.0), 0.0);
        // 64 sums of 5 us at least.
        let sums = two.collectives_seconds(1.0) * 1e3;
        assert!((0.320..0.325).contains(&sums), "{sums}");
        let link = (one.prices().link, two.prices().link);
        assert_eq!((link.0.byte_picos, link.1.byte_picos), (20, 10));
        let many = worker("gb200", "llama-3.1-8b", 16);
        let eight = worker("gb200", "llama-3.1-8b", 8);
        assert_eq!(
            many.kv_read_seconds(64),
            eight.kv_read_seconds(64),
            "8 KV heads"
        );
    }

    #[test]
    fn stages_of_a_pipeline_follow_one_another() {
        let one = worker("a100-80", "opt-66b", 4);
        let two = WorkerSetup {
            pipeline_parallel: 2,
            ..one.clone()
        };
        assert_eq!(two.devices_count(), 8);
        let (alone, staged) = (decode(&one, 8, 500), decode(&two, 8, 500));
        assert!(staged > alone && staged < alone + 0.1, "{alone} {staged}");
    }

    /// A window bounds what a token reads: a context of 100,000 costs a half of what it would.
    #[test]
    fn windows_are_read_at_most_once() {
        let worker = worker("h100", "gpt-oss-20b", 1);
        let (short, long) = (decode(&worker, 1, 1000), decode(&worker, 1, 101_000));
        let bytes = 100_000.0 * 24_576.0;
        let expected = bytes / (3350e9 * 0.8) * 1e3;
        assert!((long - short - expected).abs() < 0.01, "{short} {long}");
    }

    #[test]
    fn fewer_bits_read_faster_and_compute_in_their_format() {
        let bf16 = worker("h100", "llama-3.1-8b", 1);
        let fp8 = WorkerSetup {
            weights: WeightFormat::Fp8,
            ..bf16.clone()
        };
        assert_eq!(fp8.dense_seconds(1.0), bf16.dense_seconds(1.0) / 2.0);
        let ratio = bf16.dense_seconds(2048.0) / fp8.dense_seconds(2048.0);
        assert!((1.2..1.5).contains(&ratio), "{ratio}");
        let int4 = WorkerSetup {
            weights: WeightFormat::Int4,
            ..bf16.clone()
        };
        assert_eq!(int4.dense_seconds(2048.0), bf16.dense_seconds(2048.0));
        // An A100 has no fp8: weights are read in it, and multiplied as bf16.
        let old = WorkerSetup {
            hardware: Hardware::named("a100-80").unwrap(),
            ..fp8
        };
        let plain = worker("a100-80", "llama-3.1-8b", 1);
        assert_eq!(old.dense_seconds(2048.0), plain.dense_seconds(2048.0));
    }

    #[test]
    fn impossible_workers_are_refused() {
        let good = worker("h100", "opt-13b", 1);
        assert_eq!(good.check(), Ok(()));
        let error = |change: &dyn Fn(&mut WorkerSetup)| {
            let mut bad = good.clone();
            change(&mut bad);
            bad.check().unwrap_err()
        };
        let tensor = error(&|bad| bad.tensor_parallel = 16);
        let pipeline = error(&|bad| bad.pipeline_parallel = 41);
        let share = error(&|bad| bad.limits.memory_share = 1.2);
        assert!(tensor.contains("8 devices"), "{tensor}");
        assert!(pipeline.contains("40 layers"), "{pipeline}");
        assert!(share.contains("1.2"), "{share}");
    }

    /// Published times, none of which was used for the catalogue. Decode steps come out within a
    /// tenth, prompts up to a fifth too short: shares are those of products that ran alone.
    #[test]
    fn uncalibrated_times_are_near_published_ones() {
        let near = |found: f64, published: f64, off_max: f64, name: &str| {
            let off = found / published - 1.0;
            assert!(
                off.abs() <= off_max,
                "{name}: {found:.2} and not {published}: {off:.3}"
            );
        };
        // results/gpu/2026-11-27-h100-80gb-hbm3.md: this engine, decode.
        let small = worker("h100", "llama-3.1-8b", 1);
        near(decode(&small, 1, 1024), 6.397, 0.05, "1 x 1k");
        near(decode(&small, 32, 1024), 8.213, 0.05, "32 x 1k");
        near(decode(&small, 32, 8192), 18.134, 0.08, "32 x 8k");
        // The same page, torch-compile: a prompt of 2048 tokens at 39.8 k tokens/s.
        near(prefill(&small, 2048), 51.5, 0.2, "2k prompt");
        // DistServe's fitted law, OPT-13B on one A100.
        let opt = worker("a100-80", "opt-13b", 1);
        near(prefill(&opt, 2048), 256.7, 0.17, "13B prompt");
        near(decode(&opt, 64, 1024), 63.5, 0.1, "13B 64 x 1k");
    }
}
