//! Arguments of the kernels that draw tokens.

use super::KernelBench;
use crate::args::{CapArgs, DeviceEdit, DeviceRule, SampleArgs};

pub(super) fn cap(bench: &KernelBench, name: &str) {
    let count = 2 * 2048 + 77;
    let args = CapArgs {
        logits: bench.floats(count),
        count: count as u64,
        limit: 2.0,
        exponent: 1.4,
    };
    bench.launch(name, [count.div_ceil(2048) as u32, 1, 1], args);
}

/// The rules: greedy with edits, then top-k, then top-p under a mask, the last two with
/// top-n-sigma, and a row that is drawn later.
pub(super) fn sample(bench: &KernelBench, name: &str) {
    const VOCAB: usize = 1300;
    let rule = |row: u32, top_k: u32, top_p: u64, edits_count: u32| DeviceRule {
        bits: 1 << 52,
        top_p,
        inverse_temperature: f32::from(u8::from(edits_count == 0)),
        min_p: 0.01,
        top_k,
        edits_first: 0,
        edits_count,
        top_n_sigma: 2.0,
        row,
        mask: [u32::MAX, u32::MAX, 0, u32::MAX - 1][row as usize],
    };
    let edit = |token: u32, kind: u32| DeviceEdit {
        token,
        kind,
        value: 1.5,
        frequency: 0.1,
        presence: 0.1,
    };
    let all = 1 << 53;
    let rules = [
        rule(0, 0, all, 3),
        rule(1, 40, all, 0),
        rule(2, 0, all / 2, 0),
        rule(3, 0, all, 0),
    ];
    let args = SampleArgs {
        logits: bench.floats(rules.len() * VOCAB),
        rules: bench.of(&rules),
        edits: bench.of(&[edit(3, 0), edit(3, 2), edit(VOCAB as u32 - 1, 1)]),
        masks: bench.of(&[0x1111_1111u32; VOCAB.div_ceil(32)]),
        best: bench.zeros(rules.len() * 8),
        segments: bench.zeros(rules.len() * 1024 * 8),
        tokens: bench.zeros(rules.len() * 4),
        vocab: VOCAB as u32,
        padding: 0,
    };
    let rows = rules.len() as u32;
    bench.launch("sample_prepare", [rows, 2, 1], args);
    if name != "sample_prepare" {
        bench.launch("sample_weigh", [rows, 2, 1], args);
    }
    if name == "sample_draw" {
        bench.launch(name, [rows, 1, 1], args);
    }
}
