//! Fleets of several models, and what must hold in them.
//!
//! Owns: the draw of models, apart from the seed's other draws, and the check that a flight stays
//! with workers of its model. Never: changes what a world without several models does.
//! Invariant: every model has the same workers, so that in a world without faults each request is
//! done.

use crate::run::{ChaosRun, worker_index};
use crate::world::ChaosWorld;
use cleave_domain::{FlightId, Order, SplitMix64, WorkerDescription, WorkerRef};
use std::sync::Arc;

/// Separates the draw of models from the seed's other draws.
const MODELS_SEED_SALT: u64 = 0x3a91_7c05_e4d2_8b6f;

impl ChaosWorld {
    /// Gives the fleet one to three models. Each has the drawn workers; which of them meet faults
    /// differs by model. Where there are faults, some workers serve another model after a restart.
    pub(crate) fn draw_models(&mut self) {
        let rng = &mut SplitMix64::new(self.seed ^ MODELS_SEED_SALT);
        let count = rng.count(1, 3);
        let drawn = std::mem::take(&mut self.workers);
        let shifts: Vec<u32> = drawn.iter().map(|_| rng.count(0, count - 1)).collect();
        for copy in 0..count {
            for (worker, shift) in drawn.iter().zip(&shifts) {
                let model = model_name((copy + shift) % count);
                self.workers.push(WorkerDescription {
                    model,
                    ..worker.clone()
                });
            }
        }
        let drawn = self.request_models.iter();
        let models = drawn.map(|_| Arc::from(model_name(rng.count(0, count - 1))));
        self.request_models = models.collect();
        if !self.is_faultless() && count > 1 && rng.chance(300) {
            let worker = rng.count(0, self.workers.len() as u32 - 1) as usize;
            let changed = model_name(rng.count(0, count - 1));
            self.changed_models.insert(worker, changed);
        }
    }

    /// The description of one life of a worker.
    pub(crate) fn description(&self, me: WorkerRef) -> WorkerDescription {
        let worker = worker_index(me);
        let mut description = self.workers[worker].clone();
        if me.incarnation.0.is_multiple_of(2)
            && let Some(changed) = self.changed_models.get(&worker)
        {
            description.model.clone_from(changed);
        }
        description
    }

    /// The models of the fleet, each once.
    pub(crate) fn models(&self) -> Vec<&str> {
        let mut models: Vec<&str> = self.workers.iter().map(|one| one.model.as_str()).collect();
        models.sort_unstable();
        models.dedup();
        models
    }
}

fn model_name(number: u32) -> String {
    format!("model-{number}")
}

impl ChaosRun<'_> {
    /// Checks that an order that begins a leg of a flight goes to a worker of the flight's model,
    /// and names no worker of another one.
    pub(crate) fn check_models(&self, worker: WorkerRef, order: &Order) -> Result<(), String> {
        let (flight, other) = match order {
            Order::Reserve(reserve) => (reserve.handoff.flight, reserve.sender),
            Order::Prefill(prefill) => (prefill.handoff.flight, prefill.target.worker),
            Order::Migrate(migrate) => (migrate.handoff.flight, migrate.target.worker),
            Order::Run(run) => (run.handoff.flight, worker),
            Order::Renew { .. }
            | Order::Cancel { .. }
            | Order::Drain
            | Order::Serve { .. }
            | Order::Relay(_)
            | Order::FetchAdapter { .. } => return Ok(()),
        };
        let model = self.model_of(flight);
        for worker in [worker, other] {
            let served = self.world.description(worker).model;
            if *served != *model {
                return Err(format!(
                    "{flight} of {model} was sent to {worker} of {served}"
                ));
            }
        }
        Ok(())
    }

    fn model_of(&self, flight: FlightId) -> Arc<str> {
        let client = self.clients.index_of(flight);
        Arc::clone(&self.world.request_models[client])
    }
}
