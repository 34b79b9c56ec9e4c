//! Operations on one row: normalisation, rotation, storing; and the gate.
//!
//! Invariant: sums over a row add sixteen elements at a time, in order, and then the lanes as a
//! tree.

use super::SoftCap;
use super::tile::ElementFormat;
use crate::simd::{LANES, Simd};

/// `x[i] ← x[i] · weight[i] / sqrt(mean(x²) + epsilon)`.
#[inline(always)]
pub(super) fn norm<S: Simd>(s: S, x: &mut [f32], weight: &[f32], epsilon: f32) {
    let mut squares = s.splat(0.0);
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        let v = s.load(chunk);
        squares = s.fma(v, v, squares);
    }
    let last = s.load_part(tail);
    squares = s.fma(last, last, squares);
    let scale = s.splat(1.0 / (s.sum(squares) / x.len() as f32 + epsilon).sqrt());
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    let (weights, weights_tail) = weight.as_chunks::<LANES>();
    for (chunk, weight) in chunks.iter_mut().zip(weights) {
        s.store(s.mul(s.mul(s.load(chunk), scale), s.load(weight)), chunk);
    }
    if !tail.is_empty() {
        s.store_part(s.mul(s.mul(last, scale), s.load_part(weights_tail)), tail);
    }
}

/// `x[i] ← x[i] − mean(x)`.
#[inline(always)]
pub(super) fn remove_mean<S: Simd>(s: S, x: &mut [f32]) {
    let mut sum = s.splat(0.0);
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        sum = s.add(sum, s.load(chunk));
    }
    let last = s.load_part(tail);
    sum = s.add(sum, last);
    let mean = s.splat(s.sum(sum) / x.len() as f32);
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        s.store(s.sub(s.load(chunk), mean), chunk);
    }
    if !tail.is_empty() {
        s.store_part(s.sub(last, mean), tail);
    }
}

/// `x[i] ← x[i] + delta[i]`.
#[inline(always)]
pub(super) fn add<S: Simd>(s: S, x: &mut [f32], delta: &[f32]) {
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    let (deltas, deltas_tail) = delta.as_chunks::<LANES>();
    for (chunk, delta) in chunks.iter_mut().zip(deltas) {
        s.store(s.add(s.load(chunk), s.load(delta)), chunk);
    }
    for (x, delta) in tail.iter_mut().zip(deltas_tail) {
        *x += delta;
    }
}

/// `x[i] ← x[i] + factor · addend[i]`.
#[inline(always)]
pub(super) fn add_scaled<S: Simd>(s: S, x: &mut [f32], addend: &[f32], factor: f32) {
    let factor = s.splat(factor);
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    let (addends, addends_tail) = addend.as_chunks::<LANES>();
    for (chunk, addend) in chunks.iter_mut().zip(addends) {
        s.store(s.fma(factor, s.load(addend), s.load(chunk)), chunk);
    }
    if !tail.is_empty() {
        let sum = s.fma(factor, s.load_part(addends_tail), s.load_part(tail));
        s.store_part(sum, tail);
    }
}

/// `x[i] ← exp(x[i]) / Σ exp(x)`.
#[inline(always)]
pub(super) fn softmax<S: Simd>(s: S, x: &mut [f32]) {
    let most = x.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x));
    let (most, to_log2) = (s.splat(most), s.splat(std::f32::consts::LOG2_E));
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    let mut sums = s.splat(0.0);
    for chunk in chunks.iter_mut() {
        let power = s.exp2(s.mul(s.sub(s.load(chunk), most), to_log2));
        sums = s.add(sums, power);
        s.store(power, chunk);
    }
    if !tail.is_empty() {
        s.store_part(s.exp2(s.mul(s.sub(s.load_part(tail), most), to_log2)), tail);
        sums = s.add(sums, s.load_part(tail));
    }
    let sum = s.splat(s.sum(sums));
    for chunk in chunks.iter_mut() {
        s.store(s.div(s.load(chunk), sum), chunk);
    }
    if !tail.is_empty() {
        s.store_part(s.div(s.load_part(tail), sum), tail);
    }
}

/// `x[i] ← 1 / (1 + exp(−x[i]))`.
#[inline(always)]
pub(super) fn sigmoid<S: Simd>(s: S, x: &mut [f32]) {
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        s.store(sigmoid_of(s, s.load(chunk)), chunk);
    }
    if !tail.is_empty() {
        s.store_part(sigmoid_of(s, s.load_part(tail)), tail);
    }
}

#[inline(always)]
fn sigmoid_of<S: Simd>(s: S, x: S::V) -> S::V {
    let exp = s.exp2(s.mul(x, s.splat(-std::f32::consts::LOG2_E)));
    let share = s.div(s.splat(1.0), s.add(s.splat(1.0), exp));
    // The exponential of NaN is a number: it would hide that a logit is none.
    s.add(share, s.sub(x, x))
}

/// Prefetches memory that is about to be written.
#[inline(always)]
pub(super) fn prefetch_lines<S: Simd>(s: S, bytes: &[u8]) {
    const LINE: usize = 64;
    for line in bytes.chunks(LINE) {
        s.prefetch(line.as_ptr().cast());
    }
}

