//! Devices as data: what they can do at most, and which share of it is reached.
//!
//! Owns: the catalogue of known devices, and the form of a file that describes a measured one.
//! Never: measures. Invariant: every number of the catalogue has its source, or is listed as
//! assumed; a checked description has no share above 1 and no rate of 0.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const CATALOGUE: &str = include_str!("hardware.json");

/// Version of the form, which a file must name.
pub const HARDWARE_VERSION: u32 = 1;

/// Format of the numbers of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProductFormat {
    /// bf16 or f16, summed in f32.
    Bf16,
    Fp8,
    Int8,
    Fp4,
}

/// A device, of which a worker has one or several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Version of the form, which must be [`HARDWARE_VERSION`].
    pub version: u32,
    /// Name by which flags select it.
    pub name: String,
    /// The device in words, such as `NVIDIA H100 80 GB SXM`.
    pub about: String,
    /// Sources of the numbers.
    pub sources: Vec<String>,
    /// Bytes of memory as the driver reports them.
    pub memory_bytes: u64,
    /// Bytes of memory read per second at most.
    pub memory_bytes_per_second: f64,
    /// Peak of products by format; `bf16` must be there.
    pub arithmetic: BTreeMap<ProductFormat, Arithmetic>,
    /// Shares that are reached, and times that are no product's.
    pub shares: ReachedShares,
    /// Link to another device of the same node.
    pub node_link: DeviceLink,
    /// Link to a device of another node.
    pub network_link: DeviceLink,
    /// Link to host memory.
    pub host_link: DeviceLink,
    /// Devices that `node_link` joins.
    pub devices_per_node: u32,
}

/// Products in one format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arithmetic {
    /// Dense peak; a multiplication and its addition count as two.
    pub operations_per_second: f64,
    /// Share of the peak that a product of so many rows reaches, by ascending rows; between two of
    /// them it grows with the logarithm of the rows.
    pub shares: Vec<(u32, f64)>,
}

/// Shares of a device's peaks that kinds of operations reach, and fixed times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReachedShares {
    /// Of the bandwidth of memory, by reads of weights and by what moves rows between products.
    pub weights_read: f64,
    /// Of the bf16 peak, by attention of prompts.
    pub prefill_attention: f64,
    /// Of the bandwidth of memory, by attention of decode steps.
    pub decode_attention: f64,
    /// Of the speed that a dense product with an expert's rows has, by products of experts.
    pub experts: f64,
    /// Of the bandwidth of `node_link`, by collectives.
    pub collectives: f64,
    /// Nanoseconds of each layer beside its products and attention.
    pub layer_nanos: u64,
    /// Nanoseconds of each step.
    pub step_nanos: u64,
}

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceLink {
    /// Nanoseconds before the first byte.
    pub latency_nanos: u64,
    /// Bytes per second of one device.
    pub bytes_per_second: f64,
}

impl Hardware {
    /// All devices of the catalogue.
    pub fn catalogue() -> Vec<Self> {
        serde_json::from_str(CATALOGUE).expect("the catalogue was parsed in a test")
    }

    /// The device of the catalogue with this name.
    ///
    /// # Errors
    /// Lists the known names.
    pub fn named(name: &str) -> Result<Self, String> {
        let all = Self::catalogue();
        let names: Vec<&str> = all.iter().map(|device| device.name.as_str()).collect();
        let unknown = format!("no hardware `{name}`; there are {}", names.join(", "));
        all.iter()
            .find(|device| device.name == name)
            .cloned()
            .ok_or(unknown)
    }

    /// Reads a file's text.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let read: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        read.check()?;
        Ok(read)
    }

    /// Checks that every rate is positive and every share at most 1.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn check(&self) -> Result<(), String> {
        if self.version != HARDWARE_VERSION {
            return Err(format!(
                "version {}: this program reads version {HARDWARE_VERSION}",
                self.version
            ));
        }
        let rate = |name: &str, rate: f64| {
            if rate.is_finite() && rate > 0.0 {
                return Ok(());
            }
            Err(format!("{name} {rate}: expected a rate above 0"))
        };
        rate("memory_bytes", self.memory_bytes as f64)?;
        rate("devices_per_node", f64::from(self.devices_per_node))?;
        rate("memory_bytes_per_second", self.memory_bytes_per_second)?;
        for (name, link) in [
            ("node_link", self.node_link),
            ("network_link", self.network_link),
            ("host_link", self.host_link),
        ] {
            rate(&format!("{name}: bytes_per_second"), link.bytes_per_second)?;
        }
        if !self.arithmetic.contains_key(&ProductFormat::Bf16) {
            return Err("arithmetic: bf16 is missing".to_owned());
        }
        for (format, arithmetic) in &self.arithmetic {
            arithmetic
                .check()
                .map_err(|error| format!("arithmetic: {format:?}: {error}"))?;
        }
        self.shares.check()
    }

    /// Products in this format, or in bf16 where the device has no faster ones.
    pub fn products(&self, format: ProductFormat) -> &Arithmetic {
        let found = self.arithmetic.get(&format);
        found.unwrap_or_else(|| &self.arithmetic[&ProductFormat::Bf16])
    }
}

