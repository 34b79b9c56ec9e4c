//! From a folder to engines.
//!
//! Owns: which folder, which number format, how memory and threads are shared among workers.
//! Never: serves. Invariant: when loading returns, everything a checkpoint could be refused for has
//! been looked at.

use crate::args::{Device, Dtype, EngineArgs, GpuMatmul, KvCacheDtype, ModelArgs, QuantizeArg};
use crate::bench::Products;
use crate::demo;
use crate::gpu::{self, GpuPart};
use crate::processor::Processor;
use anyhow::{Context, bail};
use cleave_api::{ModelFiles, ModelText};
use cleave_cpu::{Binding, CpuOps, CpuOptions, CpuPack, Dot, Isa, Quantize, WorkerThreads};
use cleave_cuda::{CudaOps, CudaOptions, CudaPack};
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, Role, Sampling, Segment, SlotIndex, StepId, StepPlan,
};
use cleave_engine::checkpoint::{Checkpoint, KvScales, ModelConfig, StoredType};
use cleave_engine::e4m3;
use cleave_engine::ops::{KvType, Pack, PoolShape, Precision};
use cleave_engine::{Engine, EngineLimits, ModelEngine, Progress, Weights};
use cleave_planner::Shape;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where free memory cannot be read: the KV cache of all workers together, in bytes.
const KV_BYTES_FALLBACK: u64 = 1 << 30;

/// A model in memory, ready for any number of engines.
pub(crate) struct Loaded {
    /// The text side, as the API and routers want it.
    pub(crate) files: ModelFiles,
    backend: Backend,
    precision: Precision,
    kv: KvType,
    /// What bringing the weights to where they are took.
    pub(crate) weights_time: Duration,
}

/// Weights, and what computes with them.
enum Backend {
    Cpu {
        weights: Arc<Weights<CpuPack>>,
        processor: Processor,
        /// What products of floats are made with.
        floats: Dot,
    },
    Cuda {
        weights: Arc<Weights<CudaPack>>,
        device: Arc<cleave_cuda::Device>,
        products: cleave_cuda::Products,
    },
}

/// What does not depend on where weights are.
struct Facts<'a> {
    config: &'a ModelConfig,
    name: &'a str,
    context_tokens_max: usize,
    /// Of all layers' matrices, and of the head.
    matrix_bytes: (u64, u64),
}

/// A cache without scales holds less than one with those that the makers measured: too large a number would be cut.
fn check_kv_scales(kv: KvType, checkpoint: &Checkpoint) -> anyhow::Result<()> {
    let (KvType::Fp8E4m3, Some(KvScales { least, most })) = (kv, checkpoint.kv_scales()) else {
        return Ok(());
    };
    if most > 1.0 {
        bail!(
            "--kv-cache-dtype fp8: the checkpoint's k_scale or v_scale is {most}, which says that keys or values go up to {}; \
             this cache has a scale of 1, and would cut them at {}: take --kv-cache-dtype bf16",
            most * e4m3::MAX,
            e4m3::MAX
        );
    }
    tracing::warn!(
        least,
        most,
        "the checkpoint's k_scale and v_scale are not used: the fp8 KV cache has a scale of 1, which cuts nothing here, \
         but numbers below 2^-6 lose bits"
    );
    Ok(())
}

