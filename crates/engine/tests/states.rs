//! States of sequences: cleared, restored and kept as snapshots around the steps that name them.
//! The reference keeps a number and a hash of the tokens that a state has seen.

use crate::reference::{self, PlainDeviceProbe, STATE_BYTES, state_after};
use cleave_domain::{
    BlockIndex, KvPlane, LogitsWanted, OpenSlot, SamplingParams, Segment, SegmentState, SlotIndex,
    StepId, StepPlan, StepResult, TokenId,
};
use cleave_engine::{BlockSpan, Engine, EngineError, EngineLimits};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const LIMITS: EngineLimits = EngineLimits {
    block_tokens: 4,
    blocks_count: 8,
    states_count: 5,
    slots_count: 2,
    step_tokens_max: 16,
    windows_count: 0,
};

const PROMPT: [TokenId; 6] = [1, 2, 3, 4, 5, 6];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/llama2")
}

/// An engine whose state slots have earlier contents.
fn engine() -> impl Engine {
    let mut engine = reference::engine(&folder(), LIMITS).unwrap();
    spoil(&mut engine);
    engine
}

/// The same over a device that draws, so that steps overlap.
fn device_engine() -> (impl Engine, Arc<PlainDeviceProbe>) {
    let (mut engine, watched) = reference::device_engine(&folder(), LIMITS).unwrap();
    spoil(&mut engine);
    (engine, watched)
}

fn spoil(engine: &mut impl Engine) {
    for slot in 0..LIMITS.states_count {
        engine
            .write_block(whole(slot), &[0xee; STATE_BYTES])
            .unwrap();
    }
}

fn whole(slot: u32) -> BlockSpan {
    BlockSpan {
        plane: KvPlane::State,
        block: BlockIndex(slot),
        offset: 0,
        len: STATE_BYTES,
    }
}

fn state(engine: &impl Engine, slot: u32) -> [u8; STATE_BYTES] {
    let mut bytes = [0; STATE_BYTES];
    engine.read_block(whole(slot), &mut bytes).unwrap();
    bytes
}

fn open(slot: u32) -> OpenSlot {
    OpenSlot {
        slot: SlotIndex(slot),
        sampling: Arc::new(SamplingParams::greedy()),
        prompt: Arc::from(PROMPT),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
    }
}

/// Tokens `position..position + len` of an engine slot, with a state slot.
fn segment(slot: u32, position: u32, len: u32, state: u32) -> Segment {
    Segment {
        slot: SlotIndex(slot),
        position,
        len,
        blocks: (slot * 4..slot * 4 + 4).map(BlockIndex).collect(),
        logits: if position + len < PROMPT.len() as u32 {
            LogitsWanted::No
        } else {
            LogitsWanted::Sample
        },
        drafts: Vec::new(),
        state: Some(SegmentState {
            slot: BlockIndex(state),
            restore: None,
            snapshot: None,
        }),
        window: None,
    }
}

fn restoring(mut segment: Segment, snapshot: u32) -> Segment {
    segment.state.as_mut().unwrap().restore = Some(BlockIndex(snapshot));
    segment
}

fn keeping(mut segment: Segment, snapshot: u32) -> Segment {
    segment.state.as_mut().unwrap().snapshot = Some(BlockIndex(snapshot));
    segment
}

fn plan(opens: &[u32], segments: Vec<Segment>) -> StepPlan {
    StepPlan {
        step: StepId(1),
        opens: opens.iter().map(|slot| open(*slot)).collect(),
        segments,
        poolings: Vec::new(),
    }
}

fn tokens(result: &StepResult) -> Vec<TokenId> {
    result.sampled.iter().map(|(_, s)| s.token).collect()
}

#[test]
fn a_state_is_cleared_at_position_0_and_kept_between_chunks() {
    let mut engine = engine();
    for turn in 0..2 {
        engine.step(&plan(&[0], vec![segment(0, 0, 4, 3)])).unwrap();
        assert_eq!(state(&engine, 3), state_after(&PROMPT[..4]), "turn {turn}");
        let drawn = engine.step(&plan(&[], vec![segment(0, 4, 2, 3)])).unwrap();
        assert_eq!(state(&engine, 3), state_after(&PROMPT));
        engine.step(&plan(&[], vec![segment(0, 6, 1, 3)])).unwrap();
        let all = [&PROMPT[..], &tokens(&drawn)].concat();
        assert_eq!(state(&engine, 3), state_after(&all));
    }
    for untouched in [0, 1, 2, 4] {
        assert_eq!(state(&engine, untouched), [0xee; STATE_BYTES]);
    }
}

