//! Real devices as prices.
//!
//! Owns: the table of profiles, each with its source and licence, and profiles of workers that are
//! put together from parts. Never: measures. Invariant: a profile's prices are those of one worker,
//! which may stand for several devices.

use super::WorkerDevice;
use super::scenario::VOCAB_SIZE;
use cleave_domain::{
    Capacity, Incarnation, LinkPrice, Prices, Role, RowPrice, WorkerId, WorkerRef,
};
use cleave_planner::AdapterPrices;
use cleave_planner::parts::WorkerSetup;
use cleave_sched::PoolWriter;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const TABLE: &str = include_str!("profiles.json");
/// Tokens of a KV block of a worker from parts.
const BLOCK_TOKENS: u32 = 64;

/// A kind of worker: model, engine and devices.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerProfile {
    pub name: String,
    /// A description of the worker in words.
    pub about: String,
    /// The source of its numbers, their licence, and how far off they are.
    pub source: String,
    /// Real devices of one worker.
    devices: u32,
    /// Tokens of a KV block.
    block_tokens: u32,
    /// Bytes of KV of a token.
    token_bytes: u32,
    /// Tokens that the pool holds.
    kv_tokens: u32,
    /// Tokens of the longest sequence.
    context_tokens: u32,
    /// Sequences of a step.
    slots: u32,
    /// Tokens of a step.
    step_tokens: u32,
    /// Step prices as in [`Prices::rows`]: rows, nanoseconds.
    rows: Vec<(u32, u64)>,
    /// Step prices of a decode-only worker, where a separate law was measured for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    decode_rows: Vec<(u32, u64)>,
    pair_picos: u64,
    context_picos: u64,
    draw_nanos: u64,
    /// Nanoseconds before the first byte, picoseconds for each.
    link: (u64, u64),
    /// The same of the link to host memory.
    host: (u64, u64),
    /// Prices of a LoRA adapter of rank 16 of every projection, where they were measured; its loads
    /// take what a router assumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    adapter: Option<AdapterPrices>,
}

/// All profiles of the table.
pub fn profiles() -> Vec<WorkerProfile> {
    serde_json::from_str(TABLE).expect("the table was parsed in a test")
}

impl WorkerProfile {
    /// The profile with this name.
    ///
    /// # Errors
    /// Lists the known names.
    pub fn named(name: &str) -> Result<Self, String> {
        let all = profiles();
        let names: Vec<&str> = all.iter().map(|profile| profile.name.as_str()).collect();
        let unknown = format!("no profile `{name}`; there are {}", names.join(", "));
        let found = all.iter().find(|profile| profile.name == name);
        found.cloned().ok_or(unknown)
    }

    /// The profile of a worker that is put together from parts.
    ///
    /// # Errors
    /// If the devices cannot be divided so, or the model leaves no room for a block of keys and
    /// values.
    pub fn from_parts(parts: &WorkerSetup) -> Result<Self, String> {
        parts.check()?;
        let (kv_tokens, token_bytes) = (parts.kv_tokens()?, parts.token_bytes());
        let model = &parts.model;
        let (hardware, devices) = (&parts.hardware, parts.devices_count());
        let name = format!("{devices}x{}-{}", hardware.name, model.name);
        if kv_tokens < BLOCK_TOKENS {
            return Err(format!(
                "{name}: there is room for {kv_tokens} tokens, and a block has {BLOCK_TOKENS}"
            ));
        }
        let about = format!(
            "{} on {devices} of {}: weights {}, experts {}, keys and values {}, tensor-parallel \
             over {}, pipeline-parallel over {}",
            model.name,
            hardware.about,
            parts.weights,
            parts.expert_weights,
            parts.kv,
            parts.tensor_parallel,
            parts.pipeline_parallel,
        );
        let prices = parts.prices();
        let link = |link: LinkPrice| (link.latency_nanos, link.byte_picos);
        Ok(Self {
            name,
            about,
            source: format!("computed from parts: {}", hardware.sources.join("; ")),
            devices,
            block_tokens: BLOCK_TOKENS,
            token_bytes: u32::try_from(token_bytes)
                .map_err(|_| format!("{token_bytes} bytes for each token are too many"))?,
            kv_tokens,
            context_tokens: model.context_tokens_max.min(kv_tokens),
            slots: parts.limits.sequences_max,
            step_tokens: parts.limits.step_tokens_max,
            rows: prices
                .rows
                .iter()
                .map(|row| (row.rows, row.nanos))
                .collect(),
            decode_rows: Vec::new(),
            pair_picos: prices.pair_picos,
            context_picos: prices.context_picos,
            draw_nanos: prices.draw_nanos,
            link: link(prices.link),
            host: link(parts.host_link()),
            adapter: None,
        })
    }

