//! Products with weights of f16, compared with sums in f64 on every instruction set that this
//! processor has, and with themselves: rows alone and together, other thread counts, other sets.

use crate::harness::{self, assert_independent, available, multiply, numbers, same_bits};
use cleave_checkpoint::{StoredMatrix, StoredTensor};
use cleave_cpu::{CpuOptions, CpuWeightLoader, Isa};
use cleave_engine::ops::{InnerSlices, Precision, WeightLoader};
use half::f16;

fn options(isa: Isa, threads: usize) -> CpuOptions {
    CpuOptions {
        keeps_f16: true,
        ..harness::options(Precision::Bf16, isa, threads)
    }
}

/// Weights `(columns, width)`; every seventh is subnormal in f16.
fn weights(columns: usize, width: usize) -> Vec<f16> {
    let values = numbers(3, columns * width).into_iter().enumerate();
    let scaled = values.map(|(i, x)| x * if i % 7 == 0 { 3e-5 } else { 0.3 });
    scaled.map(f16::from_f32).collect()
}

fn stored(columns: usize, width: usize) -> StoredMatrix {
    StoredTensor::from_f16("w", columns, width, &weights(columns, width)).into()
}

/// The product in f64, and the sum of magnitudes, to which errors are relative.
fn expected(columns: usize, width: usize, x: &[f32], bias: Option<&[f32]>) -> Vec<(f64, f64)> {
    let weights = weights(columns, width);
    let mut out = Vec::new();
    for row in x.chunks_exact(width) {
        for (column, weights) in weights.chunks_exact(width).enumerate() {
            let terms = row
                .iter()
                .zip(weights)
                .map(|(x, w)| f64::from(*x) * w.to_f64());
            let bias = bias.map_or(0.0, |bias| f64::from(bias[column]));
            let most: f64 = terms.clone().map(f64::abs).sum();
            out.push((terms.sum::<f64>() + bias, most + bias.abs()));
        }
    }
    out
}

#[test]
fn f16_products_are_right_and_bit_equal_on_every_isa() {
    for (columns, width) in [
        (1, 1),
        (16, 3),
        (17, 4),
        (33, 71),
        (31, 512),
        (70, 515),
        (100, 1100),
    ] {
        for rows in [1, 2, 5, 8, 14, 15, 29, 70] {
            let bias = (rows % 2 == 0).then(|| numbers(8, columns));
            let x = numbers(9, rows * width);
            let expected = expected(columns, width, &x, bias.as_deref());
            let mut first: Option<Vec<f32>> = None;
            for isa in available() {
                let options = options(isa, 2);
                let pack = CpuWeightLoader::new(&options);
                let stack = [stored(columns, width)];
                let matrix = pack.matrix(&stack, bias.as_deref()).unwrap();
                assert_eq!(
                    pack.matrix_bytes(&stack, &InnerSlices::whole(width)),
                    (width * columns.next_multiple_of(32) * 2) as u64
                );
                let out = multiply(&options, &matrix, columns, &x, rows);
                let label = format!("{isa} {width} × {columns}, {rows} rows");
                for (found, (expected, most)) in out.iter().zip(&expected) {
                    // Activations lose at most 2^-13, and sums of so many hardly more.
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error <= 1.3e-4 * most, "{label}: {found} for {expected}");
                }
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
fn f16_rows_are_bit_equal_in_any_batch_and_thread_count() {
    // Rows larger than a cache, in more than one block.
    let (columns, width, rows) = (200, 1153, 530);
    let x = numbers(2, rows * width);
    for isa in available() {
        let matrix = CpuWeightLoader::new(&options(isa, 2))
            .matrix(&[stored(columns, width)], None)
            .unwrap();
        assert_independent(&x, rows, isa.name(), |threads, x, rows| {
            multiply(&options(isa, threads), &matrix, columns, x, rows)
        });
    }
}

/// In bf16, weights lose three bits and activations five.
#[test]
fn kept_f16_is_16_times_more_exact_than_bf16() {
    let (columns, width, rows) = (64, 512, 4);
    let x = numbers(2, rows * width);
    let expected = expected(columns, width, &x, None);
    let error = |keeps_f16| {
        let options = CpuOptions {
            keeps_f16,
            ..options(Isa::detect(), 2)
        };
        let matrix = CpuWeightLoader::new(&options)
            .matrix(&[stored(columns, width)], None)
            .unwrap();
        let out = multiply(&options, &matrix, columns, &x, rows);
        let errors = out
            .iter()
            .zip(&expected)
            .map(|(x, (expected, _))| (f64::from(*x) - expected).powi(2));
        errors.sum::<f64>().sqrt()
    };
    let (exact, rounded) = (error(true), error(false));
    assert!(16.0 * exact < rounded, "{exact} and {rounded}");
}

#[test]
fn non_finite_inputs_stay_non_finite_with_f16() {
    let (columns, width) = (32, 256);
    // The second NaN has its only fraction bits among those that rounding drops.
    for bad in [
        f32::NAN,
        f32::from_bits(0x7f80_0001),
        f32::INFINITY,
        f32::NEG_INFINITY,
    ] {
        for isa in available() {
            let options = options(isa, 1);
            let matrix = CpuWeightLoader::new(&options)
                .matrix(&[stored(columns, width)], None)
                .unwrap();
            let mut x = numbers(2, 2 * width);
            x[77] = bad;
            let out = multiply(&options, &matrix, columns, &x, 2);
            assert!(
                out[..columns]
                    .iter()
                    .all(|x| !x.is_finite() && (x.is_nan() || !bad.is_nan())),
                "{isa} {bad}"
            );
            assert!(out[columns..].iter().all(|x| x.is_finite()), "{isa} {bad}");
        }
    }
}