#[test]
fn a_sequence_continues_from_a_snapshot_of_another() {
    let mut engine = engine();
    let kept = keeping(segment(0, 0, 4, 0), 1);
    engine.step(&plan(&[0], vec![kept])).unwrap();
    assert_eq!(state(&engine, 1), state_after(&PROMPT[..4]));
    // The blocks that the snapshot belongs to.
    let blocks: Vec<_> = (0..2).map(|i| (BlockIndex(i), BlockIndex(4 + i))).collect();
    engine.copy_blocks(KvPlane::Blocks, &blocks).unwrap();
    // One sequence ends its prompt, another restores the snapshot, in one step.
    let both = vec![
        keeping(segment(0, 4, 2, 0), 3),
        restoring(segment(1, 4, 2, 2), 1),
    ];
    let drawn = tokens(&engine.step(&plan(&[1], both)).unwrap());
    assert_eq!(drawn[0], drawn[1]);
    for slot in [0, 2, 3] {
        assert_eq!(state(&engine, slot), state_after(&PROMPT), "slot {slot}");
    }
    assert_eq!(state(&engine, 1), state_after(&PROMPT[..4]));
    assert_eq!(state(&engine, 4), [0xee; STATE_BYTES]);
}

#[test]
fn a_refused_plan_copies_no_state() {
    let mut engine = engine();
    engine.step(&plan(&[0], vec![segment(0, 0, 4, 0)])).unwrap();
    // The second segment names a slot that was never opened.
    let refused = vec![
        restoring(keeping(segment(0, 4, 2, 0), 1), 2),
        segment(1, 0, 4, 3),
    ];
    assert!(engine.step(&plan(&[], refused)).is_err());
    assert_eq!(state(&engine, 0), state_after(&PROMPT[..4]));
    assert_eq!(state(&engine, 1), [0xee; STATE_BYTES]);
    assert_eq!(state(&engine, 3), [0xee; STATE_BYTES]);
}

#[test]
fn overlapping_steps_copy_states_in_their_order() {
    let (mut engine, _) = device_engine();
    let ahead = engine.overlap().unwrap();
    let prompt = keeping(segment(0, 0, 6, 0), 1);
    ahead.begin(&plan(&[0], vec![prompt])).unwrap();
    let decode = keeping(segment(0, 6, 1, 0), 2);
    ahead.begin(&plan(&[], vec![decode])).unwrap();
    let drawn = tokens(&ahead.collect().unwrap());
    // Goes back to the state after the prompt, in another slot.
    let again = restoring(segment(0, 6, 2, 3), 1);
    ahead.begin(&plan(&[], vec![again])).unwrap();
    let second = tokens(&ahead.collect().unwrap());
    ahead.collect().unwrap();
    let seven = [&PROMPT[..], &drawn].concat();
    let eight = [&seven[..], &second].concat();
    let expected = [&seven, &PROMPT[..], &seven, &eight];
    for (slot, tokens) in (0..).zip(expected) {
        assert_eq!(state(&engine, slot), state_after(tokens), "slot {slot}");
    }
}

/// The step's draw was queued already; the next step would have been given its tokens.
#[test]
fn a_failed_snapshot_costs_only_its_step() {
    let decode = |position| plan(&[], vec![segment(0, position, 1, 0)]);
    let prompt = || plan(&[0], vec![segment(0, 0, 6, 0)]);
    let (mut alone, _) = device_engine();
    let expected: Vec<_> = [prompt(), decode(6), decode(7)]
        .iter()
        .map(|plan| tokens(&alone.step(plan).unwrap()))
        .collect();
    let (mut engine, watched) = device_engine();
    let ahead = engine.overlap().unwrap();
    ahead.begin(&prompt()).unwrap();
    watched.breaks_state_copy.store(true, Ordering::Relaxed);
    let failing = plan(&[], vec![keeping(segment(0, 6, 1, 0), 1)]);
    let failed = ahead.begin(&failing);
    assert!(matches!(failed, Err(EngineError::Device(_))), "{failed:?}");
    assert_eq!(tokens(&ahead.collect().unwrap()), expected[0]);
    for (position, expected) in [(6, &expected[1]), (7, &expected[2])] {
        ahead.begin(&decode(position)).unwrap();
        assert_eq!(tokens(&ahead.collect().unwrap()), *expected);
    }
}

#[test]
fn a_layout_with_a_state_needs_a_slot() {
    let limits = EngineLimits {
        states_count: 0,
        ..LIMITS
    };
    let checkpoint = cleave_checkpoint::Checkpoint::open(&folder()).unwrap();
    let plain = reference::PlainOps::default();
    let weights = cleave_engine::Weights::load(&plain, &checkpoint, None, &mut |_| {}).unwrap();
    let mut layout = weights.kv_spec(4, cleave_engine::ops::KvType::F32);
    layout.state = Some(cleave_domain::PlaneLayout::packed([(90, 8)]));
    let built = cleave_engine::ModelEngine::with_layout(plain, Arc::new(weights), &layout, limits);
    assert!(matches!(built.err(), Some(EngineError::Plan(problem)) if problem.contains("is 0")));
}
