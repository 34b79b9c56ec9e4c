//! Each way a hand-off can go, played step by step; the goldens hold every fact and every output.
//! `INSTA_UPDATE=always cargo test -p cleave-sched` writes them anew.

mod stage;

use stage::script::play;

/// One test for each script: the golden has the test's name.
macro_rules! scenarios {
    ($($name:ident: $script:literal)*) => {
        $(#[test]
        fn $name() {
            insta::assert_snapshot!(stringify!($name), play($script));
        })*
    };
}

#[test]
fn a_router_that_joins_hears_of_a_large_cache_in_pieces() {
    let said = play(
        "worker b both blocks=17000 step=70000 context=70000
        reserve 1 on b from b prompt=66000 max=1
        prefill 1 on b to b
        run 20
        router joined b
        empty",
    );
    let joined = said.rsplit("router joined b").next().expect("a last part");
    assert!(joined.contains("tell prefix +16384 -0"));
    assert!(joined.contains("tell prefix +116 -0"));
}

scenarios! {
    a_prompt_is_chunked_and_handed_on_while_the_next_chunk_computes: "
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
        reserve 1 on b from b prompt=10 max=3
        prefill 1 on b to b
        run 100
        empty"
    a_prefix_is_reused_on_both_workers_and_not_sent_again: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=9 max=2 family=1
        prefill 1 on p to d
        run 100
        reserve 2 on d from p prompt=12 max=2 family=1
        prefill 2 on p to d
        run 100
        empty"
    a_prompt_that_is_cached_whole_still_runs_its_last_token: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=8 max=2 family=1
        prefill 1 on p to d
        run 100
        reserve 2 on d from p prompt=8 max=2 family=1
        prefill 2 on p to d
        run 100
        empty"
    siblings_on_one_worker_share_the_prompt_the_first_one_computed: "
        worker b both blocks=12
        reserve 1 on b from b prompt=9 max=2 family=1
        reserve 2 on b from b prompt=9 max=2 family=1
        prefill 1 on b to b
        step b
        prefill 2 on b to b
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
    a_first_token_that_ends_the_sequence_hands_nothing_on: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=10 max=9 stop=0
        prefill 1 on p to d
        run 100
        empty"
    a_stop_token_ends_a_sequence_and_the_context_does_too: "
        worker b both context=12
        reserve 1 on b from b prompt=10 max=9 stop=1
        prefill 1 on b to b
        run 100
        reserve 2 on b from b prompt=9 max=9
        prefill 2 on b to b
        run 100
        empty"
    a_stream_continues_at_the_next_index: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=6 output=3 max=6 attempt=1
        prefill 1 on p to d attempt=1
        run 200
        empty"
    lesson_13_cancelled_while_reserved: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        cancel 1 on d
        empty"
    lesson_13_cancelled_while_queued: "
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
    lesson_13_cancelled_in_a_step_frees_when_the_step_is_over: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        prefill 1 on p to d
        cancel 1 on p
        step p
        run 100
        empty"
    lesson_02_cancelled_while_frames_are_read_sent_and_written: "
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
    lesson_01_cancelled_between_prefill_and_landing: "
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
    cancelled_while_a_block_is_read_frees_it_once_it_was_read: "
        worker p prefill
        worker d decode
        reserve 1 on d from p prompt=4
        prefill 1 on p to d
        step p
        cancel 1 on p
        copies p
        run 100
        empty"
    lesson_03_a_decode_worker_that_lost_its_reservation_tells_the_sender: "
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
    cancelled_while_decoding: "
        worker b both
        reserve 1 on b from b prompt=6 max=9
        prefill 1 on b to b
        step b
        step b
        cancel 1 on b
        step b
        empty"
    lesson_04_a_lease_that_nobody_renews_expires_and_the_peer_is_told: "
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
    lesson_14_a_hand_off_that_is_renewed_lives_as_long_as_it_takes: "
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
    a_lost_router_takes_its_flights_with_it: "
        worker p prefill
        worker d decode
        reserve 1 on d from p
        prefill 1 on p to d
        step p
        router lost d
        router lost p
        run 200
        empty"
    lesson_08_a_lost_link_fails_what_has_not_landed_and_nothing_else: "
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
    a_worker_that_restarted_is_another_one: "
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
    lesson_02_a_late_frame_finds_its_block_in_another_life: "
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
    a_landed_token_outside_the_vocabulary_fails_its_hand_off_alone: "
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
    lost_frames_of_a_sealed_hand_off_cost_two_seconds: "
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
    a_lost_landed_is_asked_for_again: "
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
    packets_in_reverse_land_all_the_same: "
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
    lesson_05_a_copy_that_fails_ends_the_hand_off: "
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
    a_failed_step_fails_its_sequences_and_no_others: "
        worker b both slots=1
        reserve 1 on b from b prompt=6
        prefill 1 on b to b
        reserve 2 on b from b prompt=6
        prefill 2 on b to b
        step b fail
        run 100
        empty"
    a_failed_step_gives_back_the_slot_of_one_that_was_cancelled: "
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
    blocks_that_run_out_are_taken_from_the_least_important: "
        worker b both blocks=6 cache=off
        reserve 1 on b from b prompt=8 max=9 expect=1
        reserve 2 on b from b prompt=8 max=9 expect=1
        prefill 1 on b to b
        prefill 2 on b to b
        run 400
        empty"
    priority_outweighs_age_when_blocks_run_out: "
        worker b both blocks=6 cache=off
        reserve 1 on b from b prompt=8 max=9 expect=1
        reserve 2 on b from b prompt=8 max=9 expect=1 priority=-1
        prefill 1 on b to b
        prefill 2 on b to b
        run 400
        empty"
    a_preempted_sequence_is_not_overtaken_by_new_ones: "
        worker b both blocks=6
        reserve 1 on b from b prompt=8 max=12 expect=1
        reserve 2 on b from b prompt=8 max=12 expect=1
        prefill 1 on b to b
        prefill 2 on b to b
        run 50
        reserve 3 on b from b prompt=2 max=1
        run 500
        empty"
    a_small_preempted_sequence_does_not_overtake_a_large_one: "
        worker b both blocks=6 cache=off step=24
        reserve 1 on b from b prompt=8 max=9 expect=1
        reserve 2 on b from b prompt=12 max=3 expect=1
        reserve 3 on b from b prompt=4 max=3 expect=1
        prefill 1 on b to b
        prefill 2 on b to b
        prefill 3 on b to b
        run 400
        empty"
    a_sequence_that_outgrows_the_pool_fails_and_says_so: "
        worker b both blocks=3
        reserve 1 on b from b prompt=8 max=30
        prefill 1 on b to b
        run 200
        empty"
    lesson_10_what_cannot_be_held_whole_is_refused_at_once: "
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
        reserve 1 on b from b prompt=4 max=6
        prefill 1 on b to b
        step b
        reserve 2 on b from b prompt=16 max=2
        prefill 2 on b to b
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
    lesson_27_draining_finishes_what_is_here_and_takes_nothing_new: "
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
    lesson_12_a_broken_engine_fails_what_is_here_and_takes_nothing_new: "
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
    a_cached_prefix_is_evicted_when_room_is_needed_and_routers_hear_of_it: "
        worker b both blocks=4
        reserve 1 on b from b prompt=9 max=1
        prefill 1 on b to b
        run 50
        reserve 2 on b from b prompt=12 max=1
        prefill 2 on b to b
        run 50
        router joined b
        empty"
}