impl Arithmetic {
    fn check(&self) -> Result<(), String> {
        let rate = self.operations_per_second;
        if !rate.is_finite() || rate <= 0.0 {
            return Err(format!(
                "operations_per_second {rate}: expected a rate above 0"
            ));
        }
        let rows = self.shares.iter().map(|(rows, _)| *rows);
        let is_ascending = rows.clone().is_sorted_by(|one, next| one < next);
        if self.shares.is_empty() || !is_ascending || rows.min() == Some(0) {
            return Err("shares: expected at least one, by ascending rows from 1 on".to_owned());
        }
        for (rows, share) in &self.shares {
            check_share(&format!("shares: {rows} rows"), *share)?;
        }
        Ok(())
    }

    /// Operations per second of a product of so many rows.
    pub fn speed(&self, rows: f64) -> f64 {
        self.operations_per_second * self.share(rows)
    }

    fn share(&self, rows: f64) -> f64 {
        let above = self
            .shares
            .partition_point(|(knot, _)| f64::from(*knot) < rows);
        if above == 0 {
            return self.shares[0].1;
        }
        let left = self.shares[above - 1];
        let Some(right) = self.shares.get(above) else {
            return left.1;
        };
        let (from, to) = (f64::from(left.0).ln(), f64::from(right.0).ln());
        left.1 + (right.1 - left.1) * (rows.ln() - from) / (to - from)
    }
}

impl ReachedShares {
    fn check(&self) -> Result<(), String> {
        let Self {
            weights_read,
            prefill_attention,
            decode_attention,
            experts,
            collectives,
            layer_nanos: _,
            step_nanos: _,
        } = self;
        for (name, share) in [
            ("weights_read", weights_read),
            ("prefill_attention", prefill_attention),
            ("decode_attention", decode_attention),
            ("experts", experts),
            ("collectives", collectives),
        ] {
            check_share(&format!("shares: {name}"), *share)?;
        }
        Ok(())
    }
}

fn check_share(name: &str, share: f64) -> Result<(), String> {
    if share > 0.0 && share <= 1.0 {
        return Ok(());
    }
    Err(format!("{name} {share}: expected a share above 0, up to 1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_catalogue_is_valid_and_names_sources() {
        let all = Hardware::catalogue();
        let names: Vec<&str> = all.iter().map(|device| device.name.as_str()).collect();
        let wanted = [
            "a100-40", "a100-80", "h100", "h200", "b200", "gb200", "l40s", "mi300x",
        ];
        assert_eq!(names, wanted);
        for device in &all {
            assert_eq!(device.check(), Ok(()), "{}", device.name);
            let sources = device.sources.join("\n");
            for part in ["data sheet", "assumed", "network_link"] {
                assert!(sources.contains(part), "{} lacks {part}", device.name);
            }
        }
        let error = Hardware::named("abacus").unwrap_err();
        assert!(
            error.contains("abacus") && error.contains("mi300x"),
            "{error}"
        );
    }

    #[test]
    fn a_file_has_the_form_of_the_catalogue() {
        let device = Hardware::named("h200").unwrap();
        let text = serde_json::to_string(&device).unwrap();
        assert_eq!(Hardware::parse(&text), Ok(device));
    }

    #[test]
    fn wrong_numbers_are_named() {
        let wrong = |change: &dyn Fn(&mut Hardware)| {
            let mut device = Hardware::named("l40s").unwrap();
            change(&mut device);
            Hardware::parse(&serde_json::to_string(&device).unwrap()).unwrap_err()
        };
        let found = [
            wrong(&|device| device.version = 2),
            wrong(&|device| device.memory_bytes_per_second = 0.0),
            wrong(&|device| device.shares.decode_attention = 1.5),
            wrong(&|device| device.host_link.bytes_per_second = -1.0),
            wrong(&|device| {
                device.arithmetic.remove(&ProductFormat::Bf16);
            }),
            wrong(&|device| {
                let fp8 = device.arithmetic.get_mut(&ProductFormat::Fp8).unwrap();
                fp8.shares.reverse();
            }),
            wrong(&|device| {
                let int8 = device.arithmetic.get_mut(&ProductFormat::Int8).unwrap();
                int8.shares[0].0 = 0;
            }),
        ];
        let parts = [
            "version 2",
            "memory_bytes_per_second 0",
            "decode_attention 1.5",
            "host_link",
            "bf16 is missing",
            "Fp8: shares",
            "rows from 1 on",
        ];
        for (error, part) in found.iter().zip(parts) {
            assert!(error.contains(part), "{error} lacks {part}");
        }
        let unknown = Hardware::parse(r#"{"version": 1, "cores": 8}"#).unwrap_err();
        assert!(unknown.contains("cores"), "{unknown}");
    }

    #[test]
    fn shares_grow_with_the_logarithm_of_rows() {
        let products = Arithmetic {
            operations_per_second: 100.0,
            shares: vec![(64, 0.2), (256, 0.6)],
        };
        let speeds = [1.0, 64.0, 128.0, 256.0, 4096.0].map(|rows| products.speed(rows).round());
        assert_eq!(speeds, [20.0, 20.0, 40.0, 60.0, 60.0]);
    }
}
