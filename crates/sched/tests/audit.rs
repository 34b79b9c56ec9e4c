//! The sums of blocks that a worker reports: which sequences hold how many, and for what.

use crate::stage::script::play;

/// One sum of the last audit in a script's output.
fn sum(log: &str, name: &str) -> u32 {
    let pool = log.rsplit("pool ").next().expect("an audit");
    let sum = pool.split(name).nth(1).expect("a sum");
    let number = sum.trim_start_matches(": ").split([',', '\n']).next();
    number.expect("a number").parse().expect("a number")
}

/// Plays a script that ends with an audit, and compares its sums in this order: held, reserved,
/// leased, quarantined, leaked, swapped.
#[track_caller]
fn audited(script: &str, expected: [u32; 6]) {
    let log = play(script);
    let names = [
        "blocks_held",
        "blocks_reserved",
        "blocks_leased",
        "blocks_quarantined",
        "blocks_leaked",
        "blocks_swapped",
    ];
    assert_eq!(names.map(|name| sum(&log, name)), expected, "{log}");
}

#[test]
fn reserved_blocks_are_those_of_all_reservations() {
    audited(
        "worker p prefill
        worker d decode
        reserve 1 on d from p prompt=10
        reserve 2 on d from p prompt=6
        pool d",
        [5, 5, 0, 0, 0, 0],
    );
}

#[test]
fn leased_blocks_are_those_of_prompts_for_other_workers() {
    let two = "worker p prefill step=32
        worker d decode blocks=20
        reserve 1 on d from p prompt=10
        prefill 1 on p to d
        reserve 2 on d from p prompt=6
        prefill 2 on p to d
        step p
        ";
    // The first was alone in its step, and its blocks are still to be sent; the second runs.
    audited(&format!("{two} pool p"), [5, 0, 5, 0, 0, 0]);
    // A sequence that landed and decodes here belongs to this worker.
    audited(&format!("{two} run 15\n pool d"), [5, 0, 0, 0, 0, 0]);
}

#[test]
fn blocks_of_sequences_that_generate_here_are_not_leased() {
    audited(
        "worker b both
        start 1 on b prompt=10 max=9
        step b
        step b
        pool b",
        [3, 0, 0, 0, 0, 0],
    );
}

#[test]
fn blocks_a_sender_may_still_write_to_are_quarantined() {
    let begin = "worker p prefill
        worker d decode onesided
        reserve 1 on d from p prompt=10
        reserve 2 on d from p prompt=6
        reserve 3 on d from p prompt=4
        prefill 1 on p to d
        prefill 2 on p to d
        ";
    let cancelled = format!("{begin} cancel 1 on d\n cancel 2 on d\n pool d");
    audited(&cancelled, [6, 1, 0, 5, 0, 0]);
}

#[test]
fn blocks_that_only_a_step_still_touches_are_not_quarantined() {
    audited(
        "worker b both
        start 1 on b prompt=6
        cancel 1 on b
        pool b",
        [2, 0, 0, 0, 0, 0],
    );
}

/// Two streams outgrow a pool of six blocks; the second is copied to host memory from 50 ms to
/// 54 ms, and back from 94 ms to 98 ms.
const SWAPPED: &str = "worker b both blocks=6 cache=off swap=8
    start 1 on b prompt=8 max=9 expect=1
    start 2 on b prompt=8 max=9 expect=1
    run 50";

#[test]
fn swapped_blocks_are_those_in_host_memory_or_copied() {
    // While they are copied out, the blocks are still held.
    audited(&format!("{SWAPPED}\n pool b"), [6, 0, 0, 0, 0, 3]);
    audited(&format!("{SWAPPED}\n run 5\n pool b"), [4, 0, 0, 0, 0, 3]);
    // While they are copied back, the new blocks are held too.
    audited(&format!("{SWAPPED}\n run 45\n pool b"), [3, 0, 0, 0, 0, 3]);
    audited(&format!("{SWAPPED}\n run 50\n pool b"), [3, 0, 0, 0, 0, 0]);
}

#[test]
fn a_cancelled_swapped_sequence_holds_no_host_memory() {
    let cancelled = format!("{SWAPPED}\n run 5\n cancel 2 on b\n pool b");
    audited(&cancelled, [4, 0, 0, 0, 0, 0]);
}

#[test]
fn blocks_of_a_move_are_not_leased() {
    let moving = "worker a both
        worker e decode
        start 1 on a prompt=9 max=20
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=20 ahead=8
        migrate 1 on a to e
        ";
    // The sequence decodes here while its blocks are sent; then it pauses for the last one.
    audited(&format!("{moving} pool a"), [4, 0, 0, 0, 0, 0]);
    let paused = format!("{moving} run 10");
    assert!(play(&paused).ends_with("waiting 0 running 0 free 4\n"));
    audited(&format!("{paused}\n pool a"), [4, 0, 0, 0, 0, 0]);
    // The target's blocks are reserved until the move has landed.
    audited(&format!("{paused}\n pool e"), [6, 6, 0, 0, 0, 0]);
}

#[test]
fn blocks_that_are_copied_to_host_memory_are_not_leaked() {
    let offloading = "worker b both blocks=20 context=80 host=16
        start 1 on b prompt=20 max=1
        step b
        step b
        step b
        ";
    // The sequence is over; the copies alone hold its five full blocks.
    audited(&format!("{offloading} pool b"), [5, 0, 0, 0, 0, 0]);
    let copied = format!("{offloading} shelves b\n pool b");
    audited(&copied, [0, 0, 0, 0, 0, 0]);
}