/// Opens, checks and loads a model.
///
/// # Errors
/// One that names the file and what is wrong with it.
pub(crate) fn load(model: &ModelArgs, engine: &EngineArgs) -> anyhow::Result<Loaded> {
    // Before a checkpoint is read: a GPU that is not there is known at once.
    let place = Place::find(engine)?;
    let folder = match &model.model {
        Some(folder) => folder.clone(),
        None => {
            demo::folder().context("cannot unpack the bundled checkpoint; give one with --model")?
        }
    };
    let checkpoint = Checkpoint::open(&folder)?;
    let mut files = ModelFiles::read(&folder)?;
    files.context_tokens_max = model.max_model_len;
    match (&model.served_model_name, &model.model) {
        (Some(name), _) => files.name.clone_from(name),
        (None, None) => demo::NAME.clone_into(&mut files.name),
        (None, Some(_)) => {}
    }
    ModelText::new(files.clone()).with_context(|| format!("{}", folder.display()))?;
    // Reading a tokenizer takes several times its size; weights come next.
    cleave_cpu::give_back_freed();
    let precision = precision(model.dtype, &checkpoint);
    check_f16(model, &place, &checkpoint)?;
    let kv = match model.kv_cache_dtype {
        KvCacheDtype::Auto => precision.into(),
        KvCacheDtype::Bf16 => KvType::Bf16,
        KvCacheDtype::Fp8E4m3 => KvType::Fp8E4m3,
        KvCacheDtype::Int8PerTokenHead => KvType::Int8PerTokenHead,
    };
    check_kv_scales(kv, &checkpoint)?;
    let quantize = quantize(model, &place, &checkpoint)?;
    let limit = model.max_model_len.map(|tokens| tokens as usize);
    let from = Instant::now();
    let backend = match place {
        Place::Cpu(processor) => {
            let sole = WorkerThreads {
                index: 0,
                count: engine.threads(),
            };
            let options = CpuOptions {
                quantize,
                keeps_f16: model.dtype == Dtype::F16,
                ..processor.options(precision, sole)?
            };
            let pack = match &model.packed_cache {
                Some(folder) => CpuPack::cached(&options, folder, &checkpoint),
                None => CpuPack::new(&options),
            };
            let weights = weights(&pack, &checkpoint, limit)?;
            let floats = match precision {
                Precision::Bf16 if !options.keeps_f16 => Dot::Bf16,
                Precision::Bf16 | Precision::F32 => Dot::F32,
            };
            Backend::Cpu {
                weights,
                processor,
                floats,
            }
        }
        Place::Cuda(device) => {
            if let Some(folder) = &model.packed_cache {
                let folder = folder.display();
                tracing::warn!(%folder, "--packed-cache is for --device cpu; nothing is kept");
            }
            let weights = weights(&CudaPack::new(&device, precision)?, &checkpoint, limit)?;
            Backend::Cuda {
                weights,
                device,
                products: match engine.gpu_matmul {
                    GpuMatmul::Invariant => cleave_cuda::Products::PathIndependent,
                    GpuMatmul::Fast => cleave_cuda::Products::Fast,
                },
            }
        }
    };
    Ok(Loaded {
        files,
        backend,
        precision,
        kv,
        weights_time: from.elapsed(),
    })
}

/// Where to compute, found to be there.
enum Place {
    Cpu(Processor),
    Cuda(Arc<cleave_cuda::Device>),
}

impl Place {
    fn find(engine: &EngineArgs) -> anyhow::Result<Self> {
        match engine.device {
            Device::Cpu => Processor::find(engine).map(Self::Cpu),
            Device::Cuda(number) => {
                if engine.cpu_bind != Binding::Auto {
                    let binding = &engine.cpu_bind;
                    tracing::warn!(%binding, "--cpu-bind is for --device cpu; nothing is bound");
                }
                let device = cleave_cuda::Device::open(number)
                    .with_context(|| format!("--device cuda:{number}"))?;
                Ok(Self::Cuda(device))
            }
        }
    }
}

/// Weights where the pack brings them, with a progress bar.
fn weights<P: Pack>(
    pack: &P,
    checkpoint: &Checkpoint,
    limit: Option<usize>,
) -> anyhow::Result<Arc<Weights<P>>> {
    let bar = loading_bar();
    let weights = Weights::load(pack, checkpoint, limit, &mut |progress| {
        show(&bar, progress)
    });
    bar.finish_and_clear();
    Ok(Arc::new(weights?))
}

