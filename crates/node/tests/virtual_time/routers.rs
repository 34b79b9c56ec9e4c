//! Several routers share the same workers: each decides from what workers say, and workers take only
//! what they can keep.

use crate::fleet::{Promises, day, serve};
use cleave_api::{FlightEvent, FlightStream, Frontend};
use cleave_domain::{Ending, Slo, Time};
use cleave_node::{RouterNode, RouterOptions, Running, RunningRouter};
use cleave_sim::goodput::Scenario;
use futures::StreamExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// What a client got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Got {
    /// All of it, within what was promised.
    Good,
    Late,
    Refused,
}

async fn read(mut events: FlightStream, slo: Slo) -> Got {
    let asked = Instant::now();
    let mut tokens = Vec::new();
    loop {
        match events.next().await.expect("a stream ends with its ending") {
            FlightEvent::Token(_) => tokens.push(asked.elapsed()),
            FlightEvent::Ended { ending, .. } => match ending {
                Ending::Done { .. } => break,
                Ending::Refused(_) => return Got::Refused,
                other => panic!("{other:?}"),
            },
        }
    }
    let (first, last) = (tokens[0], tokens[tokens.len() - 1]);
    let gaps = tokens.len() as u32 - 1;
    let tpot = (last - first).checked_div(gaps).unwrap_or_default();
    let within = |took: Duration, target: Option<Duration>| target.is_none_or(|most| took <= most);
    match within(first, slo.ttft) && within(tpot, slo.tpot) {
        true => Got::Good,
        false => Got::Late,
    }
}

/// Arrivals take turns among the routers, as a load balancer has it. Gives what became of them, and how
/// often a worker was passed over.
async fn live(scenario: &Scenario, routers_count: usize) -> (Vec<Got>, f64) {
    let born = Instant::now();
    let options = RouterOptions {
        limits: scenario.router.clone(),
        ..RouterOptions::default()
    };
    let mut running: Running = serve(options.clone()).await;
    let mut others: Vec<RunningRouter> = Vec::new();
    for _ in 1..routers_count {
        let node = RouterNode {
            listen: "127.0.0.1:0".into(),
            options: options.clone(),
            picker: None,
        };
        let router = node.start().await.unwrap();
        running.join(&router);
        router.ready().await;
        others.push(router);
    }
    let mut frontends: Vec<Arc<dyn Frontend>> = vec![running.frontend()];
    frontends.extend(others.iter().map(RunningRouter::frontend));
    let mut clients = JoinSet::new();
    for (number, arrival) in scenario.arrivals.iter().enumerate() {
        sleep_until(born + arrival.at.since(Time::ZERO)).await;
        let events = frontends[number % routers_count].submit(arrival.request(number as u64));
        clients.spawn(read(events, arrival.slo.clone()));
    }
    let got = clients.join_all().await;
    let passed_over = frontends.iter().map(|frontend| {
        let text = frontend.metrics();
        let lines = text
            .lines()
            .filter(|line| line.starts_with("cleave_workers_passed_over_total"));
        let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        values.sum::<f64>()
    });
    let passed_over = passed_over.sum();
    for router in others {
        router.drain(Duration::from_secs(3600)).await;
    }
    running.drain(Duration::from_secs(3600)).await;
    (got, passed_over)
}

fn count(got: &[Got], what: Got) -> usize {
    got.iter().filter(|one| **one == what).count()
}

#[tokio::test(start_paused = true)]
async fn two_routers_kept_fewer_promises_than_one() {
    let promises = Promises {
        one_in: 1,
        ttft_millis: (800, 2500),
        tpot_millis: 150,
    };
    // From what the fleet bears easily to more than it can.
    for gap_millis in [60, 40, 25] {
        let (mut one, mut two, mut asked) = (0, 0, 0);
        for seed in 1..=2 {
            let mut scenario = day(seed, (200, gap_millis), promises);
            // Who waits has been promised less, and would be counted as late.
            scenario.router = cleave_router::Limits::default();
            asked += scenario.arrivals.len();
            let (alone, _) = live(&scenario, 1).await;
            let (shared, passed_over) = live(&scenario, 2).await;
            eprintln!(
                "gap {gap_millis} ms, seed {seed}: one router {} good, {} late, {} refused; two: {} good, {} late, {} refused, {passed_over} passed over",
                count(&alone, Got::Good),
                count(&alone, Got::Late),
                count(&alone, Got::Refused),
                count(&shared, Got::Good),
                count(&shared, Got::Late),
                count(&shared, Got::Refused),
            );
            one += count(&alone, Got::Good);
            two += count(&shared, Got::Good);
        }
        assert!(
            two * 100 >= one * 95,
            "{asked} asked every {gap_millis} ms: {two} good with two routers, {one} with one"
        );
    }
}
