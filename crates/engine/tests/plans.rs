//! Plans that contradict the engine or themselves are refused, and change nothing.

use crate::reference;
use cleave_domain::{
    BlockIndex, KvPlane, LogitsWanted, OpenSlot, SamplingParams, Segment, SegmentState, SlotIndex,
    StepId, StepPlan,
};
use cleave_engine::{BlockSpan, Engine, EngineError, EngineLimits};
use std::path::Path;
use std::sync::Arc;

const LIMITS: EngineLimits = EngineLimits {
    block_tokens: 4,
    blocks_count: 8,
    states_count: 0,
    slots_count: 2,
    step_tokens_max: 16,
    windows_count: 0,
};

fn engine() -> impl Engine {
    engine_with_states(0)
}

fn engine_with_states(states_count: u32) -> impl Engine {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/llama2");
    let limits = EngineLimits {
        states_count,
        ..LIMITS
    };
    reference::engine(&dir, limits).unwrap()
}

fn open(slot: u32, prompt: &[u32]) -> OpenSlot {
    OpenSlot {
        slot: SlotIndex(slot),
        sampling: Arc::new(SamplingParams::greedy()),
        prompt: Arc::from(prompt),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
    }
}

fn segment(slot: u32, position: u32, len: u32, blocks: &[u32]) -> Segment {
    Segment {
        slot: SlotIndex(slot),
        position,
        len,
        blocks: blocks.iter().copied().map(BlockIndex).collect(),
        logits: LogitsWanted::Sample,
        drafts: Vec::new(),
        state: None,
        window: None,
    }
}

fn plan(opens: Vec<OpenSlot>, segments: Vec<Segment>) -> StepPlan {
    StepPlan {
        step: StepId(1),
        opens,
        segments,
        poolings: Vec::new(),
    }
}

/// A valid plan of two sequences of six tokens.
fn fine() -> StepPlan {
    plan(
        vec![open(0, &[1, 2, 3, 4, 5, 6]), open(1, &[6, 5, 4, 3, 2, 1])],
        vec![segment(0, 0, 6, &[0, 1]), segment(1, 0, 6, &[2, 3])],
    )
}

type DamagePlan = fn(&mut StepPlan);
type DamageSampling = fn(&mut SamplingParams);

#[test]
fn an_inconsistent_plan_is_refused() {
    let with = |change: DamageSampling| {
        move |plan: &mut StepPlan| change(Arc::make_mut(&mut plan.opens[0].sampling))
    };
    let damages: [(&str, DamagePlan); 24] = [
        ("no such slot", |p| p.segments[0].slot.0 = 2),
        ("no such slot", |p| p.opens[0].slot.0 = 9),
        ("was never opened", |p| p.opens.truncate(1)),
        ("opened twice", |p| p.opens[1].slot.0 = 0),
        ("two segments", |p| p.segments[1].slot.0 = 0),
        ("without tokens", |p| p.segments[0].len = 0),
        ("tokens 0..7 of 6", |p| p.segments[0].len = 7),
        ("tokens 1..7 of 6", |p| p.segments[0].position = 1),
        ("samples after 5 of 6", |p| p.segments[0].len = 5),
        ("needs 2", |p| p.segments[0].blocks.truncate(1)),
        ("no block b8", |p| p.segments[0].blocks[1].0 = 8),
        ("twice in its table", |p| p.segments[0].blocks[1].0 = 0),
        ("written by two", |p| p.segments[1].blocks[0].0 = 1),
        ("vocabulary of 512", |p| {
            p.opens[0].prompt = Arc::from([1, 2, 3, 4, 5, 512])
        }),
        ("in a step of 16", |p| {
            p.opens[0].prompt = Arc::from([7; 11]);
            p.segments[0].len = 11;
            p.segments[0].blocks.push(BlockIndex(7));
        }),
        ("in a context of 256", |p| {
            p.opens[0].prompt = Arc::from(vec![7; 300]);
            p.segments[0].position = 250;
            p.segments[0].len = 8;
        }),
        ("in a step of 16", |p| p.segments[0].len = u32::MAX),
        ("tokens 0..7 of 6", |p| {
            p.segments[0].len = 8;
            p.segments[0].drafts = vec![7];
        }),
        ("samples after 5 of 6", |p| p.segments[0].drafts = vec![7]),
        ("17 drafts, the engine takes 16", |p| {
            p.segments[0].drafts = vec![7; 17];
        }),
        ("needs 3", |p| {
            p.segments[0].len = 9;
            p.segments[0].drafts = vec![7; 3];
        }),
        ("only of a segment that samples", |p| {
            p.segments[0].drafts = vec![7];
            p.segments[0].logits = LogitsWanted::No;
        }),
        ("and after its history", |p| {
            p.segments[0].drafts = vec![7; 6];
        }),
        ("draft 512 in a vocabulary of 512", |p| {
            p.segments[0].len = 7;
            p.segments[0].drafts = vec![512];
        }),
    ];
    let mut engine = engine();
    for (expected, damage) in damages {
        let mut plan = fine();
        damage(&mut plan);
        match engine.step(&plan) {
            Err(error @ (EngineError::Plan(_) | EngineError::Slot(..))) => {
                let problem = error.to_string();
                assert!(problem.contains(expected), "{problem}: {expected}");
                // Only the sum of all tokens concerns no single slot.
                assert_eq!(
                    error.slots().is_empty(),
                    expected == "in a step of 16",
                    "{expected}"
                );
            }
            other => panic!("{expected}: {other:?}"),
        }
    }
    let samplings: [(&str, DamageSampling); 8] = [
        ("temperature", |s| s.temperature = f32::NAN),
        ("temperature", |s| s.temperature = -1.0),
        ("top_p", |s| s.top_p = 0.0),
        ("min_p", |s| s.min_p = 1.5),
        ("top_n_sigma", |s| s.top_n_sigma = f32::INFINITY),
        ("repetition_penalty", |s| s.repetition_penalty = 0.0),
        ("logit_bias", |s| s.logit_bias = vec![(512, 1.0)]),
        ("logit_bias", |s| s.logit_bias = vec![(1, f32::INFINITY)]),
    ];
    for (expected, change) in samplings {
        let mut plan = fine();
        with(change)(&mut plan);
        match engine.step(&plan) {
            Err(EngineError::Slot(slot, problem)) => {
                assert!(problem.contains(expected), "{problem}");
                assert_eq!(slot, fine().opens[0].slot);
            }
            other => panic!("{expected}: {other:?}"),
        }
    }
    // Nothing has changed: no slot was opened on the way.
    let unopened = plan(Vec::new(), fine().segments);
    assert!(engine.step(&unopened).is_err());
    assert_eq!(engine.step(&fine()).unwrap().sampled.len(), 2);
}

