//! Moves, swaps and changes of role; steps that hang, and writers that cannot be stopped. Played
//! step by step, as in `scenarios`.

use crate::stage::script::{handoff, play, prompt};
use crate::stage::{ROUTER, StageWorld, limits};
use cleave_domain::{
    BlockIndex, BlockRef, Generation, HandoffTarget, Incarnation, MigrateOrder, Order, Role,
    RouterId, RunOrder, WorkerId, WorkerRef,
};
use cleave_sched::WorkerInput;
use cleave_testkit::build;
use std::sync::Arc;
use std::time::Duration;

/// Only the router that owns the flight may begin a move, or cancel one.
#[test]
fn only_the_owning_router_moves_a_sequence() {
    let limits = limits(1, Role::Both);
    let mut world = StageWorld::default();
    let at = world.add('a', limits);
    let (of, moved) = (handoff(1, 0), handoff(1, 1));
    let run = Order::Run(RunOrder {
        handoff: of,
        request: Arc::new(build::request(prompt(1, 9), 20)),
        expected_output_tokens: 4,
        waited: Duration::ZERO,
        due: None,
    });
    let send = |world: &mut StageWorld, router, order| {
        world.feed(at, WorkerInput::Ordered { router, order });
    };
    send(&mut world, ROUTER, run);
    world.run(Duration::from_millis(30));
    let block = |index| BlockRef {
        block: BlockIndex(index),
        generation: Generation(0),
    };
    let migrate = Order::Migrate(MigrateOrder {
        handoff: moved,
        of,
        target: HandoffTarget {
            worker: WorkerRef {
                worker: WorkerId(7),
                incarnation: Incarnation(1),
            },
            present: 0,
            blocks: (10..16).map(block).collect(),
            state: None,
            window: None,
        },
        tokens: 10,
    });
    let log = |world: &mut StageWorld| std::mem::take(&mut world.log).join("\n");
    log(&mut world);
    let foreign = RouterId(9);
    send(&mut world, foreign, migrate.clone());
    assert!(log(&mut world).contains("tell stayed #1.1 Rejected"));
    // An order of another router must not make the attempt count as known.
    send(&mut world, ROUTER, migrate.clone());
    assert!(log(&mut world).contains("export #1.1 0"));
    send(&mut world, foreign, Order::Cancel { handoff: moved });
    send(&mut world, foreign, migrate);
    let after = log(&mut world);
    assert!(!after.contains("abandoned"), "{after}");
    send(&mut world, ROUTER, Order::Cancel { handoff: moved });
    assert!(log(&mut world).contains("send abandoned #1.1"));
}

