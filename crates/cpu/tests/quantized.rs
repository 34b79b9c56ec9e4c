//! Products with weights of eight and four bits, compared with sums in f64 of the rounded numbers
//! on every instruction set that this processor has, and with themselves: rows alone and together,
//! other thread counts, other sets.

use crate::harness::{
    self, assert_close, assert_independent, available, multiply, numbers, same_bits,
};
use cleave_checkpoint::rounding::RoundedForm;
use cleave_checkpoint::synth::{QuantizeOptions, QuantizedLayout, quantize, synth};
use cleave_checkpoint::{
    ByteCodes, Checkpoint, QuantizedTensor, QuantizedType, StoredMatrix, StoredTensor, e2m1,
};
use cleave_cpu::{CpuOptions, CpuWeightLoader, Isa, Quantize};
use cleave_engine::Weights;
use cleave_engine::ops::{Precision, WeightLoader};
use safetensors::SafeTensors;

/// The bound of an error of a product with rounded rows.
const BOUND: f64 = 3e-5;

fn options(quantize: Option<Quantize>, isa: Isa, threads: usize) -> CpuOptions {
    CpuOptions {
        quantize,
        ..harness::options(Precision::Bf16, isa, threads)
    }
}

/// A quantised weight, one byte per code.
#[derive(Clone)]
struct CodedWeight {
    element: QuantizedType,
    columns: usize,
    width: usize,
    group: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<u8>,
    /// The weight as a checkpoint has it, if that is not made of the numbers above.
    stored: Option<StoredMatrix>,
}

/// Kinds of scales and zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WeightCase {
    Int8,
    /// Groups with scales that are exact in bf16, without zero points.
    Int8Even,
    /// Scales that are not exact in bf16, and varying zero points.
    Int8Odd,
    /// Scales that are exact in bf16, zero points of 8.
    Int4Even,
    /// Scales that are not exact in bf16, and varying zero points.
    Int4Odd,
    /// Scales that are powers of two, as MXFP4 has them.
    Float4Even,
    /// Scales that are exact in no type of 16 bits.
    Float4Odd,
    /// Scales that are exact in f16 and not in bf16, as AWQ and GPTQ have them.
    Int4Halves,
    /// Scales in e4m3 with a factor of the matrix: NVFP4.
    Float4Scaled,
}

impl CodedWeight {
    fn new(kind: WeightCase, columns: usize, width: usize, group: usize) -> Self {
        let count = columns * width;
        let groups = columns * width.div_ceil(group);
        let random = |seed, count| numbers(seed, count).into_iter();
        let codes = random(3, count).map(|x| match kind {
            // Includes the smallest and the largest code.
            WeightCase::Int8 | WeightCase::Int8Even | WeightCase::Int8Odd => {
                ((x * 140.0).clamp(-128.0, 127.0) as i8).cast_unsigned()
            }
            WeightCase::Int4Even
            | WeightCase::Int4Odd
            | WeightCase::Int4Halves
            | WeightCase::Float4Even
            | WeightCase::Float4Odd
            | WeightCase::Float4Scaled => ((x + 1.0) * 8.0) as u8 & 15,
        });
        let scales = random(4, groups).map(|x| match kind {
            WeightCase::Int4Even | WeightCase::Int8Even => half::bf16::from_f32(x * 0.1).to_f32(),
            WeightCase::Float4Even => (x * 2.0 - 5.0).round().exp2(),
            WeightCase::Int4Halves => half::f16::from_f32(x * 0.1).to_f32(),
            WeightCase::Int8
            | WeightCase::Int8Odd
            | WeightCase::Int4Odd
            | WeightCase::Float4Odd
            | WeightCase::Float4Scaled => x * 0.1,
        });
        let zeros = random(5, groups).map(|x| match kind {
            WeightCase::Int8
            | WeightCase::Int8Even
            | WeightCase::Float4Even
            | WeightCase::Float4Odd
            | WeightCase::Float4Scaled => 0,
            WeightCase::Int8Odd => ((x * 128.0) as i8).cast_unsigned(),
            WeightCase::Int4Even => 8,
            WeightCase::Int4Odd | WeightCase::Int4Halves => ((x + 1.0) * 8.0) as u8 & 15,
        });
        Self {
            element: match kind {
                WeightCase::Int8 | WeightCase::Int8Even | WeightCase::Int8Odd => {
                    QuantizedType::Int8
                }
                WeightCase::Int4Even | WeightCase::Int4Odd | WeightCase::Int4Halves => {
                    QuantizedType::Int4
                }
                WeightCase::Float4Even | WeightCase::Float4Odd | WeightCase::Float4Scaled => {
                    QuantizedType::E2m1
                }
            },
            columns,
            width,
            group,
            codes: codes.collect(),
            scales: scales.collect(),
            zeros: zeros.collect(),
            stored: None,
        }
    }

