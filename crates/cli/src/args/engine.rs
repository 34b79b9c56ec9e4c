//! Which model, and how an engine runs it.
//!
//! Owns: these flags, which every command that loads a model shares. Never: reads a file.

use crate::values::{parse_bytes, parse_mock_block_bytes};
use clap::{Args, ValueEnum};
use cleave_cpu::Binding;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Which model, and how it is held in memory.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Hugging Face folder (config.json, tokenizer.json, *.safetensors); the bundled demo if absent.
    #[arg(long, value_name = "DIR", env = "CLEAVE_MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Name under which the API serves the model; the folder's name if absent.
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,
    /// Number format of weights and activations; `auto` takes the checkpoint's (f16 runs as bf16). `f16` keeps the weights
    /// of an f16 checkpoint as they are, on a processor: no bit of theirs is lost and activations keep 13 bits instead of 8,
    /// one sequence reads no more bytes, but prompts and large batches take about twice as long. Quantised weights run beside it
    /// as they are; on a processor fp8, and what its kernels do not take, is rounded to it.
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    pub(crate) dtype: Dtype,
    /// Round the weights of a checkpoint of floats when it is loaded, on a processor: `int8` with a scale for each
    /// row, `int4` with one for each 128 elements and the head in int8. Activations that meet them have eight bits.
    #[arg(long, value_enum, value_name = "FORM")]
    pub(crate) quantize: Option<QuantizeArg>,
    /// Keep packed weights in files of this folder, on a processor, so that the next load maps them instead of packing
    /// them. Each checkpoint has a file for each form (`--dtype`, `--quantize`), as large as the packed weights. Who may
    /// write there can change what a model says.
    #[arg(long, value_name = "DIR", env = "CLEAVE_PACKED_CACHE")]
    pub(crate) packed_cache: Option<PathBuf>,
    /// Number format of the KV cache; `auto` is that of the weights, `fp8` is fp8_e4m3 with a scale of 1, `int8` is
    /// int8_per_token_head, with a scale for every key and value of a head, on a processor.
    #[arg(long, value_enum, default_value_t = KvCacheDtype::Auto)]
    pub(crate) kv_cache_dtype: KvCacheDtype,
    /// Shorten the model's context to this many tokens (prompt and output).
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_model_len: Option<u32>,
}

/// How an engine runs.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    /// Where to compute: `cpu`, `cuda` (the first NVIDIA GPU) or `cuda:N`.
    #[arg(long, value_name = "DEVICE", default_value_t = Device::Cpu)]
    pub(crate) device: Device,
    /// Processor threads, all workers of this process together; more than there are cores are shared.
    /// If absent, the machine's cores (or those of --cpu-bind) for one worker, twice as many for several: who has
    /// nothing to do leaves its cores to the others.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
    /// Which cores threads keep to: `auto` keeps a worker's threads on one memory node where the machine has several
    /// (on all alike where none is wide enough), `none` leaves them to the system, `0-3,8` binds each thread to one of
    /// these, in turn. Weights that are packed here lie on the memory nodes of all those cores in turn.
    #[arg(long, value_name = "auto|none|CORES", default_value_t = Binding::Auto, env = "CLEAVE_CPU_BIND")]
    pub(crate) cpu_bind: Binding,
    /// Instruction set; the best that the processor has if absent.
    #[arg(long, value_name = "ISA")]
    pub(crate) isa: Option<String>,
    /// KV cache of each worker, such as `512MiB` or `4GiB`; sized from free memory if absent.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) kv_cache: Option<u64>,
    /// Who makes a GPU's large matrix products.
    #[arg(long, value_enum, default_value_t = GpuMatmul::Invariant)]
    pub(crate) gpu_matmul: GpuMatmul,
    /// Share of a GPU's memory that weights, activations and KV cache together take.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, value_parser = parse_share)]
    pub(crate) gpu_memory_utilization: f64,
    /// Share of a GPU's multiprocessors that decode workers keep to, from 0.01 to 0.99; prefill workers of the same process get the
    /// others. 0.4 if absent and a process has prefill and decode workers on the GPU; `none` (or 0) leaves it undivided, and
    /// decode steps then wait for the kernels of prompts. Between processes it divides nothing without MPS: they take turns.
    #[arg(long, value_name = "SHARE|none", value_parser = parse_decode_share)]
    pub(crate) gpu_decode_share: Option<DecodeShare>,
    /// Tokens per KV block; 16 if absent, or what a mock engine's profile says.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) block_size: Option<u32>,
    /// Sequences that one worker runs at once; 64 if absent (256 on a GPU), or what a mock engine's profile
    /// says.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) max_num_seqs: Option<u32>,
    /// Tokens in one step, which bounds the prefill chunk; 512 if absent (8192 on a GPU), or what a mock
    /// engine's profile says.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) max_num_batched_tokens: Option<u32>,
    /// Requests a worker queues before it refuses, each leg.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub(crate) max_queue: Option<u32>,
    /// Do not keep blocks of finished sequences for reuse.
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
}

/// Tokens of a block, where neither a flag nor a profile says how many.
const BLOCK_TOKENS: u32 = 16;
/// Sequences at once, where neither a flag nor a profile says how many; on a GPU.
const SLOTS_COUNT: (u32, u32) = (64, 256);
/// Tokens in one step, likewise. A GPU needs thousands of them to compute at its best.
const STEP_TOKENS_MAX: (u32, u32) = (512, 8192);