/// Rotates one head, pairs `(i, i + half)`.
#[inline(always)]
pub(super) fn rotate<S: Simd>(s: S, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    let (low_chunks, low_tail) = low.as_chunks_mut::<LANES>();
    let (high_chunks, high_tail) = high.as_chunks_mut::<LANES>();
    let (cos_chunks, cos_tail) = cos.as_chunks::<LANES>();
    let (sin_chunks, sin_tail) = sin.as_chunks::<LANES>();
    for i in 0..cos_chunks.len() {
        let (x, y) = (s.load(&low_chunks[i]), s.load(&high_chunks[i]));
        let (x, y) = rotate_pair(s, x, y, s.load(&cos_chunks[i]), s.load(&sin_chunks[i]));
        s.store(x, &mut low_chunks[i]);
        s.store(y, &mut high_chunks[i]);
    }
    if !cos_tail.is_empty() {
        let (x, y) = (s.load_part(low_tail), s.load_part(high_tail));
        let (x, y) = rotate_pair(s, x, y, s.load_part(cos_tail), s.load_part(sin_tail));
        s.store_part(x, low_tail);
        s.store_part(y, high_tail);
    }
}

#[inline(always)]
fn rotate_pair<S: Simd>(s: S, x: S::V, y: S::V, cos: S::V, sin: S::V) -> (S::V, S::V) {
    (
        s.sub(s.mul(x, cos), s.mul(y, sin)),
        s.fma(x, sin, s.mul(y, cos)),
    )
}

/// `gate / (1 + exp(−gate)) · up`.
#[inline(always)]
pub(super) fn silu<S: Simd>(s: S, gate: S::V, up: S::V) -> S::V {
    let exp = s.exp2(s.mul(gate, s.splat(-std::f32::consts::LOG2_E)));
    s.mul(s.div(gate, s.add(s.splat(1.0), exp)), up)
}

/// `gate / 2 · (1 + tanh(√(2/π) · (gate + 0.044715 · gate³))) · up`, as `gate / (1 + exp(−2y)) ·
/// up` with the tangent's argument `y`.
#[inline(always)]
pub(super) fn gelu_tanh<S: Simd>(s: S, gate: S::V, up: S::V) -> S::V {
    // 2 · √(2/π), and 0.044715 times it.
    const LINEAR: f32 = 1.595_769;
    const CUBIC: f32 = 0.071_354_82;
    let slope = s.fma(s.mul(gate, gate), s.splat(CUBIC), s.splat(LINEAR));
    let twice = s.mul(gate, slope);
    let exp = s.exp2(s.mul(twice, s.splat(-std::f32::consts::LOG2_E)));
    s.mul(s.div(gate, s.add(s.splat(1.0), exp)), up)
}

/// `gate / (1 + exp(−1.702 · gate)) · (up + 1)`, the gate cut to at most `limit` and its factor to
/// `±limit`.
#[inline(always)]
pub(super) fn clamped_swiglu<S: Simd>(s: S, gate: S::V, up: S::V, limit: f32) -> S::V {
    const SLOPE: f32 = 1.702;
    let (least, most) = (s.splat(-limit), s.splat(limit));
    let gate = s.min(gate, most);
    let factor = s.add(s.max(s.min(up, most), least), s.splat(1.0));
    let exp = s.exp2(s.mul(gate, s.splat(-SLOPE * std::f32::consts::LOG2_E)));
    s.mul(s.div(gate, s.add(s.splat(1.0), exp)), factor)
}

/// `limit · tanh(x / scale / cap)`, see [`SoftCap`].
#[inline(always)]
pub(super) fn capped<S: Simd>(s: S, x: S::V, cap: SoftCap) -> S::V {
    // tanh(y) = 1 − 2 / (exp(2y) + 1).
    let exp = s.exp2(s.mul(x, s.splat(cap.exponent)));
    let rest = s.div(s.splat(-2.0 * cap.limit), s.add(exp, s.splat(1.0)));
    let capped = s.add(rest, s.splat(cap.limit));
    // The exponential of NaN is a number: the cap would hide that a logit is none.
    s.add(capped, s.sub(x, x))
}

/// Caps a row in place.
#[inline(always)]
pub(super) fn cap_row<S: Simd>(s: S, x: &mut [f32], cap: SoftCap) {
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        s.store(capped(s, s.load(chunk), cap), chunk);
    }
    if !tail.is_empty() {
        s.store_part(capped(s, s.load_part(tail), cap), tail);
    }
}

/// Stores a head in the pool's element type.
#[inline(always)]
pub(super) fn store<S: Simd, F: ElementFormat<S>>(s: S, x: &[f32], to: &mut [F::Stored]) {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let (to_chunks, to_tail) = to.as_chunks_mut::<LANES>();
    for (x, to) in chunks.iter().zip(to_chunks) {
        F::store(s, s.load(x), to);
    }
    if let Some(&first) = to_tail.first() {
        let mut whole = [first; LANES];
        F::store(s, s.load_part(tail), &mut whole);
        to_tail.copy_from_slice(&whole[..tail.len()]);
    }
}
