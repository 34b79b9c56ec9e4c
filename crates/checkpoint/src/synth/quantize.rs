//! Converting a dense checkpoint: quantised projections, or all tensors in f16.
//!
//! Owns: rounding to nearest, and writing of the common layouts (`checkpoint` reads them).
//! Never: calibrates with activations, so that answers are worse than those of calibrated
//! checkpoints; its purpose is to measure speed, and tests.
//! Invariant: a written checkpoint loads; a projection that a layout cannot hold stays dense.

use super::encoded::{EncodedMatrix, powers, scale};
use super::experts::StackedExperts;
use super::{SynthError, new_config, write_json};
use crate::packed_numbers::{ALONG_COLUMNS, AWQ, GPTQ_CODES, GPTQ_ZEROS, WordPacking};
use crate::rounding::{MX_GROUP, NV_GROUP, RoundedForm};
use crate::{Checkpoint, CheckpointError, StoredMatrix, StoredType};
use crate::{CheckpointProgress, e4m3};
use cleave_models::ModelTensor;
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::thread;

/// Limit of a copied file beside the weights, in bytes: the largest tokenizers have forty million.
const TEXT_BYTES_MAX: u64 = 256 << 20;

/// A layout that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizedLayout {
    /// compressed-tensors, float 8, a scale for each row.
    Fp8,
    /// fp8 with a scale for each block of rows and columns.
    Fp8Block,
    /// compressed-tensors, int 8, a scale for each row.
    Int8,
    /// compressed-tensors, symmetric int 4 in groups.
    Int4,
    /// awq, with zero points.
    Awq,
    /// gptq, four bits with zero points, columns in order.
    Gptq,
    /// gptq with eight bits.
    Gptq8,
    /// compressed-tensors, float 8 in groups of 32 whose scales are powers of two.
    Mxfp8,
    /// compressed-tensors, float 4 in groups of 32 whose scales are powers of two.
    Mxfp4,
    /// The same numbers as gpt-oss has them: experts alone, of which one tensor has all of a
    /// layer. A conversion to [`QuantizedLayout::Mxfp4`] of a model with such tensors is one to
    /// this layout.
    Mxfp4Experts,
    /// compressed-tensors, float 4 in groups of 16 whose scales are float 8.
    Nvfp4,
    /// The same as modelopt writes it.
    ModelOptNvfp4,
    /// modelopt, float 8, a scale for each matrix.
    ModelOptFp8,
    /// No quantisation: every tensor in f16. Quantised weights are expanded.
    F16,
    /// The same in f32, which has every expanded number exactly.
    F32,
}

impl QuantizedLayout {
    /// Element type of every tensor in a layout without quantisation.
    const fn dense(self) -> Option<StoredType> {
        match self {
            Self::F16 => Some(StoredType::F16),
            Self::F32 => Some(StoredType::F32),
            _ => None,
        }
    }
}

/// Options of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizeOptions {
    /// Layout of the written checkpoint.
    pub layout: QuantizedLayout,
    /// Columns per group, and rows and columns per block; at least 1.
    pub group: usize,
}

/// Writes a quantised copy of a checkpoint's folder.
///
/// # Errors
/// See [`SynthError`].
pub fn quantize(
    from: &Path,
    out: &Path,
    quantizing: QuantizeOptions,
    progress: &mut dyn FnMut(CheckpointProgress),
) -> Result<(), SynthError> {
    let config_file = new_config(out)?;
    let checkpoint = Checkpoint::open(from).map_err(SynthError::Source)?;
    if checkpoint.quantization().is_some() && quantizing.layout.dense().is_none() {
        return Err(SynthError::Source(CheckpointError::unsupported(
            &from.join("config.json"),
            "quantization_config",
            "is quantised already; give a dense checkpoint, or expand this one to f16 or f32 first",
        )));
    }
    let quantizing = quantizing.of_model(&checkpoint)?;
    fs::create_dir_all(out).map_err(SynthError::at(out))?;
    write_weights(&checkpoint, out, quantizing, progress)?;
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ] {
        let file = from.join(name);
        if file.exists() {
            let text = cleave_files::read(&file, TEXT_BYTES_MAX).map_err(SynthError::at(&file))?;
            let copy = out.join(name);
            fs::write(&copy, text).map_err(SynthError::at(&copy))?;
        }
    }
    let read = cleave_files::read(&from.join("config.json"), 16 << 20);
    let read = read.map_err(SynthError::at(from))?;
    let mut config: Value = serde_json::from_slice(&read)
        .map_err(|error| SynthError::at(from)(std::io::Error::from(error)))?;
    match (quantizing.layout.dense(), config.as_object_mut()) {
        (Some(stored), Some(config)) => {
            config.remove("quantization_config");
            config.remove("dtype");
            config.insert("torch_dtype".to_owned(), stored.name().into());
        }
        _ => config["quantization_config"] = quantizing.config(),
    }
    write_json(&config_file, &config)
}

