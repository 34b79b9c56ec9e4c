//! What is kept below the pool, played step by step; the goldens hold every fact and every output.
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

/// The least important of three streams lost its blocks, and has just begun to have them brought back: the pool has no
/// block left.
const BROUGHT_BACK: &str = "worker b both blocks=15 context=48 host=40 price=10
    reserve 1 on b from b prompt=16 max=28 expect=1
    reserve 2 on b from b prompt=4 max=16 expect=1
    reserve 3 on b from b prompt=20 max=12 expect=1
    prefill 1 on b to b
    prefill 2 on b to b
    prefill 3 on b to b
    run 180";

/// Of a fetch nothing can come while the step runs that was planned with it.
#[test]
fn the_step_planned_with_a_fetch_is_waited_for_before_patience_begins() {
    // At least a quarter of a second, after a step of ten milliseconds.
    let waited = play(&format!("{BROUGHT_BACK}\nwait 255"));
    let (_, since) = waited
        .rsplit_once("> fetch #3.0")
        .expect("it loses its blocks");
    assert!(since.contains("> STEP "), "{since}");
    assert!(!since.contains("> fetch stop"), "{since}");
    let waited = play(&format!("{BROUGHT_BACK}\nwait 255\nwait 10"));
    assert!(waited.ends_with("> fetch stop #3.0\n"), "{waited}");
}

