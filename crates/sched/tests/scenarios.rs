//! Each course that a hand-off can take, played step by step; the goldens hold every fact and every
//! output.
//! `INSTA_UPDATE=always cargo test -p cleave-sched` writes them anew.

use crate::stage::script::play;

#[test]
fn a_joining_router_receives_a_large_cache_in_parts() {
    let log = play(
        "worker b both blocks=17000 step=70000 context=70000
        start 1 on b prompt=66000 max=1
        run 20
        router joined b
        empty",
    );
    let joined = log.rsplit("router joined b").next().expect("a last part");
    assert!(joined.contains("tell prefix +16384 -0"));
    assert!(joined.contains("tell prefix +116 -0"));
}

scenarios! {
    prefill_chunks_are_sent_while_the_next_computes: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=18 max=3
        prefill 1 on p to d
        step p
        copies p
        deliver p d
        copies d
        step p
        step p
        run 100
        empty"
    both_legs_on_one_worker_move_nothing: "
        worker b both
        start 1 on b prompt=10 max=3
        run 100
        empty"
    a_prefix_cached_on_both_workers_is_not_sent: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=9 max=2 family=1
        prefill 1 on p to d
        run 100
        reserve 2 on d from p prompt=12 max=2 family=1
        prefill 2 on p to d
        run 100
        empty"
    a_fully_cached_prompt_still_runs_its_last_token: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=8 max=2 family=1
        prefill 1 on p to d
        run 100
        reserve 2 on d from p prompt=8 max=2 family=1
        prefill 2 on p to d
        run 100
        empty"
    siblings_on_one_worker_share_their_prompts_blocks: "
        worker b both blocks=12
        start 1 on b prompt=9 max=2 family=1
        start 2 on b prompt=9 max=2 family=1
        step b
        run 100
        empty"
    prompt_scores_cover_the_prompt_and_ignore_the_cache: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=10 max=1 family=1
        prefill 1 on p to d
        run 100
        reserve 2 on d from p prompt=10 max=2 family=1 scores
        prefill 2 on p to d
        run 100
        empty"
    a_first_token_that_ends_the_sequence_sends_nothing: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=10 max=9 stop=0
        prefill 1 on p to d
        run 100
        empty"
    a_stop_token_ends_a_sequence_and_the_context_does_too: "
        worker b both context=12
        start 1 on b prompt=10 max=9 stop=1
        run 100
        start 2 on b prompt=9 max=9
        run 100
        empty"
    a_stream_continues_at_the_next_index: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=6 output=3 max=6 attempt=1
        prefill 1 on p to d attempt=1
        run 200
        empty"
    // Lesson: 13.
    a_cancel_of_a_reservation_frees_its_blocks: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        cancel 1 on d
        empty"
    // Lesson: 13.
    a_cancel_of_a_queued_prompt_frees_its_blocks: "
        worker p prefill slots=1
        worker d decode
        reserve 1 on d from p prompt=6
        prefill 1 on p to d
        reserve 2 on d from p prompt=6
        prefill 2 on p to d
        cancel 2 on p
        deliver p d
        run 100
        empty"
    // Lesson: 13.
    a_cancel_during_a_step_frees_after_it: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        prefill 1 on p to d
        cancel 1 on p
        step p
        run 100
        empty"
    // Lesson: 2.
    a_cancel_during_copies_frees_after_the_last_one: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=18
        prefill 1 on p to d
        step p
        copies p
        deliver p d 1
        keep p d
        cancel 1 on d
        cancel 1 on p
        copies d
        step p
        run 100
        replay
        empty"
    // Lesson: 1.
    a_cancel_between_prefill_and_landing_frees_both_ends: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        prefill 1 on p to d
        step p
        step p
        copies p
        cancel 1 on p
        cancel 1 on d
        deliver p d
        run 100
        empty"
    a_cancelled_block_is_freed_after_its_read: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=4
        prefill 1 on p to d
        step p
        cancel 1 on p
        copies p
        run 100
        empty"
    // Lesson: 3.
    a_lost_reservation_is_reported_to_the_sender: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        prefill 1 on p to d
        cancel 1 on d
        drop d p
        step p
        step p
        copies p
        deliver p d 1
        deliver d p
        run 100
        empty"
    a_cancel_while_decoding_frees_everything: "
        worker b both
        start 1 on b prompt=6 max=9
        step b
        step b
        cancel 1 on b
        step b
        empty"
    // Lesson: 4.
    an_expired_lease_is_reported_to_the_peer: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        wait 900
        renew 1 on d
        wait 900
        prefill 1 on p to d
        wait 200
        run 100
        empty"
    // Lesson: 14.
    a_renewed_hand_off_lives_as_long_as_it_takes: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        prefill 1 on p to d
        wait 900
        renew 1 on p
        renew 1 on d
        wait 900
        renew 1 on p
        renew 1 on d
        run 200
        empty"
    a_lost_router_ends_its_hand_offs: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        prefill 1 on p to d
        step p
        router lost d
        router lost p
        run 200
        empty"
    // Lesson: 8.
    a_lost_link_fails_only_hand_offs_not_landed: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=6 max=4
        prefill 1 on p to d
        step p
        copies p
        deliver p d
        copies d
        deliver d p
        reserve 2 on d from p prompt=6
        prefill 2 on p to d
        cut p d
        run 200
        empty"
    a_restarted_worker_is_another_incarnation: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        prefill 1 on p to d
        step p
        restart p
        reserve 2 on d from p
        prefill 2 on p to d
        run 200
        empty"
    a_damaged_frame_fails_closed_at_both_ends: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        prefill 1 on p to d
        step p
        copies p
        damage p d
        run 100
        empty"
    // Lesson: 2.
    a_late_frame_never_writes_a_reused_block: "
        worker p prefill
        worker d decode blocks=3
        reserve 1 on d from p
        prefill 1 on p to d
        step p
        copies p
        keep p d
        cancel 1 on p
        cancel 1 on d
        run 100
        reserve 1 on d from p attempt=1
        replay
        prefill 1 on p to d attempt=1
        run 200
        empty"
    a_lost_seal_is_sent_again_and_lands: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=4
        prefill 1 on p to d
        step p
        copies p
        deliver p d 2
        drop p d
        copies d
        wait 300
        run 100
        empty"
    a_landed_token_outside_the_vocabulary_fails_only_its_own: "
        worker p prefill
        worker d decode vocab=300000
        reserve 1 on d from p prompt=4
        prefill 1 on p to d
        reserve 2 on d from p prompt=2
        prefill 2 on p to d
        run 200
        empty"
    a_sender_whose_seals_are_all_lost_gives_up: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=4
        prefill 1 on p to d
        step p
        copies p
        deliver p d 2
        drop p d
        copies d
        wait 16
        drop p d
        wait 38
        drop p d
        wait 75
        drop p d
        wait 150
        drop p d
        run 300
        empty"
    frames_unread_during_a_suspension_still_land: "
        worker p prefill stall=20000 lease=10000
        worker d decode stall=20000 lease=10000
        reserve 1 on d from p prompt=4
        prefill 1 on p to d
        step p
        copies p
        keep p d
        drop p d 1
        deliver p d
        copies d
        renew 1 on p
        renew 1 on d
        stop 3500
        replay
        run 100
        empty"
    a_suspended_process_extends_its_frame_deadline_once: "
        worker p prefill stall=20000 lease=10000
        worker d decode stall=20000 lease=10000
        reserve 1 on d from p prompt=4
        prefill 1 on p to d
        step p
        copies p
        drop p d 1
        deliver p d
        copies d
        renew 1 on p
        renew 1 on d
        stop 3500
        renew 1 on p
        renew 1 on d
        wait 900
        renew 1 on p
        renew 1 on d
        wait 900
        renew 1 on p
        renew 1 on d
        wait 250
        run 100
        empty"
    a_sealed_hand_off_waits_two_seconds_for_frames: "
        worker p prefill stall=20000
        worker d decode stall=20000
        reserve 1 on d from p prompt=4
        prefill 1 on p to d
        step p
        copies p
        drop p d 1
        deliver p d
        copies d
        renew 1 on p
        renew 1 on d
        wait 900
        renew 1 on p
        renew 1 on d
        wait 900
        renew 1 on p
        renew 1 on d
        wait 250
        run 100
        empty"
    a_lost_frame_is_noticed_by_the_receiver: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=4
        prefill 1 on p to d
        step p
        copies p
        drop p d 1
        deliver p d
        copies d
        wait 300
        run 100
        empty"
    a_lost_landed_makes_the_sender_repeat_its_seal: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=4 max=50
        prefill 1 on p to d
        step p
        copies p
        deliver p d
        copies d
        drop d p
        run 310
        cancel 1 on d
        run 100
        empty"
    packets_in_reverse_order_still_land: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=6
        prefill 1 on p to d
        step p
        copies p
        reverse p d
        run 100
        empty"
    repeated_orders_and_frames_change_nothing: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=6
        reserve 1 on d from p prompt=6
        prefill 1 on p to d
        prefill 1 on p to d
        step p
        copies p
        repeat p d
        run 100
        cancel 1 on p
        cancel 1 on d
        reserve 1 on d from p prompt=6
        prefill 1 on p to d
        empty"
    // Lesson: 5.
    a_failed_copy_ends_the_hand_off: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=6
        prefill 1 on p to d
        step p
        copies p
        deliver p d
        copies d fail
        run 100
        empty"
    a_failed_step_fails_only_its_own_sequences: "
        worker b both slots=1
        start 1 on b prompt=6
        start 2 on b prompt=6
        step b fail
        run 100
        empty"
    a_failed_constraint_is_not_the_engines_failure: "
        worker b both
        start 1 on b prompt=6
        start 2 on b prompt=6
        step b
        step b constraint slot=1
        run 100
        empty"
    a_failed_step_frees_the_slot_of_a_cancelled_sequence: "
        worker p prefill slots=1
        worker d decode
        reserve 1 on d from p prompt=12
        prefill 1 on p to d
        step p
        reserve 2 on d from p prompt=6
        prefill 2 on p to d
        cancel 1 on p
        cancel 1 on d
        step p fail
        run 200
        empty"
    blocks_are_taken_from_the_least_important_sequence: "
        worker b both blocks=6 cache=off
        start 1 on b prompt=8 max=9 expect=1
        start 2 on b prompt=8 max=9 expect=1
        run 400
        empty"
    priority_outweighs_age_when_blocks_run_out: "
        worker b both blocks=6 cache=off
        start 1 on b prompt=8 max=9 expect=1
        start 2 on b prompt=8 max=9 expect=1 priority=-1
        run 400
        empty"
    a_preempted_sequence_is_not_overtaken_by_new_ones: "
        worker b both blocks=6
        start 1 on b prompt=8 max=12 expect=1
        start 2 on b prompt=8 max=12 expect=1
        run 50
        start 3 on b prompt=2 max=1
        run 500
        empty"
    a_small_preempted_sequence_does_not_overtake_a_large_one: "
        worker b both blocks=6 cache=off step=24
        start 1 on b prompt=8 max=9 expect=1
        start 2 on b prompt=12 max=3 expect=1
        start 3 on b prompt=4 max=3 expect=1
        run 400
        empty"
    a_sequence_that_outgrows_the_pool_fails_with_a_reason: "
        worker b both blocks=3
        start 1 on b prompt=8 max=30
        run 200
        empty"
    // Lesson: 10.
    a_leg_whose_blocks_do_not_all_fit_is_refused: "
        worker p prefill blocks=4
        worker d decode blocks=4 queue=1 slots=1
        reserve 1 on d from p prompt=10 max=9 expect=8
        reserve 2 on d from p prompt=4 max=1
        reserve 3 on d from p prompt=16 max=1
        reserve 4 on p from d prompt=4 max=1
        prefill 1 on p to d
        cancel 1 on d
        reserve 5 on d from p prompt=8 max=1
        prefill 5 on p to d
        reserve 6 on d from p prompt=4 max=1
        reserve 7 on d from p prompt=4 max=1
        run 100"
    the_more_urgent_prompt_goes_first: "
        worker p prefill slots=1
        worker d decode
        reserve 1 on d from p prompt=4 max=1
        reserve 2 on d from p prompt=4 max=1
        reserve 3 on d from p prompt=4 max=1 priority=-1
        prefill 1 on p to d
        prefill 2 on p to d
        prefill 3 on p to d
        run 100
        empty"
    prompts_fill_the_room_that_decoding_leaves: "
        worker b both blocks=16
        start 1 on b prompt=4 max=6
        step b
        start 2 on b prompt=16 max=2
        run 200
        empty"
    a_landed_sequence_waits_for_a_slot: "
        worker p prefill
        worker d decode slots=1 blocks=8
        reserve 1 on d from p prompt=4 max=4
        prefill 1 on p to d
        reserve 2 on d from p prompt=4 max=2
        prefill 2 on p to d
        run 200
        empty"
    // Lesson: 27.
    a_draining_worker_finishes_and_accepts_nothing_new: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=6
        drain d
        reserve 2 on d from p prompt=6
        prefill 1 on p to d
        drain p
        router joined p
        run 200
        empty"
    // Lesson: 12.
    a_broken_engine_fails_its_work_and_drains: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=6
        reserve 2 on d from p prompt=6
        prefill 1 on p to d
        broken d
        reserve 3 on d from p prompt=6
        broken p
        run 200
        empty"
    an_evicted_prefix_is_reported_to_routers: "
        worker b both blocks=4
        start 1 on b prompt=9 max=1
        run 50
        start 2 on b prompt=12 max=1
        run 50
        router joined b
        empty"
}