/// A tensor of the written file.
pub(super) struct WrittenTensor {
    pub(super) name: String,
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<usize>,
}

impl WrittenTensor {
    fn bytes_count(&self) -> usize {
        let each = match self.dtype {
            "F8_E4M3" | "I8" | "U8" => 1,
            "F16" | "BF16" => 2,
            "I64" => 8,
            _ => 4,
        };
        self.shape.iter().product::<usize>() * each
    }
}

fn write_weights(
    checkpoint: &Checkpoint,
    out: &Path,
    quantizing: QuantizeOptions,
    progress: &mut dyn FnMut(CheckpointProgress),
) -> Result<(), SynthError> {
    let expected = checkpoint.layout();
    let pieces_of = |expected: &ModelTensor| {
        if let Some(experts) = quantizing.experts(expected) {
            return experts.written_tensors();
        }
        match quantizing.module(expected) {
            Some(module) => quantizing.written_tensors(module, &expected.shape),
            None => vec![WrittenTensor {
                name: expected.name.clone(),
                dtype: dtype(quantizing.stored(checkpoint, &expected.name)),
                shape: expected.shape.clone(),
            }],
        }
    };
    let pieces: Vec<WrittenTensor> = expected.iter().flat_map(pieces_of).collect();
    let path = out.join("model.safetensors");
    let mut file = fs::File::create(&path).map_err(SynthError::at(&path))?;
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(SynthError::at(&path));
    put(&header(&pieces))?;
    let mut done = CheckpointProgress {
        bytes_done: 0,
        bytes_total: pieces.iter().map(|piece| piece.bytes_count() as u64).sum(),
    };
    for expected in expected {
        let contents = match (quantizing.experts(expected), quantizing.module(expected)) {
            (Some(experts), _) => experts.contents(checkpoint.tensor(&expected.name)),
            (None, Some(_)) => {
                let matrix = checkpoint.matrix(&expected.name);
                quantizing.contents(&matrix.expect("open() found every tensor of the layout"))
            }
            (None, None) => vec![quantizing.bytes(checkpoint, expected)],
        };
        for bytes in contents {
            put(&bytes)?;
            done.bytes_done += bytes.len() as u64;
        }
        progress(done);
    }
    Ok(())
}

