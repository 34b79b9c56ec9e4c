//! The table of KV memory in docs/models.md, made from published models that have windows.

use super::{cohere, exaone4, experts, gemma, gemma3_4b, olmo3, published, usual};
use crate::spec::ModelSpec;
use cleave_domain::{KvSpec, KvWindow};
use serde_json::Value;

const BLOCK_TOKENS: u32 = 16;

/// Names, billions of parameters and keys.
fn models() -> [(&'static str, f64, Value); 8] {
    [
        ("Command R7B", 8.03, cohere::cohere2()),
        ("EXAONE 4 32B", 32.0, exaone4()),
        ("Gemma 2 2B", 2.61, gemma::gemma2()),
        ("Gemma 3 1B", 1.0, gemma::gemma3_1b()),
        ("Gemma 3 4B", 3.88, gemma3_4b()),
        ("gpt-oss-20b", 20.91, experts::gpt_oss()),
        ("Mistral 7B v0.1", 7.24, usual::mistral()),
        ("OLMo 3 7B", 7.3, olmo3()),
    ]
}

/// The planes of a model in bf16.
fn planes(spec: &ModelSpec) -> KvSpec {
    let whole = spec.kv_spec(BLOCK_TOKENS, 2, 0);
    spec.kv_spec_with_window(whole, spec.context_tokens_max)
}

/// Bytes that a stream of so many tokens holds, in one plane and in two.
fn held_bytes(spec: &ModelSpec, tokens: u32) -> (u64, u64) {
    let blocks = u64::from(tokens.div_ceil(BLOCK_TOKENS));
    let in_one = blocks * spec.kv_spec(BLOCK_TOKENS, 2, 0).blocks.bytes;
    let planes = planes(spec);
    let of_window = planes.window.as_ref().map_or(0, |layout| {
        let window = KvWindow {
            tokens: layout.tokens,
            block_tokens: BLOCK_TOKENS,
        };
        let most = u64::from(window.blocks_max(KvWindow::DECODE_TOKENS));
        most.min(blocks) * layout.layout.bytes
    });
    (in_one, blocks * planes.blocks.bytes + of_window)
}

fn table() -> String {
    let mut text = "| model | layers, those with a window | window | bytes per token, all layers | behind \
                    the window | longest stream | in one plane | in two |\n|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for (name, billions, keys) in models() {
        let spec = published(billions, &keys);
        let planes = planes(&spec);
        let layout = planes.window.as_ref().unwrap();
        let (all, windows) = (spec.layers.len(), layout.layout.layers.len());
        let each = u64::from(BLOCK_TOKENS);
        let whole = planes.blocks.bytes + layout.layout.bytes;
        let context = spec.context_tokens_max as u32;
        let (in_one, in_two) = held_bytes(&spec, context);
        let window = layout.tokens;
        text += &format!(
            "| {name} | {all}, {windows} | {window} | {} | {} | {context} | {} MiB | {} MiB |\n",
            whole / each,
            planes.blocks.bytes / each,
            in_one >> 20,
            in_two >> 20,
        );
    }
    text
}

/// Of 26 layers with one KV head of 256, four have no window; a stream of 32768 tokens takes
/// 832 MiB without a window plane.
#[test]
fn a_long_stream_of_gemma_3_holds_five_times_less() {
    let spec = published(1.0, &gemma::gemma3_1b());
    let (in_one, in_two) = held_bytes(&spec, 32_768);
    assert_eq!(in_one, 26 * 2 * 256 * 2 * 32_768);
    let window_blocks = 512 / 16 + 1;
    let layer_block = 16 * 2 * 256 * 2;
    assert_eq!(in_two, (4 * 2048 + 22 * window_blocks) * layer_block);
    assert!(in_one > 5 * in_two, "{in_one} {in_two}");
}

#[test]
fn one_layer_stays_where_every_layer_has_a_window() {
    let spec = published(7.24, &usual::mistral());
    let planes = planes(&spec);
    assert_eq!(planes.blocks.layers[0].layer, 31);
    assert_eq!(planes.window.unwrap().layout.layers.len(), 31);
    // A context no longer than the window has one plane.
    let whole = spec.kv_spec(BLOCK_TOKENS, 2, 0);
    assert_eq!(spec.kv_spec_with_window(whole.clone(), 4096), whole);
}

#[test]
fn the_page_of_models_has_the_memory_of_windows() {
    let page = include_str!("../../../../../docs/models.md");
    let table = table();
    assert!(
        page.contains(&table),
        "docs/models.md needs this table:\n{table}"
    );
}