    /// Random floats in NVFP4. Sizes of columns differ, and so do scales.
    fn nvfp4(columns: usize, width: usize) -> Self {
        let mut values = numbers(3, columns * width);
        for (column, values) in values.chunks_exact_mut(width).enumerate() {
            let size = 2f32.powi(-((column % 12) as i32));
            values.iter_mut().for_each(|x| *x *= size);
        }
        let dense = StoredTensor::from_f32("w", columns, width, &values);
        let rounded = StoredMatrix::from(dense).rounded(RoundedForm::Nvfp4, 1);
        let mut weight = Self::new(WeightCase::Float4Scaled, columns, width, 16);
        for column in 0..columns {
            let range = column * width..(column + 1) * width;
            rounded.read_codes(column, 0, &mut weight.codes[range]);
            for group in 0..width / 16 {
                weight.scales[column * (width / 16) + group] = rounded.scale(column, group);
            }
        }
        weight.stored = Some(rounded.into());
        weight
    }

    fn stored(&self) -> StoredMatrix {
        if let Some(stored) = &self.stored {
            return stored.clone();
        }
        let coded = ByteCodes {
            element: self.element,
            codes: &self.codes,
            group: self.group,
            scales: &self.scales,
            zeros: &self.zeros,
        };
        QuantizedTensor::from_codes("w", self.columns, self.width, &coded).into()
    }

    fn value(&self, column: usize, element: usize) -> f64 {
        let code = self.codes[column * self.width + element];
        let at = column * self.width.div_ceil(self.group) + element / self.group;
        let code = match self.element {
            QuantizedType::Int8 => {
                f64::from(code.cast_signed()) - f64::from(self.zeros[at].cast_signed())
            }
            QuantizedType::E2m1 => f64::from(e2m1::to_f32(code)),
            _ => f64::from(code) - f64::from(self.zeros[at]),
        };
        code * f64::from(self.scales[at])
    }

    /// Elements of a row that are rounded with one scale: all if each column has one scale and no
    /// zero point.
    fn rounded_each(&self) -> usize {
        let group = self.group.min(self.width);
        let is_plain = group == self.width && self.zeros.iter().all(|zero| *zero == 0);
        match self.element {
            QuantizedType::Int8 if is_plain => self.width,
            _ => {
                let mut group_sizes = [128, 64, 32, 16].into_iter();
                group_sizes
                    .find(|each| group.is_multiple_of(*each))
                    .unwrap()
            }
        }
    }

    /// The product in f64, with rows rounded to eight bits with a scale per group, as documented.
    fn expected(&self, x: &[f32], bias: Option<&[f32]>) -> Vec<f64> {
        let mut out = Vec::new();
        for row in x.chunks_exact(self.width) {
            let each = self.rounded_each();
            let rounded: Vec<f64> = row
                .chunks(each)
                .flat_map(|group| {
                    let most = group.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                    let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
                    let scale = f64::from(most / 127.0);
                    let code = move |x: &f32| f64::from((x * inverse).round_ties_even()) * scale;
                    group.iter().map(code)
                })
                .collect();
            for column in 0..self.columns {
                let terms = rounded.iter().enumerate();
                let sum: f64 = terms.map(|(i, x)| x * self.value(column, i)).sum();
                out.push(sum + bias.map_or(0.0, |bias| f64::from(bias[column])));
            }
        }
        out
    }
}

/// Kinds, columns, widths and groups around panels, steps and blocks.
fn weights() -> Vec<(WeightCase, CodedWeight)> {
    let mut weights = Vec::new();
    for (columns, width) in [
        (1, 1),
        (16, 3),
        (17, 4),
        (33, 70),
        (31, 512),
        (70, 515),
        (64, 1100),
    ] {
        weights.push((
            WeightCase::Int8,
            CodedWeight::new(WeightCase::Int8, columns, width, width),
        ));
    }
    for (columns, width, group) in [
        (1, 32, 32),
        (17, 96, 32),
        (33, 64, 64),
        (31, 512, 128),
        (70, 640, 128),
        (64, 544, 32),
        (40, 1088, 64),
    ] {
        for kind in [
            WeightCase::Int4Even,
            WeightCase::Int4Odd,
            WeightCase::Int4Halves,
            WeightCase::Int8Even,
            WeightCase::Int8Odd,
        ] {
            weights.push((kind, CodedWeight::new(kind, columns, width, group)));
        }
    }
    for (columns, width, group) in [
        (1, 32, 32),
        (1, 16, 16),
        (17, 80, 16),
        (33, 64, 32),
        (31, 528, 16),
        (70, 544, 32),
        (64, 1104, 16),
    ] {
        for kind in [WeightCase::Float4Even, WeightCase::Float4Odd] {
            weights.push((kind, CodedWeight::new(kind, columns, width, group)));
        }
        let scaled = CodedWeight::nvfp4(columns, width);
        weights.push((WeightCase::Float4Scaled, scaled));
    }
    // Groups that kernels support only after splitting.
    for (columns, width, group) in [(40, 512, 256), (24, 384, 192), (33, 96, 96)] {
        let kind = WeightCase::Int8Odd;
        weights.push((kind, CodedWeight::new(kind, columns, width, group)));
    }
    weights
}

