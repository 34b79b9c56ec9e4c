//! Several routers share the same workers: each decides from the workers' reports, and workers
//! accept only what they can keep.

use crate::virtual_time::fleet::{DayTargets, day, serve};
use cleave_api::{FlightEvent, FlightStream, Frontend};
use cleave_domain::{Ending, RequestSlo, Time};
use cleave_node::{RouterNode, RouterOptions, RunningFleet, RunningRouter};
use cleave_sim::goodput::Scenario;
use futures::StreamExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// The result of a client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientOutcome {
    /// All tokens, within the targets.
    Good,
    Late,
    Refused,
}

async fn read(mut events: FlightStream, slo: RequestSlo) -> ClientOutcome {
    let began = Instant::now();
    let mut tokens = Vec::new();
    loop {
        match events.next().await.expect("a stream ends with its ending") {
            FlightEvent::Token(_) => tokens.push(began.elapsed()),
            FlightEvent::Ended { ending, .. } => match ending {
                Ending::Done { .. } => break,
                Ending::Refused(_) => return ClientOutcome::Refused,
                other => panic!("{other:?}"),
            },
        }
    }
    let (first, last) = (tokens[0], tokens[tokens.len() - 1]);
    let gaps = tokens.len() as u32 - 1;
    let tpot = (last - first).checked_div(gaps).unwrap_or_default();
    let within = |took: Duration, target: Option<Duration>| target.is_none_or(|most| took <= most);
    if within(first, slo.ttft) && within(tpot, slo.tpot) {
        ClientOutcome::Good
    } else {
        ClientOutcome::Late
    }
}

/// Arrivals take turns among the routers, as with a load balancer. Gives the clients' outcomes, and
/// how often a worker was passed over.
async fn live(scenario: &Scenario, routers_count: usize) -> (Vec<ClientOutcome>, f64) {
    let born = Instant::now();
    let options = RouterOptions {
        limits: scenario.router.clone(),
        ..RouterOptions::default()
    };
    let mut running: RunningFleet = serve(options.clone()).await;
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

fn count(got: &[ClientOutcome], outcome: ClientOutcome) -> usize {
    got.iter().filter(|one| **one == outcome).count()
}

// Invariant: I31.
#[tokio::test(start_paused = true)]
async fn two_routers_meet_as_many_targets_as_one() {
    let targets = DayTargets {
        one_in: 1,
        ttft_millis: (800, 2500),
        tpot_millis: 150,
    };
    // From what the fleet bears easily to more than it can.
    for gap_millis in [60, 40, 25] {
        let (mut one, mut two, mut requests_count) = (0, 0, 0);
        for seed in 1..=2 {
            let mut scenario = day(seed, 200, gap_millis, targets);
            // A request that waited has less of its target left, and would count as late.
            scenario.router = cleave_router::RouterLimits::default();
            requests_count += scenario.arrivals.len();
            let (alone, _) = live(&scenario, 1).await;
            let (shared, passed_over) = live(&scenario, 2).await;
            eprintln!(
                "gap {gap_millis} ms, seed {seed}: one router {} good, {} late, {} refused; two: {} good, {} late, {} refused, {passed_over} passed over",
                count(&alone, ClientOutcome::Good),
                count(&alone, ClientOutcome::Late),
                count(&alone, ClientOutcome::Refused),
                count(&shared, ClientOutcome::Good),
                count(&shared, ClientOutcome::Late),
                count(&shared, ClientOutcome::Refused),
            );
            one += count(&alone, ClientOutcome::Good);
            two += count(&shared, ClientOutcome::Good);
        }
        assert!(
            two * 100 >= one * 95,
            "{requests_count} asked every {gap_millis} ms: {two} good with two routers, {one} with one"
        );
    }
}
