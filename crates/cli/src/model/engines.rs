//! Engines of a loaded model: the division of threads, GPU and KV memory among workers.

use super::kv_memory::{PlaneBlocks, SequenceLimits};
use super::{LoadedModel, LoadedWeights};
use crate::args::EngineArgs;
use crate::gpu::{self, GpuShare};
use anyhow::{Context, bail};
use cleave_cpu::{CpuOps, CpuOptions, CpuWeightLoader, WorkerThreads};
use cleave_cuda::{
    CudaAdapterLoader, CudaOps, CudaOptions, adapter_bytes_max, experts_workspace_bytes,
};
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, Role, SamplingParams, Segment, SlotIndex, StepId, StepPlan,
    WindowTable,
};
use cleave_engine::ops::AdapterLoader;
use cleave_engine::{AdapterTable, Engine, EngineLimits, ModelEngine};
use cleave_models::ModelSpec;
use std::sync::Arc;

/// KV cache of all workers together, in bytes, if free memory cannot be read.
const KV_BYTES_FALLBACK: u64 = 1 << 30;

/// The workers of all models of this process, which divide its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessWorkers {
    pub(crate) count: usize,
    /// Workers whose KV cache was given no size.
    pub(crate) count_unsized: usize,
    /// Bytes of the KV caches of the others.
    pub(crate) kv_bytes_given: u64,
}

impl ProcessWorkers {
    /// The workers of one model for each set of flags.
    pub(crate) fn of<'a>(models: impl Iterator<Item = (&'a EngineArgs, usize)>) -> Self {
        let none = Self {
            count: 0,
            count_unsized: 0,
            kv_bytes_given: 0,
        };
        models.fold(none, |sum, (args, count)| Self {
            count: sum.count + count,
            count_unsized: sum.count_unsized + if args.kv_cache.is_none() { count } else { 0 },
            kv_bytes_given: sum.kv_bytes_given.saturating_add(
                args.kv_cache
                    .unwrap_or_default()
                    .saturating_mul(count as u64),
            ),
        })
    }
}

/// The part of the process that one model's workers get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineShare {
    /// Bytes of each KV cache.
    pub(crate) kv_bytes: u64,
    /// Workers of the models before this one, whose threads come first.
    pub(crate) workers_before: usize,
    /// Workers of all models.
    pub(crate) workers_count: usize,
}

impl LoadedModel {
    /// Creates the engine of a process with one worker.
    ///
    /// # Errors
    /// As [`LoadedModel::engines`].
    pub(crate) fn only_engine(&self, args: &EngineArgs) -> anyhow::Result<Box<dyn Engine>> {
        let sole = ProcessWorkers::of(std::iter::once((args, 1)));
        let share = EngineShare {
            kv_bytes: self.kv_bytes(args, sole)?,
            workers_before: 0,
            workers_count: 1,
        };
        let mut engines = self.engines(args, &[Role::Both], share)?;
        engines.pop().context("one engine was asked for")
    }

