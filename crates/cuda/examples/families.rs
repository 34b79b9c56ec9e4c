//! Measures every golden checkpoint in every number format of weights: a JSON object a line.
//!
//! usage: families cpu | gpu [PROMPTS [FOLDER ...]]
//!
//! `cpu` is the processor's backend, `gpu` the CUDA backend on a real device or, without one, over
//! the stand-in driver, which takes minutes for a path: there only f32 and bf16 are compared on
//! every path. PROMPTS is the number of prompts of each checkpoint, by default all.
//!
//! A line has the largest error of a logit, and the first difference between two paths of a
//! sequence, null if there was none. f32 is compared with the goldens of transformers. Other
//! formats are compared with the same numbers in f32 on the processor, and the error is a share of
//! the largest logit. These checkpoints have random weights and widths that are multiples of 32;
//! for the error every expert is chosen, since a small error of a router's logit chooses another
//! one. Rounding at load has no error here: its numbers are those of a rounded checkpoint.

use cleave_checkpoint::Checkpoint;
use cleave_checkpoint::synth::{QuantizeOptions, QuantizedLayout, quantize, synth_of_config};
use cleave_cpu::{CpuOps, CpuOptions, CpuWeightLoader};
use cleave_cuda::{CudaDevice, CudaOps, CudaOptions, CudaWeightLoader};
use cleave_engine::ops::{Precision, Quantize};
use cleave_engine::{Engine, EngineLimits, ModelEngine, Weights, conformance};
use serde_json::{Map, Value, json};
use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Columns that share a scale, and the sides of a block.
const GROUP: usize = 32;

