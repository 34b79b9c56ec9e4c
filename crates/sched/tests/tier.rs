//! The tiers below the pool, played step by step; the goldens hold every fact and every output.
//! `INSTA_UPDATE=always cargo test -p cleave-sched` writes them anew.

use crate::stage::script::play;

/// The least important of three streams lost its blocks, and has just begun to fetch them: the pool
/// has no block left.
const BROUGHT_BACK: &str = "worker b both blocks=15 context=48 host=40 price=10
    start 1 on b prompt=16 max=28 expect=1
    start 2 on b prompt=4 max=16 expect=1
    start 3 on b prompt=20 max=12 expect=1
    run 180";

/// No block of a fetch can arrive while the step runs that was planned with it.
#[test]
fn a_fetch_deadline_starts_after_the_step_planned_with_it() {
    // The deadline is at least a quarter of a second, after a step of ten milliseconds.
    let waited = play(&format!("{BROUGHT_BACK}\nwait 255"));
    let (_, since) = waited
        .rsplit_once("> fetch #3.0")
        .expect("it loses its blocks");
    assert!(since.contains("> STEP "), "{since}");
    assert!(!since.contains("> fetch stop"), "{since}");
    let waited = play(&format!("{BROUGHT_BACK}\nwait 255\nwait 10"));
    assert!(waited.ends_with("> fetch stop #3.0\n"), "{waited}");
}

/// Nor while the step runs that was emitted right after it: a new sequence fetches before its step
/// is planned.
#[test]
fn a_fetch_deadline_includes_one_later_step_only() {
    let script = "worker b both blocks=40 context=160 host=40 price=200
        start 1 on b prompt=20 max=1 family=1
        run 900
        start 2 on b prompt=150 max=1 family=2
        run 9000
        start 3 on b prompt=20 max=1 family=1
        start 4 on b prompt=40 max=20 family=3";
    // A quarter of a second, and the ten milliseconds of that step.
    let waited = play(&format!("{script}\nwait 255"));
    let (_, since) = waited.rsplit_once("> fetch #3.0").expect("it was kept");
    assert!(since.contains("> STEP "), "{since}");
    assert!(!since.contains("> fetch stop"), "{since}");
    let waited = play(&format!("{script}\nwait 255\nstep b\nwait 5"));
    let (_, since) = waited.rsplit_once("\nstep b").expect("it is in the script");
    assert!(since.contains("> STEP "), "{since}");
    assert!(since.ends_with("> fetch stop #3.0\n"), "{since}");
}

#[test]
fn a_fetching_victim_yields_to_a_more_important_stream() {
    let steps = "\nstep b".repeat(4);
    let log = play(&format!("{BROUGHT_BACK}{steps}"));
    let (_, since) = log.rsplit_once("> fetch #3.0").expect("it begins");
    assert!(!since.contains("> note preempted #1.0"), "{since}");
    assert!(since.ends_with("> fetch stop #3.0\n"), "{since}");
    // Fetched KV is written where no other sequence is until the fetch ends; then the block is the
    // stream's.
    let log = play(&format!("{BROUGHT_BACK}{steps}\nfetches b\nrun 10"));
    let (_, since) = log.rsplit_once("> fetch stop #3.0").expect("it is stopped");
    let (_, since) = since
        .split_once("> note preempted #3.0")
        .expect("it gives way");
    assert!(since.contains("> EMIT #1.0"), "{since}");
    play(&format!("{BROUGHT_BACK}{steps}\nfetches b\nrun 800\nempty"));
}

/// Plays two prompts in turns, of which the pool has room for one. Returns for each turn whether
/// blocks of it were fetched.
fn turns(before: &str, count: u32) -> Vec<bool> {
    let mut script = before.to_owned();
    for turn in 0..count {
        let (flight, family) = (10 + turn, 1 + turn % 2);
        script += &format!(
            "\nstart {flight} on b prompt=68 max=1 family={family}
            run 900
            renew {flight} on b
            run 900
            renew {flight} on b
            run 900"
        );
    }
    let log = play(&format!("{script}\nempty"));
    let earlier = before.matches("start ").count();
    let turns = log.split("\nstart ").skip(1 + earlier);
    turns.map(|turn| turn.contains("> fetch #")).collect()
}

/// The first fetch was slow, and a slow tier's price is lowered each time that it is not used.
fn slow_then_tried_again(before: &str) {
    let fetched = turns(before, 120);
    assert!(!fetched[..20].contains(&true), "{fetched:?}");
    assert!(fetched[20..].contains(&true), "{fetched:?}");
}

/// Contents of host memory come back 900 ms later.
const DEAR: &str = "worker b both blocks=20 context=80 host=60
    start 1 on b prompt=68 max=1 family=2
    run 400
    start 2 on b prompt=68 max=1 family=1
    run 400
    start 3 on b prompt=68 max=1 family=2
    wait 900
    run 400";

#[test]
fn slow_host_memory_is_avoided_then_tried_again() {
    slow_then_tried_again(DEAR);
}

