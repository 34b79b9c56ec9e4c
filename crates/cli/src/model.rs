//! Loading of a model.
//!
//! Owns: the choice of the folder and of the number format. Never: serves. Invariant: when loading
//! returns, every reason to refuse a checkpoint was checked.

mod engines;
mod kv_memory;
mod opened;

pub(crate) use engines::{EngineShare, ProcessWorkers, memory_available, on_own_thread};
pub(crate) use opened::OpenedModel;

use crate::args::{DeviceArg, DtypeArg, EngineArgs, KvCacheDtype, ModelArgs, QuantizeArg};
use crate::bench::ProcessorProducts;
use crate::demo;
use crate::processor::ProcessorChoice;
use crate::task::model_task;
use anyhow::{Context, bail};
use cleave_checkpoint::e4m3;
use cleave_checkpoint::{AdapterTarget, Checkpoint, CheckpointProgress, KvScales, StoredType};
use cleave_cpu::{CoreBinding, CpuWeightLoader, DotType, Isa, Quantize};
use cleave_cuda::CudaWeightLoader;
use cleave_domain::KvSpec;
use cleave_engine::ops::{KvType, Precision, WeightLoader};
use cleave_engine::{MatrixBytes, Weights};
use cleave_models::{ModelCost, ModelSpec, StoredSizes};
use cleave_text::{ModelFiles, ModelTask, ModelText};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::Arc;
use std::time::Duration;

/// A model in memory, from which any number of engines can be made.
pub(crate) struct LoadedModel {
    /// Text side of the model, for the API and the routers.
    pub(crate) files: ModelFiles,
    backend: LoadedWeights,
    precision: Precision,
    kv: KvType,
    /// The projections that adapters may change.
    adapter_target: AdapterTarget,
    /// Largest rank of an adapter that is accepted.
    lora_rank_max: usize,
    /// Adapters that an engine has loaded at once, for which a GPU's memory is set aside.
    loras_max: usize,
    /// Time that loading the weights took.
    pub(crate) weights_time: Duration,
}

/// The weights, on the device that computes with them.
enum LoadedWeights {
    Cpu {
        weights: Arc<Weights<CpuWeightLoader>>,
        processor: ProcessorChoice,
        /// Instruction kind of floating-point products.
        floats: DotType,
    },
    Cuda {
        weights: Arc<Weights<CudaWeightLoader>>,
        device: Arc<cleave_cuda::CudaDevice>,
        products: cleave_cuda::MatmulMode,
    },
}

/// Facts about the weights that do not depend on the device.
struct WeightFacts<'a> {
    spec: &'a ModelSpec,
    name: &'a str,
    context_tokens_max: usize,
    /// Bytes of all layers' matrices, and of the head.
    matrix_bytes: MatrixBytes,
}

/// Checks the scales of an fp8 KV cache: this cache has a scale of 1, which would clip values of a
/// checkpoint with larger scales.
fn check_kv_scales(kv: KvType, checkpoint: &Checkpoint) -> anyhow::Result<()> {
    let (
        KvType::Fp8E4m3,
        Some(KvScales {
            min: least,
            max: most,
        }),
    ) = (kv, checkpoint.kv_scales())
    else {
        return Ok(());
    };
    if most > 1.0 {
        bail!(
            "--kv-cache-dtype fp8: the checkpoint's k_scale or v_scale is {most}, which says that keys or values go up to {}; \
             this cache has a scale of 1, and would clip them at {}: use --kv-cache-dtype bf16",
            most * e4m3::MAX,
            e4m3::MAX
        );
    }
    tracing::warn!(
        least,
        most,
        "the checkpoint's k_scale and v_scale are not used: the fp8 KV cache has a scale of 1, which clips nothing here, \
         but numbers below 2^-6 lose bits"
    );
    Ok(())
}

/// Refuses a `--max-model-len` above the context of the model.
pub(crate) fn check_max_model_len(max_model_len: Option<u32>, context: u32) -> anyhow::Result<()> {
    if let Some(tokens) = max_model_len.filter(|tokens| *tokens > context) {
        bail!(
            "--max-model-len {tokens}: the model has a context of {context} tokens, and answers beyond it are \
             nonsense; give at most {context}, or leave the flag out"
        );
    }
    Ok(())
}

/// Opens, checks and loads a model.
///
/// # Errors
/// One that names the file and its defect.
pub(crate) fn load(model: &ModelArgs, engine: &EngineArgs) -> anyhow::Result<LoadedModel> {
    open(model, engine)?.load()
}

