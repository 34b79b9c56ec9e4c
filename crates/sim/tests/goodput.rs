//! Goodput worlds: the same seed gives the same score, everybody ends once, and promises are counted as a
//! person with a pencil would.

use cleave_domain::{LinkPrice, Prices, RowPrice, Slo, SloClass, SloPolicy, Time};
use cleave_sim::goodput::{
    Arrival, Client, Contest, End, Fleet, Outcome, Prompt, Scenario, Way, Workload, run,
};
use std::sync::Arc;
use std::time::Duration;

fn policy(ttft: u64, tpot: u64) -> Arc<SloPolicy> {
    let class = SloClass {
        ttft: Some(Duration::from_millis(ttft)),
        tpot: Some(Duration::from_millis(tpot)),
        ..SloClass::default()
    };
    Arc::new(SloPolicy {
        classes: vec![class],
        ..SloPolicy::default()
    })
}

fn contest(fleet: &str, policy: &Arc<SloPolicy>) -> Contest {
    Contest {
        fleet: fleet.parse().expect("it is there"),
        policy: Arc::clone(policy),
        noise_permille: 50,
        seed: 1,
    }
}

fn score(fleet: &str, workload: &str, way: Way) -> Outcome {
    let policy = policy(500, 40);
    let workload: Workload = workload.parse().expect("it is there");
    let contest = contest(fleet, &policy);
    run(&contest.scenario(way, workload.arrivals(&policy)))
}

const FLEET: &str = "prefill=2,decode=2,profile=h100-llama-3-8b";

#[test]
fn same_seed_same_score() {
    let workload = "conversation,rate=20,seconds=20,seed=5";
    let json =
        |outcome: &Outcome| serde_json::to_string(&(&outcome.score, &outcome.clients)).unwrap();
    let once = score(FLEET, workload, Way::Auto);
    assert_eq!(json(&once), json(&score(FLEET, workload, Way::Auto)));
    let other = score(FLEET, "conversation,rate=20,seconds=20,seed=6", Way::Auto);
    assert_ne!(json(&once), json(&other));
}

/// Decode workers' seats were promised to streams whose prompts still waited elsewhere: no prompt stayed there,
/// all of them ran on half of the fleet, and a twentieth fewer were in time than with no roles at all.
#[test]
fn seats_for_who_was_not_there_kept_decode_workers_from_prompts() {
    let workload = "light-light,rate=720,seconds=4";
    let good = |way| score(FLEET, workload, way).score.all.good;
    let (auto, whole) = (good(Way::Auto), good(Way::Whole));
    assert!(auto * 100 >= whole * 98, "{auto} in time, and {whole}");
}

#[test]
fn every_arrival_ends_once_whatever_the_way_and_the_load() {
    for way in Way::ALL {
        for workload in [
            "conversation+long,rate=10,seconds=10,seed=1",
            "heavy-heavy,rate=60,seconds=10,cv=3,shared=512,groups=4,seed=2",
        ] {
            let Outcome { score, clients, .. } = score(FLEET, workload, way);
            let all = &score.all;
            let late: u64 = all.late.iter().sum();
            let ended = all.good + late + all.refused + all.failed;
            assert_eq!((ended, all.unfinished), (all.arrivals, 0), "{way:?}");
            assert_eq!(all.failed, 0, "{way:?}: nothing breaks here");
            assert_eq!(clients.len() as u64, all.arrivals);
            let silent = clients
                .iter()
                .filter(|c| c.tokens == 0 && c.end != Some(End::Refused));
            assert_eq!(silent.count(), 0, "{way:?}");
        }
    }
}

fn alone(at_millis: u64, prompt: u32, output_tokens: u32, policy: &SloPolicy) -> Arrival {
    Arrival {
        at: Time::from_nanos(at_millis * 1_000_000),
        prompt: Prompt::alone(at_millis, prompt),
        output_tokens,
        slo: Slo {
            ttft: policy.classes[0].ttft,
            tpot: policy.classes[0].tpot,
            ..Slo::default()
        },
        priority: 0,
    }
}

