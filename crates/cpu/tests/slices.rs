//! Products whose inner dimension has slices, compared with products of each slice alone, on every
//! instruction set that this processor has.

use cleave_checkpoint::{ByteCodes, QuantizedTensor, QuantizedType, StoredMatrix, StoredTensor};
use cleave_cpu::{CpuMatrix, CpuOps, CpuOptions, CpuWeightLoader, Isa, Quantize};
use cleave_engine::ops::{BufferRole, InnerSlices, Ops, Precision, WeightLoader};
use half::{bf16, f16};
use std::ops::Range;

/// Format of a weight, as stored and as packed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SlicedKind {
    F32,
    Bf16,
    F16,
    /// Codes with a scale per column.
    Int8,
    /// Codes in groups of [`GROUP`] with zero points.
    Int8Groups,
    Int4,
    /// Floats rounded to four bits at load.
    ToInt4,
}

const KINDS: [SlicedKind; 7] = [
    SlicedKind::F32,
    SlicedKind::Bf16,
    SlicedKind::F16,
    SlicedKind::Int8,
    SlicedKind::Int8Groups,
    SlicedKind::Int4,
    SlicedKind::ToInt4,
];

const GROUP: usize = 32;
/// Columns of the result: more than a panel, and no multiple of a vector.
const COLUMNS: usize = 75;

/// Inner dimension, unit and number of slices: equal and unequal slices, shorter and longer than a
/// block of any format.
const CUTS: [(usize, usize, usize); 6] = [
    (128, 16, 8),
    (112, 16, 4),
    (352, 32, 8),
    (640, 128, 4),
    (1408, 128, 8),
    (2624, 32, 2),
];

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

/// Numbers in −1..1, the same for the same seed.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

