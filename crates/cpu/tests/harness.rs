//! Operands, single products and comparisons for the tests of operations.

use cleave_cpu::{CpuMatrix, CpuOps, CpuOptions, CpuRows, Isa};
use cleave_engine::ops::{BufferRole, Ops, Precision};

/// The instruction sets that this processor has.
pub(crate) fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

pub(crate) fn options(precision: Precision, isa: Isa, threads: usize) -> CpuOptions {
    CpuOptions {
        isa: Some(isa),
        threads,
        ..CpuOptions::new(precision)
    }
}

/// Numbers in −1..1, the same for the same seed.
pub(crate) fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

pub(crate) fn filled(ops: &CpuOps, rows: usize, values: &[f32]) -> CpuRows {
    let width = values.len() / rows.max(1);
    let mut buffer = ops.rows(rows, width, BufferRole::Activations).unwrap();
    buffer.values_mut().copy_from_slice(values);
    buffer
}

/// The product `(rows, columns)` of `x`, `(rows, width)`.
pub(crate) fn multiply(
    options: &CpuOptions,
    matrix: &CpuMatrix,
    columns: usize,
    x: &[f32],
    rows: usize,
) -> Vec<f32> {
    let mut ops = CpuOps::new(options).unwrap();
    let x = filled(&ops, rows, x);
    let mut out = ops.rows(rows, columns, BufferRole::Activations).unwrap();
    ops.matmul(matrix, rows, &x, &mut out).unwrap();
    out.values().to_vec()
}

pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

pub(crate) fn assert_close(found: &[f32], expected: &[f64], bound: f64, label: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(
            error <= bound * (1.0 + expected.abs()),
            "{label}: element {i} is {found}, should be {expected}"
        );
    }
}

/// Asserts that a product of many rows has the same bits with several numbers of threads, and that
/// some of its rows have the same bits alone. `run` multiplies with a number of threads, rows and
/// their count.
pub(crate) fn assert_independent(
    x: &[f32],
    rows: usize,
    label: &str,
    run: impl Fn(usize, &[f32], usize) -> Vec<f32>,
) {
    let together = run(1, x, rows);
    for threads in [2, 5] {
        let again = run(threads, x, rows);
        assert!(same_bits(&together, &again), "{label} {threads} threads");
    }
    let picked = [0, 1, 30, rows - 1];
    assert_rows_alone(&together, x, rows, &picked, label, |x| run(2, x, 1));
}

/// Asserts that the picked rows of `together`, the product of `x`, have the same bits alone.
pub(crate) fn assert_rows_alone(
    together: &[f32],
    x: &[f32],
    rows: usize,
    picked: &[usize],
    label: &str,
    run: impl Fn(&[f32]) -> Vec<f32>,
) {
    let (width, columns) = (x.len() / rows, together.len() / rows);
    for row in picked {
        let alone = run(&x[row * width..(row + 1) * width]);
        let among = &together[row * columns..(row + 1) * columns];
        assert!(same_bits(&alone, among), "{label} row {row}");
    }
}