/// A step costs 10 ms and each row 1 ms, nothing else costs anything, and no message takes time.
fn by_hand(mut scenario: Scenario) -> Scenario {
    let row = |rows| RowPrice {
        rows,
        nanos: 10_000_000 + u64::from(rows) * 1_000_000,
    };
    let prices = Prices {
        rows: vec![row(1), row(1000)],
        link: LinkPrice::default(),
        ..Prices::default()
    };
    for device in &mut scenario.devices {
        device.real = prices.clone();
        device.limits.prices = prices.clone();
    }
    scenario.noise_permille = 0;
    scenario.message = Duration::ZERO;
    scenario
}

/// One worker, prices of one's own: a step costs 10 ms and each row 1 ms, nothing else costs anything, and no
/// message takes time. A prompt of 90 tokens takes 10 + 90 = 100 ms; each token after it takes 11 ms. A
/// second prompt that comes 50 ms later waits for the first's 50 ms, and its own step has the first's token in
/// it: 101 ms.
#[test]
fn a_tiny_world_is_counted_as_by_hand() {
    let policy = policy(130, 20);
    let contest = contest("both=1,profile=h100-llama-3-8b", &policy);
    let mut arrivals = vec![alone(0, 90, 3, &policy), alone(50, 90, 3, &policy)];
    // A gap that is promised would be kept from the other's prompt.
    arrivals
        .iter_mut()
        .for_each(|arrival| arrival.slo.tpot = None);
    let scenario = by_hand(contest.scenario(Way::LoadWhole, arrivals));
    let Outcome { score, clients, .. } = run(&scenario);
    let millis = |time: Time| time.as_nanos() / 1_000_000;
    // First: 100, then its second token in the second's prompt step at 201, its third at 201 + 12.
    let first = &clients[0];
    assert_eq!(first.first.map(millis), Some(100));
    assert_eq!(millis(first.last), 213);
    // Second: its prompt ends at 201, 151 ms after it came; then 213, then 11 ms alone.
    let second = &clients[1];
    assert_eq!(second.first.map(millis), Some(201));
    assert_eq!(millis(second.last), 224);
    // 100 ms are within 130 ms; 151 ms are not.
    assert_eq!(first.end, Some(End::Good));
    assert_eq!(second.end, Some(End::Late(cleave_domain::Aim::Ttft)));
    assert_eq!((score.all.good, score.all.late), (1, [1, 0, 0]));
    // Gaps: (213 - 100) / 2 and (224 - 201) / 2.
    assert_eq!(score.all.ttft.p50, Duration::from_millis(100));
    assert_eq!(score.all.tpot.p99, Duration::from_micros(56_500));
}

/// The same scenario where every engine takes so many steps at a time.
fn in_flight(mut scenario: Scenario, steps: u32) -> Scenario {
    for device in &mut scenario.devices {
        device.limits.steps_in_flight = steps;
    }
    scenario
}

/// A stream draws every 11 ms from 100 ms on. A prompt that comes at 105 ms waits for the step under way,
/// which is over at 111 ms, or for the one behind it too, at 122 ms; its own step has the stream's token
/// in it and takes 101 ms.
#[test]
fn a_prompt_waits_for_a_step_more_only_at_the_end_of_one_where_two_are_in_flight() {
    let policy = policy(1000, 1000);
    let contest = contest("both=1,profile=h100-llama-3-8b", &policy);
    let waits = |at: u64| {
        let mut arrivals = vec![alone(0, 90, 30, &policy), alone(at, 90, 2, &policy)];
        arrivals
            .iter_mut()
            .for_each(|arrival| arrival.slo.tpot = None);
        let scenario = by_hand(contest.scenario(Way::LoadWhole, arrivals));
        let [one, two] = [1, 2].map(|steps| run(&in_flight(scenario.clone(), steps)).clients);
        // If the stream has drawn one token more by then, it ends when it would have all the same.
        assert_eq!(one[0].last, two[0].last);
        assert_eq!(
            (one[0].tokens, one[1].tokens),
            (two[0].tokens, two[1].tokens)
        );
        let first = |clients: &[Client]| clients[1].first.expect("it was served").as_nanos();
        (first(&two) - first(&one)) / 1_000_000
    };
    // Steps are 11 ms long here, and the next one is said 2 ms before the end.
    let waits: Vec<u64> = (100..122).map(waits).collect();
    assert!(
        waits.iter().all(|wait| [0, 10, 11].contains(wait)),
        "{waits:?}"
    );
    let late = waits.iter().filter(|wait| **wait > 0).count();
    assert!((2..=6).contains(&late), "{waits:?}");
}