/// What weights are rounded to.
fn quantize(
    model: &ModelArgs,
    place: &Place,
    checkpoint: &Checkpoint,
) -> anyhow::Result<Option<Quantize>> {
    let Some(form) = model.quantize else {
        return Ok(None);
    };
    if let Place::Cuda(_) = place {
        bail!("--quantize is for --device cpu; a GPU takes checkpoints that are quantised already");
    }
    if let Some(already) = checkpoint.quantization() {
        bail!("--quantize: the checkpoint is quantised already ({already}); leave the flag out");
    }
    Ok(Some(match form {
        QuantizeArg::Int8 => Quantize::Int8,
        QuantizeArg::Int4 => Quantize::Int4,
    }))
}

/// `--dtype f16` keeps what is there.
fn check_f16(model: &ModelArgs, place: &Place, checkpoint: &Checkpoint) -> anyhow::Result<()> {
    if model.dtype != Dtype::F16 {
        return Ok(());
    }
    if let Place::Cuda(_) = place {
        bail!("--dtype f16 is for --device cpu; a GPU runs f16 checkpoints in bf16");
    }
    if model.quantize.is_some() {
        bail!("--dtype f16 keeps the weights that --quantize rounds; leave one of them out");
    }
    if checkpoint.stored_type() != StoredType::F16 {
        bail!(
            "--dtype f16 keeps weights that are f16, and this checkpoint's are not; leave the flag out"
        );
    }
    Ok(())
}

fn precision(dtype: Dtype, checkpoint: &Checkpoint) -> Precision {
    match (dtype, checkpoint.stored_type()) {
        (Dtype::F32, _) | (Dtype::Auto, StoredType::F32) => Precision::F32,
        (Dtype::Bf16 | Dtype::F16, _) | (Dtype::Auto, StoredType::Bf16 | StoredType::F16) => {
            Precision::Bf16
        }
    }
}