/// Formats of weights of eight and four bits, as checkpoints have them.
const LAYOUTS: [(&str, QuantizedLayout); 12] = [
    ("fp8", QuantizedLayout::Fp8),
    ("fp8 blocks", QuantizedLayout::Fp8Block),
    ("fp8 modelopt", QuantizedLayout::ModelOptFp8),
    ("mxfp8", QuantizedLayout::Mxfp8),
    ("int8", QuantizedLayout::Int8),
    ("gptq int8", QuantizedLayout::Gptq8),
    ("int4", QuantizedLayout::Int4),
    ("awq", QuantizedLayout::Awq),
    ("gptq", QuantizedLayout::Gptq),
    ("mxfp4", QuantizedLayout::Mxfp4),
    ("nvfp4", QuantizedLayout::Nvfp4),
    ("nvfp4 modelopt", QuantizedLayout::ModelOptNvfp4),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Backend {
    Cpu,
    Gpu,
}

/// A way to load a checkpoint.
#[derive(Clone, Copy)]
struct Loading {
    backend: Backend,
    precision: Precision,
    quantize: Option<Quantize>,
    keeps_f16: bool,
}

impl Loading {
    const fn new(backend: Backend, precision: Precision) -> Self {
        Self {
            backend,
            precision,
            quantize: None,
            keeps_f16: false,
        }
    }

    fn engine(self, dir: &Path, limits: EngineLimits) -> Result<Box<dyn Engine>, String> {
        let engine = match self.backend {
            Backend::Cpu => self.on_cpu(dir, limits),
            Backend::Gpu => self.on_gpu(dir, limits),
        };
        engine.map_err(|error| error.to_string())
    }

    fn on_cpu(self, dir: &Path, limits: EngineLimits) -> Result<Box<dyn Engine>, Box<dyn Error>> {
        let options = CpuOptions {
            threads: 2,
            quantize: self.quantize,
            keeps_f16: self.keeps_f16,
            ..CpuOptions::new(self.precision)
        };
        let pack = CpuWeightLoader::new(&options);
        let weights = Weights::load(&pack, &Checkpoint::open(dir)?, None, &mut |_| {})?;
        let engine = ModelEngine::new(CpuOps::new(&options)?, Arc::new(weights), limits)?;
        Ok(Box::new(engine))
    }

    fn on_gpu(self, dir: &Path, limits: EngineLimits) -> Result<Box<dyn Engine>, Box<dyn Error>> {
        let device = CudaDevice::open(0)?;
        let pack = CudaWeightLoader::new(&device, self.precision)?.with_quantize(self.quantize);
        let weights = Weights::load(&pack, &Checkpoint::open(dir)?, None, &mut |_| {})?;
        let ops = CudaOps::new(&device, &CudaOptions::new(self.precision))?;
        Ok(Box::new(ModelEngine::new(ops, Arc::new(weights), limits)?))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let backend = match arguments.first().map(String::as_str) {
        Some("cpu") => Backend::Cpu,
        Some("gpu") => Backend::Gpu,
        _ => return Err("usage: families cpu | gpu [PROMPTS [FOLDER ...]]".into()),
    };
    let prompts = match arguments.get(1) {
        Some(count) => count.parse()?,
        None => usize::MAX,
    };
    if backend == Backend::Gpu && !is_real() {
        cleave_emulator::preload(cleave_emulator::SanitizerVariant::from_environment());
    }
    let named: Vec<&String> = arguments.iter().skip(2).collect();
    for folder in golden_folders()? {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        if named.is_empty() || named.iter().any(|each| **each == name) {
            measure(&folder, &name, backend, prompts)?;
        }
    }
    Ok(())
}

/// Whether the GPU is a real one.
fn is_real() -> bool {
    std::env::var("CLEAVE_TEST_DEVICE").is_ok_and(|device| device == "cuda")
}

/// Folders with goldens, in order.
fn golden_folders() -> Result<Vec<PathBuf>, Box<dyn Error>> {
    // By cargo's variable at run time, so that this program finds it on another machine too.
    let folder = std::env::var("CARGO_MANIFEST_DIR");
    let folder = folder.as_deref().unwrap_or(env!("CARGO_MANIFEST_DIR"));
    let testdata = Path::new(folder).join("../../testdata");
    let mut folders = Vec::new();
    for entry in fs::read_dir(testdata)? {
        let path = entry?.path();
        if path.join("goldens.json").exists() && path.join("config.json").exists() {
            folders.push(path);
        }
    }
    folders.sort();
    Ok(folders)
}

fn measure(
    folder: &Path,
    name: &str,
    backend: Backend,
    prompts: usize,
) -> Result<(), Box<dyn Error>> {
    let print = |format: &str, error: Result<Option<f32>, String>, paths: Result<(), String>| {
        let line = json!({
            "backend": if backend == Backend::Cpu { "cpu" } else { "gpu" },
            "folder": name,
            "format": format,
            "error": error.as_ref().ok(),
            "problem": error.as_ref().err(),
            "paths": paths.err(),
        });
        writeln!(std::io::stdout(), "{line}")
    };
    let golden = copy(folder, prompts)?;
    let exact = Loading::new(Backend::Cpu, Precision::F32);
    let f32 = Loading::new(backend, Precision::F32);
    let bf16 = Loading::new(backend, Precision::Bf16);
    let error = |dir: &Path, loading: Loading, reference: &Path| {
        let build = |dir: &Path, limits| loading.engine(dir, limits);
        let expected = |_: &Path, limits| exact.engine(reference, limits);
        conformance::logit_error(dir, [&build, &expected])
    };
    let paths = |dir: &Path, loading: Loading| {
        conformance::path_independence(dir, &|dir, limits| loading.engine(dir, limits))
    };
    let has_every_path = backend == Backend::Cpu || is_real();
    let quantized_paths = |dir: &Path, loading: Loading| {
        if has_every_path {
            paths(dir, loading)
        } else {
            Ok(())
        }
    };
    let build = |dir: &Path, limits| f32.engine(dir, limits);
    let of_goldens = conformance::goldens(golden.path(), &build);
    print("f32", of_goldens.map(Some), paths(golden.path(), f32))?;
    let (wide, every_expert) = (
        wide(golden.path(), ExpertChoice::AsConfigured)?,
        wide(golden.path(), ExpertChoice::EveryExpert)?,
    );
    let of_bf16 = error(every_expert.path(), bf16, every_expert.path());
    print("bf16", of_bf16.map(Some), paths(golden.path(), bf16))?;
    if backend == Backend::Cpu {
        let f16 = Loading {
            keeps_f16: true,
            ..bf16
        };
        let halves = [&wide, &every_expert].map(|dir| written(dir.path(), QuantizedLayout::F16));
        let [wide, every_expert] = halves;
        let (wide, every_expert) = (wide?, every_expert?);
        let of_f16 = error(every_expert.path(), f16, every_expert.path());
        print("f16", of_f16.map(Some), paths(wide.path(), f16))?;
    }
    for (format, layout) in LAYOUTS {
        let quantized = [&wide, &every_expert].map(|dir| written(dir.path(), layout));
        match quantized {
            [Ok(wide), Ok(every_expert)] => {
                let expanded = written(every_expert.path(), QuantizedLayout::F32)?;
                let error = error(every_expert.path(), bf16, expanded.path());
                print(format, error.map(Some), quantized_paths(wide.path(), bf16))?;
            }
            [Err(refused), _] | [_, Err(refused)] => {
                print(format, Err(refused.to_string()), Ok(()))?;
            }
        }
    }
    for quantize in Quantize::ALL {
        let rounding = Loading {
            quantize: Some(quantize),
            ..bf16
        };
        let (error, paths) = match error(wide.path(), rounding, wide.path()) {
            Ok(_) => (Ok(None), quantized_paths(wide.path(), rounding)),
            Err(refused) => (Err(refused), Ok(())),
        };
        print(&format!("--quantize {}", quantize.name()), error, paths)?;
    }
    Ok(())
}

/// A copy of a checkpoint with the first prompts of its goldens.
fn copy(folder: &Path, prompts: usize) -> Result<TempDir, Box<dyn Error>> {
    let out = tempfile::tempdir()?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        fs::copy(&path, out.path().join(path.file_name().unwrap_or_default()))?;
    }
    let file = out.path().join("goldens.json");
    let mut goldens: Value = serde_json::from_slice(&fs::read(&file)?)?;
    if let Some(list) = goldens["prompts"].as_array_mut() {
        list.truncate(prompts);
    }
    fs::write(file, goldens.to_string())?;
    Ok(out)
}

/// A copy in another format, with the prompts.
fn written(from: &Path, layout: QuantizedLayout) -> Result<TempDir, Box<dyn Error>> {
    let out = tempfile::tempdir()?;
    let quantizing = QuantizeOptions {
        layout,
        group: GROUP,
    };
    quantize(from, out.path(), quantizing, &mut |_| {})?;
    fs::copy(from.join("goldens.json"), out.path().join("goldens.json"))?;
    Ok(out)
}

/// Experts that a token gets.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExpertChoice {
    AsConfigured,
    EveryExpert,
}

