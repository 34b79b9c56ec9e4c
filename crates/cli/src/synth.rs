//! `cleave synth`: a checkpoint of a real shape with random weights, or a quantised copy of a
//! checkpoint.

use crate::args::{QuantizationArg, SynthArgs};
use crate::model::{loading_bar, show_progress};
use cleave_checkpoint::synth::{QuantizeOptions, QuantizedLayout, quantize, synth};

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
    let mut progress = |progress| show_progress(&bar, progress);
    let written = match (shape, model, quantization) {
        (Some(shape), _, _) => synth(shape, out, *seed, &mut progress),
        (None, Some(model), Some(quantization)) => {
            let quantizing = QuantizeOptions {
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
    }
}
