//! Real devices as prices.
//!
//! Owns: the table of profiles, each with its source and licence. Never: measures. Invariant: a
//! profile's prices are those of one worker, which may stand for several devices.

use super::WorkerDevice;
use super::scenario::VOCAB_SIZE;
use cleave_domain::{
    Capacity, Incarnation, LinkPrice, Prices, Role, RowPrice, WorkerId, WorkerRef,
};
use cleave_planner::AdapterPrices;
use cleave_sched::PoolWriter;
use serde::Deserialize;
use std::time::Duration;

const TABLE: &str = include_str!("profiles.json");

/// A kind of worker: model, engine and devices.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
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
    #[serde(default)]
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
    use cleave_planner::Predict;

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
