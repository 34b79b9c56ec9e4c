//! Tables of the rotary embedding.
//!
//! Owns: cosines and sines for every position. Never: rotates a vector; the device does.
//! Invariant: arithmetic is in the reference's precision (f32 angles), so that far positions agree
//! with the model as it was trained.

use cleave_models::{QueryGrowth, Rope};
use std::thread;

/// Cosines and sines, `(positions, half)` each.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RotaryValues {
    /// Cosines, in the shape `(positions, half)`.
    pub(crate) cos: Vec<f32>,
    /// Sines, in the shape `(positions, half)`.
    pub(crate) sin: Vec<f32>,
    /// Pairs of elements that are rotated together in a head.
    pub(crate) half: usize,
    /// Factors of rotated queries, in the shape `(positions)`; empty if they are 1.
    pub(crate) query_factors: Vec<f32>,
}

/// Cosines and sines for positions `0..positions`.
pub(crate) fn table(rope: &Rope, positions: usize) -> RotaryValues {
    let frequencies = rope.frequencies(positions);
    let half = frequencies.len();
    let factor = rope.attention_factor();
    let growth = rope.query_growth.iter();
    let query_factors = growth.flat_map(|growth| query_factors(growth, positions));
    let query_factors = query_factors.collect();
    if half == 0 {
        return RotaryValues {
            cos: Vec::new(),
            sin: Vec::new(),
            half,
            query_factors,
        };
    }
    let (mut cos, mut sin) = (vec![0.0; positions * half], vec![0.0; positions * half]);
    // A context of 131072 tokens needs eight million sines, a second on one core; so all cores
    // share them.
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let part = positions.div_ceil(cores).max(1);
    thread::scope(|scope| {
        let parts = cos.chunks_mut(part * half).zip(sin.chunks_mut(part * half));
        for (index, (cos, sin)) in parts.enumerate() {
            let frequencies = &frequencies;
            scope.spawn(move || fill(frequencies, factor, index * part, cos, sin));
        }
    });
    RotaryValues {
        cos,
        sin,
        half,
        query_factors,
    }
}

/// Factors of queries at positions `0..positions`.
fn query_factors(growth: &QueryGrowth, positions: usize) -> impl Iterator<Item = f32> {
    let QueryGrowth {
        beta,
        original_context,
    } = *growth;
    (0..positions).map(move |position| {
        let times = (position as f64 / original_context).floor();
        (1.0 + beta * (1.0 + times).ln()) as f32
    })
}

/// Fills the table for consecutive positions from `first`.
fn fill(frequencies: &[f32], factor: f32, first: usize, cos: &mut [f32], sin: &mut [f32]) {
    let half = frequencies.len();
    let rows = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
    for (position, (cos, sin)) in (first..).zip(rows) {
        for (pair, frequency) in frequencies.iter().enumerate() {
            let angle = f64::from(position as f32 * frequency);
            let (s, c) = angle.sin_cos();
            (cos[pair], sin[pair]) = (c as f32 * factor, s as f32 * factor);
        }
    }
}
