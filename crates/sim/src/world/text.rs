//! The text of a world, printed before it runs.
//!
//! Owns: one line for each worker, request, command and fault. Never: draws anything. Invariant:
//! every input of a run is shown, so that worlds that differ print differently.

use super::{ChaosRequest, ChaosWorld};
use crate::event_log::millis;
use cleave_testkit::CellConstraint;
use std::fmt;

impl fmt::Display for ChaosWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {}: {} routers, faults until {}",
            self.seed,
            self.routers_count,
            millis(self.faults_end_at)
        )?;
        for (index, worker) in self.workers.iter().enumerate() {
            let fingerprint = &worker.fingerprint.0;
            let queue_max = worker.queue_max;
            let capacity = &worker.capacity;
            writeln!(
                f,
                "  w{:x} {} {fingerprint} queue {queue_max} {capacity:?}",
                index + 1,
                worker.role
            )?;
        }
        writeln!(f, "  {:?}", self.router)?;
        writeln!(f, "  {:?}", self.engine_costs)?;
        writeln!(f, "  {:?}", self.links)?;
        if self.flips.any() {
            writeln!(f, "  {:?}", self.flips)?;
        }
        writeln!(
            f,
            "  lease {:?}, stall {:?}, step {:?}, swap blocks {}, prefix cache {}, {:?} writes, silence {:?}, {} in flight, {:?}",
            self.lease,
            self.stall_max,
            self.step_max,
            self.swap_blocks,
            self.prefix_cache,
            self.writer,
            self.silence_max,
            self.steps_in_flight,
            self.tiers
        )?;
        if let Some(speculation) = &self.speculation {
            writeln!(f, "  {speculation:?}")?;
        }
        if self.models().len() > 1 {
            let of_workers: Vec<&str> = self.workers.iter().map(|one| &*one.model).collect();
            writeln!(
                f,
                "  workers of {of_workers:?}, changed {:?}",
                self.changed_models
            )?;
            writeln!(f, "  requests of {:?}", self.request_models)?;
        }
        for arrival in &self.requests {
            write_arrival(f, arrival)?;
        }
        for command in &self.commands {
            writeln!(f, "  {} {command:?}", millis(command.at))?;
        }
        for (at, fault) in &self.faults {
            writeln!(f, "  {} {fault:?}", millis(*at))?;
        }
        Ok(())
    }
}

fn write_arrival(f: &mut fmt::Formatter<'_>, arrival: &ChaosRequest) -> fmt::Result {
    let request = &arrival.request;
    write!(
        f,
        "  {} request {} at r{:x}",
        millis(arrival.at),
        request.sampling.seed,
        arrival.router + 1
    )?;
    write!(
        f,
        ": {} + {} tokens",
        request.prompt.len(),
        request.stop.max_tokens
    )?;
    write!(
        f,
        ", stop {:?} from {}",
        request.stop.stop_tokens, request.stop.min_tokens
    )?;
    write!(
        f,
        ", priority {}, salt {}",
        request.priority, request.cache_salt
    )?;
    let constraint = request.sampling.constraint.as_deref();
    if let Some(constraint) = constraint.and_then(CellConstraint::of) {
        write!(f, ", {constraint:?}")?;
    }
    if let Some(at) = arrival.leaves_at {
        write!(f, ", leaves {}", millis(at))?;
    }
    match arrival.stalls {
        Some((at, span)) => writeln!(f, ", stalls {} for {span:?}", millis(at)),
        None => writeln!(f),
    }
}
