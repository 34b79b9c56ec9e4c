//! The flags that choose a model and configure its engine.
//!
//! Owns: these flags, which every command that loads a model shares. Never: reads a file.

use crate::model_location::ModelLocation;
use crate::values::{parse_bytes, parse_mock_block_bytes, parse_model_name};
use clap::{Args, ValueEnum};
use cleave_cpu::CoreBinding;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Flags of one model: which it is, and its form in memory.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    pub(crate) name: ModelNameArgs,
    #[command(flatten)]
    pub(crate) form: ModelFormArgs,
}

/// Flags that choose one model and name it.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelNameArgs {
    /// Hugging Face folder (config.json, tokenizer.json, *.safetensors), or a model of a hub, such
    /// as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@v1`, which is downloaded unless the cache has it;
    /// the bundled demo model, `cleave-demo`, if absent. A path that exists is the path.
    #[arg(long, value_name = "DIR|ORG/NAME[@REVISION]")]
    pub(crate) model: Option<ModelLocation>,
    /// Name under which the API serves the model; the name of the folder or of the hub's model if
    /// absent.
    #[arg(long, value_name = "NAME", num_args = 1.., value_parser = parse_model_name)]
    pub(crate) served_model_name: Vec<String>,
}

/// Flags of a model's form in memory and of its task.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelFormArgs {
    /// Number format of weights and activations. `auto` takes the checkpoint's format, and runs f16
    /// as bf16. `f16`, on a processor, keeps the weights of an f16 checkpoint exactly: activations
    /// keep 13 bits instead of 8, and one sequence reads no more bytes, but prompts and large
    /// batches take about twice as long. Quantised weights keep their own format; on a processor,
    /// fp8 and formats without a kernel are rounded to this one.
    #[arg(long, value_enum, default_value_t = DtypeArg::Auto)]
    pub(crate) dtype: DtypeArg,
    /// Round the projections of a floating-point checkpoint, experts' too, when it is loaded.
    /// `int8` and `fp8` (on a GPU only) have a scale for each row, `int4` for each 128 elements,
    /// `mxfp4` a power of two for each 32, `nvfp4` a float 8 for each 16. On a processor the head
    /// has int8, and activations that meet rounded weights have eight bits.
    #[arg(long, value_enum, value_name = "FORM")]
    pub(crate) quantize: Option<QuantizeArg>,
    /// Folder for files of packed weights, on a processor: the next load maps them instead of
    /// packing again. Each checkpoint has one file for each form (`--dtype`, `--quantize`), as
    /// large as the packed weights. Everyone who can write to the folder can change the model's
    /// answers.
    #[arg(long, value_name = "DIR")]
    pub(crate) packed_cache: Option<PathBuf>,
    /// Number format of the KV cache. `auto` is the format of the weights, `fp8` is fp8_e4m3 with a
    /// scale of 1, and `int8`, on a processor, is int8_per_token_head, with a scale for each head's
    /// key and value.
    #[arg(long, value_enum, default_value_t = KvCacheDtype::Auto)]
    pub(crate) kv_cache_dtype: KvCacheDtype,
    /// Limit the model's context to this many tokens (prompt and output).
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_model_len: Option<u32>,
    /// Task that the model is served for. `auto` embeds where the folder has a
    /// sentence-transformers `modules.json`, and generates otherwise; `pooling` embeds, by
    /// `--pooling`, or scores documents, by `--classifier-from-token`.
    #[arg(long, value_enum, default_value_t = RunnerArg::Auto)]
    pub(crate) runner: RunnerArg,
    /// Hidden states that a vector is made of: the last token's, the mean of all, or the first
    /// token's. As `1_Pooling/config.json` says if absent, or else the last token's.
    #[arg(long, value_enum, value_name = "KIND")]
    pub(crate) pooling: Option<PoolingArg>,
    /// Serve a reranker: the score of a document is the probability of the second of these two
    /// words against the first, each one token, after Qwen3-Reranker's prompt (`no,yes`).
    #[arg(long, value_name = "NO,YES", value_delimiter = ',', num_args = 1)]
    pub(crate) classifier_from_token: Option<Vec<String>>,
}

/// The task that a model is served for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum RunnerArg {
    Auto,
    Generate,
    Pooling,
}

/// Hidden states that a vector is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PoolingArg {
    Last,
    Mean,
    Cls,
}