/// Random weights of a checkpoint's model, but of widths that groups divide, with its prompts.
fn wide(folder: &Path, choice: ExpertChoice) -> Result<TempDir, Box<dyn Error>> {
    let out = tempfile::tempdir()?;
    let mut config: Value = serde_json::from_slice(&fs::read(folder.join("config.json"))?)?;
    let text = match config.get("text_config") {
        Some(_) => &mut config["text_config"],
        None => &mut config,
    };
    let text = text.as_object_mut().ok_or("config.json has no object")?;
    widen(text);
    if choice == ExpertChoice::EveryExpert {
        choose_every_expert(text);
    }
    let file = out.path().join("wide.json");
    fs::write(&file, config.to_string())?;
    synth_of_config(&file, out.path(), 7, &mut |_| {})?;
    fs::remove_file(file)?;
    fs::copy(folder.join("goldens.json"), out.path().join("goldens.json"))?;
    Ok(out)
}

/// Raises widths to multiples of [`GROUP`]. Heads keep their width, and become more where they
/// divide the model's.
fn widen(config: &mut Map<String, Value>) {
    let size = |config: &Map<String, Value>, key: &str| config[key].as_u64().unwrap_or(1);
    for key in [
        "intermediate_size",
        "moe_intermediate_size",
        "shared_intermediate_size",
        "shared_expert_intermediate_size",
    ] {
        if config.get(key).is_some_and(Value::is_u64) {
            let wide = size(config, key).next_multiple_of(GROUP as u64);
            config.insert(key.to_owned(), json!(wide));
        }
    }
    let hidden = size(config, "hidden_size");
    let times = if config.get("head_dim").is_some_and(Value::is_u64) {
        1
    } else {
        let least = (1..).find(|times| (hidden * times).is_multiple_of(GROUP as u64));
        least.unwrap_or(1)
    };
    let heads = size(config, "num_attention_heads") * times;
    let wide = (hidden * times).next_multiple_of(GROUP as u64);
    config.insert("num_attention_heads".to_owned(), json!(heads));
    config.insert("hidden_size".to_owned(), json!(wide));
}

fn choose_every_expert(config: &mut Map<String, Value>) {
    let experts = &["n_routed_experts", "num_experts", "num_local_experts"][..];
    for (chosen, counts) in [
        ("num_experts_per_tok", experts),
        ("experts_per_token", experts),
        ("topk_group", &["n_group"]),
    ] {
        let all = counts.iter().find_map(|count| config.get(*count).cloned());
        if let (Some(all), true) = (all, config.contains_key(chosen)) {
            config.insert(chosen.to_owned(), all);
        }
    }
}