    /// The prices of a LoRA adapter.
    ///
    /// # Errors
    /// Lists the profiles that have some.
    pub fn adapter_prices(&self) -> Result<AdapterPrices, String> {
        let all = profiles().into_iter();
        let priced = all.filter(|profile| profile.adapter.is_some());
        let names: Vec<String> = priced.map(|profile| profile.name).collect();
        let unknown = || {
            format!(
                "profile `{}` has no prices of adapters; {} has",
                self.name,
                names.join(", ")
            )
        };
        self.adapter.ok_or_else(unknown)
    }

    /// Real devices of one worker.
    pub fn devices_count(&self) -> u32 {
        self.devices
    }

    /// The prices of a worker with this role.
    pub fn prices(&self, role: Role) -> Prices {
        let decodes = role == Role::Decode && !self.decode_rows.is_empty();
        let rows = if decodes {
            &self.decode_rows
        } else {
            &self.rows
        };
        let price = |(rows, nanos): &(u32, u64)| RowPrice {
            rows: *rows,
            nanos: *nanos,
        };
        Prices {
            rows: rows.iter().map(price).collect(),
            pair_picos: self.pair_picos,
            context_picos: self.context_picos,
            draw_nanos: self.draw_nanos,
            link: link_price(self.link.0, self.link.1),
            links: Vec::new(),
            error_permille: 0,
        }
    }

    /// The `number`-th worker of a fleet, from 0; its brain is given the true prices.
    pub fn device(&self, number: u32, role: Role) -> WorkerDevice {
        let real = self.prices(role);
        let capacity = Capacity {
            block_tokens: self.block_tokens,
            block_bytes: self.token_bytes * self.block_tokens,
            blocks_count: self.kv_tokens / self.block_tokens,
            slots_count: self.slots,
            step_tokens_max: self.step_tokens,
            context_tokens_max: self.context_tokens,
            states: None,
            windows: None,
        };
        let limits = cleave_sched::WorkerLimits {
            me: WorkerRef {
                worker: WorkerId(u64::from(number) + 1),
                incarnation: Incarnation(1),
            },
            role,
            capacity,
            vocab_size: VOCAB_SIZE,
            queue_max: 1024,
            lease: Duration::from_secs(30),
            stall_max: Duration::from_secs(30),
            step_max: Duration::from_secs(60),
            prefix_cache: true,
            swap_blocks: 0,
            host_blocks: 0,
            disk_blocks: 0,
            writer: PoolWriter::Receiver,
            prices: real.clone(),
            steps_in_flight: 1,
            speculation: None,
        };
        WorkerDevice {
            limits,
            real_prices: real,
            host_link: link_price(self.host.0, self.host.1),
            devices_count: self.devices,
        }
    }
}

fn link_price(latency_nanos: u64, byte_picos: u64) -> LinkPrice {
    LinkPrice {
        latency_nanos,
        byte_picos,
    }
}

#[cfg(test)]
mod tests {
    use super::{WorkerProfile, profiles};
    use cleave_domain::Role;
    use cleave_models::ModelParts;
    use cleave_planner::Predict;
    use cleave_planner::parts::{Hardware, KvFormat, StepLimits, WeightFormat, WorkerSetup};

