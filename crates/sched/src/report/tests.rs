//! Tests of every number in a load, and of when it is reported to routers.

use super::*;
use crate::WorkerLimits;
use crate::test_worker::{MS, PEER, ROUTER, TestWorker, Want, handoff, limits, prices};
use cleave_domain::{
    BlockRef, HandoffTarget, LinkPrice, PrefillBacklog, RowPrice, StateCapacity, StepProgress,
    WorkerId,
};

const OTHER: RouterId = RouterId(2);

fn noticeable(worker: &TestWorker, load: &WorkerLoad) -> bool {
    let brain = &worker.brain;
    let now = brain.machines.context.now();
    brain
        .machines
        .reports
        .noticeable(load, now, &brain.machines.forecast, &brain.machines.steps)
}

fn nanos(nanos: u64) -> Duration {
    Duration::from_nanos(nanos)
}

/// Microseconds of prompts without urgency, and of those that must begin within 50 ms.
fn backlog(later: u32, soon: u32) -> PrefillBacklog {
    let mut backlog = PrefillBacklog::default();
    (backlog.micros[1][8], backlog.micros[1][0]) = (later, soon);
    backlog
}

fn with_targets(prompt: u32, due: Duration, tpot: Duration) -> Want {
    Want {
        due: Some(due),
        tpot: Some(tpot),
        ..Want::tokens(prompt)
    }
}

#[test]
fn a_load_counts_what_waits_and_what_runs() {
    let mut worker = TestWorker::new(limits());
    assert_eq!(
        worker.brain.load(),
        WorkerLoad {
            blocks_free: 100,
            ..WorkerLoad::default()
        }
    );
    worker.reserve(1, Want::tokens(160), PEER);
    let reserved = WorkerLoad {
        blocks_free: 90,
        sequences_waiting: 1,
        context_tokens: 160,
        streams: 1,
        ..WorkerLoad::default()
    };
    assert_eq!(worker.brain.load(), reserved);
    worker.submit(2, Want::tokens(160)).expect("there is room");
    let load = worker.brain.load();
    let running = WorkerLoad {
        blocks_free: 80,
        sequences_waiting: 1,
        sequences_running: 1,
        queue_tokens: 160,
        context_tokens: 320,
        streams: 2,
        // 160 of 64 tokens a step, 12880 pairs and a draw.
        backlog: backlog(2517, 0),
        // 64 rows with 2080 pairs.
        step_left: nanos(1_002_080),
        ..WorkerLoad::default()
    };
    assert_eq!(load, running);
}

#[test]
fn a_load_follows_the_time_and_the_steps() {
    let mut worker = TestWorker::new(limits());
    worker.submit(1, Want::tokens(160)).expect("there is room");
    worker.now = Time::from_nanos(400_000);
    let urgent = with_targets(32, MS * 10, MS * 20);
    worker.submit(2, urgent).expect("it can be in time");
    let load = WorkerLoad {
        blocks_free: 88,
        sequences_waiting: 1,
        sequences_running: 1,
        queue_tokens: 192,
        context_tokens: 192,
        streams: 2,
        backlog: backlog(2517, 505),
        tpot_least: Some(MS * 20),
        step_left: nanos(602_080),
        ..WorkerLoad::default()
    };
    assert_eq!(worker.brain.load(), load);
    worker.now = Time::ZERO;
    worker.end_step();
    // 64 tokens are computed: 96 more attend to them.
    let load = WorkerLoad {
        sequences_waiting: 0,
        sequences_running: 2,
        queue_tokens: 128,
        backlog: backlog(1515, 505),
        step_left: worker.brain.load().step_left,
        ..load
    };
    assert_eq!(worker.brain.load(), load);
}

#[test]
fn a_prompt_for_another_worker_is_no_stream_here() {
    let mut worker = TestWorker::new(limits());
    let target = HandoffTarget {
        worker: PEER,
        present: 0,
        blocks: vec![BlockRef::default(); 2],
        state: None,
        window: None,
    };
    worker.prefill(1, Want::tokens(32), target);
    let load = worker.brain.load();
    assert_eq!((load.streams, load.context_tokens), (0, 0));
    assert_eq!((load.queue_tokens, load.sequences_running), (32, 1));
}

