//! Sequences with a window of six tokens, in blocks of four. The stage's engine panics where a
//! block of the window is missing or not the sequence's own.

use crate::stage::script::play;

/// The clients' tokens, as `flight token`.
fn emitted(log: &str) -> Vec<&str> {
    let tokens = log.lines().filter_map(|line| line.split_once("EMIT "));
    let tokens = tokens.map(|(_, token)| token.split(" cached").next().unwrap_or_default());
    let mut tokens: Vec<_> = tokens.collect();
    tokens.sort_unstable();
    tokens
}

/// Plays a script for a model with a window plane of so many blocks and for one without; returns
/// the log of the first.
fn play_both(windows: u32, script: &str) -> String {
    let with = play(&script.replace("WINDOWS", &format!("windows={windows}")));
    let without = play(&script.replace("WINDOWS", ""));
    assert_eq!(emitted(&with), emitted(&without), "{with}");
    with
}

// Invariant: I57.
/// Ten blocks of tokens, in a plane that has room for a window and one chunk.
#[test]
fn a_long_stream_needs_no_more_than_its_window() {
    for flying in [1, 2] {
        let script = format!(
            "worker b both blocks=12 context=48 WINDOWS flying={flying}
            start 1 on b prompt=12 max=28
            run 2000
            empty"
        );
        let log = play_both(4, &script);
        assert_eq!(log.matches("EMIT").count(), 28, "{log}");
        assert!(!log.contains("preempted"), "{log}");
    }
}

#[test]
fn a_hand_off_sends_the_live_window_alone() {
    let log = play_both(
        8,
        "worker p prefill WINDOWS
        worker d decode WINDOWS
        reserve 1 on d from p prompt=20 max=6
        prefill 1 on p to d
        run 300
        empty",
    );
    // The token at position 20 reads from position 15 on, of blocks 3 and 4, in two pieces each.
    for piece in 0..14 {
        let is_sent = (6..10).contains(&piece);
        let export = format!("export #1.0 w{piece} ");
        assert_eq!(log.contains(&export), is_sent, "{piece}: {log}");
    }
}

// Invariant: I57.
#[test]
fn without_a_free_window_a_reservation_is_refused() {
    let log = play(
        "worker p prefill windows=8
        worker d decode windows=4
        reserve 1 on d from p prompt=4 max=9 expect=9
        reserve 2 on d from p prompt=4 max=9 expect=9
        cancel 1 on d
        reserve 3 on d from p prompt=4 max=9 expect=9
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

#[test]
fn a_target_of_a_model_without_windows_is_refused() {
    for (prefill, decode) in [("windows=8", ""), ("", "windows=8")] {
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

#[test]
fn a_moving_stream_takes_its_window_along() {
    let log = play_both(
        8,
        "worker a both WINDOWS
        worker e decode WINDOWS
        start 1 on a prompt=9 max=16
        run 50
        reserve 1 on e from a attempt=1 prompt=9 output=4 max=16 ahead=8
        migrate 1 on a to e
        run 400
        empty",
    );
    assert!(log.contains("note moved out"), "{log}");
    assert!(log.contains("export #1.1 w"), "{log}");
}

// Invariant: I58.
/// The second prompt continues the first one's cached blocks. The third finds them too, but others
/// took the window blocks before its end, so that it begins anew.
#[test]
fn a_prefix_without_its_window_is_computed() {
    let script = |others: &str| {
        format!(
            "worker b both blocks=40 windows=6
            start 1 on b prompt=17 max=2 family=1
            run 200
            start 2 on b prompt=17 max=2 family=1
            run 200
            {others}
            start 9 on b prompt=17 max=2 family=1
            run 200
            empty"
        )
    };
    let last = |log: &str| -> String {
        let last = log.split("start 9 on b").nth(1).expect("a last prompt");
        last.to_owned()
    };
    let log = play(&script(""));
    assert!(log.matches("cached 16").count() >= 2, "{log}");
    assert!(last(&log).contains("cached 16"), "{log}");
    let others = "start 3 on b prompt=20 max=2 family=2\nrun 200";
    let log = play(&script(others));
    let third = last(&log);
    assert!(!third.contains("cached 16"), "{third}");
}

/// Swapped with its live window, and back.
#[test]
fn a_swapped_stream_goes_on_with_its_window() {
    let log = play_both(
        12,
        "worker b both slots=3 blocks=10 swap=40 WINDOWS
        start 1 on b prompt=9 max=16 expect=1
        start 2 on b prompt=9 max=16 expect=1
        start 3 on b prompt=5 max=16 expect=1
        run 4000
        empty",
    );
    assert_eq!(log.matches("EMIT").count(), 48, "{log}");
    assert!(log.contains("swapped out"), "{log}");
    assert!(log.contains(" window "), "{log}");
}
