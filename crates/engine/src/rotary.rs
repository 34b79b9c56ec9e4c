//! Tables of the rotary embedding.
//!
//! Owns: cosines and sines for every position. Never: rotates a vector; the device does.
//! Invariant: arithmetic is in the reference's precision (f32 angles), so that far positions agree
//! with the model as it was trained.

use cleave_models::Rope;
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
}

/// Cosines and sines for positions `0..positions`.
pub(crate) fn table(rope: &Rope, head_dim: usize, positions: usize) -> RotaryValues {
    let frequencies = rope.frequencies(head_dim);
    let half = frequencies.len();
    let (mut cos, mut sin) = (vec![0.0; positions * half], vec![0.0; positions * half]);
    // A context of 131072 tokens needs eight million sines, a second on one core; so all cores
    // share them.
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let part = positions.div_ceil(cores).max(1);
    thread::scope(|scope| {
        let parts = cos.chunks_mut(part * half).zip(sin.chunks_mut(part * half));
        for (index, (cos, sin)) in parts.enumerate() {
            let frequencies = &frequencies;
            scope.spawn(move || fill(frequencies, index * part, cos, sin));
        }
    });
    RotaryValues { cos, sin, half }
}

/// Fills the table for consecutive positions from `first`.
fn fill(frequencies: &[f32], first: usize, cos: &mut [f32], sin: &mut [f32]) {
    let half = frequencies.len();
    let rows = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
    for (position, (cos, sin)) in (first..).zip(rows) {
        for (pair, frequency) in frequencies.iter().enumerate() {
            let angle = f64::from(position as f32 * frequency);
            let (s, c) = angle.sin_cos();
            (cos[pair], sin[pair]) = (c as f32, s as f32);
        }
    }
}