#[test]
fn a_load_without_prices_predicts_nothing() {
    let mut worker = TestWorker::new(WorkerLimits {
        // Nothing is known before the rows of a step are.
        prices: Prices {
            rows: Vec::new(),
            pair_picos: 0,
            ..prices()
        },
        ..limits()
    });
    let want = with_targets(160, MS * 10, MS * 20);
    worker.submit(1, want).expect("nothing is known");
    let load = WorkerLoad {
        blocks_free: 90,
        sequences_running: 1,
        queue_tokens: 160,
        ..WorkerLoad::default()
    };
    assert_eq!(worker.brain.load(), load);
    worker.brain.machines.reports.load = load;
    assert!(!noticeable(&worker, &load));
    let more = WorkerLoad {
        queue_tokens: 161,
        ..load
    };
    assert!(noticeable(&worker, &more), "reported exactly");
}

#[test]
fn a_step_that_takes_too_long_is_reported_stuck() {
    let mut worker = TestWorker::new(limits());
    worker.submit(1, Want::tokens(160)).expect("there is room");
    worker.now = Time::ZERO + worker.brain.limits().step_max;
    worker.handle(crate::WorkerInput::Woke);
    let load = worker.brain.load();
    assert_eq!(
        (load.progress, load.step_left),
        (StepProgress::Stuck, Duration::ZERO)
    );
    let last_load = worker.reports.last().map(|(_, report)| report.clone());
    let Some(Report::Load(last_load)) = last_load else {
        panic!("{last_load:?}");
    };
    assert_eq!(last_load.progress, StepProgress::Stuck);
}

#[test]
fn an_infeasible_gap_binds_no_other_stream() {
    let mut worker = TestWorker::new(limits());
    let gap = |tpot| Want {
        tpot: Some(tpot),
        output: 90,
        ..Want::tokens(50)
    };
    // A step of one such stream takes 1.0051 ms.
    worker.submit(1, gap(nanos(1_005_099))).expect("no due");
    assert_eq!(worker.brain.load().tpot_least, None);
    worker.submit(2, gap(nanos(1_005_100))).expect("no due");
    assert_eq!(worker.brain.load().tpot_least, Some(nanos(1_005_100)));
}

#[test]
fn a_stream_that_ends_soon_binds_no_other_stream() {
    let least = |output| {
        let mut worker = TestWorker::new(limits());
        let want = Want {
            tpot: Some(MS * 100),
            output,
            ..Want::tokens(50)
        };
        worker.submit(1, want).expect("there is room");
        let before = worker.brain.load().tpot_least;
        assert_eq!(before, Some(MS * 100), "it is yet to begin");
        worker.end_step();
        worker.brain.load().tpot_least
    };
    // Half a second is five of its gaps; one token was drawn.
    assert_eq!([least(5), least(6)], [None, Some(MS * 100)]);
}

/// A worker that has just reported its load, and that load.
fn worker_with_prompt() -> (TestWorker, WorkerLoad) {
    let mut worker = TestWorker::new(limits());
    let want = with_targets(320, MS * 200, MS * 20);
    worker.submit(1, want).expect("it can be in time");
    let load = worker.brain.load();
    worker.brain.machines.reports.load = load;
    worker.brain.machines.reports.load_at = Some(worker.now);
    (worker, load)
}

#[test]
fn counts_of_a_load_are_reported_at_once() {
    let (worker, load) = worker_with_prompt();
    assert!(!noticeable(&worker, &load));
    let changes: [fn(&mut WorkerLoad); 5] = [
        |load| load.sequences_waiting += 1,
        |load| load.sequences_running += 1,
        |load| load.blocks_free += 1,
        |load| load.progress = StepProgress::Stuck,
        |load| load.streams += 1,
    ];
    for change in changes {
        let mut other = load;
        change(&mut other);
        assert!(noticeable(&worker, &other), "{other:?}");
    }
}

#[test]
fn amounts_of_a_load_are_reported_ten_times_a_second() {
    let (mut worker, load) = worker_with_prompt();
    let changes: [fn(&mut WorkerLoad); 4] = [
        |load| load.queue_tokens -= 1,
        |load| load.context_tokens += 1,
        |load| load.backlog.micros[1][8] += 1,
        |load| load.tpot_least = Some(Duration::from_micros(19_999)),
    ];
    let noticed = |worker: &TestWorker| {
        changes.map(|change| {
            let mut other = load;
            change(&mut other);
            noticeable(worker, &other)
        })
    };
    assert_eq!(noticed(&worker), [false; 4]);
    worker
        .brain
        .machines
        .context
        .advance(Time::from_nanos(99_999_999));
    assert_eq!(noticed(&worker), [false; 4]);
    worker
        .brain
        .machines
        .context
        .advance(Time::from_nanos(100_000_000));
    assert_eq!(noticed(&worker), [true; 4]);
    let passed = WorkerLoad {
        step_left: Duration::ZERO,
        ..load
    };
    assert!(!noticeable(&worker, &passed), "time alone is no news");
}