    /// Creates engines for workers of these roles, which share the weights, the threads and the
    /// memory.
    ///
    /// # Errors
    /// If the KV cache does not hold a single block, or memory or threads are not available.
    pub(crate) fn engines(
        &self,
        args: &EngineArgs,
        roles: &[Role],
        share: EngineShare,
    ) -> anyhow::Result<Vec<Box<dyn Engine>>> {
        let bytes = share.kv_bytes;
        let context_blocks = self.context_tokens_max().div_ceil(args.block_tokens());
        let blocks_max = match args.kv_cache {
            Some(_) => u32::MAX,
            None => args.slots_count().saturating_mul(context_blocks),
        };
        let limits = SequenceLimits {
            slots_count: args.slots_count(),
            step_tokens_max: args.step_tokens_max(),
            blocks_max,
        };
        let spec = self.kv_spec(args.block_tokens());
        let PlaneBlocks {
            blocks_count,
            windows_count,
        } = PlaneBlocks::divide(bytes, &spec, limits);
        if blocks_count == 0 {
            let block_bytes = self.block_bytes(args.block_tokens());
            bail!(
                "a KV cache of {bytes} bytes does not hold one block of {} tokens ({block_bytes} bytes); \
                 raise --kv-cache",
                args.block_tokens()
            );
        }
        let limits = EngineLimits {
            block_tokens: args.block_tokens(),
            blocks_count,
            states_count: 0,
            windows_count,
            slots_count: args.slots_count(),
            step_tokens_max: args.step_tokens_max(),
        };
        let count = args.threads_each(share.workers_count);
        let decode_percent = match &self.backend {
            LoadedWeights::Cpu { .. } => None,
            LoadedWeights::Cuda { device, .. } => {
                gpu::decode_percent(args.gpu_decode_share, roles, device)
            }
        };
        let mut engines = (share.workers_before..)
            .zip(roles)
            .map(|(index, role)| {
                let gpu = GpuShare::of(*role, decode_percent);
                let threads = WorkerThreads { index, count };
                self.engine(limits, threads, gpu)
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        if let Some(first) = engines.first_mut() {
            on_own_thread(|| check_first_step(first.as_mut()))
                .context("the model cannot take a single step")?;
        }
        Ok(engines)
    }

    /// Creates an engine for one sequence of `tokens` tokens.
    ///
    /// # Errors
    /// If memory or threads are not available.
    pub(crate) fn single_sequence_engine(
        &self,
        args: &EngineArgs,
        tokens: u32,
    ) -> anyhow::Result<Box<dyn Engine>> {
        let limits = EngineLimits {
            block_tokens: args.block_tokens(),
            blocks_count: tokens.div_ceil(args.block_tokens()) + 1,
            states_count: 0,
            slots_count: 1,
            step_tokens_max: args.step_tokens_max(),
            windows_count: 0,
        };
        let sole = WorkerThreads {
            index: 0,
            count: args.threads(),
        };
        self.engine(limits, sole, GpuShare::WHOLE)
    }

    /// Creates an engine with these limits, for a worker with these threads or this share of a GPU.
    ///
    /// # Errors
    /// If memory or threads are not available.
    pub(crate) fn engine(
        &self,
        limits: EngineLimits,
        worker: WorkerThreads,
        gpu: GpuShare,
    ) -> anyhow::Result<Box<dyn Engine>> {
        Ok(match &self.backend {
            LoadedWeights::Cpu {
                weights, processor, ..
            } => {
                let options = CpuOptions {
                    kv: self.kv,
                    ..processor.options(self.precision, worker)?
                };
                let ops = CpuOps::new(&options)?;
                // One thread packs an adapter: the others compute steps meanwhile.
                let pack = CpuWeightLoader::new(&CpuOptions {
                    threads: 1,
                    ..options
                });
                let engine = ModelEngine::new(ops, Arc::clone(weights), limits)?;
                Box::new(engine.with_adapters(self.adapters(pack, weights.spec())))
            }
            LoadedWeights::Cuda {
                weights,
                device,
                products,
            } => {
                let options = CudaOptions {
                    products: *products,
                    kv: self.kv,
                    priority: gpu.priority,
                    share: gpu.share,
                    ..CudaOptions::new(self.precision)
                };
                let ops = CudaOps::new(device, &options)?;
                let engine = ModelEngine::new(ops, Arc::clone(weights), limits)?;
                if self.loras_max == 0 {
                    return Ok(Box::new(engine));
                }
                let (spec, rank_max) = (weights.spec(), self.lora_rank_max);
                let loader = CudaAdapterLoader::new(device, spec, self.loras_max, rank_max);
                let loader = loader
                    .context("no room for LoRA adapters; lower --max-loras or --max-lora-rank")?;
                Box::new(engine.with_adapters(self.adapters(loader, spec)))
            }
        })
    }

    /// Returns an engine's table of adapters, with none yet.
    fn adapters<L: AdapterLoader>(&self, loader: L, spec: &ModelSpec) -> Arc<AdapterTable<L>> {
        let target = self.adapter_target.clone();
        let table = AdapterTable::new(loader, spec.clone(), target, self.lora_rank_max);
        Arc::new(table)
    }

    /// Returns the bytes of the KV cache of each worker of this model, beside all `workers` of the
    /// process. The weights of every model are in memory, and no engine is.
    ///
    /// # Errors
    /// If no size was given, and no memory is left or it cannot be read.
    pub(crate) fn kv_bytes(
        &self,
        args: &EngineArgs,
        workers: ProcessWorkers,
    ) -> anyhow::Result<u64> {
        match args.kv_cache {
            Some(bytes) => Ok(bytes),
            None => self.kv_bytes_default(args, workers),
        }
    }

    /// Returns the default size of a KV cache, derived from free memory.
    fn kv_bytes_default(&self, args: &EngineArgs, workers: ProcessWorkers) -> anyhow::Result<u64> {
        let LoadedWeights::Cuda { device, .. } = &self.backend else {
            return Ok(kv_bytes_default(memory_available(), workers));
        };
        let (free, total) = device.memory()?;
        let used = (total - free) as f64;
        let each = self.activation_bytes(args) + self.adapters_bytes();
        let workers_count = workers.count;
        let activations = (each * workers_count as u64) as f64;
        let beside = activations + workers.kv_bytes_given as f64;
        let left = total as f64 * args.gpu_memory_utilization - used - beside;
        if left <= 0.0 {
            bail!(
                "of the GPU's {total} bytes {free} are free, and the activations, adapters and given KV caches of {workers_count} \
                 workers take {beside}: nothing is left for a KV cache; raise --gpu-memory-utilization, lower \
                 --max-num-batched-tokens, --max-loras or --kv-cache, or use a larger GPU"
            );
        }
        Ok(left as u64 / workers.count_unsized.max(1) as u64)
    }

    /// Memory of an engine's adapters on a GPU, which is allocated at the start.
    fn adapters_bytes(&self) -> u64 {
        let each = adapter_bytes_max(self.facts().spec, self.lora_rank_max);
        (each * self.loras_max) as u64
    }

    /// Upper bound of an engine's memory on a GPU besides weights and KV: rows of every width,
    /// logits, and temporary buffers of kernels.
    fn activation_bytes(&self, args: &EngineArgs) -> u64 {
        const BESIDE: u64 = 64 << 20;
        let spec = self.facts().spec;
        let widest = spec.widths_max();
        let widths = 8 * spec.hidden_size + 4 * widest.qkv + 4 * widest.gated;
        let rows = u64::from(args.step_tokens_max()) * widths as u64 * 4;
        let logits = u64::from(args.slots_count().clamp(16, 128)) * spec.vocab_size as u64 * 4;
        let step_rows = args.step_tokens_max() as usize;
        let experts = experts_workspace_bytes(spec, step_rows, self.precision);
        rows + 2 * logits + experts + BESIDE
    }
}

/// Runs `act` on a thread of its own. An engine binds the thread that steps it to cores, and
/// threads started from there would inherit the binding.
pub(crate) fn on_own_thread<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| match scope.spawn(act).join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Runs one token through the whole model, so that weights that are not finite are found before a
/// port is bound, not with the first request.
fn check_first_step(engine: &mut dyn Engine) -> anyhow::Result<()> {
    let slot = SlotIndex(0);
    let windows = engine.describe().capacity.windows;
    let open = OpenSlot {
        slot,
        sampling: Arc::new(SamplingParams::greedy()),
        prompt: Arc::from([0]),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
    };
    let segment = Segment {
        slot,
        position: 0,
        len: 1,
        blocks: vec![BlockIndex(0)],
        logits: LogitsWanted::Sample,
        drafts: Vec::new(),
        state: None,
        window: windows.map(|_| WindowTable {
            first: 0,
            blocks: vec![BlockIndex(0)],
        }),
    };
    engine.step(&StepPlan {
        step: StepId(0),
        opens: vec![open],
        segments: vec![segment],
        poolings: Vec::new(),
    })?;
    Ok(())
}

/// Returns the memory of this machine that programs can have, in bytes.
pub(crate) fn memory_available() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Returns a quarter of the memory that given sizes leave, divided among the other workers.
fn kv_bytes_default(free: Option<u64>, workers: ProcessWorkers) -> u64 {
    let left = free.map(|bytes| bytes.saturating_sub(workers.kv_bytes_given) / 4);
    left.unwrap_or(KV_BYTES_FALLBACK) / workers.count_unsized.max(1) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_without_a_size_share_what_given_ones_leave() {
        let workers = |count, count_unsized, kv_bytes_given| ProcessWorkers {
            count,
            count_unsized,
            kv_bytes_given,
        };
        let bytes = |workers| kv_bytes_default(Some(4000), workers);
        assert_eq!(bytes(workers(1, 1, 0)), 1000);
        assert_eq!(bytes(workers(4, 4, 0)), 250);
        assert_eq!(bytes(workers(4, 2, 2000)), 250);
        assert_eq!(bytes(workers(2, 1, 5000)), 0);
        assert_eq!(
            kv_bytes_default(None, workers(2, 2, 0)),
            KV_BYTES_FALLBACK / 2
        );
    }
}
