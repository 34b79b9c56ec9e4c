//! Launches of every kernel of norms.
//!
//! Owns: their arguments. Never: compares results.
//! Invariant: each kernel reads every element of its buffers, of widths that are multiples of eight
//! and of others.

use super::{KernelBench, element_bytes};
use crate::args::{
    AddRowsArgs, HeadNormArgs, NormAddArgs, NormArgs, ProjectionNormArgs, RoundArgs,
};

pub(super) fn norm(bench: &KernelBench, name: &str) {
    let rows = 3;
    for (width, formula) in [(261, 0), (264, 0), (261, 1), (264, 1)] {
        let args = NormArgs {
            residual: bench.floats(rows * width),
            delta: bench.stored(name, rows * width),
            weight: bench.floats(width),
            out: bench.zeros(rows * width * element_bytes(name)),
            width: width as u32,
            epsilon: 1e-5,
            formula,
            padding: 0,
        };
        bench.launch(name, [rows as u32, 1, 1], args);
    }
}

pub(super) fn add_rows(bench: &KernelBench, name: &str) {
    for width in [261, 264] {
        let rows = 3;
        let args = AddRowsArgs {
            delta: bench.stored(name, rows * width),
            residual: bench.floats(rows * width),
            width: width as u32,
            padding: 0,
        };
        bench.launch(name, [rows as u32, 1, 1], args);
    }
}

pub(super) fn norm_add(bench: &KernelBench, name: &str) {
    for width in [261, 264] {
        let rows = 3;
        let args = NormAddArgs {
            x: bench.stored(name, rows * width),
            residual: bench.floats(rows * width),
            weight: bench.floats(width),
            width: width as u32,
            epsilon: 1e-5,
        };
        bench.launch(name, [rows as u32, 1, 1], args);
    }
}

pub(super) fn round_rows(bench: &KernelBench, name: &str) {
    for width in [261, 264] {
        let rows = 3;
        let args = RoundArgs {
            from: bench.floats(rows * width),
            to: bench.zeros(rows * width * element_bytes(name)),
            width: width as u32,
            padding: 0,
        };
        bench.launch(name, [rows as u32, 1, 1], args);
    }
}

pub(super) fn projection_norm(bench: &KernelBench, name: &str) {
    let rows = 2;
    for (query_width, key_width) in [(72, 24), (39, 13)] {
        let args = ProjectionNormArgs {
            qkv: bench.stored(name, rows * (query_width + 2 * key_width)),
            query_weight: bench.floats(query_width),
            key_weight: bench.floats(key_width),
            query_width: query_width as u32,
            key_width: key_width as u32,
            epsilon: 1e-5,
            padding: 0,
        };
        bench.launch(name, [rows as u32, 2, 1], args);
    }
}

pub(super) fn head_norm(bench: &KernelBench, name: &str) {
    let (rows, dim) = (2, 24);
    let args = HeadNormArgs {
        qkv: bench.stored(name, rows * (3 + 2) * dim),
        query_weight: bench.floats(dim),
        key_weight: bench.floats(dim),
        query_heads: 3,
        kv_heads: 1,
        head_dim: dim as u32,
        epsilon: 1e-5,
    };
    bench.launch(name, [rows as u32, 1, 1], args);
}
