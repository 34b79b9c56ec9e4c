//! Sequences with a state. The stage's engine panics at a state that is not the sequence's own.

use crate::stage::script::play;

/// The clients' tokens, as `flight token`.
fn emitted(log: &str) -> Vec<&str> {
    let tokens = log.lines().filter_map(|line| line.split_once("EMIT "));
    let mut tokens: Vec<_> = tokens.map(|(_, token)| token).collect();
    tokens.sort_unstable();
    tokens
}

/// Plays a script for a model with states and for one without; returns the log of the first.
fn play_both(script: &str) -> String {
    let with = play(&script.replace("STATES", "states=6"));
    let without = play(&script.replace("STATES", ""));
    let tokens = |log: &str| -> Vec<String> {
        let emitted = emitted(log).into_iter();
        emitted
            .map(|line| line.split(" cached").next().unwrap_or_default().to_owned())
            .collect()
    };
    assert_eq!(tokens(&with), tokens(&without), "{with}");
    assert!(!with.contains("note preempted"), "{with}");
    with
}

#[test]
fn a_prompts_state_is_handed_over_in_pieces() {
    let log = play_both(
        "worker p prefill STATES
        worker d decode STATES
        reserve 1 on d from p prompt=10 max=6
        prefill 1 on p to d
        run 300
        empty",
    );
    for piece in ["s0[0+24]", "s0[24+8]", "s1[0+24]", "s2[0+8]", "s2[8+8]"] {
        assert!(
            log.contains(&format!("import #1.0 {piece}")),
            "{piece}: {log}"
        );
    }
    let states = log.find("export #1.0 s0").expect("it has a state");
    let last_block = log.find("export #1.0 2 ").expect("it has three blocks");
    assert!(last_block < states, "{log}");
}

// Invariant: I52.
#[test]
fn without_a_free_slot_a_reservation_is_refused() {
    let log = play(
        "worker p prefill states=4
        worker d decode states=1
        reserve 1 on d from p prompt=4 max=3
        reserve 2 on d from p prompt=4 max=3
        cancel 1 on d
        reserve 3 on d from p prompt=4 max=3
        cancel 3 on d
        empty",
    );
    assert_eq!(
        log.matches("tell refused #2.0 NoBlocks").count(),
        1,
        "{log}"
    );
    assert_eq!(log.matches("tell reserved").count(), 2, "{log}");
}

// Invariant: I52.
#[test]
fn without_a_free_slot_an_order_to_run_is_refused() {
    let log = play(
        "worker b both states=1
        start 1 on b prompt=4 max=3
        start 2 on b prompt=4 max=3
        run 200
        start 3 on b prompt=4 max=3
        run 200
        empty",
    );
    assert_eq!(
        log.matches("tell refused #2.0 NoBlocks").count(),
        1,
        "{log}"
    );
    assert_eq!(log.matches("tell running").count(), 2, "{log}");
    assert_eq!(log.matches("tell finished").count(), 2, "{log}");
}

#[test]
fn a_target_of_another_kind_of_model_is_refused() {
    for (prefill, decode) in [("states=2", ""), ("", "states=2")] {
        let log = play(&format!(
            "worker p prefill {prefill}
            worker d decode {decode}
            reserve 1 on d from p prompt=4 max=3
            prefill 1 on p to d
            cancel 1 on d
            empty"
        ));
        assert!(log.contains("tell refused #1.0 WrongWorker"), "{log}");
    }
}

// Invariant: I53.
#[test]
fn a_failed_step_computes_its_sequences_again() {
    for flying in [1, 2] {
        let script = |failing: &str| {
            format!(
                "worker b both slots=3 blocks=40 step=16 queue=8 states=6 flying={flying}
                start 1 on b prompt=9 max=9
                start 2 on b prompt=5 max=9
                start 3 on b prompt=6 max=9
                step b
                step b
                step b
                step b
                {failing}
                run 2000
                empty"
            )
        };
        let whole = play(&script(""));
        assert_eq!(emitted(&whole).len(), 27);
        assert!(!whole.contains("note preempted"), "{whole}");
        let broken = play(&script("step b slot=0 fail"));
        assert_eq!(broken.matches("tell leg failed").count(), 1, "{broken}");
        assert_eq!(broken.matches("note preempted").count(), 2, "{broken}");
        let lost = broken.split("tell leg failed ").nth(1).expect("one failed");
        let lost = lost.split(' ').next().expect("a hand-off").to_owned() + " ";
        let of_others = |log: &str| -> Vec<String> {
            let tokens = emitted(log).into_iter();
            let tokens = tokens.filter(|token| !token.starts_with(&lost));
            tokens.map(str::to_owned).collect()
        };
        assert_eq!(of_others(&broken), of_others(&whole), "{broken}");
    }
}