fn first(plan: &mut StepPlan) -> &mut SegmentState {
    plan.segments[0].state.as_mut().unwrap()
}

fn second(plan: &mut StepPlan) -> &mut SegmentState {
    plan.segments[1].state.as_mut().unwrap()
}

#[test]
fn a_plan_with_inconsistent_states_is_refused() {
    let state = |slot: u32| SegmentState {
        slot: BlockIndex(slot),
        restore: None,
        snapshot: None,
    };
    // The second segment goes on from a snapshot of four tokens.
    let with_states = || {
        let mut plan = fine();
        plan.segments[0].state = Some(state(0));
        plan.segments[1].position = 4;
        plan.segments[1].len = 2;
        plan.segments[1].state = Some(SegmentState {
            restore: Some(BlockIndex(2)),
            snapshot: Some(BlockIndex(3)),
            ..state(1)
        });
        plan
    };
    let damages: [(&str, DamagePlan); 12] = [
        ("has no state slot", |p| p.segments[1].state = None),
        ("no state slot 5, there are 5", |p| first(p).slot.0 = 5),
        ("no state slot 5", |p| {
            second(p).restore = Some(BlockIndex(5))
        }),
        ("no state slot 9", |p| {
            second(p).snapshot = Some(BlockIndex(9))
        }),
        ("restores a state at position 0", |p| {
            first(p).restore = Some(BlockIndex(4));
        }),
        ("state slot 0 is written twice", |p| second(p).slot.0 = 0),
        ("state slot 0 is written twice", |p| {
            second(p).snapshot = Some(BlockIndex(0));
        }),
        ("state slot 1 is written twice", |p| {
            second(p).snapshot = Some(BlockIndex(1));
        }),
        ("state slot 0 is restored and written", |p| {
            second(p).restore = Some(BlockIndex(0));
        }),
        ("state slot 1 is restored and written", |p| {
            second(p).restore = Some(BlockIndex(1));
        }),
        ("state slot 3 is restored and written", |p| {
            second(p).restore = Some(BlockIndex(3));
        }),
        ("1 drafts, the engine takes 0", |p| {
            p.segments[0].len = 7;
            p.segments[0].drafts = vec![7];
        }),
    ];
    let mut engine = engine_with_states(5);
    assert_eq!(engine.drafts_max(), 0);
    let mut before = vec![1; reference::STATE_BYTES];
    for (expected, damage) in damages {
        let mut plan = with_states();
        damage(&mut plan);
        // A segment may name a slot that a later one writes.
        let mut reversed = plan.clone();
        reversed.segments.reverse();
        for plan in [plan, reversed] {
            match engine.step(&plan) {
                Err(EngineError::Slot(_, problem)) => {
                    assert!(problem.contains(expected), "{problem}")
                }
                other => panic!("{expected}: {other:?}"),
            }
        }
        let whole = BlockSpan {
            plane: KvPlane::State,
            block: BlockIndex(3),
            offset: 0,
            len: before.len(),
        };
        engine.read_block(whole, &mut before).unwrap();
        assert_eq!(before, [0; reference::STATE_BYTES], "nothing was copied");
    }
    engine.step(&with_states()).unwrap();
    let mut stateless = fine();
    stateless.segments[0].state = Some(state(0));
    let refused = engine_with_states(0).step(&stateless).unwrap_err();
    assert!(refused.to_string().contains("the model has no state"));
}

