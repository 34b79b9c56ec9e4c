//! `cleave synth`: a checkpoint of a real shape with random weights, or a quantised one of another.

use crate::args::{Quantized, SynthArgs};
use crate::model::{loading_bar, show};
use cleave_engine::synth::{Layout, Quantizing, quantize, synth};

/// Runs the command.
pub(crate) fn run(args: &SynthArgs) -> anyhow::Result<()> {
    let SynthArgs {
        shape,
        model,
        quantization,
        group_size,
        out,
        seed,
    } = args;
    let bar = loading_bar();
    bar.set_message("writing");
    let mut progress = |progress| show(&bar, progress);
    let written = match (shape, model, quantization) {
        (Some(shape), _, _) => synth(shape, out, *seed, &mut progress),
        (None, Some(model), Some(quantization)) => {
            let quantizing = Quantizing {
                layout: layout(*quantization),
                group: *group_size as usize,
            };
            quantize(model, out, quantizing, &mut progress)
        }
        (None, ..) => anyhow::bail!("give --shape, or --model with --quantization"),
    };
    bar.finish_and_clear();
    written?;
    eprintln!("wrote {}", out.display());
    Ok(())
}

fn layout(quantization: Quantized) -> Layout {
    match quantization {
        Quantized::Fp8 => Layout::Fp8,
        Quantized::Fp8Block => Layout::Fp8Block,
        Quantized::Int8 => Layout::Int8,
        Quantized::Int4 => Layout::Int4,
        Quantized::Awq => Layout::Awq,
        Quantized::Gptq => Layout::Gptq,
        Quantized::GptqInt8 => Layout::Gptq8,
        Quantized::F16 => Layout::F16,
    }
}