/// Opens and checks a model.
///
/// # Errors
/// One that names the file and its defect.
pub(crate) fn open(model: &ModelArgs, engine: &EngineArgs) -> anyhow::Result<OpenedModel> {
    // The device is found before the checkpoint is read, so that a missing GPU is reported at once.
    let place = ComputeDevice::find(engine)?;
    let folder = match model.folder()? {
        Some(folder) => folder.to_owned(),
        None => {
            demo::folder().context("cannot unpack the bundled checkpoint; give one with --model")?
        }
    };
    let checkpoint = Checkpoint::open(&folder)?;
    let mut files = ModelFiles::read(&folder)?;
    // The weights bound the context, which config.json may leave to the model's class.
    let trained = u32::try_from(checkpoint.spec().context_tokens_max).unwrap_or(u32::MAX);
    files.context_tokens_max = Some(trained);
    if let Some(class) = checkpoint.wrapper() {
        tracing::warn!(
            class,
            "the text part of this model is served; its images are not read"
        );
    }
    files.task = model_task(&model.form, model.folder()?)?;
    if files.task == ModelTask::Generate && !checkpoint.has_head() {
        bail!(
            "{}: has no lm_head, so that it cannot generate; --runner pooling serves its vectors",
            folder.display()
        );
    }
    match (model.given_name(), model.folder()?) {
        (Some(name), _) => files.name = name,
        (None, None) => demo::NAME.clone_into(&mut files.name),
        (None, Some(_)) => {}
    }
    let text = ModelText::new(files.clone()).with_context(|| format!("{}", folder.display()))?;
    check_max_model_len(model.form.max_model_len, text.context_tokens_max())?;
    drop(text);
    files.context_tokens_max = model.form.max_model_len.or(files.context_tokens_max);
    // Reading a tokenizer takes several times its size, so freed memory is returned before the
    // weights are loaded.
    cleave_cpu::trim_allocator();
    let precision = precision(model.form.dtype, &checkpoint);
    check_f16(model, &place, &checkpoint)?;
    let kv = match model.form.kv_cache_dtype {
        KvCacheDtype::Auto => precision.into(),
        KvCacheDtype::Bf16 => KvType::Bf16,
        KvCacheDtype::Fp8E4m3 => KvType::Fp8E4m3,
        KvCacheDtype::Int8PerTokenHead => KvType::Int8PerTokenHead,
    };
    check_kv_scales(kv, &checkpoint)?;
    let quantize = quantize(model, &checkpoint)?;
    Ok(OpenedModel {
        files,
        args: model.clone(),
        engine: engine.clone(),
        place,
        checkpoint,
        precision,
        kv,
        quantize,
    })
}

/// The device that computes, found to be present.
enum ComputeDevice {
    Cpu(ProcessorChoice),
    Cuda(Arc<cleave_cuda::CudaDevice>),
}

impl ComputeDevice {
    fn find(engine: &EngineArgs) -> anyhow::Result<Self> {
        match engine.device {
            DeviceArg::Cpu => ProcessorChoice::find(engine).map(Self::Cpu),
            DeviceArg::Cuda(number) => {
                if engine.cpu_bind != CoreBinding::Auto {
                    let binding = &engine.cpu_bind;
                    tracing::warn!(%binding, "--cpu-bind applies to --device cpu only and is ignored");
                }
                let device = cleave_cuda::CudaDevice::open(number)
                    .with_context(|| format!("--device cuda:{number}"))?;
                Ok(Self::Cuda(device))
            }
        }
    }
}

/// Loads the weights with a progress bar.
fn weights<P: WeightLoader>(
    pack: &P,
    checkpoint: &Checkpoint,
    limit: Option<usize>,
) -> anyhow::Result<Arc<Weights<P>>> {
    let bar = loading_bar();
    let weights = Weights::load(pack, checkpoint, limit, &mut |progress| {
        show_progress(&bar, progress)
    });
    bar.finish_and_clear();
    Ok(Arc::new(weights?))
}

/// Returns the quantisation of the weights at load time, if any.
fn quantize(model: &ModelArgs, checkpoint: &Checkpoint) -> anyhow::Result<Option<Quantize>> {
    let Some(form) = model.form.quantize else {
        return Ok(None);
    };
    if let Some(already) = checkpoint.quantization() {
        bail!("--quantize: the checkpoint is quantised already ({already}); leave the flag out");
    }
    Ok(Some(match form {
        QuantizeArg::Int8 => Quantize::Int8,
        QuantizeArg::Int4 => Quantize::Int4,
        QuantizeArg::Fp8 => Quantize::Fp8,
        QuantizeArg::Mxfp4 => Quantize::Mxfp4,
        QuantizeArg::Nvfp4 => Quantize::Nvfp4,
    }))
}

/// Checks `--dtype f16`, which keeps the checkpoint's weights exactly.
fn check_f16(
    model: &ModelArgs,
    place: &ComputeDevice,
    checkpoint: &Checkpoint,
) -> anyhow::Result<()> {
    if model.form.dtype != DtypeArg::F16 {
        return Ok(());
    }
    if let ComputeDevice::Cuda(_) = place {
        bail!("--dtype f16 is for --device cpu; a GPU runs f16 checkpoints in bf16");
    }
    if model.form.quantize.is_some() {
        bail!("--dtype f16 keeps the weights that --quantize rounds; leave one of them out");
    }
    if checkpoint.stored_type() != StoredType::F16 {
        bail!(
            "--dtype f16 keeps weights that are f16, and this checkpoint's are not; leave the flag out"
        );
    }
    Ok(())
}