#[test]
fn work_is_reported_at_once_if_it_moved_over_a_step() {
    let (mut worker, load) = worker_with_prompt();
    let moved = |worker: &TestWorker, micros: u32| {
        let mut other = load;
        other.backlog.micros[1][8] += micros;
        noticeable(worker, &other)
    };
    // The step under way takes 1002.08 us; a twentieth of the work is less.
    assert_eq!([moved(&worker, 1002), moved(&worker, 1003)], [false, true]);
    worker.brain.machines.reports.load.backlog.micros[1][8] = 40_000;
    let all = worker
        .brain
        .machines
        .reports
        .load
        .backlog
        .work_ahead(i32::MAX, None);
    let part = u32::try_from((all / 20).as_micros()).expect("small");
    let of = |micros| {
        let mut other = worker.brain.machines.reports.load;
        other.backlog.micros[1][8] -= micros;
        noticeable(&worker, &other)
    };
    assert_eq!([of(part), of(part + 1)], [false, true]);
}

#[test]
fn a_gap_is_reported_at_once_if_it_moved_by_a_tenth() {
    let (worker, load) = worker_with_prompt();
    let is_noticeable = |tpot_least| noticeable(&worker, &WorkerLoad { tpot_least, ..load });
    assert!(!is_noticeable(Some(MS * 18)), "a tenth less");
    assert!(is_noticeable(Some(MS * 18 - nanos(1))));
    assert!(is_noticeable(None));
    assert!(gap_moved(None, Some(MS)) && !gap_moved(None, None));
}

#[test]
fn a_change_counts_above_its_share() {
    assert!(!moved(100, 90, 10) && moved(100, 89, 10));
    assert!(!moved(100, 111, 10) && moved(100, 112, 10));
    assert!(!moved(0, 0, 10) && moved(0, 1, 10));
}

#[test]
fn prices_have_moved_where_a_router_would_predict_badly() {
    let link = |to, byte_picos| {
        let price = LinkPrice {
            latency_nanos: 1,
            byte_picos,
        };
        (WorkerId(to), price)
    };
    let reported = Prices {
        links: vec![link(2, 1000)],
        error_permille: 100,
        ..prices()
    };
    let changed = |change: fn(&mut Prices)| {
        let mut current = reported.clone();
        change(&mut current);
        prices_moved(&reported, &current)
    };
    assert!(!changed(|_| ()));
    assert!(!changed(|current| current.rows[0].nanos = 900_000));
    assert!(changed(|current| current.rows[0].nanos = 899_999));
    assert!(changed(|current| current.pair_picos = 899));
    assert!(changed(|current| current.context_picos = 1799));
    assert!(changed(|current| current.draw_nanos = 4499));
    assert!(changed(|current| current.links[0].1.byte_picos = 899));
    assert!(changed(|current| current.links[0].0 = WorkerId(3)));
    assert!(changed(|current| current.links.clear()));
    assert!(!changed(|current| current.error_permille = 150));
    assert!(changed(|current| current.error_permille = 151));
    assert!(changed(|current| current
        .rows
        .push(RowPrice { rows: 9, nanos: 9 })));
}

#[test]
fn prices_are_reported_once_a_second_at_most() {
    let mut worker = TestWorker::new(limits());
    let price_reports = |worker: &TestWorker| {
        let reports = worker.reports.iter();
        let prices = reports.filter(|(_, report)| matches!(report, Report::Prices(_)));
        prices.count()
    };
    let measured = |worker: &mut TestWorker, to, now| {
        worker.now = now;
        let mut peer = PEER;
        peer.worker = WorkerId(to);
        let price = LinkPrice {
            latency_nanos: 10,
            byte_picos: 10,
        };
        worker.handle(crate::WorkerInput::LinkMeasured { peer, price });
        price_reports(worker)
    };
    assert_eq!(price_reports(&worker), 1, "to a router that joins");
    assert_eq!(measured(&mut worker, 2, Time::from_nanos(5)), 2);
    assert_eq!(measured(&mut worker, 3, Time::from_nanos(1_000_000_004)), 2);
    assert_eq!(measured(&mut worker, 3, Time::from_nanos(1_000_000_005)), 3);
    assert_eq!(measured(&mut worker, 3, Time::from_nanos(3_000_000_000)), 3);
}