impl EngineArgs {
    /// Tokens per KV block.
    pub(crate) fn block_tokens(&self) -> u32 {
        self.block_size.unwrap_or(BLOCK_TOKENS)
    }

    /// Sequences that one worker runs at once.
    pub(crate) fn slots_count(&self) -> u32 {
        self.max_num_seqs
            .unwrap_or_else(|| self.device.pick(SLOTS_COUNT))
    }

    /// Tokens in one step.
    pub(crate) fn step_tokens_max(&self) -> u32 {
        self.max_num_batched_tokens
            .unwrap_or_else(|| self.device.pick(STEP_TOKENS_MAX))
    }

    /// Threads of one that computes alone.
    pub(crate) fn threads(&self) -> usize {
        self.threads_each(1)
    }

    /// Threads of each of so many workers.
    pub(crate) fn threads_each(&self, workers: usize) -> usize {
        let all = match (self.threads, &self.cpu_bind) {
            (Some(threads), _) => threads as usize,
            (None, Binding::Cores(cores)) => cores.len() * workers.min(2),
            (None, _) => cleave_cpu::cores_count() * workers.min(2),
        };
        (all / workers).max(1)
    }
}

/// What runs the steps of a fleet.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Mock engine")]
pub(crate) struct MockArgs {
    /// `model` computes. `mock` computes nothing: its steps take the time that a profile prices them at,
    /// its tokens are drawn from a hash of seed and position, and it needs no model folder. Everything
    /// else is real: HTTP, router, scheduling, hand-offs.
    #[arg(long, value_enum, default_value_t = EngineKind::Model)]
    pub(crate) engine: EngineKind,
    /// Whose time a mock engine's steps take: a name, or a JSON file like those of the
    /// simulator. A wrong name lists the names.
    #[arg(long, value_name = "NAME|FILE", default_value = crate::mock::PROFILE)]
    pub(crate) mock_profile: String,
    /// Bytes of a mock engine's KV block. Hand-offs move them, but steps read none, so a few do; the
    /// size of the real one shows what its way costs.
    #[arg(long, value_name = "SIZE", default_value = "64", value_parser = parse_mock_block_bytes)]
    pub(crate) mock_block_bytes: u32,
}

/// See [`MockArgs::engine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineKind {
    Model,
    Mock,
}

/// See [`ModelArgs::dtype`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    Auto,
    F32,
    Bf16,
    #[value(alias = "float16", alias = "half")]
    F16,
}

/// See [`ModelArgs::quantize`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum QuantizeArg {
    Int8,
    Int4,
}

/// See [`ModelArgs::kv_cache_dtype`]; named as vLLM names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvCacheDtype {
    Auto,
    Bf16,
    #[value(name = "fp8_e4m3", alias = "fp8")]
    Fp8E4m3,
    #[value(name = "int8_per_token_head", alias = "int8")]
    Int8PerTokenHead,
}

/// See [`EngineArgs::gpu_matmul`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum GpuMatmul {
    /// Cleave's kernels: the same answer whatever else is in the step.
    Invariant,
    /// NVIDIA's cublasLt, which must be installed: the last bits may depend on what else is in the step.
    Fast,
}

/// See [`EngineArgs::device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Cpu,
    /// By its number among those that the process may see.
    Cuda(u32),
}

impl Device {
    /// One of two values: for the processor, or for a GPU.
    pub(crate) fn pick<T>(self, (cpu, gpu): (T, T)) -> T {
        match self {
            Self::Cpu => cpu,
            Self::Cuda(_) => gpu,
        }
    }
}

impl FromStr for Device {
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

impl fmt::Display for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => out.write_str("cpu"),
            Self::Cuda(number) => write!(out, "cuda:{number}"),
        }
    }
}

/// A share above 0 and at most 1.
fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err("a share above 0, at most 1".to_owned()),
    }
}

/// How a GPU's multiprocessors are divided between the legs of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecodeShare {
    /// All legs have all of them.
    Undivided,
    /// So many for decode workers, 1 to 99.
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
    struct Flags {
        #[command(flatten)]
        engine: EngineArgs,
    }

    #[track_caller]
    fn each(flags: &[&str], workers: usize) -> usize {
        let words = std::iter::once(&"test").chain(flags);
        Flags::parse_from(words).engine.threads_each(workers)
    }

    #[test]
    fn workers_of_one_process_had_more_threads_than_were_given() {
        assert_eq!(each(&["--threads", "6"], 1), 6);
        assert_eq!(each(&["--threads", "6"], 4), 1);
        assert_eq!(each(&["--threads", "6"], 3), 2);
        assert_eq!(each(&["--threads", "2"], 3), 1, "nobody has none");
        assert_eq!(each(&["--cpu-bind", "0-2,5"], 1), 4);
        assert_eq!(each(&["--cpu-bind", "0-2,5"], 2), 4, "shared");
        assert_eq!(each(&["--cpu-bind", "0-2,5", "--threads", "2"], 1), 2);
    }

    /// Two have every core each, since one often waits for the other; more of them do not make more threads.
    #[test]
    fn workers_of_one_process_divide_twice_the_cores() {
        let cores = cleave_cpu::cores_count();
        assert_eq!(each(&[], 1), cores);
        assert_eq!(each(&[], 2), cores);
        assert_eq!(each(&[], 4), (cores / 2).max(1));
        assert_eq!(each(&[], 1000 * cores), 1);
    }
}