scenarios! {
    a_moving_sequence_pauses_for_its_last_block_only: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=20
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=20 ahead=8
        migrate 1 on a to e
        run 400
        empty"
    tokens_drawn_past_the_next_block_move_too: "
        worker a both
        worker e decode
        start 1 on a prompt=6 max=20
        run 30
        reserve 1 on e from a attempt=1 prompt=6 output=1 max=20 ahead=8
        run 20
        migrate 1 on a to e
        step a
        copies a
        step a
        run 400
        empty"
    a_moving_sequence_pauses_when_the_target_is_full: "
        worker a both
        worker e decode
        start 1 on a prompt=8 max=20
        run 20
        reserve 1 on e from a attempt=1 prompt=8 output=2 max=20 expect=0
        migrate 1 on a to e
        step a
        step a
        run 400
        empty"
    a_sequence_that_waits_for_a_slot_draws_before_it_moves: "
        worker p prefill
        worker a decode slots=1
        worker e decode
        reserve 1 on a from p prompt=4 max=5
        reserve 2 on a from p prompt=4 max=5
        prefill 1 on p to a
        prefill 2 on p to a
        run 30
        reserve 2 on e from a attempt=1 prompt=4 output=1 max=5 ahead=4
        migrate 2 on a to e
        run 300
        empty"
    a_long_step_aborts_no_move: "
        worker a both
        worker e decode
        start 1 on a prompt=8 max=9
        run 20
        reserve 1 on e from a attempt=1 prompt=8 output=2 max=9 expect=0
        migrate 1 on a to e
        step a
        step a
        step a
        wait 310
        copies a
        run 400
        empty"
    // Lesson: 14.
    a_paused_sequence_resumes_after_the_stall_limit: "
        worker a both late=100
        worker e decode
        start 1 on a prompt=8 max=9
        run 20
        reserve 1 on e from a attempt=1 prompt=8 output=2 max=9 expect=0
        migrate 1 on a to e
        step a
        step a
        step a
        wait 410
        copies a
        run 400
        cancel 1 on e attempt=1
        empty"
    a_late_seal_of_a_landed_move_is_answered_landed: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=7
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=7 ahead=8
        migrate 1 on a to e
        copies a
        step a
        copies a
        deliver a e 8
        keep a e
        deliver a e
        copies e
        drop e a
        step e
        step e
        replay
        run 400
        empty"
    a_move_whose_target_is_too_small_is_aborted: "
        worker a both
        worker e decode
        start 1 on a prompt=8 max=9
        run 20
        reserve 1 on e from a attempt=1 prompt=8 output=2 max=9 expect=0
        run 40
        migrate 1 on a to e
        cancel 1 on e attempt=1
        run 100
        empty"
    blocks_cached_at_the_target_are_not_sent: "
        worker a both
        worker e decode blocks=12
        start 9 on e prompt=9 max=1 family=1
        run 50
        start 1 on a prompt=9 max=9
        run 30
        reserve 1 on e from a attempt=1 prompt=9 output=2 max=9 ahead=4
        migrate 1 on a to e
        run 300
        empty"
    a_move_the_target_cancels_is_aborted: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=12
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        cancel 1 on e attempt=1
        run 400
        empty"
    a_sealed_move_the_target_cancels_is_aborted: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=12
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        copies a
        step a
        copies a
        cancel 1 on a attempt=1
        cancel 1 on e attempt=1
        run 400
        empty"
    a_sealed_move_the_target_forgot_never_runs_twice: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=12
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        copies a
        step a
        copies a
        deliver a e 1
        forget a e
        cancel 1 on e attempt=1
        run 400
        empty"
    // Lesson: 8.
    a_link_lost_before_the_seal_keeps_the_sequence_here: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=12
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        copies a
        cut a e
        run 400
        empty"
    // Invariant: I19.
    // Lesson: 8.
    a_link_lost_after_the_seal_never_runs_it_twice: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=12
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        copies a
        step a
        copies a
        cut a e
        run 400
        empty"
    a_seal_is_repeated_until_landed_arrives: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=9
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=9 ahead=8
        migrate 1 on a to e
        copies a
        step a
        copies a
        deliver a e
        copies e
        drop e a
        run 400
        empty"
    a_sequence_that_ends_before_its_pause_does_not_move: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=5
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=5 ahead=8
        migrate 1 on a to e
        run 400
        empty"
    // Lesson: 13.
    a_cancel_during_a_move_frees_both_ends: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=12
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        cancel 1 on a
        copies a
        run 400
        empty"
    // Lesson: 13.
    a_cancel_of_a_paused_sequence_frees_both_ends: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=12
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        copies a
        step a
        cancel 1 on a
        cancel 1 on e attempt=1
        run 400
        empty"
    an_impossible_move_is_answered: "
        worker a both
        worker e decode blocks=40
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        migrate 1 on a to e
        start 2 on a prompt=9 max=12
        reserve 2 on e from a attempt=1 prompt=9 output=1 max=12
        migrate 2 on a to e
        run 30
        reserve 2 on e from a attempt=2 prompt=9 output=1 max=12
        migrate 2 on a to e to=2 told=30
        reserve 2 on e from a attempt=3 prompt=9 output=1 max=12 ahead=8
        migrate 2 on a to e to=3
        migrate 2 on a to e to=3
        reserve 2 on e from a attempt=4 prompt=9 output=1 max=12 ahead=8
        migrate 2 on a to e to=4
        cancel 2 on e attempt=4
        cancel 1 on e attempt=1
        cancel 2 on e attempt=1
        cancel 2 on e attempt=2
        run 400
        empty"
    preemption_aborts_the_move_of_a_sequence: "
        worker a both blocks=6 cache=off
        worker e decode
        start 1 on a prompt=8 max=9 expect=1
        start 2 on a prompt=8 max=9 expect=1
        run 30
        reserve 2 on e from a attempt=1 prompt=8 output=1 max=9 ahead=4
        migrate 2 on a to e
        step a
        step a
        copies a
        run 400
        cancel 2 on e attempt=1
        empty"
    // Lesson: 27.
    a_draining_worker_still_moves_its_sequences: "
        worker a both
        worker e decode
        start 1 on a prompt=9 max=12
        run 50
        drain a
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        run 400
        empty"
    a_role_change_lets_present_work_finish: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=6 max=5
        prefill 1 on p to d
        serve d prefill
        serve p decode
        reserve 2 on d from p prompt=6
        reserve 2 on p from d prompt=6
        prefill 2 on d to p
        router joined d
        run 300
        empty"
    // Lesson: 12.
    a_stuck_step_is_reported_once: "
        worker b both late=200
        start 1 on b prompt=5 max=4
        run 20
        wait 300
        router joined b
        wait 300
        step b
        run 100
        empty"
    // Lesson: 2.
    an_unacknowledged_writer_keeps_its_blocks_quarantined: "
        worker p prefill
        worker d decode onesided
        reserve 1 on d from p prompt=10
        prefill 1 on p to d
        step p
        cancel 1 on d
        drop d p
        copies p
        deliver p d
        wait 400
        run 100
        empty"
    // Lesson: 2.
    a_sender_stopped_first_never_writes: "
        worker p prefill
        worker d decode onesided
        reserve 1 on d from p prompt=10
        cancel 1 on d
        deliver d p
        prefill 1 on p to d
        run 100
        empty"
    // Lesson: 2.
    a_fenced_writer_ends_the_quarantine: "
        worker p prefill
        worker d decode onesided
        reserve 1 on d from p prompt=10
        prefill 1 on p to d
        step p
        cut p d
        drop d p
        wait 200
        severed d p
        run 200
        empty"
    // Lesson: 11.
    preemption_swaps_to_host_once_that_is_cheaper: "
        worker b both blocks=6 cache=off swap=8
        start 1 on b prompt=8 max=9 expect=1
        start 2 on b prompt=8 max=9 expect=1
        run 400
        empty"
    a_failed_swap_is_recomputed: "
        worker b both blocks=6 cache=off swap=8
        start 1 on b prompt=8 max=9 expect=1
        start 2 on b prompt=8 max=9 expect=1
        run 50
        swaps b fail
        run 400
        start 3 on b prompt=8 max=9 expect=1
        start 4 on b prompt=8 max=9 expect=1
        run 95
        swaps b fail
        run 400
        empty"
    // Lesson: 13.
    a_cancel_of_a_swapped_sequence_frees_host_memory: "
        worker b both blocks=6 cache=off swap=8
        start 1 on b prompt=8 max=9 expect=1
        start 2 on b prompt=8 max=9 expect=1
        run 50
        cancel 2 on b
        run 400
        start 3 on b prompt=8 max=9 expect=1
        start 4 on b prompt=8 max=9 expect=1
        run 65
        cancel 4 on b
        run 400
        empty"
    a_request_outside_the_vocabulary_is_refused: "
        worker b both vocab=5000
        start 1 on b prompt=6 family=1
        start 7 on b prompt=6 family=7
        run 100
        empty"
}
