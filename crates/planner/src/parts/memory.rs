//! The room for keys and values that weights and activations leave.
//!
//! Owns: the sizes of both. Never: knows how blocks are counted. Invariant: nothing is left where
//! the weights alone do not fit.

use super::formats::WeightFormat;
use super::worker::WorkerSetup;

/// Bytes of a device that an engine takes beside weights and activations: the driver's context and
/// workspaces. An engine that records steps as graphs takes more.
const ENGINE_BYTES: f64 = (256 << 20) as f64;
/// Elements of `hidden` that each token of a step has at once.
const HIDDEN_KEPT: f64 = 4.0;
/// Elements of an MLP's width that each token of a step has at once.
const MLP_KEPT: f64 = 2.0;
/// Bytes of a logit.
const LOGIT_BYTES: f64 = 4.0;

impl WorkerSetup {
    /// Bytes of weights on each device, which share them evenly.
    pub fn weight_bytes_each(&self) -> f64 {
        let model = &self.model;
        let words = WeightFormat::Bf16.bytes(model.head_weights + model.embedding_weights);
        let layers = self.weights.bytes(model.dense_weights)
            + self.expert_weights.bytes(model.experts.weights());
        (layers + words) / f64::from(self.devices_count())
    }

    /// Bytes of each device's activations in the largest step.
    fn activation_bytes_each(&self) -> f64 {
        let model = &self.model;
        let mlp = model.mlp_elements as f64 / f64::from(model.layers_count.max(1));
        let parted = MLP_KEPT * mlp / f64::from(self.tensor_parallel);
        let token = (HIDDEN_KEPT * model.hidden as f64 + parted) * 2.0;
        let logits =
            f64::from(self.limits.sequences_max) * f64::from(model.vocab_size) * LOGIT_BYTES;
        token * f64::from(self.limits.step_tokens_max) + logits
    }

    /// Tokens whose keys and values fit beside the weights.
    ///
    /// # Errors
    /// If the weights and the activations leave no room for one.
    pub fn kv_tokens(&self) -> Result<u32, String> {
        let given = self.hardware.memory_bytes as f64 * self.limits.memory_share;
        let (weights, rest) = (
            self.weight_bytes_each(),
            ENGINE_BYTES + self.activation_bytes_each(),
        );
        // Devices beyond the KV heads have copies.
        let parts = self.tensor_parallel.min(self.model.kv_heads.max(1)) * self.pipeline_parallel;
        let token = self.token_bytes() as f64 / f64::from(parts);
        let tokens = (given - weights - rest) / token;
        if tokens < 1.0 {
            return Err(format!(
                "{} does not fit on {} of {}: each has {:.1} GB of memory for it, weights take \
                 {:.1} GB and activations {:.1} GB; raise --tensor-parallel-size, or choose smaller \
                 weights",
                self.model.name,
                self.devices_count(),
                self.hardware.name,
                given / 1e9,
                weights / 1e9,
                rest / 1e9,
            ));
        }
        Ok(tokens.min(f64::from(u32::MAX)) as u32)
    }
}

#[cfg(test)]
mod tests {
    use crate::parts::worker::tests::worker;
    use crate::parts::{KvFormat, WeightFormat, WorkerSetup};

    /// Numbers of tokens that engines reported: DistServe's table (OPT, A100-80, 0.95), vLLM's
    /// paper (OPT, 0.9), Dynamo's planner data (fp8 on an H200), llm-d's guides and SGLang
    /// (Qwen3-32B).
    #[test]
    fn kv_capacities_are_near_published_ones() {
        let distserve = |model, tensor, pipeline, published| {
            let mut found = worker("a100-80", model, tensor);
            found.pipeline_parallel = pipeline;
            found.limits.memory_share = 0.95;
            found.limits.sequences_max = 1024;
            (found, published, 0.045)
        };
        let vllm_paper = |hardware, model, tensor, published| {
            let mut found = worker(hardware, model, tensor);
            found.limits.step_tokens_max = 2560;
            (found, published, 0.10)
        };
        let recent = |hardware, model, tensor, published, off_max| {
            (worker(hardware, model, tensor), published, off_max)
        };
        let mut fp8 = recent("h200", "llama-3.1-8b", 1, 945_029, 0.02);
        fp8.0.weights = WeightFormat::Fp8;
        for (worker, published, off_max) in [
            distserve("opt-13b", 1, 1, 66_144),
            distserve("opt-13b", 2, 1, 163_008),
            distserve("opt-13b", 1, 2, 163_008),
            distserve("opt-13b", 4, 1, 356_736),
            distserve("opt-66b", 2, 1, 11_600),
            distserve("opt-66b", 4, 1, 78_496),
            distserve("opt-66b", 2, 2, 78_512),
            distserve("opt-66b", 8, 1, 212_304),
            distserve("opt-175b", 8, 1, 59_520),
            distserve("opt-175b", 4, 2, 59_520),
            vllm_paper("a100-40", "opt-13b", 1, 15_700),
            vllm_paper("a100-40", "opt-66b", 4, 9_700),
            vllm_paper("a100-80", "opt-175b", 8, 60_100),
            fp8,
            recent("h100", "qwen3-32b", 2, 307_328, 0.075),
            recent("h100", "qwen3-32b", 2, 321_856, 0.03),
            recent("h100", "llama-3.1-70b", 4, 461_376, 0.075),
        ] {
            let found = f64::from(worker.kv_tokens().unwrap());
            let off = found / f64::from(published) - 1.0;
            let name = (
                &worker.model.name,
                &worker.hardware.name,
                worker.devices_count(),
            );
            assert!(
                off.abs() <= off_max,
                "{name:?}: {found}, not {published}: {off:.3}"
            );
        }
    }

    #[test]
    fn half_the_bytes_hold_twice_the_tokens() {
        let bf16 = worker("h100", "llama-3.1-8b", 1);
        let fp8 = WorkerSetup {
            kv: KvFormat::Fp8,
            ..bf16.clone()
        };
        let (one, two) = (bf16.kv_tokens().unwrap(), fp8.kv_tokens().unwrap());
        assert!(two.abs_diff(2 * one) <= 1, "{one} {two}");
    }

    #[test]
    fn a_model_without_room_is_refused() {
        let error = worker("h100", "llama-3.1-70b", 1).kv_tokens().unwrap_err();
        for part in [
            "llama-3.1-70b",
            "h100",
            "141.1 GB",
            "--tensor-parallel-size",
        ] {
            assert!(error.contains(part), "{error} lacks {part}");
        }
    }
}
