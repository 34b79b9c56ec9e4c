//! The LoRA adapters that workers serve from the start.
//!
//! Owns: opening them. Never: loads one; a worker does, with its first request.

use crate::args::{HostArgs, LoraModule, host_loras_max};
use crate::source::EngineSource;
use anyhow::{Context, bail};
use cleave_engine::Engine;
use cleave_worker::{OpenAdapter, WorkerOptions};
use std::collections::BTreeSet;
use tracing::info;

/// Opens the adapters that the worker serves from the start.
pub(crate) fn with_adapters(
    options: WorkerOptions,
    engine: &dyn Engine,
    host: &HostArgs,
    source: &EngineSource,
) -> anyhow::Result<WorkerOptions> {
    let open = |module: &LoraModule| {
        let LoraModule { name, location } = module;
        let flag = || format!("--lora-modules {name}={location}");
        if *name == source.served_name() {
            bail!("{}: the model itself has this name", flag());
        }
        let device = &engine.describe().device;
        let memory = engine.adapters();
        let memory = memory.with_context(|| format!("{}: {device} applies none", flag()))?;
        let folder = location.folder().with_context(flag)?;
        let facts = memory.open(folder).with_context(flag)?;
        let (rank, mib) = (facts.rank_max, facts.bytes >> 20);
        info!(name, adapter = %facts.adapter, rank, mib, "an adapter is served");
        Ok(OpenAdapter {
            name: name.clone(),
            folder: folder.to_owned(),
            facts,
        })
    };
    let modules = &host.adapters.lora_modules;
    let names: BTreeSet<&str> = modules.iter().map(|module| module.name.as_str()).collect();
    if names.len() < modules.len() {
        bail!("--lora-modules: two adapters have the same name");
    }
    if let Some(root) = &host.adapters.lora_root
        && !root.is_dir()
    {
        bail!("--lora-root {}: not a folder", root.display());
    }
    let (max_loras, max_cpu_loras) = (host.adapters.max_loras, host.adapters.max_cpu_loras);
    let max_cpu_loras = host_loras_max(max_cpu_loras, max_loras).map_err(anyhow::Error::msg)?;
    Ok(WorkerOptions {
        adapters: modules.iter().map(open).collect::<anyhow::Result<_>>()?,
        max_loras,
        max_cpu_loras,
        lora_root: host.adapters.lora_root.clone(),
        ..options
    })
}