/// Flags of the engine.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    /// Device that computes: `cpu`, `cuda` (the first NVIDIA GPU) or `cuda:N`.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceArg::Cpu)]
    pub(crate) device: DeviceArg,
    /// Processor threads of all workers of this process together; threads beyond the number of
    /// cores share cores. If absent, as many as the machine's cores (or those of --cpu-bind) for
    /// one worker, and twice as many for several, because an idle worker leaves its cores to the
    /// others.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
    /// Binding of threads to cores. `auto` keeps a worker's threads on one memory node of a machine
    /// with several (on all nodes if none is large enough), `none` leaves them to the system, and
    /// `0-3,8` binds each thread to one of these cores in turn. Weights that are packed at load
    /// time are spread over the memory nodes of all these cores.
    #[arg(long, value_name = "auto|none|CORES", default_value_t = CoreBinding::Auto)]
    pub(crate) cpu_bind: CoreBinding,
    /// Instruction set; the best one of the processor if absent.
    #[arg(long, value_name = "ISA")]
    pub(crate) isa: Option<String>,
    /// Size of the KV cache of each worker, such as `512MiB` or `4GiB`; derived from free memory if
    /// absent.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) kv_cache: Option<u64>,
    /// Largest rank of a LoRA adapter that is accepted.
    #[arg(long, value_name = "RANK", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_lora_rank: u32,
    /// Implementation of a GPU's large matrix products.
    #[arg(long, value_enum, default_value_t = GpuMatmul::Invariant)]
    pub(crate) gpu_matmul: GpuMatmul,
    /// Share of a GPU's memory for weights, activations and KV cache together.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, value_parser = parse_share)]
    pub(crate) gpu_memory_utilization: f64,
    /// Share of a GPU's multiprocessors for decode workers, from 0.01 to 0.99; prefill workers of
    /// the same process get the rest. If absent, 0.4 for a process with prefill and decode workers
    /// on the GPU. `none` (or 0) leaves the GPU undivided, and decode steps then wait for the
    /// kernels of prompts. It does not divide the GPU between processes unless MPS runs: without
    /// MPS they take turns.
    #[arg(long, value_name = "SHARE|none", value_parser = parse_decode_share)]
    pub(crate) gpu_decode_share: Option<DecodeShare>,
    /// Tokens per KV block; 16 if absent, or the value of a mock engine's profile.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) block_size: Option<u32>,
    /// Sequences that one worker runs at once; 64 if absent (256 on a GPU), or the value of a mock
    /// engine's profile.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) max_num_seqs: Option<u32>,
    /// Tokens in one step, which limits the prefill chunk; 512 if absent (8192 on a GPU), or the
    /// value of a mock engine's profile.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) max_num_batched_tokens: Option<u32>,
    /// Requests that a worker queues for each leg before it refuses more.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub(crate) max_queue: Option<u32>,
    /// Do not keep the blocks of finished sequences for reuse.
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
}

const BLOCK_TOKENS_DEFAULT: u32 = 16;
/// Defaults of `--max-num-seqs` on a processor and on a GPU.
const SLOTS_COUNT_DEFAULT_CPU: u32 = 64;
const SLOTS_COUNT_DEFAULT_GPU: u32 = 256;
/// Defaults of `--max-num-batched-tokens` on a processor and on a GPU, which needs thousands of
/// tokens to reach its best speed.
const STEP_TOKENS_DEFAULT_CPU: u32 = 512;
const STEP_TOKENS_DEFAULT_GPU: u32 = 8192;

impl EngineArgs {
    pub(crate) fn block_tokens(&self) -> u32 {
        self.block_size.unwrap_or(BLOCK_TOKENS_DEFAULT)
    }

    pub(crate) fn slots_count(&self) -> u32 {
        self.max_num_seqs.unwrap_or_else(|| {
            self.device
                .pick(SLOTS_COUNT_DEFAULT_CPU, SLOTS_COUNT_DEFAULT_GPU)
        })
    }

    pub(crate) fn step_tokens_max(&self) -> u32 {
        self.max_num_batched_tokens.unwrap_or_else(|| {
            self.device
                .pick(STEP_TOKENS_DEFAULT_CPU, STEP_TOKENS_DEFAULT_GPU)
        })
    }

    /// Threads of an engine that has the processor to itself.
    pub(crate) fn threads(&self) -> usize {
        self.threads_each(1)
    }

    /// Threads of each of this many workers.
    pub(crate) fn threads_each(&self, workers: usize) -> usize {
        let all = match (self.threads, &self.cpu_bind) {
            (Some(threads), _) => threads as usize,
            (None, CoreBinding::Cores(cores)) => cores.len() * workers.min(2),
            (None, _) => cleave_cpu::cores_count() * workers.min(2),
        };
        (all / workers).max(1)
    }
}

/// Flags of the mock engine.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Mock engine")]
pub(crate) struct MockArgs {
    /// `model` runs the model. `mock` computes nothing: its steps take the time that a profile
    /// predicts, its tokens come from a hash of seed and position, and it needs no weights.
    /// Everything else is real: HTTP, router, scheduling, hand-offs.
    #[arg(long, value_enum, default_value_t = EngineKind::Model)]
    pub(crate) engine: EngineKind,
    /// Profile of the mock engine's step times: the name of a built-in profile, or a JSON file in
    /// the simulator's format. A wrong name lists the valid ones.
    #[arg(long, value_name = "NAME|FILE", default_value = crate::mock::PROFILE)]
    pub(crate) mock_profile: String,
    /// Bytes of a mock engine's KV block. Steps read none of them but hand-offs move them, so the
    /// default is small; use the real model's block size to measure hand-offs.
    #[arg(long, value_name = "SIZE", default_value = "64", value_parser = parse_mock_block_bytes)]
    pub(crate) mock_block_bytes: u32,
    /// File of the mock engine's answers, in YAML or JSON: it answers with these texts, token by
    /// token, instead of random tokens, so that clients can be tested. The format is in
    /// docs/guides/scripted-answers.md.
    #[arg(long, value_name = "FILE")]
    pub(crate) mock_script: Option<PathBuf>,
}

