//! How much of its device a worker uses while it works.
//!
//! Owns: sums over recent steps, in which older steps weigh less. Never knows the device: the
//! caller that starts the worker describes it. Invariant: idle time does not count, so that a ratio
//! says how well steps are filled, and not how many there are.

use cleave_domain::StepWork;
use cleave_models::ModelCost;
use cleave_planner::DeviceSpec;
use std::time::Duration;

/// The busy time after which a step weighs a third (1/e).
const MEMORY_SECONDS: f64 = 10.0;

/// The limits of a device, and the operations and bytes of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceCeilings {
    /// Operations and bytes of the model.
    pub model: ModelCost,
    /// The highest rates of the device.
    pub device: DeviceSpec,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeviceUtilisation {
    flops: f64,
    bytes: f64,
    busy_seconds: f64,
}

impl DeviceUtilisation {
    /// Adds a step's work and duration. Gives the shares of arithmetic and of memory bandwidth used
    /// recently, 0 to 1.
    pub(super) fn step(
        &mut self,
        ceilings: &DeviceCeilings,
        work: &StepWork,
        took: Duration,
    ) -> (f64, f64) {
        let DeviceCeilings { model, device } = ceilings;
        let seconds = took.as_secs_f64();
        let decay = (-seconds / MEMORY_SECONDS).exp();
        self.flops = self.flops * decay + model.flops(work);
        self.bytes = self.bytes * decay + model.bytes(work, 1);
        self.busy_seconds = self.busy_seconds * decay + seconds;
        let part = |used: f64, per_second: f64| {
            let most = per_second * self.busy_seconds;
            if most > 0.0 { used / most } else { 0.0 }
        };
        (
            part(self.flops, device.flops_per_second),
            part(self.bytes, device.bytes_per_second),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_models::ExpertsCost;

    #[test]
    fn utilisation_at_the_ceiling_is_one_and_old_steps_fade() {
        let model = ModelCost {
            layer_weights: 1152,
            head_weights: 256,
            pair_flops: 64,
            layer_bytes: 2304,
            experts: ExpertsCost::NONE,
            head_bytes: 512,
            token_bytes: 32,
        };
        let work = StepWork::decode(10);
        let second = Duration::from_secs(1);
        let device = DeviceSpec {
            flops_per_second: model.flops(&work),
            bytes_per_second: 2.0 * model.bytes(&work, 1),
            step: Duration::ZERO,
        };
        let ceilings = DeviceCeilings { model, device };
        let close = |(mfu, mbu): (f64, f64), expected: (f64, f64)| {
            assert!(
                (mfu - expected.0).abs() < 1e-3 && (mbu - expected.1).abs() < 1e-3,
                "{mfu} {mbu}"
            );
        };
        let mut used = DeviceUtilisation::default();
        close(used.step(&ceilings, &work, second), (1.0, 0.5));
        close(used.step(&ceilings, &work, second), (1.0, 0.5));
        for _ in 0..100 {
            used.step(&ceilings, &work, 4 * second);
        }
        close(used.step(&ceilings, &work, 4 * second), (0.25, 0.125));
    }
}
