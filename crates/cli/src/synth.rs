//! `cleave synth`: a checkpoint with random weights, of a named shape or of a config.json, or a
//! quantised copy of a checkpoint.

use crate::args::{QuantizationArg, SynthArgs};
use crate::model::{loading_bar, show_progress};
use anyhow::Context;
use cleave_checkpoint::CheckpointProgress;
use cleave_checkpoint::synth::{
    QuantizeOptions, QuantizedLayout, quantize, synth, synth_of_config,
};
use std::fs;
use std::path::Path;

pub(crate) fn run(args: &SynthArgs) -> anyhow::Result<()> {
    let bar = loading_bar();
    bar.set_message("writing");
    let mut progress = |progress| show_progress(&bar, progress);
    let written = write(args, &mut progress);
    bar.finish_and_clear();
    written?;
    eprintln!("wrote {}", args.out.display());
    Ok(())
}

fn write(args: &SynthArgs, progress: &mut dyn FnMut(CheckpointProgress)) -> anyhow::Result<()> {
    let out = &args.out;
    let quantizing = args.quantization.map(|quantization| QuantizeOptions {
        layout: layout(quantization),
        group: args.group_size as usize,
    });
    let random = |out: &Path, progress: &mut dyn FnMut(CheckpointProgress)| {
        match (&args.shape, &args.config) {
            (Some(shape), _) => synth(shape, out, args.seed, progress)?,
            (None, Some(config)) => synth_of_config(config, out, args.seed, progress)?,
            (None, None) => {
                anyhow::bail!("give --shape, --config, or --model with --quantization")
            }
        }
        Ok(())
    };
    match (&args.model, quantizing) {
        (Some(model), Some(quantizing)) => quantize(model.folder()?, out, quantizing, progress)?,
        (_, None) => random(out, progress)?,
        (None, Some(quantizing)) => {
            // In the new folder, whose disk has room for large weights.
            let dense = out.join("dense");
            random(&dense, progress)?;
            quantize(&dense, out, quantizing, progress)?;
            fs::remove_dir_all(&dense).with_context(|| dense.display().to_string())?;
        }
    }
    Ok(())
}

fn layout(quantization: QuantizationArg) -> QuantizedLayout {
    match quantization {
        QuantizationArg::Fp8 => QuantizedLayout::Fp8,
        QuantizationArg::Fp8Block => QuantizedLayout::Fp8Block,
        QuantizationArg::Int8 => QuantizedLayout::Int8,
        QuantizationArg::Int4 => QuantizedLayout::Int4,
        QuantizationArg::Awq => QuantizedLayout::Awq,
        QuantizationArg::Gptq => QuantizedLayout::Gptq,
        QuantizationArg::GptqInt8 => QuantizedLayout::Gptq8,
        QuantizationArg::Mxfp8 => QuantizedLayout::Mxfp8,
        QuantizationArg::Mxfp4 => QuantizedLayout::Mxfp4,
        QuantizationArg::Nvfp4 => QuantizedLayout::Nvfp4,
        QuantizationArg::ModeloptNvfp4 => QuantizedLayout::ModelOptNvfp4,
        QuantizationArg::ModeloptFp8 => QuantizedLayout::ModelOptFp8,
        QuantizationArg::F16 => QuantizedLayout::F16,
        QuantizationArg::F32 => QuantizedLayout::F32,
    }
}