    fn parts(hardware: &str, model: &str, tensor_parallel: u32) -> WorkerSetup {
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

    #[test]
    fn a_worker_from_parts_is_a_profile_as_any_other() {
        let parts = parts("h100", "qwen3-30b-a3b", 2);
        let profile = WorkerProfile::from_parts(&parts).unwrap();
        assert_eq!(profile.devices_count(), 2);
        assert_eq!(profile.prices(Role::Decode), parts.prices());
        let written = serde_json::to_string(&profile).unwrap();
        let read: WorkerProfile = serde_json::from_str(&written).unwrap();
        assert_eq!(read, profile);
        let device = profile.device(0, Role::Both);
        let blocks = device.limits.capacity.blocks_count;
        assert_eq!(blocks, parts.kv_tokens().unwrap() / 64);
        assert!(device.limits.capacity.context_tokens_max <= blocks * 64 + 63);
    }

    #[test]
    fn a_model_that_does_not_fit_is_no_profile() {
        let error = WorkerProfile::from_parts(&parts("l40s", "opt-66b", 1)).unwrap_err();
        assert!(error.contains("does not fit"), "{error}");
        let error = WorkerProfile::from_parts(&parts("l40s", "opt-66b", 9)).unwrap_err();
        assert!(error.contains("tensor-parallel size 9"), "{error}");
    }

    /// The profile that was fitted to TensorRT-LLM's times, and the one that is computed.
    #[test]
    fn parts_come_near_a_fitted_profile() {
        let fitted = WorkerProfile::named("h100-llama-3-8b").unwrap();
        let computed = WorkerProfile::from_parts(&parts("h100", "llama-3.1-8b", 1)).unwrap();
        let near = |of: &dyn Fn(&WorkerProfile) -> f64, off_max: f64, name: &str| {
            let (found, expected) = (of(&computed), of(&fitted));
            let off = found / expected - 1.0;
            assert!(
                off.abs() <= off_max,
                "{name}: {found} and not {expected}: {off:.3}"
            );
        };
        for (sequences, context) in [(1, 1024), (32, 1024), (64, 2048)] {
            let decode = |profile: &WorkerProfile| {
                let prices = profile.prices(Role::Decode);
                prices
                    .decode(sequences, u64::from(sequences) * context)
                    .as_secs_f64()
            };
            near(&decode, 0.08, "decode");
        }
        for tokens in [1024, 2048] {
            let prompt = |profile: &WorkerProfile| {
                profile
                    .prices(Role::Prefill)
                    .prefill(0, tokens, 2048)
                    .as_secs_f64()
            };
            near(&prompt, 0.15, "prefill");
        }
    }

    #[test]
    fn profiles_have_unique_names_and_a_licence() {
        let all = profiles();
        for profile in &all {
            let same = all.iter().filter(|other| other.name == profile.name);
            assert_eq!(same.count(), 1, "{}", profile.name);
            let licensed = ["Apache-2.0", "MIT", "measured"];
            let is_licensed = licensed.iter().any(|word| profile.source.contains(word));
            assert!(is_licensed, "{} has no licence", profile.name);
            let rows = &profile.rows;
            assert!(rows.is_sorted(), "{}: {rows:?}", profile.name);
        }
        assert!(
            WorkerProfile::named("abacus")
                .unwrap_err()
                .contains("h100-")
        );
    }

    /// The lab measured rows, adapters, and the microseconds of a layer's four stacks together, on
    /// an H100: results/gpu/2026-11-27-h100-80gb-hbm3-adapters.md.
    #[test]
    fn adapter_prices_match_the_times_of_the_lab() {
        let profile = WorkerProfile::named("h100-llama-3-8b").unwrap();
        let prices = profile.adapter_prices().unwrap();
        for (rows, adapters, measured, off_max) in [
            // Prices are for steps of many rows: the least step of all is cheaper than they say.
            (1, 1, 55.0, 0.13),
            (32, 1, 68.3, 0.01),
            (32, 32, 137.7, 0.01),
            (256, 1, 122.0, 0.05),
            (256, 32, 223.2, 0.18),
            (4096, 1, 945.8, 0.01),
            (4096, 32, 1229.1, 0.18),
        ] {
            let layer = prices.step(adapters, rows).as_secs_f64() * 1e6 / 32.0;
            let off = (layer / measured - 1.0).abs();
            assert!(off < off_max, "{layer} and not {measured}");
        }
        let none = WorkerProfile::named("a100-opt-13b").unwrap();
        let error = none.adapter_prices().unwrap_err();
        assert!(error.contains("a100-opt-13b") && error.contains("h100-llama-3-8b has"));
    }

    /// The rows are those of DistServe's page of sample values: prompts of 128, 512, 1024 and 2048
    /// tokens, and batches of 1 x 512, 32 x 512, 64 x 1024 and 128 x 512 tokens.
    #[test]
    fn profile_prices_match_published_times() {
        let profile = WorkerProfile::named("a100-opt-13b").unwrap();
        let near = |millis: f64, published: f64, off_max: f64| {
            let off = (millis / published - 1.0).abs();
            assert!(off < off_max, "{millis} and not {published}");
        };
        let prices = profile.prices(Role::Prefill);
        let prompts = [(128, 31.3), (512, 72.1), (1024, 129.9), (2048, 256.7)];
        for (tokens, published) in prompts {
            near(
                prices.prefill(0, tokens, 8192).as_secs_f64() * 1e3,
                published,
                0.01,
            );
        }
        let prices = profile.prices(Role::Decode);
        // From 95 sequences on, context costs 8 % less, which one price cannot express.
        let batches = [
            (1, 512, 20.3),
            (32, 512, 31.4),
            (64, 1024, 63.5),
            (128, 512, 65.4),
        ];
        for (sequences, context, published) in batches {
            let took = prices.decode(sequences, u64::from(sequences) * context);
            near(took.as_secs_f64() * 1e3, published, 0.05);
        }
    }
}
