//! Two steps in flight, played step by step; the goldens hold every fact and every output.
//! `INSTA_UPDATE=always cargo test -p cleave-sched` writes them anew.

use crate::stage::script::play;

/// The clients' tokens, as `flight token`.
fn emitted(log: &str) -> Vec<&str> {
    let tokens = log.lines().filter_map(|line| line.split_once("EMIT "));
    let mut tokens: Vec<_> = tokens.map(|(_, token)| token).collect();
    tokens.sort_unstable();
    tokens
}

// Invariant: I36.
#[test]
fn overlapping_steps_change_no_token() {
    let script = |flying: u32| {
        format!(
            "worker p prefill flying={flying}
            worker d decode blocks=40 flying={flying}
            reserve 1 on d from p prompt=18 max=30 stop=11
            prefill 1 on p to d
            reserve 2 on d from p prompt=3 max=9
            prefill 2 on p to d
            run 70
            reserve 3 on d from p prompt=7 max=20 stop=8
            prefill 3 on p to d
            run 1000
            empty"
        )
    };
    let (one, two) = (play(&script(1)), play(&script(2)));
    assert_eq!(emitted(&one), emitted(&two));
    assert_eq!(emitted(&one).len(), 12 + 9 + 9);
    let steps = |log: &str| log.matches("STEP").count();
    assert!(steps(&two) > steps(&one), "nothing was drawn in vain");
}

/// Plays eight streams on one worker; step number `step` fails for the sequence in `slot`.
fn eight(flying: u32, failing: Option<(u32, u32)>) -> String {
    let mut script = format!("worker b both slots=8 blocks=80 step=16 queue=16 flying={flying}\n");
    for flight in 1..=8 {
        let prompt = 3 + flight;
        script.push_str(&format!("start {flight} on b prompt={prompt} max=9\n"));
    }
    if let Some((step, slot)) = failing {
        script.push_str(&"step b\n".repeat(step as usize));
        script.push_str(&format!("step b slot={slot} fail\n"));
    }
    script.push_str("run 2000\nempty");
    play(&script)
}

// Invariant: I51.
#[test]
fn a_step_that_fails_for_one_slot_fails_that_sequence_alone() {
    for flying in [1, 2] {
        let whole = eight(flying, None);
        let expected = emitted(&whole);
        assert_eq!(expected.len(), 8 * 9);
        let mut failed = 0;
        for (step, slot) in (0..12).flat_map(|step| (0..8).map(move |slot| (step, slot))) {
            let log = eight(flying, Some((step, slot)));
            let ended = |words: &str| log.matches(words).count();
            let case = format!("{flying} steps, step {step} fails for slot {slot}");
            // If the slot is not in the step, the whole step fails.
            if ended("tell leg failed") != 1 {
                continue;
            }
            failed += 1;
            let lost = log.split("tell leg failed #").nth(1).expect("one failed");
            let lost = format!("#{} ", lost.split(' ').next().expect("a hand-off"));
            let others = |tokens: &[&str]| -> Vec<String> {
                let others = tokens.iter().filter(|token| !token.starts_with(&lost));
                others.map(|token| (*token).to_owned()).collect()
            };
            let given = emitted(&log);
            assert_eq!(others(&given), others(&expected), "{case}");
            assert_eq!(others(&given).len(), 7 * 9, "{case}");
            assert!(given.iter().all(|token| expected.contains(token)), "{case}");
            assert_eq!(ended("tell finished"), 7, "{case}");
        }
        assert!(failed > 40, "{failed}");
    }
}

#[test]
fn a_step_that_fails_for_several_slots_runs_again_once() {
    let mut script = "worker b both slots=4 blocks=80 step=64\n".to_owned();
    for flight in 1..=4 {
        script.push_str(&format!("start {flight} on b prompt=4 max=3\n"));
    }
    let whole = play(&format!("{script}run 2000\nempty"));
    let broken = play(&format!(
        "{script}step b\nstep b slot=1 also=2 fail\nrun 2000\nempty"
    ));
    let count = |log: &str, words: &str| log.matches(words).count();
    assert_eq!(count(&broken, "tell leg failed"), 2, "{broken}");
    assert_eq!(count(&broken, "tell finished"), 2, "{broken}");
    assert_eq!(count(&broken, "STEP"), count(&whole, "STEP") + 1);
}

scenarios! {
    results_after_a_step_failed_for_a_slot_are_dropped: "
        worker b both slots=2 blocks=16 flying=2
        start 1 on b prompt=5 max=12
        start 2 on b prompt=2 max=4
        step b
        step b
        step b slot=0 fail
        step b
        run 100
        empty"
    the_next_decode_step_is_planned_while_one_runs: "
        worker b both flying=2
        start 1 on b prompt=5 max=6
        step b
        step b
        step b
        run 100
        empty"
    // Invariant: I36.
    a_token_past_the_end_is_dropped_with_its_step: "
        worker b both slots=1 flying=2
        start 1 on b prompt=6 max=9 stop=2
        start 2 on b prompt=3 max=2
        step b
        step b
        step b
        step b
        run 100
        empty"
    a_prompt_waits_for_the_step_ahead_only: "
        worker b both flying=2
        start 1 on b prompt=5 max=12
        step b
        step b
        start 2 on b prompt=5 max=2
        step b
        step b
        step b
        run 200
        empty"
    a_cancel_during_two_steps_frees_after_both: "
        worker b both flying=2
        start 1 on b prompt=5 max=12
        start 2 on b prompt=2 max=12
        step b
        step b
        cancel 1 on b
        step b
        step b
        cancel 2 on b
        run 100
        empty"
    a_failed_step_voids_the_step_ahead: "
        worker b both flying=2
        start 1 on b prompt=5 max=12
        step b
        step b fail
        start 2 on b prompt=2 max=4
        step b
        run 100
        empty"
    a_failed_step_ahead_keeps_the_tokens_before_it: "
        worker b both flying=2
        start 1 on b prompt=5 max=12
        step b
        step b
        step b
        step b fail
        run 100
        empty"
    a_step_ahead_takes_no_block_of_another_sequence: "
        worker b both blocks=4 flying=2
        start 1 on b prompt=3 max=8 expect=1
        start 2 on b prompt=3 max=8 expect=1 priority=1
        run 300
        empty"
    // Invariant: I36.
    a_moving_sequence_is_in_no_step_ahead: "
        worker b both flying=2
        worker e decode flying=2
        start 1 on b prompt=6 max=14
        step b
        step b
        reserve 1 on e from b attempt=1 prompt=6 output=2 ahead=8
        migrate 1 on b to e to=1
        copies b
        step b
        step b
        run 300
        empty"
    a_request_with_logprobs_is_not_drawn_ahead: "
        worker b both flying=2
        start 1 on b prompt=5 max=3 logprobs
        run 100
        empty"
    // Lesson: 12.
    only_the_running_step_is_reported_stuck: "
        worker b both late=200 flying=2
        start 1 on b prompt=5 max=5
        run 10
        wait 300
        step b
        wait 150
        step b
        run 200
        empty"
}
