//! The processor as flags want it used.
//!
//! Owns: which instructions and cores were asked for. Never: computes.

use crate::args::EngineArgs;
use anyhow::Context;
use cleave_cpu::{Binding, CpuOptions, Isa, Machine, WorkerThreads};
use cleave_engine::ops::Precision;

/// The processor, as the user wants it used.
pub(crate) struct Processor {
    pub(crate) isa: Option<Isa>,
    binding: Binding,
    machine: Machine,
}

impl Processor {
    /// What the flags say, found to be there.
    ///
    /// # Errors
    /// If they name instructions or cores that are not.
    pub(crate) fn find(engine: &EngineArgs) -> anyhow::Result<Self> {
        let isa = engine.isa.as_deref().map(str::parse::<Isa>);
        let found = Self {
            isa: isa.transpose().map_err(anyhow::Error::msg)?,
            binding: engine.cpu_bind.clone(),
            machine: Machine::here(),
        };
        let sole = WorkerThreads { index: 0, count: 1 };
        let placed = found.machine.place(&found.binding, sole);
        placed.with_context(|| format!("--cpu-bind {}", found.binding))?;
        Ok(found)
    }

    /// For one worker.
    ///
    /// # Errors
    /// If its cores are not there.
    pub(crate) fn options(
        &self,
        precision: Precision,
        worker: WorkerThreads,
    ) -> anyhow::Result<CpuOptions> {
        Ok(CpuOptions {
            threads: worker.count,
            isa: self.isa,
            placement: self.machine.place(&self.binding, worker)?,
            ..CpuOptions::new(precision)
        })
    }
}