/// The first step of a prompt changes nothing that it needs again.
#[test]
fn a_failed_first_step_is_repeated_with_what_it_had() {
    let log = play(
        "worker b both states=3
        start 1 on b prompt=4 max=3
        start 2 on b prompt=3 max=3
        step b slot=1 fail
        run 200
        empty",
    );
    assert!(!log.contains("note preempted"), "{log}");
    assert_eq!(log.matches("tell finished").count(), 1, "{log}");
}

/// A prompt whose first blocks have left fails a step: they are not sent again.
#[test]
fn a_prompt_that_is_computed_again_sends_each_block_once() {
    let log = play(
        "worker p prefill slots=2 step=8 states=4
        worker d decode slots=2 blocks=16 states=4
        reserve 1 on d from p prompt=20 max=3
        prefill 1 on p to d
        step p
        copies p
        reserve 2 on d from p prompt=3 max=3
        prefill 2 on p to d
        step p
        step p slot=1 fail
        run 500
        empty",
    );
    assert_eq!(log.matches("note preempted").count(), 1, "{log}");
    for ordinal in 0..5 {
        let exports = format!("export #1.0 {ordinal} ");
        assert_eq!(log.matches(&exports).count(), 1, "{ordinal}: {log}");
    }
    assert_eq!(log.matches("EMIT #1.0").count(), 3, "{log}");
}

#[test]
fn a_part_of_a_block_computed_again_sends_nothing() {
    let log = play(
        "worker p prefill slots=3 step=7 states=3
        worker d decode slots=3 blocks=20 states=4
        reserve 1 on d from p prompt=20 max=3 priority=1
        prefill 1 on p to d priority=1
        step p
        reserve 2 on d from p prompt=3 max=3
        prefill 2 on p to d
        step p
        copies p
        reserve 3 on d from p prompt=6 max=3
        prefill 3 on p to d
        step p slot=1 fail
        run 500
        empty",
    );
    assert_eq!(log.matches("note preempted").count(), 1, "{log}");
    assert!(log.contains("[0+3]No"), "{log}");
    for ordinal in 0..5 {
        let exports = format!("export #1.0 {ordinal} ");
        assert_eq!(log.matches(&exports).count(), 1, "{ordinal}: {log}");
    }
    assert_eq!(log.matches("EMIT #1.0").count(), 3, "{log}");
}

#[test]
fn a_move_takes_the_state_along_after_the_pause() {
    let log = play_both(
        "worker a both STATES
        worker e decode STATES
        start 1 on a prompt=9 max=12
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        run 400
        empty",
    );
    let paused = log.find("tell prefilled #1.1").expect("it pauses");
    let piece = log.find("export #1.1 s0").expect("its state is sent");
    assert!(paused < piece, "{log}");
    assert!(log.contains("note moved out"), "{log}");
}

#[test]
fn a_move_of_a_lost_state_is_aborted() {
    let log = play(
        "worker a both slots=2 blocks=16 states=4
        worker e decode states=2
        start 1 on a prompt=9 max=12
        start 2 on a prompt=3 max=9
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=3 max=12 ahead=8
        migrate 1 on a to e
        step a slot=1 fail
        cancel 1 on e attempt=1
        run 600
        empty",
    );
    assert!(log.contains("tell stayed #1.1 Engine"), "{log}");
    assert_eq!(log.matches("note preempted #1.0").count(), 1, "{log}");
    assert_eq!(log.matches("EMIT #1.0").count(), 12, "{log}");
}