#[test]
fn a_slow_disk_is_avoided_then_tried_again() {
    slow_then_tried_again(
        "worker b both blocks=20 context=80 host=60 disk=60
        start 1 on b prompt=68 max=1 family=1
        run 400
        start 2 on b prompt=68 max=1 family=2
        run 400
        restart b
        start 3 on b prompt=68 max=1 family=3
        run 400
        start 4 on b prompt=68 max=1 family=2
        wait 900
        renew 4 on b
        run 900
        renew 4 on b
        run 900
        renew 4 on b
        run 900",
    );
}

/// Contents are not offloaded where fetching them takes longer than computing them.
#[test]
fn contents_too_slow_to_fetch_are_not_offloaded() {
    let log = play(&format!(
        "{DEAR}
        start 4 on b prompt=68 max=1 family=3
        run 400
        empty"
    ));
    let (before, after) = log.split_once("\nstart 4 ").expect("it is asked for");
    assert!(before.contains("> shelve "));
    assert!(!after.contains("> shelve "), "{after}");
}

scenarios! {
    evicted_blocks_are_fetched_from_host_memory: "
        worker p prefill blocks=20 context=80 host=16
        worker d decode blocks=50 context=80
        reserve 1 on d from p prompt=20 max=1 family=1
        prefill 1 on p to d
        run 100
        reserve 2 on d from p prompt=76 max=1 family=2
        prefill 2 on p to d
        run 300
        reserve 3 on d from p prompt=20 max=1 family=1 attempt=1
        prefill 3 on p to d attempt=1
        run 100
        empty"
    both_legs_on_one_worker_fetch_into_reserved_blocks: "
        worker b both blocks=20 context=80 host=16
        start 1 on b prompt=20 max=2 family=1
        run 100
        start 2 on b prompt=76 max=1 family=2
        run 300
        start 3 on b prompt=20 max=2 family=1
        run 100
        empty"
    other_sequences_run_during_a_fetch: "
        worker b both blocks=20 context=80 host=16
        start 1 on b prompt=20 max=1 family=1
        run 100
        start 2 on b prompt=76 max=1 family=2
        run 300
        start 3 on b prompt=4 max=6 family=3
        step b
        start 4 on b prompt=20 max=1 family=1
        step b
        step b
        fetches b
        run 100
        empty"
    a_failed_fetch_is_computed: "
        worker b both blocks=20 context=80 host=16
        start 1 on b prompt=20 max=1 family=1
        run 100
        start 2 on b prompt=76 max=1 family=2
        run 300
        start 3 on b prompt=20 max=1 family=1
        fetches b fail
        run 100
        empty"
    a_late_fetch_is_computed: "
        worker b both blocks=20 context=80 host=16
        start 1 on b prompt=20 max=1 family=1
        run 100
        start 2 on b prompt=76 max=1 family=2
        run 300
        start 3 on b prompt=20 max=1 family=1
        wait 300
        run 100
        empty"
    // Lesson: 13.
    a_cancel_during_a_fetch_frees_its_blocks: "
        worker b both blocks=20 context=80 host=16
        start 1 on b prompt=20 max=1 family=1
        run 100
        start 2 on b prompt=76 max=1 family=2
        run 300
        start 3 on b prompt=20 max=1 family=1
        cancel 3 on b
        fetches b
        run 20
        empty"
    // Lesson: 7.
    another_tenants_equal_prompt_is_computed: "
        worker b both blocks=20 context=80 host=16
        start 1 on b prompt=20 max=1 family=1 salt=1
        run 100
        start 2 on b prompt=76 max=1 family=2
        run 300
        start 3 on b prompt=20 max=1 family=1 salt=2
        run 100
        empty"
    steps_do_not_count_towards_the_fetch_price: "
        worker b both blocks=20 context=80 host=40
        start 1 on b prompt=20 max=1 family=1
        run 100
        start 2 on b prompt=76 max=1 family=2
        run 300
        start 3 on b prompt=4 max=24 family=3
        step b
        start 4 on b prompt=20 max=1 family=1
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        step b
        fetches b
        run 300
        start 5 on b prompt=76 max=1 family=4
        run 300
        start 6 on b prompt=20 max=1 family=1
        run 100
        empty"
    a_restarted_worker_finds_its_contents_on_disk: "
        worker b both blocks=20 context=80 host=8 disk=16
        start 1 on b prompt=20 max=1 family=1
        run 100
        start 2 on b prompt=76 max=1 family=2
        run 300
        restart b
        start 3 on b prompt=20 max=1 family=1
        run 900
        empty"
    a_preempted_sequence_fetches_its_blocks: "
        worker b both blocks=12 context=48 host=40
        start 1 on b prompt=16 max=28 expect=1
        start 2 on b prompt=20 max=12 expect=1
        run 900
        empty"
    a_preempted_sequence_computes_what_it_cannot_fetch: "
        worker b both blocks=12 context=48 host=40
        start 1 on b prompt=16 max=28 expect=1
        start 2 on b prompt=20 max=12 expect=1
        run 291
        fetches b fail
        run 900
        empty"
    a_failed_offload_stores_nothing_and_frees_the_block: "
        worker b both blocks=20 context=80 host=16
        start 1 on b prompt=20 max=1 family=1
        step b
        step b
        step b
        shelves b fail
        run 100
        drain b
        empty"
}
