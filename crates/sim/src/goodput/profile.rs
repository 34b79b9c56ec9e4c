//! Real devices as prices.
//!
//! Owns: the table of profiles, each with its source and licence. Never: measures.
//! Invariant: a profile's prices are those of one worker, which may stand for several devices.

use super::Device;
use super::scenario::VOCAB_SIZE;
use cleave_domain::{
    Capacity, Incarnation, LinkPrice, Prices, Role, RowPrice, WorkerId, WorkerRef,
};
use cleave_sched::Writer;
use serde::Deserialize;
use std::time::Duration;

const TABLE: &str = include_str!("profiles.json");

/// A kind of worker: model, engine and devices.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Unique.
    pub name: String,
    /// What it is.
    pub about: String,
    /// Where its numbers are from, under which licence, and how far off they are.
    pub source: String,
    /// Real devices of one worker.
    devices: u32,
    /// Tokens of a KV block.
    block_tokens: u32,
    /// Bytes of KV of a token.
    token_bytes: u32,
    /// Tokens that the pool holds.
    kv_tokens: u32,
    /// The longest sequence.
    context_tokens: u32,
    /// Sequences of a step.
    slots: u32,
    /// Tokens of a step.
    step_tokens: u32,
    /// As in [`Prices::rows`]: rows, nanoseconds.
    rows: Vec<(u32, u64)>,
    /// The same of a worker that only decodes, where another law was measured for it.
    #[serde(default)]
    decode_rows: Vec<(u32, u64)>,
    pair_picos: u64,
    context_picos: u64,
    draw_nanos: u64,
    /// Nanoseconds before the first byte, picoseconds for each.
    link: (u64, u64),
    /// The same, to host memory.
    host: (u64, u64),
}

/// Every profile there is.
pub fn profiles() -> Vec<Profile> {
    serde_json::from_str(TABLE).expect("the table was parsed in a test")
}

impl Profile {
    /// The one of that name.
    ///
    /// # Errors
    /// Which names there are.
    pub fn named(name: &str) -> Result<Self, String> {
        let all = profiles();
        let names: Vec<&str> = all.iter().map(|profile| profile.name.as_str()).collect();
        let unknown = format!("no profile `{name}`; there are {}", names.join(", "));
        let found = all.iter().find(|profile| profile.name == name);
        found.cloned().ok_or(unknown)
    }

    /// Real devices of one worker.
    pub fn devices_count(&self) -> u32 {
        self.devices
    }

    /// What the work of a worker with these legs costs.
    pub fn prices(&self, role: Role) -> Prices {
        let decodes = role == Role::Decode && !self.decode_rows.is_empty();
        let rows = match decodes {
            true => &self.decode_rows,
            false => &self.rows,
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
            link: link(self.link),
            links: Vec::new(),
            error_permille: 0,
        }
    }

    /// The `number`-th worker of a fleet, from 0; it knows its prices as they are.
    pub fn device(&self, number: u32, role: Role) -> Device {
        let real = self.prices(role);
        let capacity = Capacity {
            block_tokens: self.block_tokens,
            block_bytes: self.token_bytes * self.block_tokens,
            blocks_count: self.kv_tokens / self.block_tokens,
            slots_count: self.slots,
            step_tokens_max: self.step_tokens,
            context_tokens_max: self.context_tokens,
        };
        let limits = cleave_sched::Limits {
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
            writer: Writer::Receiver,
            prices: real.clone(),
            steps_in_flight: 1,
            speculation: None,
        };
        Device {
            limits,
            real,
            host: link(self.host),
            devices_count: self.devices,
        }
    }
}

fn link((latency_nanos, byte_picos): (u64, u64)) -> LinkPrice {
    LinkPrice {
        latency_nanos,
        byte_picos,
    }
}

#[cfg(test)]
mod tests {
    use super::{Profile, profiles};
    use cleave_domain::Role;
    use cleave_planner::Predict;

    #[test]
    fn profiles_have_names_of_their_own_and_say_where_they_are_from() {
        let all = profiles();
        for profile in &all {
            let same = all.iter().filter(|other| other.name == profile.name);
            assert_eq!(same.count(), 1, "{}", profile.name);
            let licensed = ["Apache-2.0", "MIT", "measured"];
            let says = licensed.iter().any(|word| profile.source.contains(word));
            assert!(says, "{} has no licence", profile.name);
            let rows = &profile.rows;
            assert!(rows.is_sorted(), "{}: {rows:?}", profile.name);
        }
        assert!(Profile::named("abacus").unwrap_err().contains("h100-"));
    }

    /// The rows are those of DistServe's page of sample values: prompts of 128, 512, 1024 and 2048 tokens,
    /// and batches of 1 x 512, 32 x 512, 64 x 1024 and 128 x 512 tokens.
    #[test]
    fn prices_are_the_published_ones() {
        let profile = Profile::named("a100-opt-13b").unwrap();
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
        // From 95 sequences on their context costs 8 % less, which one price cannot say.
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
