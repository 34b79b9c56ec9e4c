//! The processor, as the flags configure it.
//!
//! Owns: the requested instructions and cores. Never: computes.

use crate::args::EngineArgs;
use anyhow::Context;
use cleave_cpu::{CoreBinding, CoreTopology, CpuOptions, Isa, WorkerThreads};
use cleave_engine::ops::Precision;

pub(crate) struct ProcessorChoice {
    pub(crate) isa: Option<Isa>,
    binding: CoreBinding,
    machine: CoreTopology,
}

impl ProcessorChoice {
    /// Checks that the requested instructions and cores exist.
    ///
    /// # Errors
    /// If they do not.
    pub(crate) fn find(engine: &EngineArgs) -> anyhow::Result<Self> {
        let isa = engine.isa.as_deref().map(str::parse::<Isa>);
        let found = Self {
            isa: isa.transpose().map_err(anyhow::Error::msg)?,
            binding: engine.cpu_bind.clone(),
            machine: CoreTopology::of_this_machine(),
        };
        let sole = WorkerThreads { index: 0, count: 1 };
        let placed = found.machine.place(&found.binding, sole);
        placed.with_context(|| format!("--cpu-bind {}", found.binding))?;
        Ok(found)
    }

    /// Returns the options of one worker.
    ///
    /// # Errors
    /// If its cores do not exist.
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