/// These elements of every row of `(…, width)`.
fn part<T: Copy>(rows: &[T], width: usize, elements: &Range<usize>) -> Vec<T> {
    let rows = rows.chunks_exact(width);
    rows.flat_map(|row| row[elements.clone()].to_vec())
        .collect()
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The sum of these rows' results as a balanced binary tree.
fn tree(parts: &[Vec<f32>]) -> Vec<f32> {
    if let [only] = parts {
        return only.clone();
    }
    let (left, right) = parts.split_at(parts.len() / 2);
    let sums = tree(left).into_iter().zip(tree(right));
    sums.map(|(left, right)| left + right).collect()
}

/// A product with a weight of one format.
struct SlicedCase {
    kind: SlicedKind,
    width: usize,
}

impl SlicedCase {
    fn options(&self, isa: Isa, threads: usize) -> CpuOptions {
        CpuOptions {
            isa: Some(isa),
            threads,
            keeps_f16: self.kind == SlicedKind::F16,
            quantize: (self.kind == SlicedKind::ToInt4).then_some(Quantize::Int4),
            ..CpuOptions::new(match self.kind {
                SlicedKind::F32 => Precision::F32,
                _ => Precision::Bf16,
            })
        }
    }

    /// The weight's elements in this range of the inner dimension.
    fn weight(&self, elements: &Range<usize>) -> StoredMatrix {
        let (width, count) = (elements.len(), COLUMNS * self.width);
        let of = |values: &[f32]| part(values, self.width, elements);
        let coded = |element, group: usize, of_code: fn(f32) -> u8, zero: fn(f32) -> u8| {
            let codes: Vec<u8> = numbers(3, count).iter().map(|x| of_code(*x)).collect();
            let groups = self.width / group;
            let some = if group == self.width {
                0..1
            } else {
                elements.start / group..elements.end / group
            };
            let scales: Vec<f32> = numbers(4, COLUMNS * groups)
                .iter()
                .map(|x| bf16::from_f32(0.01 + x.abs()).to_f32())
                .collect();
            let zeros: Vec<u8> = numbers(5, COLUMNS * groups)
                .iter()
                .map(|x| zero(*x))
                .collect();
            let coded = ByteCodes {
                element,
                codes: &part(&codes, self.width, elements),
                group: group.min(width),
                scales: &part(&scales, groups, &some),
                zeros: &part(&zeros, groups, &some),
            };
            QuantizedTensor::from_codes("w", COLUMNS, width, &coded).into()
        };
        let values = numbers(3, count);
        let eight = |x: f32| ((x * 127.0) as i8).cast_unsigned();
        let four = |x: f32| ((x + 1.0) * 7.9) as u8;
        match self.kind {
            SlicedKind::F32 => StoredTensor::from_f32("w", COLUMNS, width, &of(&values)).into(),
            SlicedKind::Bf16 | SlicedKind::ToInt4 => {
                let values: Vec<bf16> = of(&values).into_iter().map(bf16::from_f32).collect();
                StoredTensor::from_bf16("w", COLUMNS, width, &values).into()
            }
            SlicedKind::F16 => {
                let values: Vec<f16> = of(&values).into_iter().map(f16::from_f32).collect();
                StoredTensor::from_f16("w", COLUMNS, width, &values).into()
            }
            SlicedKind::Int8 => coded(QuantizedType::Int8, self.width, eight, |_| 0),
            SlicedKind::Int8Groups => coded(QuantizedType::Int8, GROUP, eight, eight),
            SlicedKind::Int4 => coded(QuantizedType::Int4, GROUP, four, four),
        }
    }

    /// Multiplies rows `(…, width)` with the elements that these slices own.
    fn product(
        &self,
        options: &CpuOptions,
        slices: &InnerSlices,
        bias: Option<&[f32]>,
        x: &[f32],
    ) -> Vec<f32> {
        let elements = slices.elements();
        let stack = [self.weight(&elements)];
        let pack = CpuWeightLoader::new(options);
        let matrix = pack.sliced_matrix(&stack, bias, slices).unwrap();
        self.multiply(options, &matrix, &elements, x)
    }

    /// The product of a run of elements as a matrix of its own.
    fn product_alone(&self, options: &CpuOptions, elements: &Range<usize>, x: &[f32]) -> Vec<f32> {
        let stack = [self.weight(elements)];
        let matrix = CpuWeightLoader::new(options).matrix(&stack, None).unwrap();
        self.multiply(options, &matrix, elements, x)
    }

    fn multiply(
        &self,
        options: &CpuOptions,
        matrix: &CpuMatrix,
        elements: &Range<usize>,
        x: &[f32],
    ) -> Vec<f32> {
        let rows = x.len() / self.width;
        let mut ops = CpuOps::new(options).unwrap();
        let mut left = ops
            .rows(rows, elements.len(), BufferRole::Activations)
            .unwrap();
        left.values_mut()
            .copy_from_slice(&part(x, self.width, elements));
        let mut out = ops.rows(rows, COLUMNS, BufferRole::Activations).unwrap();
        ops.matmul(matrix, rows, &left, &mut out).unwrap();
        out.values().to_vec()
    }
}

/// Every format with every cut that it can have.
fn cases() -> Vec<(SlicedCase, InnerSlices)> {
    let mut cases = Vec::new();
    for kind in KINDS {
        for (width, unit, count) in CUTS {
            let group = match kind {
                SlicedKind::F32 | SlicedKind::Bf16 | SlicedKind::F16 | SlicedKind::Int8 => 1,
                SlicedKind::Int8Groups | SlicedKind::Int4 => GROUP,
                // The largest group, so that a slice alone is rounded in the same groups.
                SlicedKind::ToInt4 => 128,
            };
            if unit.is_multiple_of(group) {
                let slices = InnerSlices::halved(width, unit, count);
                cases.push((SlicedCase { kind, width }, slices));
            }
        }
    }
    cases
}

fn ranges(slices: &InnerSlices) -> Vec<Range<usize>> {
    let starts = std::iter::once(0).chain(slices.ends());
    let ranges = starts.zip(slices.ends());
    ranges.map(|(start, end)| start..end).collect()
}

#[test]
fn a_sliced_product_is_the_tree_of_its_slices_products() {
    for (case, slices) in cases() {
        for rows in [1, 2, 6, 15, 29] {
            let x = numbers(9, rows * case.width);
            let bias = (rows % 2 == 0).then(|| numbers(8, COLUMNS));
            for isa in available() {
                let options = case.options(isa, 2);
                let found = case.product(&options, &slices, bias.as_deref(), &x);
                let parts: Vec<Vec<f32>> = ranges(&slices)
                    .iter()
                    .map(|elements| case.product_alone(&options, elements, &x))
                    .collect();
                let mut expected = tree(&parts);
                for row in expected.chunks_exact_mut(COLUMNS) {
                    for (sum, bias) in row.iter_mut().zip(bias.iter().flatten()) {
                        *sum += bias;
                    }
                }
                let label = format!("{isa} {:?} {slices:?}, {rows} rows", case.kind);
                assert!(same_bits(&found, &expected), "{label}");
            }
        }
    }
}

#[test]
fn ranks_that_own_subtrees_give_the_bits_of_one_rank() {
    for (case, slices) in cases() {
        let rows = 3;
        let x = numbers(9, rows * case.width);
        for isa in available() {
            let options = case.options(isa, 1);
            let alone = case.product(&options, &slices, None, &x);
            for ranks in [1, 2, 4, 8] {
                if !slices.count().is_multiple_of(ranks) {
                    continue;
                }
                let shares = (0..ranks).map(|rank| slices.share(rank, ranks));
                let parts: Vec<Vec<f32>> = shares
                    .map(|share| case.product(&options, &share, None, &x))
                    .collect();
                let label = format!("{isa} {:?} {slices:?}, {ranks} ranks", case.kind);
                assert!(same_bits(&tree(&parts), &alone), "{label}");
            }
        }
    }
}

/// More rows than a pass has, with a left side larger than the cache, and as many threads as share
/// panels or tiles.
#[test]
fn sliced_rows_are_bit_equal_in_any_batch_and_thread_count() {
    for kind in KINDS {
        let width = 1408;
        let case = SlicedCase { kind, width };
        let slices = InnerSlices::halved(width, 128, 8);
        let rows = 530;
        let x = numbers(2, rows * width);
        for isa in available() {
            let run =
                |threads, x: &[f32]| case.product(&case.options(isa, threads), &slices, None, x);
            let together = run(1, &x);
            assert!(same_bits(&together, &run(3, &x)), "{isa} {kind:?}");
            for row in [0, 255, 256, 529] {
                let alone = run(2, &x[row * width..(row + 1) * width]);
                let among = &together[row * COLUMNS..(row + 1) * COLUMNS];
                assert!(same_bits(&alone, among), "{isa} {kind:?} row {row}");
            }
        }
    }
}

/// Formats whose products are exact in f32.
#[test]
fn sliced_products_are_bit_equal_on_isas_of_one_arithmetic() {
    for (case, slices) in cases() {
        if case.kind == SlicedKind::F32 {
            continue;
        }
        let x = numbers(9, 9 * case.width);
        let run = |isa| case.product(&case.options(isa, 2), &slices, None, &x);
        let plain = run(Isa::Plain);
        for isa in available() {
            let label = format!("{isa} {:?} {slices:?}", case.kind);
            assert!(same_bits(&plain, &run(isa)), "{label}");
        }
    }
}

#[test]
fn a_sliced_product_is_right_to_within_rounding() {
    for (case, slices) in cases() {
        if !matches!(case.kind, SlicedKind::F32 | SlicedKind::Bf16) {
            continue;
        }
        let x: Vec<f32> = numbers(9, 5 * case.width)
            .into_iter()
            .map(|x| bf16::from_f32(x).to_f32())
            .collect();
        let weights = case.weight(&(0..case.width)).to_f32();
        for isa in available() {
            let found = case.product(&case.options(isa, 1), &slices, None, &x);
            let found = found.chunks_exact(COLUMNS);
            for (row, x) in found.zip(x.chunks_exact(case.width)) {
                for (found, weights) in row.iter().zip(weights.chunks_exact(case.width)) {
                    let terms = x.iter().zip(weights);
                    let expected: f64 = terms.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error < 1e-4, "{isa} {:?} {slices:?}", case.kind);
                }
            }
        }
    }
}