// Invariant: I3.
#[test]
fn a_resumed_sequence_waits_until_its_state_is_read() {
    let log = play(
        "worker a both states=2
        worker e decode states=2
        start 1 on a prompt=9 max=12
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=12 ahead=8
        migrate 1 on a to e
        copies a
        step a
        cancel 1 on a attempt=1
        cancel 1 on e attempt=1
        copies a
        run 400
        empty",
    );
    let stayed = log.find("tell stayed #1.1").expect("the move is given up");
    let read = log
        .rfind("< exported #1.1 s2")
        .expect("its state was to be read");
    let step = stayed + log[stayed..].find("STEP").expect("it goes on");
    assert!(stayed < read && read < step, "{log}");
    assert_eq!(log.matches("EMIT #1.0").count(), 12, "{log}");
}

#[test]
fn a_prompt_begins_at_its_longest_snapshot() {
    let log = play(
        "worker b both blocks=20 states=4
        start 1 on b prompt=15 max=2 family=1
        run 200
        start 2 on b prompt=15 max=2 family=1
        run 200
        empty",
    );
    assert!(log.contains("EMIT #1.0 0 "), "{log}");
    assert_eq!(log.matches(" copy b").count(), 1, "one snapshot: {log}");
    let second = log.split("start 2 on b").nth(1).expect("a second prompt");
    assert!(second.contains(" from b"), "{second}");
    assert!(second.contains("cached 12"), "{second}");
}

/// The second prompt ends where the first one has blocks but no snapshot.
#[test]
fn a_prefix_without_a_snapshot_gets_one() {
    let log = play(
        "worker b both blocks=24 states=4
        start 1 on b prompt=15 max=2 family=1
        run 200
        start 2 on b prompt=10 max=2 family=1
        run 200
        start 3 on b prompt=10 max=2 family=1
        run 200
        empty",
    );
    let after = |line: &str| log.split(line).nth(1).expect("a prompt").to_owned();
    assert!(
        after("start 2 on b")
            .split("start 3")
            .next()
            .is_some_and(|log| log.contains("cached 0") && log.contains(" copy b")),
        "{log}"
    );
    assert!(after("start 3 on b").contains("cached 8"), "{log}");
}

#[test]
fn without_a_free_slot_no_snapshot_is_taken() {
    let script = |states: u32| {
        play(&format!(
            "worker b both states={states}
            start 1 on b prompt=10 max=4
            run 200
            empty"
        ))
    };
    let (one, two) = (script(1), script(2));
    assert_eq!(one.matches(" copy b").count(), 0, "{one}");
    assert_eq!(two.matches(" copy b").count(), 1, "{two}");
    assert_eq!(emitted(&one), emitted(&two));
}

/// A snapshot whose step failed has no content.
#[test]
fn a_snapshot_of_a_failed_step_is_not_kept() {
    let log = play(
        "worker b both slots=2 blocks=20 states=5 step=32
        start 1 on b prompt=10 max=2 family=1
        start 2 on b prompt=3 max=2
        step b slot=1 fail
        start 3 on b prompt=10 max=2 family=1
        run 300
        empty",
    );
    assert_eq!(log.matches("tell leg failed").count(), 1, "{log}");
    assert_eq!(log.matches("tell finished").count(), 2, "{log}");
}

#[test]
fn a_state_is_swapped_with_its_blocks() {
    let log = play_both(
        "worker b both blocks=6 cache=off swap=16 STATES
        start 1 on b prompt=8 max=9 expect=1
        start 2 on b prompt=8 max=9 expect=1
        run 400
        empty",
    );
    let swapped = log.lines().find(|line| line.contains("swap out"));
    assert!(
        swapped.is_some_and(|line| line.contains(" state ")),
        "{log}"
    );
    assert!(log.contains("swapped in #2.0 Copied"), "{log}");
}

/// A state needs host memory too: three pieces beside three blocks do not fit into five.
#[test]
fn a_state_counts_as_its_pieces_in_host_memory() {
    let log = play(
        "worker b both blocks=6 cache=off swap=5 states=4
        start 1 on b prompt=8 max=9 expect=1
        start 2 on b prompt=8 max=9 expect=1
        run 600
        empty",
    );
    assert!(!log.contains("swap out"), "{log}");
    assert!(log.contains("note preempted"), "{log}");
}