/// Nor while one runs that was said right after: whoever is taken on fetches before its step is planned.
#[test]
fn the_step_said_after_a_fetch_is_waited_for_too_and_no_later_one() {
    let script = "worker b both blocks=40 context=160 host=40 price=200
        reserve 1 on b from b prompt=20 max=1 family=1
        prefill 1 on b to b
        run 900
        reserve 2 on b from b prompt=150 max=1 family=2
        prefill 2 on b to b
        run 9000
        reserve 3 on b from b prompt=20 max=1 family=1
        reserve 4 on b from b prompt=40 max=20 family=3
        prefill 3 on b to b
        prefill 4 on b to b";
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
fn a_stream_gave_way_to_a_less_important_one_whose_blocks_were_being_filled() {
    let steps = "\nstep b".repeat(4);
    let said = play(&format!("{BROUGHT_BACK}{steps}"));
    let (_, since) = said.rsplit_once("> fetch #3.0").expect("it begins");
    assert!(!since.contains("> note preempted #1.0"), "{since}");
    assert!(since.ends_with("> fetch stop #3.0\n"), "{since}");
    // What came is put where nobody else is until it has come; then it is the stream's.
    let said = play(&format!("{BROUGHT_BACK}{steps}\nfetches b\nrun 10"));
    let (_, since) = said
        .rsplit_once("> fetch stop #3.0")
        .expect("it is stopped");
    let (_, since) = since
        .split_once("> note preempted #3.0")
        .expect("it gives way");
    assert!(since.contains("> EMIT #1.0"), "{since}");
    play(&format!("{BROUGHT_BACK}{steps}\nfetches b\nrun 800\nempty"));
}

/// Two prompts in turns, of which the pool has room for one. Says for each turn whether blocks of it were
/// brought back.
fn turns(before: &str, count: u32) -> Vec<bool> {
    let mut script = before.to_owned();
    for turn in 0..count {
        let (flight, family) = (10 + turn, 1 + turn % 2);
        script += &format!(
            "\nreserve {flight} on b from b prompt=68 max=1 family={family}
            prefill {flight} on b to b
            run 900
            renew {flight} on b
            run 900
            renew {flight} on b
            run 900"
        );
    }
    let said = play(&format!("{script}\nempty"));
    let earlier = before.matches("reserve ").count();
    let turns = said.split("\nreserve ").skip(1 + earlier);
    turns.map(|turn| turn.contains("> fetch #")).collect()
}

/// The first time was dear, and what was dear is believed less each time it is not paid.
fn dear_and_then_tried_again(before: &str) {
    let fetched = turns(before, 120);
    assert!(!fetched[..20].contains(&true), "{fetched:?}");
    assert!(fetched[20..].contains(&true), "{fetched:?}");
}

/// What is in host memory comes back 900 ms later.
const DEAR: &str = "worker b both blocks=20 context=80 host=60
    reserve 1 on b from b prompt=68 max=1 family=2
    prefill 1 on b to b
    run 400
    reserve 2 on b from b prompt=68 max=1 family=1
    prefill 2 on b to b
    run 400
    reserve 3 on b from b prompt=68 max=1 family=2
    prefill 3 on b to b
    wait 900
    run 400";

#[test]
fn what_was_dear_to_bring_back_from_memory_is_computed_and_tried_again_later() {
    dear_and_then_tried_again(DEAR);
}

#[test]
fn what_was_dear_to_bring_back_from_disk_is_computed_and_tried_again_later() {
    dear_and_then_tried_again(
        "worker b both blocks=20 context=80 host=60 disk=60
        reserve 1 on b from b prompt=68 max=1 family=1
        prefill 1 on b to b
        run 400
        reserve 2 on b from b prompt=68 max=1 family=2
        prefill 2 on b to b
        run 400
        restart b
        reserve 3 on b from b prompt=68 max=1 family=3
        prefill 3 on b to b
        run 400
        reserve 4 on b from b prompt=68 max=1 family=2
        prefill 4 on b to b
        wait 900
        renew 4 on b
        run 900
        renew 4 on b
        run 900
        renew 4 on b
        run 900",
    );
}

/// Nothing new is kept where it would come back for more than it costs to compute.
#[test]
fn what_would_be_dear_to_bring_back_is_not_kept() {
    let said = play(&format!(
        "{DEAR}
        reserve 4 on b from b prompt=68 max=1 family=3
        prefill 4 on b to b
        run 400
        empty"
    ));
    let (before, after) = said.split_once("\nreserve 4 ").expect("it is asked for");
    assert!(before.contains("> shelve "));
    assert!(!after.contains("> shelve "), "{after}");
}

scenarios! {
    what_is_evicted_was_copied_out_and_comes_back: "
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
    both_legs_on_one_worker_fetch_into_what_was_reserved: "
        worker b both blocks=20 context=80 host=16
        reserve 1 on b from b prompt=20 max=2 family=1
        prefill 1 on b to b
        run 100
        reserve 2 on b from b prompt=76 max=1 family=2
        prefill 2 on b to b
        run 300
        reserve 3 on b from b prompt=20 max=2 family=1
        prefill 3 on b to b
        run 100
        empty"
    everybody_else_goes_on_while_contents_come_back: "
        worker b both blocks=20 context=80 host=16
        reserve 1 on b from b prompt=20 max=1 family=1
        prefill 1 on b to b
        run 100
        reserve 2 on b from b prompt=76 max=1 family=2
        prefill 2 on b to b
        run 300
        reserve 3 on b from b prompt=4 max=6 family=3
        prefill 3 on b to b
        step b
        reserve 4 on b from b prompt=20 max=1 family=1
        prefill 4 on b to b
        step b
        step b
        fetches b
        run 100
        empty"
    what_cannot_be_brought_back_is_computed: "
        worker b both blocks=20 context=80 host=16
        reserve 1 on b from b prompt=20 max=1 family=1
        prefill 1 on b to b
        run 100
        reserve 2 on b from b prompt=76 max=1 family=2
        prefill 2 on b to b
        run 300
        reserve 3 on b from b prompt=20 max=1 family=1
        prefill 3 on b to b
        fetches b fail
        run 100
        empty"
    what_takes_too_long_is_computed: "
        worker b both blocks=20 context=80 host=16
        reserve 1 on b from b prompt=20 max=1 family=1
        prefill 1 on b to b
        run 100
        reserve 2 on b from b prompt=76 max=1 family=2
        prefill 2 on b to b
        run 300
        reserve 3 on b from b prompt=20 max=1 family=1
        prefill 3 on b to b
        wait 300
        run 100
        empty"
    lesson_13_cancelled_while_contents_come_back: "
        worker b both blocks=20 context=80 host=16
        reserve 1 on b from b prompt=20 max=1 family=1
        prefill 1 on b to b
        run 100
        reserve 2 on b from b prompt=76 max=1 family=2
        prefill 2 on b to b
        run 300
        reserve 3 on b from b prompt=20 max=1 family=1
        prefill 3 on b to b
        cancel 3 on b
        fetches b
        run 20
        empty"
    lesson_07_another_tenants_equal_prompt_is_computed: "
        worker b both blocks=20 context=80 host=16
        reserve 1 on b from b prompt=20 max=1 family=1 salt=1
        prefill 1 on b to b
        run 100
        reserve 2 on b from b prompt=76 max=1 family=2
        prefill 2 on b to b
        run 300
        reserve 3 on b from b prompt=20 max=1 family=1 salt=2
        prefill 3 on b to b
        run 100
        empty"
    a_busy_engine_does_not_make_what_is_kept_dear: "
        worker b both blocks=20 context=80 host=40
        reserve 1 on b from b prompt=20 max=1 family=1
        prefill 1 on b to b
        run 100
        reserve 2 on b from b prompt=76 max=1 family=2
        prefill 2 on b to b
        run 300
        reserve 3 on b from b prompt=4 max=24 family=3
        prefill 3 on b to b
        step b
        reserve 4 on b from b prompt=20 max=1 family=1
        prefill 4 on b to b
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
        reserve 5 on b from b prompt=76 max=1 family=4
        prefill 5 on b to b
        run 300
        reserve 6 on b from b prompt=20 max=1 family=1
        prefill 6 on b to b
        run 100
        empty"
    what_is_on_disk_is_found_by_the_next_life: "
        worker b both blocks=20 context=80 host=8 disk=16
        reserve 1 on b from b prompt=20 max=1 family=1
        prefill 1 on b to b
        run 100
        reserve 2 on b from b prompt=76 max=1 family=2
        prefill 2 on b to b
        run 300
        restart b
        reserve 3 on b from b prompt=20 max=1 family=1
        prefill 3 on b to b
        run 900
        empty"
    one_that_lost_its_blocks_has_them_brought_back: "
        worker b both blocks=12 context=48 host=40
        reserve 1 on b from b prompt=16 max=28 expect=1
        reserve 2 on b from b prompt=20 max=12 expect=1
        prefill 1 on b to b
        prefill 2 on b to b
        run 900
        empty"
    one_whose_blocks_do_not_come_back_computes_them: "
        worker b both blocks=12 context=48 host=40
        reserve 1 on b from b prompt=16 max=28 expect=1
        reserve 2 on b from b prompt=20 max=12 expect=1
        prefill 1 on b to b
        prefill 2 on b to b
        run 291
        fetches b fail
        run 900
        empty"
    a_copy_that_fails_keeps_nothing_and_holds_nothing: "
        worker b both blocks=20 context=80 host=16
        reserve 1 on b from b prompt=20 max=1 family=1
        prefill 1 on b to b
        step b
        step b
        step b
        shelves b fail
        run 100
        drain b
        empty"
}