#[test]
fn streams_are_the_same_and_first_tokens_a_step_later_where_two_are_in_flight() {
    let policy = policy(60_000, 10_000);
    for (fleet, way) in [
        (FLEET, Way::Auto),
        (FLEET, Way::LoadSplit),
        (FLEET, Way::Whole),
    ] {
        let contest = contest(fleet, &policy);
        let workload: Workload = "conversation,rate=12,seconds=20,seed=5"
            .parse()
            .expect("it is there");
        let scenario = contest.scenario(way, workload.arrivals(&policy));
        let [one, two] = [1, 2].map(|steps| run(&in_flight(scenario.clone(), steps)));
        let tokens = |outcome: &Outcome| -> Vec<u32> {
            outcome.clients.iter().map(|client| client.tokens).collect()
        };
        assert_eq!(tokens(&one), tokens(&two), "{way:?}");
        let (one, two) = (one.score.all, two.score.all);
        assert_eq!((one.failed, two.failed), (0, 0), "{way:?}");
        // As long as a step of this fleet takes.
        let step = Duration::from_millis(20);
        assert!(two.ttft.p50 <= one.ttft.p50 + step, "{way:?}");
    }
}

#[test]
fn blocks_of_split_requests_take_their_links_time() {
    let policy = policy(1000, 1000);
    let contest = contest("prefill=1,decode=1,profile=h100-llama-3-8b", &policy);
    let arrivals = vec![alone(0, 6400, 2, &policy)];
    let mut scenario = contest.scenario(Way::LoadSplit, arrivals);
    scenario.noise_permille = 0;
    let fast = run(&scenario);
    assert_eq!(fast.score.split, 1);
    for device in &mut scenario.devices {
        // A microsecond per KiB more.
        device.real.link.byte_picos += 1_000_000 / 1024;
    }
    let slow = run(&scenario);
    let gap = |outcome: &Outcome| {
        let client = &outcome.clients[0];
        client.last.since(client.first.unwrap())
    };
    // The last chunk is 256 tokens, four blocks of 8 MiB: 32 ms more, the rest is hidden behind it or not.
    let more = gap(&slow) - gap(&fast);
    assert!(more >= Duration::from_millis(32), "{more:?}");
}

#[test]
fn fleets_are_as_large_as_their_text_says() {
    let fleet: Fleet = "prefill=1,decode=3,profile=h100x8-llama-2-70b"
        .parse()
        .unwrap();
    assert_eq!((fleet.workers_count(), fleet.devices_count()), (4, 32));
}

/// Of a thousand requests, so many are good: by promises on one worker or two, on two, on one.
fn by_promises(workload: &str) -> [u64; 3] {
    [Way::Auto, Way::Split, Way::Whole].map(|way| {
        let all = score(FLEET, workload, way).score.all;
        all.attainment_permille()
    })
}

/// At loads that four devices just cannot bear, in each quadrant of light and heavy prompts and answers.
#[test]
fn lesson_22_choosing_serves_as_many_as_the_better_of_splitting_and_not() {
    for workload in [
        "light-light,rate=600,seconds=3,seed=1",
        "light-heavy,rate=160,seconds=3,seed=2",
        "heavy-light,rate=70,seconds=3,seed=3",
        "heavy-heavy,rate=50,seconds=3,seed=4",
    ] {
        let [auto, split, whole] = by_promises(workload);
        println!("{workload}: auto {auto} split {split} whole {whole}");
        assert!(
            auto * 100 >= split.max(whole) * 95,
            "{workload}: {auto} of a thousand, split {split}, whole {whole}"
        );
    }
}

/// Above what the fleet can bear, whoever promises nothing serves everybody late: routing by promises is
/// better than by load or by turns, whether those split or not.
#[test]
fn promises_are_kept_under_overload_where_others_serve_everybody_late() {
    let workload = "conversation,rate=125,seconds=8,seed=0";
    let good = |way| score(FLEET, workload, way).score.all.good;
    let auto = good(Way::Auto);
    for way in [
        Way::LoadSplit,
        Way::LoadWhole,
        Way::TurnsSplit,
        Way::TurnsWhole,
    ] {
        let other = good(way);
        println!("{}: {other}, slo auto: {auto}", way.name());
        assert!(
            auto * 100 >= other * 103,
            "{}: {other}, slo auto only {auto}",
            way.name()
        );
    }
}
