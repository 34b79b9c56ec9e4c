//! Requests for a vector: one worker runs the prompt, and nothing is decoded.

use crate::stage::script::{play, prompt};
use cleave_domain::Pooling;
use cleave_testkit::pooled_vector;

/// The vector of a prompt as a log shows it.
fn shown(pooling: &Pooling, family: u32, tokens: u32) -> String {
    let vector = pooled_vector(pooling, &prompt(family, tokens));
    format!("pooled {vector:?}")
}

fn kinds() -> [(&'static str, Pooling); 4] {
    [
        ("last", Pooling::LastToken),
        ("mean", Pooling::Mean),
        ("first", Pooling::FirstToken),
        ("logits", Pooling::Logits([1, 2].into())),
    ]
}

#[test]
fn a_vector_does_not_depend_on_the_chunks() {
    for (word, pooling) in kinds() {
        for step in [1, 3, 8, 40] {
            let log = play(&format!(
                "worker p prefill step={step} blocks=20
                start 1 on p prompt=21 {word}
                start 2 on p prompt=9 {word}
                run 1000
                empty"
            ));
            for (family, tokens) in [(1, 21), (2, 9)] {
                let expected = shown(&pooling, family, tokens);
                assert!(log.contains(&expected), "{word} {step}: {log}");
            }
        }
    }
}

#[test]
fn only_last_tokens_take_their_prefix_from_the_cache() {
    for (word, pooling) in kinds() {
        let log = play(&format!(
            "worker p prefill
            start 1 on p prompt=17 family=1 {word}
            run 100
            start 2 on p prompt=18 family=1 {word}
            run 100
            empty"
        ));
        let cached = match pooling {
            Pooling::LastToken | Pooling::Logits(_) => 16,
            Pooling::Mean | Pooling::FirstToken => 0,
        };
        let expected = shown(&pooling, 1, 18);
        let line = format!("cached {cached} scores 0 {expected}");
        assert!(log.contains(&line), "{word}: {log}");
    }
}

#[test]
fn a_vector_survives_a_failed_step_of_another() {
    for (word, pooling) in kinds() {
        let log = play(&format!(
            "worker b both step=12
            start 1 on b prompt=20 {word}
            start 2 on b prompt=2 last
            step b
            step b slot=1 fail
            run 200
            empty"
        ));
        let expected = shown(&pooling, 1, 20);
        assert!(log.contains(&expected), "{word}: {log}");
    }
}

#[test]
fn a_preempted_prompt_pools_all_its_tokens_anew() {
    for (word, pooling) in kinds() {
        let log = play(&format!(
            "worker b both blocks=8 step=4
            start 1 on b prompt=6 max=14 expect=2 priority=-1
            step b
            step b
            start 2 on b prompt=18 {word}
            run 2000
            empty"
        ));
        let expected = shown(&pooling, 2, 18);
        assert!(log.contains(&expected), "{word}: {log}");
        assert!(log.contains("preempted #2.0"), "{word}: {log}");
    }
}

#[test]
fn a_decode_worker_refuses_to_pool() {
    let log = play(
        "worker d decode
        start 1 on d prompt=4 mean
        empty",
    );
    assert!(log.contains("WrongWorker"), "{log}");
}

scenarios! {
    a_vector_needs_one_worker_and_no_growth: "
        worker p prefill blocks=5
        start 1 on p prompt=10 mean
        start 2 on p prompt=8 last expect=99
        run 100
        empty"
    a_cancelled_vector_leaves_nothing: "
        worker p prefill
        start 1 on p prompt=20 mean
        step p
        cancel 1 on p
        run 100
        empty"
    vectors_wait_in_the_queue_of_prompts: "
        worker p prefill queue=1
        start 1 on p prompt=4 last
        start 2 on p prompt=4 last
        start 3 on p prompt=4 last
        run 100
        empty"
}
