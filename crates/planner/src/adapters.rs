//! Prices of LoRA adapters: what their products add to a step, and how long a load takes.
//!
//! Owns: the formula. Never: knows which adapter is where.
//! Invariant: a step without an adapter costs nothing more.

use crate::DeviceSpec;
use cleave_models::AdapterCost;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Prices of adapters of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterPrices {
    /// Fixed time of a step that has an adapter, in nanoseconds: the launches of its products.
    pub step_nanos: u64,
    /// Time of each adapter of a step, in nanoseconds: its matrices are read.
    pub each_nanos: u64,
    /// Time of each row with an adapter, in picoseconds.
    pub row_picos: u64,
    /// Time of a load from a folder, in nanoseconds.
    pub load_nanos: u64,
    /// Time of a load from a copy in host memory, in nanoseconds.
    pub load_from_host_nanos: u64,
}

impl AdapterPrices {
    /// The time that so many adapters, with so many rows together, add to a step.
    pub fn step(&self, adapters: u32, rows: u32) -> Duration {
        if adapters == 0 {
            return Duration::ZERO;
        }
        let each = self.each_nanos * u64::from(adapters);
        let rows = self.row_picos * u64::from(rows) / 1000;
        Duration::from_nanos(self.step_nanos + each + rows)
    }

    /// Least times of the products on a device; loads take no time.
    pub fn roofline(device: &DeviceSpec, adapter: &AdapterCost) -> Self {
        let seconds = |amount: u64, per_second: f64| {
            if per_second > 0.0 {
                amount as f64 / per_second
            } else {
                0.0
            }
        };
        let flops = 2 * adapter.stacked_weights;
        Self {
            each_nanos: (seconds(adapter.bytes(), device.bytes_per_second) * 1e9) as u64,
            row_picos: (seconds(flops, device.flops_per_second) * 1e12) as u64,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rank 16 of every projection of Llama 3 8B, on an H100 by its datasheet: 3.35 TB/s, and 67
    /// teraflops in f32. The lab measured 72 µs for each further adapter of a step, and 6.9 µs for
    /// each row, in a kernel that reads its matrices once for eight rows.
    #[test]
    fn an_adapter_costs_its_bytes_and_each_row_its_products() {
        let adapter = AdapterCost {
            weights: 41_943_040,
            stacked_weights: 62_914_560,
        };
        let device = DeviceSpec {
            flops_per_second: 67e12,
            bytes_per_second: 3.35e12,
            step: Duration::ZERO,
        };
        let prices = AdapterPrices::roofline(&device, &adapter);
        assert_eq!((prices.each_nanos, prices.row_picos), (75_121, 1_878_046));
        assert_eq!(prices.step(0, 0), Duration::ZERO);
        let step = prices.step(2, 1000);
        assert_eq!(step, Duration::from_nanos(2 * 75_121 + 1_878_046));
    }
}
