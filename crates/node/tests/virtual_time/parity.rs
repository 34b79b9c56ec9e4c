//! This body and the simulator's drive the same brains; here they drive them through the same day,
//! and must decide the same, in the same order, at the same moments.

use crate::virtual_time::fleet::{DayTargets, day, serve};
use cleave_api::FlightEvent;
use cleave_domain::Time;
use cleave_node::RouterOptions;
use cleave_sim::goodput::{Scenario, decisions};
use futures::StreamExt;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// Every client asks at its time and reads to the end.
async fn live(scenario: &Scenario, tape: &Path) -> Vec<Value> {
    let born = Instant::now();
    let running = serve(RouterOptions {
        limits: scenario.router.clone(),
        tape: Some(tape.to_owned()),
        ..RouterOptions::default()
    })
    .await;
    assert_eq!(born.elapsed(), Duration::ZERO, "brains are born at zero");
    let frontend = running.frontend();
    let mut clients = JoinSet::new();
    for (number, arrival) in scenario.arrivals.iter().enumerate() {
        sleep_until(born + arrival.at.since(Time::ZERO)).await;
        let mut events = frontend.submit(arrival.request(number as u64));
        clients.spawn(async move {
            while let Some(event) = events.next().await {
                if let FlightEvent::Ended { .. } = event {
                    return;
                }
            }
        });
    }
    clients.join_all().await;
    running.drain(Duration::from_secs(3600)).await;
    let text = std::fs::read_to_string(tape).unwrap();
    std::fs::remove_file(tape).unwrap();
    let notes = text.lines().filter_map(|line| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        let note = line
            .pointer_mut("/Router/Said/output/OfModel/output/Note")?
            .take();
        let decides = note.get("Decided").is_some() || note.get("Placed").is_some();
        decides.then_some(note)
    });
    notes.map(without_identities).collect()
}

/// Removes what two bodies name differently: incarnations of workers, and ids of routers.
fn without_identities(mut note: Value) -> Value {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                for (name, field) in fields {
                    match (name.as_str(), field.as_u64()) {
                        ("incarnation", Some(_)) => *field = 0.into(),
                        ("flight", Some(id)) => *field = (id & ((1 << 40) - 1)).into(),
                        _ => strip(field),
                    }
                }
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
    strip(&mut note);
    note
}

async fn compare(seed: u64) -> String {
    let targets = DayTargets {
        one_in: 2,
        ttft_millis: (300, 2500),
        tpot_millis: 150,
    };
    let scenario = day(seed, 150, 36, targets);
    let simulated: Vec<Value> = decisions(&scenario)
        .into_iter()
        .map(|note| without_identities(serde_json::to_value(note).unwrap()))
        .collect();
    let file = format!("cleave-parity-{seed}-{}", std::process::id());
    let lived = live(&scenario, &std::env::temp_dir().join(file)).await;
    for (number, (here, there)) in lived.iter().zip(&simulated).enumerate() {
        assert_eq!(
            here, there,
            "seed {seed}, decision {number}: node, simulator"
        );
    }
    assert_eq!(lived.len(), simulated.len(), "seed {seed}");
    Value::from(lived).to_string()
}

// Invariant: I32.
#[tokio::test(start_paused = true)]
async fn node_and_simulator_decide_alike_on_one_trace() {
    let mut days = String::new();
    // Where a request arrives in the very millisecond in which a step ends, either may be handled
    // first; the day of seed 3 has such a case.
    for seed in [1, 2, 4, 5, 6, 7] {
        days += &compare(seed).await;
    }
    // The days must contain every kind of decision.
    let words = [
        "Placed",
        "Split",
        "OnDecode",
        "OnPrefill",
        "Waits",
        "Downgraded",
        "Late",
    ];
    let unseen = words
        .iter()
        .filter(|word| !days.contains(&format!("\"{word}\"")));
    let unseen: Vec<&&str> = unseen.collect();
    assert!(unseen.is_empty(), "nothing was {unseen:?}");
}