/// Engine of the workers; see [`MockArgs::engine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineKind {
    Model,
    Mock,
}

/// Number format of the weights; see [`ModelFormArgs::dtype`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    Auto,
    F32,
    Bf16,
    #[value(alias = "float16", alias = "half")]
    F16,
}

/// Quantization at load time; see [`ModelFormArgs::quantize`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum QuantizeArg {
    Int8,
    Int4,
    Fp8,
    Mxfp4,
    Nvfp4,
}

/// Number format of the KV cache; see [`ModelFormArgs::kv_cache_dtype`]. Names are vLLM's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvCacheDtype {
    Auto,
    Bf16,
    #[value(name = "fp8_e4m3", alias = "fp8")]
    Fp8E4m3,
    #[value(name = "int8_per_token_head", alias = "int8")]
    Int8PerTokenHead,
}

/// Matrix products on a GPU; see [`EngineArgs::gpu_matmul`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum GpuMatmul {
    /// Cleave's kernels: the same answer whatever else is in the step.
    Invariant,
    /// NVIDIA's cublasLt, which must be installed: the last bits may depend on what else is in the
    /// step.
    Fast,
}

/// A device; see [`EngineArgs::device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    Cpu,
    /// A GPU, by its number among those visible to the process.
    Cuda(u32),
}

impl DeviceArg {
    /// Returns the first value for the processor, the second for a GPU.
    pub(crate) fn pick<T>(self, cpu: T, gpu: T) -> T {
        match self {
            Self::Cpu => cpu,
            Self::Cuda(_) => gpu,
        }
    }
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = match text {
            "cpu" => return Ok(Self::Cpu),
            "cuda" => return Ok(Self::Cuda(0)),
            _ => text.strip_prefix("cuda:").and_then(|n| n.parse().ok()),
        };
        let wrong = || format!("no device `{text}`: give cpu, cuda or cuda:N, such as cuda:1");
        number.map(Self::Cuda).ok_or_else(wrong)
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => out.write_str("cpu"),
            Self::Cuda(number) => write!(out, "cuda:{number}"),
        }
    }
}

/// Parses a share above 0 and at most 1.
pub(super) fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err("a share above 0, at most 1".to_owned()),
    }
}

/// Division of a GPU's multiprocessors between the legs of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecodeShare {
    /// All legs use all multiprocessors.
    Undivided,
    /// Percent for decode workers, 1 to 99.
    Percent(u32),
}

fn parse_decode_share(text: &str) -> Result<DecodeShare, String> {
    match (text, text.parse::<f64>()) {
        ("none", _) => Ok(DecodeShare::Undivided),
        (_, Ok(0.0)) => Ok(DecodeShare::Undivided),
        (_, Ok(share)) if (0.01..=0.99).contains(&share) => {
            Ok(DecodeShare::Percent((share * 100.0).round() as u32))
        }
        _ => Err("a share from 0.01 to 0.99, or none".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::EngineArgs;
    use clap::Parser;

    #[derive(Parser)]
    struct EngineFlags {
        #[command(flatten)]
        engine: EngineArgs,
    }

    #[track_caller]
    fn each(flags: &[&str], workers: usize) -> usize {
        let words = std::iter::once(&"test").chain(flags);
        EngineFlags::parse_from(words).engine.threads_each(workers)
    }

    #[test]
    fn workers_of_one_process_share_the_given_threads() {
        assert_eq!(each(&["--threads", "6"], 1), 6);
        assert_eq!(each(&["--threads", "6"], 4), 1);
        assert_eq!(each(&["--threads", "6"], 3), 2);
        assert_eq!(each(&["--threads", "2"], 3), 1, "nobody has none");
        assert_eq!(each(&["--cpu-bind", "0-2,5"], 1), 4);
        assert_eq!(each(&["--cpu-bind", "0-2,5"], 2), 4, "shared");
        assert_eq!(each(&["--cpu-bind", "0-2,5", "--threads", "2"], 1), 2);
    }

    /// Two workers get a thread for every core each, since one often waits for the other; more
    /// workers do not add threads.
    #[test]
    fn several_workers_share_twice_as_many_threads_as_cores() {
        let cores = cleave_cpu::cores_count();
        assert_eq!(each(&[], 1), cores);
        assert_eq!(each(&[], 2), cores);
        assert_eq!(each(&[], 4), (cores / 2).max(1));
        assert_eq!(each(&[], 1000 * cores), 1);
    }
}