impl Loaded {
    fn facts(&self) -> Facts<'_> {
        fn of<P: Pack>(weights: &Weights<P>) -> Facts<'_> {
            Facts {
                config: weights.config(),
                name: weights.name(),
                context_tokens_max: weights.context_tokens_max(),
                matrix_bytes: weights.matrix_bytes(),
            }
        }
        match &self.backend {
            Backend::Cpu { weights, .. } => of(weights),
            Backend::Cuda { weights, .. } => of(weights),
        }
    }

    /// How products are made, if a processor makes them.
    pub(crate) fn products(&self) -> Option<Products> {
        match &self.backend {
            Backend::Cpu {
                processor, floats, ..
            } => Some(Products {
                isa: processor.isa.unwrap_or_else(Isa::detect),
                dot: self.dot(*floats),
            }),
            Backend::Cuda { .. } => None,
        }
    }

    /// What most of a step's products multiply: bytes where weights are narrower than floats, and half bytes where they are
    /// narrower than bytes.
    fn dot(&self, floats: Dot) -> Dot {
        let shape = self.shape();
        match self.precision {
            Precision::Bf16 if shape.layer_bytes < shape.layer_weights() => Dot::Int4,
            Precision::Bf16 if shape.layer_bytes < 2 * shape.layer_weights() => Dot::Int8,
            Precision::Bf16 | Precision::F32 => floats,
        }
    }

    /// The longest sequence, prompt and output together.
    pub(crate) fn context_tokens_max(&self) -> u32 {
        self.facts().context_tokens_max as u32
    }

    /// The model for people: architecture, size and number format.
    pub(crate) fn title(&self) -> String {
        let kv = match self.kv == self.precision.into() {
            true => String::new(),
            false => format!(", KV cache {}", self.kv.name()),
        };
        format!(
            "{} ({}, {}{kv})",
            self.files.name,
            self.facts().name,
            self.precision.name()
        )
    }

    /// Engines for workers of these roles, which share the weights, the threads and the memory given.
    ///
    /// # Errors
    /// If the KV cache does not hold a single block, or memory or threads cannot be had.
    pub(crate) fn engines(
        &self,
        args: &EngineArgs,
        roles: &[Role],
    ) -> anyhow::Result<Vec<Box<dyn Engine>>> {
        let count = roles.len();
        let block_bytes = self.block_bytes(args.block_tokens());
        let bytes = self.kv_bytes(args, count)?;
        let wanted = u64::from(args.slots_count())
            * u64::from(self.context_tokens_max().div_ceil(args.block_tokens()));
        let most = if args.kv_cache.is_some() {
            u64::from(u32::MAX)
        } else {
            wanted
        };
        let blocks_count = (bytes / block_bytes).min(most).min(u64::from(u32::MAX)) as u32;
        if blocks_count == 0 {
            bail!(
                "a KV cache of {bytes} bytes does not hold one block of {} tokens ({block_bytes} bytes); \
                 raise --kv-cache",
                args.block_tokens()
            );
        }
        let limits = EngineLimits {
            block_tokens: args.block_tokens(),
            blocks_count,
            slots_count: args.slots_count(),
            step_tokens_max: args.step_tokens_max(),
        };
        let count = args.threads_each(count);
        let decode_percent = match &self.backend {
            Backend::Cpu { .. } => None,
            Backend::Cuda { device, .. } => {
                gpu::decode_percent(args.gpu_decode_share, roles, device)
            }
        };
        let mut engines = (0..)
            .zip(roles)
            .map(|(index, role)| {
                let gpu = GpuPart::of(*role, decode_percent);
                self.engine(limits, WorkerThreads { index, count }, gpu)
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        if let Some(first) = engines.first_mut() {
            apart(|| probe(first.as_mut())).context("the model cannot take a single step")?;
        }
        Ok(engines)
    }

    /// An engine for one sequence of `tokens` tokens.
    ///
    /// # Errors
    /// If memory or threads cannot be had.
    pub(crate) fn sole_engine(
        &self,
        args: &EngineArgs,
        tokens: u32,
    ) -> anyhow::Result<Box<dyn Engine>> {
        let limits = EngineLimits {
            block_tokens: args.block_tokens(),
            blocks_count: tokens.div_ceil(args.block_tokens()) + 1,
            slots_count: 1,
            step_tokens_max: args.step_tokens_max(),
        };
        let sole = WorkerThreads {
            index: 0,
            count: args.threads(),
        };
        self.engine(limits, sole, GpuPart::WHOLE)
    }

    /// Whether the system's processes share this GPU by NVIDIA's Multi-Process Service; `None` without a GPU.
    pub(crate) fn is_mps(&self) -> Option<bool> {
        match &self.backend {
            Backend::Cpu { .. } => None,
            Backend::Cuda { device, .. } => Some(device.facts().is_mps),
        }
    }

    /// An engine with these limits, for a worker with these threads or this part of a GPU.
    ///
    /// # Errors
    /// If memory or threads cannot be had.
    pub(crate) fn engine(
        &self,
        limits: EngineLimits,
        worker: WorkerThreads,
        gpu: GpuPart,
    ) -> anyhow::Result<Box<dyn Engine>> {
        Ok(match &self.backend {
            Backend::Cpu {
                weights, processor, ..
            } => {
                let options = CpuOptions {
                    kv: self.kv,
                    ..processor.options(self.precision, worker)?
                };
                let ops = CpuOps::new(&options)?;
                Box::new(ModelEngine::new(ops, Arc::clone(weights), limits)?)
            }
            Backend::Cuda {
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
                Box::new(ModelEngine::new(ops, Arc::clone(weights), limits)?)
            }
        })
    }

    /// The KV cache of each of so many workers.
    ///
    /// # Errors
    /// If nobody said how much, and nothing is left or known to be.
    pub(crate) fn kv_bytes(&self, args: &EngineArgs, workers_count: usize) -> anyhow::Result<u64> {
        match args.kv_cache {
            Some(bytes) => Ok(bytes),
            None => self.kv_bytes_default(args, workers_count),
        }
    }

    /// The same where nobody said how much.
    fn kv_bytes_default(&self, args: &EngineArgs, workers_count: usize) -> anyhow::Result<u64> {
        let Backend::Cuda { device, .. } = &self.backend else {
            return Ok(kv_bytes_default(workers_count));
        };
        let (free, total) = device.memory()?;
        let used = (total - free) as f64;
        let activations = (self.activation_bytes(args) * workers_count as u64) as f64;
        let left = total as f64 * args.gpu_memory_utilization - used - activations;
        if left <= 0.0 {
            bail!(
                "of the GPU's {total} bytes {free} are free, and the activations of {workers_count} workers take \
                 {activations}: nothing is left for a KV cache; raise --gpu-memory-utilization, lower \
                 --max-num-batched-tokens, or use a larger GPU"
            );
        }
        Ok(left as u64 / workers_count.max(1) as u64)
    }

    /// What an engine holds on a GPU besides weights and KV, generously: rows of every width, logits, and what
    /// kernels keep on the way.
    fn activation_bytes(&self, args: &EngineArgs) -> u64 {
        const BESIDE: u64 = 64 << 20;
        let config = self.facts().config;
        let widths =
            8 * config.hidden_size + 4 * config.heads.qkv_width() + 4 * config.intermediate_size;
        let rows = u64::from(args.step_tokens_max()) * widths as u64 * 4;
        let logits = u64::from(args.slots_count().clamp(16, 128)) * config.vocab_size as u64 * 4;
        rows + 2 * logits + BESIDE
    }

    /// The sizes that its cost depends on.
    pub(crate) fn shape(&self) -> Shape {
        let config = self.facts().config;
        let count = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        let (layer_bytes, head_bytes) = self.facts().matrix_bytes;
        Shape {
            layers: count(config.layers_count()),
            hidden: count(config.hidden_size),
            intermediate: count(config.intermediate_size),
            query_heads: count(config.heads.query_heads),
            kv_heads: count(config.heads.kv_heads),
            head_dim: count(config.heads.head_dim),
            vocab: count(config.vocab_size),
            layer_bytes,
            head_bytes,
            kv_element_bytes: count(self.kv.element_bytes()),
            kv_scale_bytes: count(self.kv.scale_bytes()),
        }
    }

    /// Of a KV block with so many tokens.
    pub(crate) fn block_bytes(&self, block_tokens: u32) -> u64 {
        let config = self.facts().config;
        let shape = PoolShape {
            blocks_count: 1,
            layers_count: config.layers_count(),
            heads: config.heads,
            block_tokens: block_tokens as usize,
            kv: self.kv,
        };
        shape.block_bytes() as u64
    }
}

/// On a thread that ends with it: an engine binds the thread that steps it to cores, and threads started from there
/// would keep to them too.
pub(crate) fn apart<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| match scope.spawn(act).join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// One token through the whole model: weights that are not numbers show here, before a port is
/// bound, and not with the first request.
fn probe(engine: &mut dyn Engine) -> anyhow::Result<()> {
    let slot = SlotIndex(0);
    let open = OpenSlot {
        slot,
        sampling: Arc::new(Sampling::greedy()),
        prompt: Arc::from([0]),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
    };
    let segment = Segment {
        slot,
        position: 0,
        len: 1,
        blocks: vec![BlockIndex(0)],
        logits: LogitsWanted::Sample,
        drafts: Vec::new(),
    };
    engine.step(&StepPlan {
        step: StepId(0),
        opens: vec![open],
        segments: vec![segment],
    })?;
    Ok(())
}

/// A quarter of what is free now, shared by the workers.
fn kv_bytes_default(workers_count: usize) -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map_or(KV_BYTES_FALLBACK, |kib| kib * 1024 / 4) / workers_count.max(1) as u64
}

/// A progress bar on standard error; silent where that is not a terminal.
pub(crate) fn loading_bar() -> ProgressBar {
    let style =
        ProgressStyle::with_template("{msg} [{bar:40}] {bytes} of {total_bytes}, {bytes_per_sec}");
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    bar.set_style(
        style
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> "),
    );
    bar.set_message("loading");
    bar
}

/// Moves the bar.
pub(crate) fn show(bar: &ProgressBar, progress: Progress) {
    bar.set_length(progress.bytes_total);
    bar.set_position(progress.bytes_done);
}
