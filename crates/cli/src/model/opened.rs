//! A model whose files were checked, and whose weights are not loaded.
//!
//! Owns: the memory that it is sure to take, and the loading. Never: checks a file again.

use super::{ComputeDevice, LoadedModel, LoadedWeights, weights};
use crate::args::{DeviceArg, DtypeArg, EngineArgs, GpuMatmul, ModelArgs};
use cleave_checkpoint::{AdapterTarget, Checkpoint};
use cleave_cpu::{CpuOptions, CpuWeightLoader, DotType, Quantize, WorkerThreads};
use cleave_cuda::CudaWeightLoader;
use cleave_engine::ops::{KvType, Precision};
use cleave_text::ModelFiles;
use std::time::Instant;

pub(crate) struct OpenedModel {
    /// Text side of the model, for the API and the routers.
    pub(crate) files: ModelFiles,
    pub(super) args: ModelArgs,
    pub(super) engine: EngineArgs,
    pub(super) place: ComputeDevice,
    pub(super) checkpoint: Checkpoint,
    pub(super) precision: Precision,
    pub(super) kv: KvType,
    pub(super) quantize: Option<Quantize>,
}

impl OpenedModel {
    pub(crate) fn device(&self) -> DeviceArg {
        self.engine.device
    }

    /// Bytes that are free where the model will be; `None` if the system does not say.
    ///
    /// # Errors
    /// If the GPU does not answer.
    pub(crate) fn bytes_free(&self) -> anyhow::Result<Option<u64>> {
        Ok(match &self.place {
            ComputeDevice::Cpu(_) => super::memory_available(),
            ComputeDevice::Cuda(device) => Some(device.memory()?.0 as u64),
        })
    }

    /// Bytes that the weights are sure to take. Rounded ones take fewer than the checkpoint, and
    /// those of a cache are mapped.
    pub(crate) fn weight_bytes_min(&self) -> u64 {
        match (&self.quantize, &self.args.form.packed_cache) {
            (None, None) => self.checkpoint.bytes_total(),
            _ => 0,
        }
    }

    /// Loads the weights.
    ///
    /// # Errors
    /// One that names the tensor, or the memory that is missing.
    pub(crate) fn load(self) -> anyhow::Result<LoadedModel> {
        let Self {
            files,
            args,
            engine,
            place,
            checkpoint,
            precision,
            kv,
            quantize,
        } = self;
        let limit = args.form.max_model_len.map(|tokens| tokens as usize);
        let from = Instant::now();
        let backend = match place {
            ComputeDevice::Cpu(processor) => {
                let sole = WorkerThreads {
                    index: 0,
                    count: engine.threads(),
                };
                let options = CpuOptions {
                    quantize,
                    keeps_f16: args.form.dtype == DtypeArg::F16,
                    ..processor.options(precision, sole)?
                };
                let pack = match &args.form.packed_cache {
                    Some(folder) => CpuWeightLoader::cached(&options, folder, &checkpoint),
                    None => CpuWeightLoader::new(&options),
                };
                let weights = weights(&pack, &checkpoint, limit)?;
                let floats = match precision {
                    Precision::Bf16 if !options.keeps_f16 => DotType::Bf16,
                    Precision::Bf16 | Precision::F32 => DotType::F32,
                };
                LoadedWeights::Cpu {
                    weights,
                    processor,
                    floats,
                }
            }
            ComputeDevice::Cuda(device) => {
                if let Some(folder) = &args.form.packed_cache {
                    let folder = folder.display();
                    tracing::warn!(%folder, "--packed-cache applies to --device cpu only and is ignored");
                }
                let weights = weights(
                    &CudaWeightLoader::new(&device, precision)?.with_quantize(quantize),
                    &checkpoint,
                    limit,
                )?;
                LoadedWeights::Cuda {
                    weights,
                    device,
                    products: match engine.gpu_matmul {
                        GpuMatmul::Invariant => cleave_cuda::MatmulMode::PathIndependent,
                        GpuMatmul::Fast => cleave_cuda::MatmulMode::Fast,
                    },
                }
            }
        };
        Ok(LoadedModel {
            adapter_target: AdapterTarget::of(&checkpoint),
            lora_rank_max: engine.max_lora_rank as usize,
            loras_max: 0,
            files,
            backend,
            precision,
            kv,
            weights_time: from.elapsed(),
        })
    }
}