#[test]
fn a_block_shared_for_reading_is_accepted() {
    let mut engine = engine();
    let tokens = [1, 2, 3, 4, 5, 6];
    let first = plan(vec![open(0, &tokens)], vec![segment(0, 0, 6, &[0, 1])]);
    let whole = engine.step(&first).unwrap().sampled[0].1.token;
    let shared = plan(
        vec![open(0, &tokens), open(1, &tokens)],
        vec![segment(0, 4, 2, &[0, 2]), segment(1, 4, 2, &[0, 3])],
    );
    let result = engine.step(&shared).unwrap();
    let tokens: Vec<u32> = result.sampled.iter().map(|(_, s)| s.token).collect();
    assert_eq!(tokens, [whole, whole]);
}

#[test]
fn a_plan_without_segments_only_opens_slots() {
    let mut engine = engine();
    let mut opens = fine();
    opens.segments.clear();
    assert!(engine.step(&opens).unwrap().sampled.is_empty());
    let segments = plan(Vec::new(), fine().segments);
    assert_eq!(engine.step(&segments).unwrap().sampled.len(), 2);
}

#[test]
fn a_byte_range_outside_a_block_is_refused() {
    let mut engine = engine();
    let bytes = engine.describe().capacity.block_bytes as usize;
    let mut buffer = vec![0; bytes];
    let span = |block, offset, len| BlockSpan::of_block(BlockIndex(block), offset, len);
    assert!(engine.read_block(span(7, 0, bytes), &mut buffer).is_ok());
    assert!(engine.write_block(span(7, bytes, 0), &[]).is_ok());
    let outside = [
        engine.read_block(span(8, 0, bytes), &mut buffer),
        engine.read_block(span(0, 1, bytes), &mut buffer),
        engine.write_block(span(0, bytes - 1, 2), &[0, 0]),
        engine.write_block(span(0, usize::MAX, 2), &[0, 0]),
        engine.copy_blocks(
            KvPlane::Blocks,
            &[
                (BlockIndex(0), BlockIndex(1)),
                (BlockIndex(0), BlockIndex(8)),
            ],
        ),
        engine.copy_blocks(KvPlane::State, &[(BlockIndex(0), BlockIndex(1))]),
    ];
    for refused in outside {
        assert!(matches!(refused, Err(EngineError::Plan(_))), "{refused:?}");
    }
}

#[test]
fn a_byte_range_outside_a_state_slot_is_refused() {
    let mut engine = engine_with_states(2);
    let bytes = reference::STATE_BYTES;
    let mut buffer = vec![0; bytes];
    let plane = KvPlane::State;
    let span = |slot, offset, len| BlockSpan {
        plane,
        ..BlockSpan::of_block(BlockIndex(slot), offset, len)
    };
    engine
        .write_block(span(0, 0, bytes), &vec![7; bytes])
        .unwrap();
    engine.write_block(span(0, bytes - 1, 1), &[8]).unwrap();
    engine
        .copy_blocks(plane, &[(BlockIndex(0), BlockIndex(1))])
        .unwrap();
    engine.read_block(span(1, 0, bytes), &mut buffer).unwrap();
    assert_eq!((buffer[bytes - 2], buffer[bytes - 1]), (7, 8));
    for refused in [
        engine.read_block(span(2, 0, bytes), &mut buffer),
        engine.read_block(span(0, 1, bytes), &mut buffer),
        engine.write_block(span(1, usize::MAX, 2), &[0, 0]),
        engine.copy_blocks(plane, &[(BlockIndex(0), BlockIndex(2))]),
    ] {
        assert!(matches!(refused, Err(EngineError::Plan(_))), "{refused:?}");
    }
}