#[test]
fn each_router_receives_its_own_order_count_with_a_load() {
    let mut worker = TestWorker::new(limits());
    worker.handle(crate::WorkerInput::RouterJoined { router: OTHER });
    worker.submit(1, Want::tokens(160)).expect("there is room");
    let last_load = |worker: &TestWorker, to: RouterId| {
        let mut loads = worker
            .reports
            .iter()
            .filter_map(|(router, report)| match report {
                Report::Load(load) if *router == to => Some(load),
                _ => None,
            });
        let last = loads.next_back().expect("it was reported");
        (last.orders_received, last.queue_tokens)
    };
    assert_eq!(last_load(&worker, ROUTER), (1, 160));
    assert_eq!(last_load(&worker, OTHER), (0, 160));
}

#[test]
fn a_joining_router_receives_prices_before_a_load() {
    let worker = TestWorker::new(limits());
    let reports: Vec<_> = worker.reports.iter().map(|(_, report)| report).collect();
    assert!(matches!(
        reports[..],
        [Report::Prices(_), Report::Serves { .. }, Report::Load(_)]
    ));
    let unknown = TestWorker::new(WorkerLimits {
        prices: Prices::default(),
        ..limits()
    });
    let first = unknown.reports.first().map(|(_, report)| report);
    assert!(matches!(first, Some(Report::Serves { .. })));
}

#[test]
fn slack_is_the_time_until_a_prompt_must_begin() {
    let mut worker = TestWorker::new(limits());
    let slack = |worker: &TestWorker, number| {
        let sequence = worker.brain.machines.sequences.get(handoff(number));
        let sequence = sequence.expect("it is accepted");
        let now = worker.brain.machines.context.now();
        worker.brain.machines.forecast.prompt_slack(sequence, now)
    };
    worker
        .submit(1, with_targets(160, MS * 10, MS * 20))
        .expect("in time");
    // Two whole chunks, the rest, 12880 pairs and a draw take 3.01788 ms.
    assert_eq!(slack(&worker, 1), Some(nanos(10_000_000 - 3_017_880)));
    worker
        .brain
        .machines
        .context
        .advance(Time::from_nanos(6_982_120));
    assert_eq!(slack(&worker, 1), Some(Duration::ZERO));
    worker
        .brain
        .machines
        .context
        .advance(Time::from_nanos(6_982_121));
    assert_eq!(slack(&worker, 1), None);
    worker.submit(2, Want::tokens(10)).expect("there is room");
    assert_eq!(slack(&worker, 2), None, "it is due at no time");
}

#[test]
fn a_worker_is_drained_once() {
    let mut context = crate::context::WorkerContext::new(limits());
    let mut reports = RouterReports::new(context.limits());
    reports.nothing_left(&mut context);
    assert!(!context.has_outputs(), "it does not drain");
    for _ in 0..2 {
        reports.drain(&mut context);
        reports.nothing_left(&mut context);
    }
    let outputs: Vec<_> = std::iter::from_fn(|| context.poll()).collect();
    assert_eq!(outputs, [WorkerOutput::Drained]);
    assert!(reports.draining());
}

#[test]
fn a_router_that_left_is_sent_nothing() {
    let mut context = crate::context::WorkerContext::new(limits());
    let forecast = WorkForecast::new(context.limits());
    let mut reports = RouterReports::new(context.limits());
    for router in [ROUTER, OTHER] {
        reports.join(&mut context, router, &[], &forecast);
    }
    while context.poll().is_some() {}
    reports.leave(OTHER);
    reports.order_received(OTHER);
    reports.serve(&mut context, Role::Decode);
    let outputs: Vec<_> = std::iter::from_fn(|| context.poll()).collect();
    let role = Role::Decode;
    let report = Report::Serves { role };
    let router = ROUTER;
    assert_eq!(outputs, [WorkerOutput::Report { router, report }]);
    assert_eq!(
        reports.routers().keys().copied().collect::<Vec<_>>(),
        [ROUTER]
    );
}

#[test]
fn a_load_has_the_state_slots_that_can_be_taken() {
    let mut limits = limits();
    limits.capacity.states = Some(StateCapacity {
        bytes: 100,
        count: 3,
    });
    let mut worker = TestWorker::new(limits);
    assert_eq!(worker.brain.load().states_free, 3);
    worker.submit(1, Want::tokens(16)).expect("there is room");
    assert_eq!(worker.brain.load().states_free, 2);
}
