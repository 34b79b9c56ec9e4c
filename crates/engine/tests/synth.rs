//! Synthetic checkpoints load, generate text, and have the same bytes for the same seed.

use crate::folder::testdata;
use crate::reference;
use cleave_checkpoint::Checkpoint;
use cleave_checkpoint::synth::{SynthError, shapes, synth, synth_of_config};
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, SamplingParams, Segment, SlotIndex, StepPlan,
};
use cleave_engine::{Engine, EngineLimits};
use std::path::Path;
use std::sync::Arc;
use tokenizers::Tokenizer;

const TINY: [&str; 9] = [
    "tiny-llama",
    "tiny-qwen3",
    "tiny-mistral",
    "tiny-qwen2",
    "tiny-olmo2",
    "tiny-cohere2",
    "tiny-gemma2",
    "tiny-qwen3-moe",
    "tiny-gpt-oss",
];

fn write(shape: &str, out: &Path, seed: u64) -> Result<(), SynthError> {
    synth(shape, out, seed, &mut |_| {})
}

/// Generates greedy tokens after a prompt.
fn generate(dir: &Path, prompt: &[u32], count: usize) -> Vec<u32> {
    let limits = EngineLimits {
        block_tokens: 16,
        blocks_count: 8,
        states_count: 0,
        slots_count: 1,
        step_tokens_max: 64,
        windows_count: 0,
    };
    let mut engine = reference::engine(dir, limits).unwrap();
    let mut opens = vec![OpenSlot {
        slot: SlotIndex(0),
        sampling: Arc::new(SamplingParams::greedy()),
        prompt: Arc::from(prompt),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
    }];
    let (mut position, mut len) = (0, prompt.len() as u32);
    let mut tokens = Vec::new();
    while tokens.len() < count {
        let segment = Segment {
            slot: SlotIndex(0),
            position,
            len,
            blocks: (0..8).map(BlockIndex).collect(),
            logits: LogitsWanted::Sample,
            drafts: Vec::new(),
            state: None,
            window: None,
        };
        let plan = StepPlan {
            opens: std::mem::take(&mut opens),
            segments: vec![segment],
            ..StepPlan::default()
        };
        tokens.push(engine.step(&plan).unwrap().sampled[0].1.token);
        (position, len) = (position + len, 1);
    }
    tokens
}

#[test]
fn tiny_shapes_load_and_generate_text() {
    for shape in TINY {
        let dir = tempfile::tempdir().unwrap();
        let mut last = None;
        synth(shape, dir.path(), 7, &mut |progress| last = Some(progress)).unwrap();
        let last = last.unwrap();
        assert_eq!(last.bytes_done, last.bytes_total, "{shape}");
        let tokenizer = Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
        let text = "The quick brown fox, naïve and 🙂, jumps over 13 lazy dogs.\n";
        let prompt = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(prompt.get_ids(), false).unwrap(), text);
        let tokens = generate(dir.path(), prompt.get_ids(), 24);
        assert!(!tokenizer.decode(&tokens, false).unwrap().is_empty());
        let mut distinct = tokens.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() > 4, "{shape} repeats itself: {tokens:?}");
    }
}

/// A class around a model, tied and fused tensors, experts of single tensors and of one tensor.
#[test]
fn a_config_file_is_enough_for_random_weights() {
    for name in [
        "gemma3-images",
        "phi4-mini",
        "qwen3-moe",
        "gpt-oss",
        "cohere2",
        "minimax-m2",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let config = testdata(name).join("config.json");
        synth_of_config(&config, dir.path(), 7, &mut |_| {}).unwrap();
        let (made, golden) = (
            Checkpoint::open(dir.path()).unwrap(),
            Checkpoint::open(&testdata(name)).unwrap(),
        );
        assert_eq!(made.spec(), golden.spec(), "{name}");
        assert_eq!(made.parameters_count(), golden.parameters_count(), "{name}");
        assert_eq!(generate(dir.path(), &[1, 2, 3], 4).len(), 4, "{name}");
    }
}

#[test]
fn a_damaged_config_file_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("odd.json");
    for (text, expected) in [
        ("[1]", "is not a JSON object"),
        ("{", "EOF"),
        (
            r#"{"architectures": ["Unknown"]}"#,
            "Unknown is not supported",
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let out = dir.path().join("out");
        let error = synth_of_config(&file, &out, 1, &mut |_| {}).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("odd.json") && error.contains(expected),
            "{error}"
        );
        assert!(!out.exists());
    }
}

#[test]
fn the_tokenizer_fills_the_vocabulary() {
    for shape in TINY {
        let dir = tempfile::tempdir().unwrap();
        write(shape, dir.path(), 1).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let tokenizer = Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
        let vocab = checkpoint.spec().vocab_size;
        assert_eq!(tokenizer.get_vocab_size(true), vocab);
        assert!((0..vocab as u32).all(|id| tokenizer.id_to_token(id).is_some()));
        let turn_end = tokenizer.token_to_id("<|im_end|>").unwrap();
        assert!(checkpoint.eos().contains(&turn_end));
        assert_eq!(checkpoint.bos(), tokenizer.token_to_id("<|begin_of_text|>"));
    }
}

#[test]
fn synthetic_bytes_depend_only_on_shape_and_seed() {
    let dirs: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    for (dir, seed) in dirs.iter().zip([5, 5, 6]) {
        write("tiny-llama", dir.path(), seed).unwrap();
    }
    let bytes: Vec<_> = dirs
        .iter()
        .map(|dir| std::fs::read(dir.path().join("model.safetensors")).unwrap())
        .collect();
    assert!(bytes[0] == bytes[1]);
    assert!(bytes[0] != bytes[2]);
    let revision = |index: usize| Checkpoint::open(dirs[index].path()).unwrap().revision();
    assert_eq!(revision(0), revision(1));
    assert_ne!(revision(0), revision(2));
}

#[test]
fn the_safetensors_crate_reads_written_files() {
    let dir = tempfile::tempdir().unwrap();
    write("tiny-qwen2", dir.path(), 1).unwrap();
    let bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = tensors
        .tensor("model.layers.1.self_attn.k_proj.bias")
        .unwrap();
    assert_eq!(view.dtype(), safetensors::Dtype::BF16);
    assert_eq!(view.shape(), [32]);
}

#[test]
fn synth_errors_name_known_shapes_and_existing_folders() {
    let dir = tempfile::tempdir().unwrap();
    let unknown = write("llama-9000b", dir.path(), 1).unwrap_err().to_string();
    for shape in shapes() {
        assert!(unknown.contains(shape.name), "{unknown}");
    }
    write("tiny-llama", dir.path(), 1).unwrap();
    let again = write("tiny-llama", dir.path(), 1).unwrap_err();
    assert!(matches!(again, SynthError::Exists { .. }), "{again}");
}