#[test]
fn quantised_products_are_right_and_bit_equal_on_every_isa() {
    for (kind, weight) in weights() {
        for rows in [1, 2, 5, 8, 14, 15, 29, 70] {
            let bias = (rows % 2 == 0).then(|| numbers(8, weight.columns));
            let x = numbers(9, rows * weight.width);
            let expected = weight.expected(&x, bias.as_deref());
            let mut first: Option<Vec<f32>> = None;
            for isa in available() {
                let options = options(None, isa, 2);
                let pack = CpuWeightLoader::new(&options);
                let matrix = pack.matrix(&[weight.stored()], bias.as_deref()).unwrap();
                let out = multiply(&options, &matrix, weight.columns, &x, rows);
                let label = format!(
                    "{isa} {kind:?} {} × {} in {}, {rows} rows",
                    weight.width, weight.columns, weight.group
                );
                assert_close(&out, &expected, BOUND, &label);
                let first = first.get_or_insert_with(|| out.clone());
                assert!(
                    same_bits(first, &out),
                    "{label}: other bits than the best set"
                );
            }
        }
    }
}

#[test]
fn quantised_rows_are_bit_equal_in_any_batch() {
    for kind in [
        WeightCase::Int8,
        WeightCase::Int8Odd,
        WeightCase::Int4Even,
        WeightCase::Int4Odd,
        WeightCase::Float4Even,
        WeightCase::Float4Odd,
    ] {
        // Rows larger than a cache, in more than one block.
        let (columns, width, rows) = (200, 1152, 530);
        let group = match kind {
            WeightCase::Int8 => width,
            WeightCase::Float4Even => 32,
            WeightCase::Float4Odd => 16,
            _ => 64,
        };
        let weight = CodedWeight::new(kind, columns, width, group);
        let x = numbers(2, rows * width);
        for isa in available() {
            let matrix = CpuWeightLoader::new(&options(None, isa, 2))
                .matrix(&[weight.stored()], None)
                .unwrap();
            assert_independent(&x, rows, &format!("{isa} {kind:?}"), |threads, x, rows| {
                multiply(&options(None, isa, threads), &matrix, columns, x, rows)
            });
        }
    }
}

/// Rows and weights at the limits of a byte: no intermediate sum saturates.
#[test]
fn products_of_the_largest_codes_do_not_saturate() {
    let (columns, width) = (32, 1024);
    for (element, code, zero, group) in [
        (QuantizedType::Int8, 0x80, 0, width),
        (QuantizedType::Int8, 0x7f, 0, width),
        (QuantizedType::Int8, 0x80, 0, 128),
        (QuantizedType::Int8, 0x80, 0x7f, 128),
        (QuantizedType::Int8, 0x7f, 0x80, 128),
        (QuantizedType::Int4, 15, 0, 128),
        (QuantizedType::Int4, 0, 15, 128),
        (QuantizedType::E2m1, 7, 0, 32),
        (QuantizedType::E2m1, 15, 0, 16),
    ] {
        let weight = CodedWeight {
            element,
            columns,
            width,
            group,
            codes: vec![code; columns * width],
            scales: vec![1.0; columns * width.div_ceil(group)],
            zeros: vec![zero; columns * width.div_ceil(group)],
            stored: None,
        };
        for sign in [1.0, -1.0] {
            let x = vec![sign * 127.0; 3 * width];
            let expected = weight.expected(&x, None);
            for isa in available() {
                let options = options(None, isa, 1);
                let matrix = CpuWeightLoader::new(&options)
                    .matrix(&[weight.stored()], None)
                    .unwrap();
                let out = multiply(&options, &matrix, columns, &x, 3);
                assert_close(&out, &expected, BOUND, &format!("{isa} {element:?} {code}"));
            }
        }
    }
}