/// The second prompt takes the pool's blocks and slots from the first, whose KV the tiers keep.
const BACK_FROM_TIERS: &str = "worker b both blocks=14 context=64 states=2 host=40
    start 1 on b prompt=33 max=2 family=1
    run 900
    renew 1 on b
    run 900
    start 2 on b prompt=50 max=2 family=2
    run 900
    renew 2 on b
    run 900";

#[test]
fn a_prompt_fetches_its_blocks_and_the_state_after_them() {
    let log = play(&format!(
        "{BACK_FROM_TIERS}
        start 3 on b prompt=33 max=2 family=1
        run 900
        empty"
    ));
    let third = log.split("start 3 on b").nth(1).expect("a third prompt");
    assert!(third.contains(" pieces"), "{log}");
    assert!(third.contains("cached 32"), "{log}");
}

/// The pool keeps the blocks, and slots for one other snapshot alone.
const SNAPSHOT_IN_TIERS: &str = "worker b both blocks=40 context=64 states=2 host=40
    start 1 on b prompt=33 max=2 family=1
    run 900
    renew 1 on b
    run 900
    start 2 on b prompt=13 max=2 family=2
    run 900
    renew 2 on b
    run 900";

#[test]
fn a_prompt_with_blocks_in_the_pool_fetches_the_state_alone() {
    let log = play(&format!(
        "{SNAPSHOT_IN_TIERS}
        start 3 on b prompt=41 max=2 family=1
        run 900
        empty"
    ));
    let third = log.split("start 3 on b").nth(1).expect("a third prompt");
    assert!(third.contains("> fetch #3.0 [] state"), "{log}");
    assert!(third.contains("cached 32"), "{log}");
    // With one slot left for new sequences, no snapshot is copied out of it.
    let second = log.split("start 2 on b").nth(1).expect("a second prompt");
    let running = second.split("tell finished").next().expect("it ran");
    assert!(!running.contains(" s0 s1 s2"), "{log}");
    assert!(second.contains(" s0 s1 s2"), "{log}");
}

/// The pool has a snapshot after 16 tokens, and blocks for the 16 after them.
const LONGER_IN_TIERS: &str = "worker b both blocks=40 context=64 states=2 host=40
    start 1 on b prompt=33 max=2 family=1
    run 900
    renew 1 on b
    run 900
    start 2 on b prompt=17 max=2 family=1
    run 900
    renew 2 on b
    run 900";

#[test]
fn a_prompt_whose_state_is_not_fetched_is_computed() {
    // The family decides the way in which the fetch fails.
    for family in 1..9 {
        for before in [BACK_FROM_TIERS, SNAPSHOT_IN_TIERS, LONGER_IN_TIERS] {
            let before = before.replace("family=1", &format!("family={family}"));
            let before = before.replace("prompt=50 max=2 family=2", "prompt=50 max=2 family=9");
            let before = before.replace("prompt=13 max=2 family=2", "prompt=13 max=2 family=9");
            let log = play(&format!(
                "{before}
                start 3 on b prompt=33 max=2 family={family}
                fetches b fail
                run 900
                empty"
            ));
            let third = log.split("start 3 on b").nth(1).expect("a third prompt");
            assert_eq!(third.matches("> fetch #3.0").count(), 1, "{log}");
            assert!(third.contains("EMIT #3.0 0 "), "{log}");
        }
    }
}

/// The tiers have the blocks of both snapshots of a prompt.
#[test]
fn a_prompt_fetches_the_latest_state() {
    let log = play(
        "worker b both blocks=14 context=64 states=3 host=60
        start 1 on b prompt=17 max=2 family=1
        run 900
        renew 1 on b
        run 900
        start 2 on b prompt=33 max=2 family=1
        run 900
        renew 2 on b
        run 900
        start 3 on b prompt=50 max=2 family=2
        run 900
        renew 3 on b
        run 900
        start 4 on b prompt=33 max=2 family=1
        run 900
        empty",
    );
    let last = log.split("start 4 on b").nth(1).expect("a last prompt");
    assert!(last.contains(" pieces"), "{log}");
    assert!(last.contains("cached 32"), "{log}");
}
