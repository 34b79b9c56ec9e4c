//! Tests of products whose inner dimension has slices: against products of each slice alone, as
//! ranks would compute them, and against themselves beside other numbers of rows.

use crate::operations::{DeviceUnderTest, cuda, numbers};
use cleave_checkpoint::{ByteCodes, QuantizedTensor, QuantizedType, StoredMatrix, StoredTensor};
use cleave_cuda::{CudaMatrix, CudaOps};
use cleave_engine::ops::{BufferRole, Head, InnerSlices, KvType, Ops, Precision, WeightLoader};
use std::ops::Range;

const COLUMNS: usize = 70;
/// A number of rows for each kernel of bf16, and for those of quantised weights.
const ROWS: [usize; 6] = [1, 9, 17, 40, 70, 530];

/// A weight of one format, with a scale for each group or each column if it has codes.
#[derive(Clone, Copy, Debug)]
struct SlicedWeight {
    precision: Precision,
    codes: Option<(QuantizedType, Option<usize>)>,
    width: usize,
}

fn part<T: Copy>(rows: &[T], width: usize, elements: &Range<usize>) -> Vec<T> {
    let rows = rows.chunks_exact(width);
    rows.flat_map(|row| row[elements.clone()].to_vec())
        .collect()
}

/// The sum of these results as a balanced binary tree.
fn tree(parts: &[Vec<f32>]) -> Vec<f32> {
    if let [only] = parts {
        return only.clone();
    }
    let (left, right) = parts.split_at(parts.len() / 2);
    let sums = tree(left).into_iter().zip(tree(right));
    sums.map(|(left, right)| left + right).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

impl SlicedWeight {
    /// Returns these elements of every column.
    fn stored(&self, elements: &Range<usize>) -> StoredMatrix {
        let values = numbers(3, COLUMNS * self.width);
        let Some((element, group)) = self.codes else {
            let values = part(&values, self.width, elements);
            return StoredTensor::from_f32("w", COLUMNS, elements.len(), &values).into();
        };
        let code = |x: &f32| match (element, ((x * 120.0) as i8).cast_unsigned()) {
            // One of the two NaN codes.
            (QuantizedType::E4m3, 0xff) => 0xfe,
            (QuantizedType::E4m3 | QuantizedType::Int8, code) => code,
            (QuantizedType::Int4 | QuantizedType::E2m1, _) => ((x + 1.0) * 7.9) as u8,
        };
        let codes: Vec<u8> = values.iter().map(code).collect();
        let (groups, some) = match group {
            Some(group) => (
                self.width / group,
                elements.start / group..elements.end / group,
            ),
            None => (1, 0..1),
        };
        let scales: Vec<f32> = numbers(4, COLUMNS * groups)
            .iter()
            .map(|x| half::f16::from_f32(0.01 + x.abs() / 50.0).to_f32())
            .collect();
        let zero_max = u8::from(element == QuantizedType::Int4) * 15;
        let zeros: Vec<u8> = numbers(6, COLUMNS * groups)
            .iter()
            .map(|x| (x.abs() * 15.9) as u8 & zero_max)
            .collect();
        let coded = ByteCodes {
            element,
            codes: &part(&codes, self.width, elements),
            group: group.unwrap_or(elements.len()),
            scales: &part(&scales, groups, &some),
            zeros: &part(&zeros, groups, &some),
        };
        QuantizedTensor::from_codes("w", COLUMNS, elements.len(), &coded).into()
    }

    /// Loads the elements that these slices own.
    fn load(&self, gpu: &DeviceUnderTest<CudaOps>, slices: &InnerSlices) -> CudaMatrix {
        let stack = [self.stored(&slices.elements())];
        let matrix = gpu.pack.sliced_matrix(&stack, None, slices).unwrap();
        gpu.pack.finish().unwrap();
        assert_eq!(matrix.is_quantized(), self.codes.is_some(), "{self:?}");
        matrix
    }

    /// Multiplies rows with the elements that these slices own; the result is f32.
    fn product(
        &self,
        gpu: &mut DeviceUnderTest<CudaOps>,
        matrix: &CudaMatrix,
        elements: &Range<usize>,
        rows: usize,
    ) -> Vec<f32> {
        let x = part(&numbers(5, rows * self.width), self.width, elements);
        let x = gpu.rows(&x, elements.len(), BufferRole::Activations);
        let mut out = vec![0.0; rows * COLUMNS];
        let head = Head::uncapped(matrix);
        gpu.ops.logits(head, rows, &x, &mut out).unwrap();
        out
    }
}

/// Weights of every format, with slices that are shorter than a kernel's stage, unequal, or several
/// spans long.
fn cases() -> Vec<(SlicedWeight, InnerSlices)> {
    let codes = [
        None,
        Some((QuantizedType::E4m3, None)),
        Some((QuantizedType::Int8, None)),
        Some((QuantizedType::E4m3, Some(32))),
        Some((QuantizedType::Int4, Some(32))),
    ];
    let mut cases = Vec::new();
    for (width, unit, count) in [(176, 16, 8), (352, 32, 8), (1152, 128, 4), (1024, 128, 2)] {
        let slices = InnerSlices::halved(width, unit, count);
        for codes in codes {
            let group = codes.and_then(|(_, group)| group).unwrap_or(1);
            if unit % group == 0 {
                let weight = SlicedWeight {
                    precision: Precision::Bf16,
                    codes,
                    width,
                };
                cases.push((weight, slices.clone()));
            }
        }
        let weight = SlicedWeight {
            precision: Precision::F32,
            codes: None,
            width,
        };
        cases.push((weight, slices));
    }
    cases
}

/// Every kernel of a format gives the same bits, and those of ranks that own subtrees.
#[test]
fn sliced_rows_have_the_bits_of_every_kernel_and_rank() {
    for precision in [Precision::Bf16, Precision::F32] {
        let Some(mut gpu) = cuda(precision, KvType::from(precision)) else {
            return;
        };
        for (weight, slices) in cases() {
            if weight.precision != precision {
                continue;
            }
            let whole = 0..weight.width;
            let matrix = weight.load(&gpu, &slices);
            let rows_max = match weight.codes {
                None if precision == Precision::Bf16 => ROWS[ROWS.len() - 1],
                _ => 70,
            };
            let all = weight.product(&mut gpu, &matrix, &whole, rows_max);
            for rows in ROWS.into_iter().filter(|rows| *rows < rows_max) {
                let some = weight.product(&mut gpu, &matrix, &whole, rows);
                let among = &all[..some.len()];
                assert!(bits(&some) == bits(among), "{weight:?} {slices:?} {rows}");
            }
            let mut ranks = 2;
            while ranks <= slices.count() {
                let parts: Vec<Vec<f32>> = (0..ranks)
                    .map(|rank| {
                        let share = slices.share(rank, ranks);
                        let matrix = weight.load(&gpu, &share);
                        weight.product(&mut gpu, &matrix, &share.elements(), 9)
                    })
                    .collect();
                let found = tree(&parts);
                let among = &all[..found.len()];
                assert!(
                    bits(&found) == bits(among),
                    "{weight:?} {slices:?} {ranks} ranks"
                );
                ranks *= 2;
            }
        }
    }
}

/// Sums of bf16 numbers in f32: a wrong place of a slice would show, and rounding does not.
#[test]
fn sliced_products_are_right_to_within_rounding() {
    let Some(mut gpu) = cuda(Precision::Bf16, KvType::Bf16) else {
        return;
    };
    for (weight, slices) in cases() {
        if weight.precision != Precision::Bf16 {
            continue;
        }
        let (rows, whole) = (5, 0..weight.width);
        let matrix = weight.load(&gpu, &slices);
        let found = weight.product(&mut gpu, &matrix, &whole, rows);
        let weights = weight.stored(&whole).to_f32();
        let x = numbers(5, rows * weight.width);
        let most = found.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (row, x) in found
            .chunks_exact(COLUMNS)
            .zip(x.chunks_exact(weight.width))
        {
            for (found, weights) in row.iter().zip(weights.chunks_exact(weight.width)) {
                let terms = x.iter().zip(weights);
                let expected: f64 = terms.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                let error = (f64::from(*found) - expected).abs();
                assert!(error < 2e-5 * f64::from(most), "{weight:?} {slices:?}");
            }
        }
    }
}