/// The error of rounding floats is bounded by half a step of the codes.
#[test]
fn floats_are_rounded_to_the_nearest_codes() {
    let (columns, width) = (40, 384);
    let weights = numbers(1, columns * width);
    let stored: StoredMatrix = StoredTensor::from_f32("w", columns, width, &weights).into();
    for (quantize, share) in [(Quantize::Int8, 0.5 / 127.0), (Quantize::Int4, 0.075)] {
        let options = options(Some(quantize), Isa::detect(), 2);
        let matrix = CpuWeightLoader::new(&options)
            .matrix(std::slice::from_ref(&stored), None)
            .unwrap();
        // A unit row reads a column of the weights.
        let mut worst = 0.0_f32;
        let mut squares = 0.0_f64;
        for element in 0..width {
            let mut x = vec![0.0; width];
            x[element] = 1.0;
            let out = multiply(&options, &matrix, columns, &x, 1);
            for (column, out) in out.iter().enumerate() {
                let error = (out - weights[column * width + element]).abs();
                worst = worst.max(error);
                squares += f64::from(error * error);
            }
        }
        let mean = (squares / (columns * width) as f64).sqrt() as f32;
        assert!(worst <= 3.0 * share, "{quantize:?}: off by {worst}");
        assert!(
            mean <= 0.6 * share,
            "{quantize:?}: off by {mean} in the mean"
        );
    }
}

#[test]
fn non_finite_inputs_stay_non_finite_with_codes() {
    let (columns, width) = (32, 256);
    let stored: StoredMatrix =
        StoredTensor::from_f32("w", columns, width, &numbers(1, columns * width)).into();
    for quantize in [Quantize::Int8, Quantize::Int4] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for isa in available() {
                let options = options(Some(quantize), isa, 1);
                let matrix = CpuWeightLoader::new(&options)
                    .matrix(std::slice::from_ref(&stored), None)
                    .unwrap();
                let mut x = numbers(2, 2 * width);
                x[77] = bad;
                let out = multiply(&options, &matrix, columns, &x, 2);
                assert!(
                    out[..columns].iter().all(|x| !x.is_finite()),
                    "{isa} {quantize:?} {bad}"
                );
                assert!(
                    out[columns..].iter().all(|x| x.is_finite()),
                    "{isa} {quantize:?} {bad}"
                );
            }
        }
    }
}

#[test]
fn a_row_of_zeros_is_the_bias() {
    let (columns, width) = (32, 256);
    let stored: StoredMatrix =
        StoredTensor::from_f32("w", columns, width, &numbers(1, columns * width)).into();
    let bias = numbers(3, columns);
    for quantize in [Quantize::Int8, Quantize::Int4] {
        let options = options(Some(quantize), Isa::detect(), 1);
        let matrix = CpuWeightLoader::new(&options)
            .matrix(std::slice::from_ref(&stored), Some(&bias))
            .unwrap();
        assert_eq!(
            multiply(&options, &matrix, columns, &vec![0.0; width], 1),
            bias
        );
    }
}

/// Bytes of packed projections, divided by those of their file; the bounds are the shares, rounded
/// up. Codes stay as they are; zero points of four bits take a byte and its padding, and powers of
/// two two bytes. NVFP4 has a factor of four bytes for each column, of 128 and 256 elements here: a
/// twentieth, and less in the longer columns of published models.
#[test]
fn packed_weights_take_little_more_than_their_file() {
    let dense = tempfile::tempdir().unwrap();
    synth("tiny-llama-64", dense.path(), 7, &mut |_| {}).unwrap();
    for (layout, group, share_max) in [
        (QuantizedLayout::Nvfp4, 16, 1.05),
        (QuantizedLayout::ModelOptNvfp4, 16, 1.05),
        (QuantizedLayout::Mxfp4, 32, 1.06),
        (QuantizedLayout::Int4, 32, 1.01),
        (QuantizedLayout::Int4, 128, 1.01),
        (QuantizedLayout::Awq, 32, 1.09),
        (QuantizedLayout::Awq, 128, 1.03),
        (QuantizedLayout::Gptq, 128, 0.98),
        (QuantizedLayout::Gptq8, 32, 1.01),
        (QuantizedLayout::Int8, 1, 1.01),
        // Float 8 is bf16 on a processor.
        (QuantizedLayout::Fp8, 1, 1.95),
        (QuantizedLayout::Mxfp8, 32, 1.95),
        (QuantizedLayout::F16, 1, 1.0),
    ] {
        let out = tempfile::tempdir().unwrap();
        let quantizing = QuantizeOptions { layout, group };
        quantize(dense.path(), out.path(), quantizing, &mut |_| {}).unwrap();
        let file = std::fs::read(out.path().join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let of_projections = tensors.tensors().into_iter();
        let of_projections = of_projections.filter(|(name, _)| name.contains("_proj."));
        let stored: usize = of_projections.map(|(_, tensor)| tensor.data().len()).sum();
        let checkpoint = Checkpoint::open(out.path()).unwrap();
        let pack = CpuWeightLoader::new(&options(None, Isa::detect(), 1));
        let weights = Weights::load(&pack, &checkpoint, None, &mut |_| {}).unwrap();
        let share = weights.matrix_bytes().layers as f64 / stored as f64;
        let is_near = share <= share_max && share > share_max - 0.03;
        assert!(is_near, "{layout:?} in {group}: {share:.3}");
    }
}
