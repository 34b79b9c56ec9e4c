//! Tests of what is refused because it would be late, to the nanosecond.

use super::*;
use crate::WorkerLimits;
use crate::test_worker::{MS, TestWorker, Want, limits};
use cleave_domain::Prices;

fn nanos(nanos: u64) -> Duration {
    Duration::from_nanos(nanos)
}

fn due(prompt: u32, left: u64) -> Want {
    Want {
        due: Some(nanos(left)),
        ..Want::tokens(prompt)
    }
}

/// A first token that would be there so late.
fn late(predicted: u64) -> Result<(), Refusal> {
    Err(Refusal::Late {
        aim: SloMetric::Ttft,
        predicted: nanos(predicted),
        retry_after: MS * 10,
    })
}

/// One that runs a prompt of 160 tokens, whose step under way takes 1.00208 ms and which adds
/// 2.51788 ms.
fn busy(left: Option<u64>) -> TestWorker {
    let mut worker = TestWorker::new(limits());
    let want = Want {
        due: left.map(nanos),
        ..Want::tokens(160)
    };
    worker.submit(1, want).expect("it is alone");
    worker
}

#[test]
fn a_prompt_is_refused_past_five_fourths_of_its_time() {
    // A step of 1 ms, 2080 pairs and a draw: 1.00708 ms.
    let of = |left| TestWorker::new(limits()).submit(1, due(64, left));
    assert_eq!(of(805_664), Ok(()));
    assert_eq!(of(805_663), late(1_007_080));
    let mut unknown = TestWorker::new(WorkerLimits {
        prices: Prices::default(),
        ..limits()
    });
    assert_eq!(unknown.submit(1, due(64, 1)), Ok(()), "nothing is known");
}

#[test]
fn an_urgent_prompt_waits_for_the_step_under_way_alone() {
    let of = |left| busy(None).submit(2, due(64, left));
    assert_eq!(of(1_607_328), Ok(()));
    assert_eq!(of(1_607_327), late(1_002_080 + 1_007_080));
}

#[test]
fn a_later_prompt_waits_for_those_before_it() {
    let of = |left| busy(Some(3_200_000)).submit(2, due(64, left));
    assert_eq!(of(3_621_632), Ok(()));
    assert_eq!(of(3_621_631), late(1_002_080 + 2_517_880 + 1_007_080));
}

#[test]
fn a_prompt_that_makes_another_late_is_refused() {
    let of = |other| busy(Some(other)).submit(2, due(64, 2_000_000));
    // The other one would be there after 4.52704 ms, and may be a fourth later than due.
    assert_eq!(of(4_000_000), Ok(()));
    assert_eq!(of(3_621_632), Ok(()));
    assert_eq!(of(3_621_631), late(2_000_000 + 4_527_040 - 3_621_631));
    // Alone it takes 3.01788 ms: it is late anyway.
    assert_eq!(of(3_017_879), Ok(()));
}

#[test]
fn only_uncached_tokens_take_time() {
    let mut worker = TestWorker::new(WorkerLimits {
        prefix_cache: true,
        ..limits()
    });
    worker.submit(1, Want::tokens(160)).expect("there is room");
    worker.finish();
    let other = Want {
        family: 1,
        ..due(160, 1_000_000)
    };
    assert_eq!(worker.submit(2, other), late(3_017_880));
    // Of ten blocks nine are cached: 16 tokens after 144 have 2440 pairs.
    assert_eq!(worker.submit(3, due(160, 805_951)), late(1_007_440));
    assert_eq!(worker.submit(4, due(160, 805_952)), Ok(()));
    let mut without = TestWorker::new(limits());
    without.submit(1, Want::tokens(160)).expect("there is room");
    without.finish();
    assert_eq!(without.submit(3, due(160, 1_000_000)), late(3_017_880));
}

#[test]
fn streams_make_prompts_beside_them_take_longer() {
    let mut worker = TestWorker::new(limits());
    let stream = Want {
        output: 50,
        ..Want::tokens(64)
    };
    worker.submit(1, stream).expect("there is room");
    worker.end_step();
    // Its step takes 1.00513 ms, and a chunk beside it 5 thousandths more than alone.
    let predicted = 1_005_130 + 1_007_080 * 1005 / 1000;
    assert_eq!(worker.submit(2, due(64, 1_000_000)), late(predicted));
}

#[test]
fn an_infeasible_gap_is_refused() {
    let of = |left: Option<u64>, tpot| {
        let want = Want {
            due: left.map(nanos),
            tpot: Some(nanos(tpot)),
            output: 50,
            ..Want::tokens(64)
        };
        TestWorker::new(limits()).submit(1, want)
    };
    // A step of one stream of 64 tokens takes 1.005128 ms.
    let refused = Err(Refusal::Late {
        aim: SloMetric::Tpot,
        predicted: nanos(1_005_128),
        retry_after: MS * 10,
    });
    assert_eq!(of(Some(10_000_000), 804_103), Ok(()));
    assert_eq!(of(Some(10_000_000), 804_102), refused);
    assert_eq!(of(None, 804_102), Ok(()), "its router wants it served");
}