fn precision(dtype: DtypeArg, checkpoint: &Checkpoint) -> Precision {
    match (dtype, checkpoint.stored_type()) {
        (DtypeArg::F32, _) | (DtypeArg::Auto, StoredType::F32) => Precision::F32,
        (DtypeArg::Bf16 | DtypeArg::F16, _)
        | (DtypeArg::Auto, StoredType::Bf16 | StoredType::F16) => Precision::Bf16,
    }
}

impl LoadedModel {
    /// Returns the model with room for so many adapters in each engine.
    pub(crate) fn with_loras_max(self, loras_max: usize) -> Self {
        Self { loras_max, ..self }
    }

    fn facts(&self) -> WeightFacts<'_> {
        fn of<P: WeightLoader>(weights: &Weights<P>) -> WeightFacts<'_> {
            WeightFacts {
                spec: weights.spec(),
                name: weights.name(),
                context_tokens_max: weights.context_tokens_max(),
                matrix_bytes: weights.matrix_bytes(),
            }
        }
        match &self.backend {
            LoadedWeights::Cpu { weights, .. } => of(weights),
            LoadedWeights::Cuda { weights, .. } => of(weights),
        }
    }

    /// Returns the kind of matrix products, if a processor computes them.
    pub(crate) fn products(&self) -> Option<ProcessorProducts> {
        match &self.backend {
            LoadedWeights::Cpu {
                processor, floats, ..
            } => Some(ProcessorProducts {
                isa: processor.isa.unwrap_or_else(Isa::detect),
                dot: self.dot(*floats),
            }),
            LoadedWeights::Cuda { .. } => None,
        }
    }

    /// Returns the kind of most products of a step: int8 where weights take less than two bytes,
    /// int4 where they take less than one.
    fn dot(&self, floats: DotType) -> DotType {
        let cost = self.cost();
        let bytes_each = cost.layer_bytes_read(1.0) / cost.layer_weights as f64;
        match self.precision {
            Precision::Bf16 if bytes_each < 1.0 => DotType::Int4,
            Precision::Bf16 if bytes_each < 2.0 => DotType::Int8,
            Precision::Bf16 | Precision::F32 => floats,
        }
    }

    /// Returns the longest sequence, prompt and output together.
    pub(crate) fn context_tokens_max(&self) -> u32 {
        self.facts().context_tokens_max as u32
    }

    /// Returns a title for people: name, architecture and number format.
    pub(crate) fn title(&self) -> String {
        let kv = if self.kv == self.precision.into() {
            String::new()
        } else {
            format!(", KV cache {}", self.kv.name())
        };
        format!(
            "{} ({}, {}{kv})",
            self.files.name,
            self.facts().name,
            self.precision.name()
        )
    }

    /// Whether processes share this GPU through NVIDIA's Multi-Process Service; `None` without a
    /// GPU.
    pub(crate) fn is_mps(&self) -> Option<bool> {
        match &self.backend {
            LoadedWeights::Cpu { .. } => None,
            LoadedWeights::Cuda { device, .. } => Some(device.facts().is_mps),
        }
    }

    /// Returns operations and bytes of the model's work.
    pub(crate) fn cost(&self) -> ModelCost {
        let WeightFacts {
            spec, matrix_bytes, ..
        } = self.facts();
        let MatrixBytes {
            layers,
            experts,
            head,
        } = matrix_bytes;
        spec.cost(&StoredSizes {
            layer_bytes: layers,
            expert_bytes: experts,
            head_bytes: head,
            kv_element_bytes: self.kv.element_bytes() as u64,
            kv_scale_bytes: self.kv.scale_bytes() as u64,
        })
    }

    /// Returns the planes of a worker's KV, with blocks of this many tokens.
    pub(crate) fn kv_spec(&self, block_tokens: u32) -> KvSpec {
        match &self.backend {
            LoadedWeights::Cpu { weights, .. } => {
                weights.kv_spec_with_window(block_tokens, self.kv)
            }
            LoadedWeights::Cuda { weights, .. } => {
                weights.kv_spec_with_window(block_tokens, self.kv)
            }
        }
    }

    /// Returns the bytes of all layers' keys and values of this many tokens.
    pub(crate) fn block_bytes(&self, block_tokens: u32) -> u64 {
        match &self.backend {
            LoadedWeights::Cpu { weights, .. } => weights.block_bytes(block_tokens, self.kv),
            LoadedWeights::Cuda { weights, .. } => weights.block_bytes(block_tokens, self.kv),
        }
    }
}

/// Creates a progress bar on standard error; it is silent if that is not a terminal.
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

pub(crate) fn show_progress(bar: &ProgressBar, progress: CheckpointProgress) {
    bar.set_length(progress.bytes_total);
    bar.set_position(progress.bytes_done);
}