/// The file's header: length and JSON, padded so that the data begin at a multiple of eight.
fn header(pieces: &[WrittenTensor]) -> Vec<u8> {
    let mut map = Map::new();
    let mut start = 0;
    for piece in pieces {
        let end = start + piece.bytes_count();
        let entry =
            json!({"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [start, end]});
        map.insert(piece.name.clone(), entry);
        start = end;
    }
    let mut text = Value::Object(map).to_string();
    let padding = text.len().next_multiple_of(8) - text.len();
    text.extend(std::iter::repeat_n(' ', padding));
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

fn dtype(stored: StoredType) -> &'static str {
    match stored {
        StoredType::F32 => "F32",
        StoredType::F16 => "F16",
        StoredType::Bf16 => "BF16",
    }
}

/// Factor of all scales, and codes and scales, of a rounded matrix.
pub(super) fn rounded(matrix: &StoredMatrix, form: RoundedForm) -> (f32, Vec<Vec<u8>>) {
    let threads = thread::available_parallelism().map_or(1, |cores| cores.get());
    let rounded = matrix.rounded(form, threads);
    let parts = rounded.part_bytes().map(<[u8]>::to_vec).collect();
    (rounded.scale_factor().unwrap_or(1.0), parts)
}

impl QuantizeOptions {
    /// The options for this model.
    ///
    /// # Errors
    /// If experts of which one tensor has all of a layer cannot be written in groups.
    fn of_model(self, checkpoint: &Checkpoint) -> Result<Self, SynthError> {
        let mut stacked = checkpoint.layout().iter().filter_map(StackedExperts::of);
        let Some(first) = stacked
            .next()
            .filter(|_| self.layout == QuantizedLayout::Mxfp4)
        else {
            return Ok(self);
        };
        if let Some(odd) = [first]
            .into_iter()
            .chain(stacked)
            .find(|of| !of.has_groups())
        {
            return Err(SynthError::Source(CheckpointError::unsupported(
                checkpoint.dir(),
                format!("tensor `{}`", odd.name()),
                format!("has columns that groups of {MX_GROUP} do not divide; mxfp4 needs them"),
            )));
        }
        Ok(Self {
            layout: QuantizedLayout::Mxfp4Experts,
            ..self
        })
    }

    /// The weights of all experts of a layer, if this layout holds them in one tensor.
    fn experts(self, expected: &ModelTensor) -> Option<StackedExperts<'_>> {
        let is_written = self.layout == QuantizedLayout::Mxfp4Experts;
        StackedExperts::of(expected).filter(|_| is_written)
    }

    /// Element type of a tensor that is written without quantisation.
    fn stored(self, checkpoint: &Checkpoint, name: &str) -> StoredType {
        let own = || checkpoint.tensor(name).stored();
        self.layout.dense().unwrap_or_else(own)
    }

    /// Bytes of a tensor that is written without quantisation.
    fn bytes(self, checkpoint: &Checkpoint, expected: &ModelTensor) -> Vec<u8> {
        let name = &expected.name;
        let stored = self.stored(checkpoint, name);
        let values = match (
            checkpoint.quantized_tensor(name),
            StackedExperts::of(expected),
        ) {
            (Some(quantized), Some(experts)) => experts.expanded(quantized),
            (Some(quantized), None) => quantized.to_f32(),
            (None, _) if stored == checkpoint.tensor(name).stored() => {
                return checkpoint.tensor(name).bytes().to_vec();
            }
            (None, _) => checkpoint.tensor(name).to_f32(),
        };
        match stored {
            StoredType::F16 => (values.into_iter())
                .flat_map(|value| f16::from_f32(value).to_le_bytes())
                .collect(),
            StoredType::F32 => values.into_iter().flat_map(f32::to_le_bytes).collect(),
            StoredType::Bf16 => (values.into_iter())
                .flat_map(|value| bf16::from_f32(value).to_le_bytes())
                .collect(),
        }
    }

    /// Bits of a code in a packed layout.
    pub(super) fn bits(self) -> u32 {
        match self.layout {
            QuantizedLayout::Gptq8 => 8,
            _ => 4,
        }
    }

    /// The packing with this layout's bits.
    fn packing(self, packing: WordPacking) -> WordPacking {
        match self.layout {
            QuantizedLayout::Gptq8 => packing.with_eight_bits(),
            _ => packing,
        }
    }

    /// Name of the projection, if this is its weight and the layout can hold it.
    fn module(self, expected: &ModelTensor) -> Option<&str> {
        let module = expected.projection_name()?;
        let [rows, columns] = *expected.shape else {
            return None;
        };
        let fits = match self.layout {
            QuantizedLayout::F16 | QuantizedLayout::F32 | QuantizedLayout::Mxfp4Experts => false,
            QuantizedLayout::Fp8
            | QuantizedLayout::Fp8Block
            | QuantizedLayout::Int8
            | QuantizedLayout::ModelOptFp8 => true,
            QuantizedLayout::Mxfp8 | QuantizedLayout::Mxfp4 => columns.is_multiple_of(MX_GROUP),
            QuantizedLayout::Nvfp4 | QuantizedLayout::ModelOptNvfp4 => {
                columns.is_multiple_of(NV_GROUP)
            }
            QuantizedLayout::Int4 => columns.is_multiple_of(self.group),
            QuantizedLayout::Awq => columns.is_multiple_of(self.group) && rows.is_multiple_of(8),
            QuantizedLayout::Gptq | QuantizedLayout::Gptq8 => {
                columns.is_multiple_of(8) && rows.is_multiple_of(8)
            }
        };
        fits.then_some(module)
    }

    /// Tensors that are written for a projection.
    fn written_tensors(self, module: &str, shape: &[usize]) -> Vec<WrittenTensor> {
        let (rows, columns) = (shape[0], shape[1]);
        let groups = columns.div_ceil(self.group);
        let piece = |kind: &str, dtype: &'static str, shape: &[usize]| WrittenTensor {
            name: format!("{module}.{kind}"),
            dtype,
            shape: shape.to_vec(),
        };
        let words =
            |packing: WordPacking, columns: usize| self.packing(packing).words_shape(rows, columns);
        match self.layout {
            QuantizedLayout::F16 | QuantizedLayout::F32 | QuantizedLayout::Mxfp4Experts => {
                Vec::new()
            }
            QuantizedLayout::Fp8 => vec![
                piece("weight", "F8_E4M3", shape),
                piece("weight_scale", "F32", &[rows, 1]),
            ],
            QuantizedLayout::Int8 => vec![
                piece("weight", "I8", shape),
                piece("weight_scale", "F32", &[rows, 1]),
            ],
            QuantizedLayout::Fp8Block => vec![
                piece("weight", "F8_E4M3", shape),
                piece(
                    "weight_scale_inv",
                    "F32",
                    &[rows.div_ceil(self.group), groups],
                ),
            ],
            QuantizedLayout::Mxfp8 => vec![
                piece("weight", "F8_E4M3", shape),
                piece("weight_scale", "U8", &[rows, columns / MX_GROUP]),
            ],
            QuantizedLayout::Mxfp4 => vec![
                piece("weight_packed", "U8", &[rows, columns / 2]),
                piece("weight_scale", "U8", &[rows, columns / MX_GROUP]),
            ],
            QuantizedLayout::Nvfp4 => vec![
                piece("weight_packed", "U8", &[rows, columns / 2]),
                piece("weight_scale", "F8_E4M3", &[rows, columns / NV_GROUP]),
                piece("weight_global_scale", "F32", &[1]),
            ],
            QuantizedLayout::ModelOptNvfp4 => vec![
                piece("weight", "U8", &[rows, columns / 2]),
                piece("weight_scale", "F8_E4M3", &[rows, columns / NV_GROUP]),
                piece("weight_scale_2", "F32", &[]),
            ],
            QuantizedLayout::ModelOptFp8 => vec![
                piece("weight", "F8_E4M3", shape),
                piece("weight_scale", "F32", &[]),
            ],
            QuantizedLayout::Int4 => vec![
                piece("weight_packed", "I32", &words(ALONG_COLUMNS, columns)),
                piece("weight_scale", "BF16", &[rows, groups]),
                piece("weight_shape", "I64", &[2]),
            ],
            QuantizedLayout::Awq => vec![
                piece("qweight", "I32", &words(AWQ, columns)),
                piece("qzeros", "I32", &words(AWQ, groups)),
                piece("scales", "F16", &[groups, rows]),
            ],
            QuantizedLayout::Gptq | QuantizedLayout::Gptq8 => vec![
                piece("qweight", "I32", &words(GPTQ_CODES, columns)),
                piece("qzeros", "I32", &words(GPTQ_ZEROS, groups)),
                piece("scales", "F16", &[groups, rows]),
                piece("g_idx", "I32", &[columns]),
            ],
        }
    }

    /// Bytes of those tensors, in the same order.
    fn contents(self, matrix: &StoredMatrix) -> Vec<Vec<u8>> {
        let (rows, columns) = (matrix.rows(), matrix.columns());
        let values = matrix.to_f32();
        let floats = |scales: &[f32]| scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        let halves = |coded: &EncodedMatrix| {
            let by_group =
                (0..coded.groups).flat_map(|group| (0..rows).map(move |row| (row, group)));
            by_group
                .flat_map(|(row, group)| f16::from_f32(coded.scale(row, group)).to_le_bytes())
                .collect()
        };
        match self.layout {
            QuantizedLayout::F16 | QuantizedLayout::F32 | QuantizedLayout::Mxfp4Experts => {
                Vec::new()
            }
            QuantizedLayout::Fp8 => rounded(matrix, RoundedForm::Fp8).1,
            QuantizedLayout::Int8 => rounded(matrix, RoundedForm::Int8).1,
            QuantizedLayout::Mxfp8 => {
                let coded =
                    EncodedMatrix::in_powers_of_two(&values, columns, e4m3::MAX, e4m3::from_f32);
                vec![coded.codes, powers(&coded.scales)]
            }
            QuantizedLayout::Mxfp4 => rounded(matrix, RoundedForm::Mxfp4).1,
            QuantizedLayout::Nvfp4 | QuantizedLayout::ModelOptNvfp4 => {
                let (factor, mut parts) = rounded(matrix, RoundedForm::Nvfp4);
                let global = match self.layout {
                    // Its number is a divisor.
                    QuantizedLayout::Nvfp4 => factor.recip(),
                    _ => factor,
                };
                parts.push(floats(&[global]));
                parts
            }
            QuantizedLayout::ModelOptFp8 => {
                let most = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let scale = scale(most, e4m3::MAX);
                let codes = values.iter().map(|x| e4m3::from_f32(x / scale));
                vec![codes.collect(), floats(&[scale])]
            }
            QuantizedLayout::Fp8Block => {
                let (codes, scales) = self.fp8_blocks(&values, rows, columns);
                vec![codes, floats(&scales)]
            }
            QuantizedLayout::Int4 => {
                let code = |x: f32| (x.round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8;
                let stored = |scale: f32| bf16::from_f32(scale).to_f32();
                let coded =
                    EncodedMatrix::symmetric(&values, columns, self.group, 7.0, stored, code);
                let scales = coded.scales.iter();
                let shape_bytes = [rows, columns].map(|n| (n as u64).to_le_bytes());
                vec![
                    ALONG_COLUMNS.pack(rows, columns, |row, column| {
                        coded.codes[row * columns + column]
                    }),
                    scales
                        .flat_map(|s| bf16::from_f32(*s).to_le_bytes())
                        .collect(),
                    shape_bytes.as_flattened().to_vec(),
                ]
            }
            QuantizedLayout::Awq | QuantizedLayout::Gptq | QuantizedLayout::Gptq8 => {
                let code_max = (1_u32 << self.bits()) - 1;
                let coded =
                    EncodedMatrix::with_zeros(&values, columns, self.group, code_max as f32);
                let code = |row: usize, column: usize| coded.codes[row * columns + column];
                let zero = |row: usize, group: usize| coded.zeros[row * coded.groups + group];
                if self.layout == QuantizedLayout::Awq {
                    let zeros = AWQ.pack(rows, coded.groups, zero);
                    return vec![AWQ.pack(rows, columns, code), zeros, halves(&coded)];
                }
                let index = (0..columns).map(|column| (column / self.group) as u32);
                vec![
                    self.packing(GPTQ_CODES).pack(rows, columns, code),
                    // GPTQ stores zero points less one.
                    self.packing(GPTQ_ZEROS)
                        .pack(rows, coded.groups, |row, group| zero(row, group) - 1),
                    halves(&coded),
                    index.flat_map(u32::to_le_bytes).collect(),
                ]
            }
        }
    }

    /// fp8 codes, and a scale per block.
    fn fp8_blocks(self, values: &[f32], rows: usize, columns: usize) -> (Vec<u8>, Vec<f32>) {
        let each = self.group;
        let across = columns.div_ceil(each);
        let mut most = vec![0.0f32; rows.div_ceil(each) * across];
        let block = |at: usize| at / columns / each * across + at % columns / each;
        for (at, value) in values.iter().enumerate() {
            let most = &mut most[block(at)];
            *most = most.max(value.abs());
        }
        let scales: Vec<f32> = most.iter().map(|most| scale(*most, e4m3::MAX)).collect();
        let codes = values.iter().enumerate();
        let codes = codes.map(|(at, value)| e4m3::from_f32(value / scales[block(at)]));
        (codes.collect(), scales)
    }
}
