//! What is done to the fleet.
//!
//! Owns: each kind of fault, from its beginning until the fleet is whole again. Never: waits for a
//! time where it can wait for an event; where nothing may happen any more, an event or a limit.

use crate::dice::Dice;
use crate::fleet::Fleet;
use crate::harness::wait_for;
use crate::load::Ledger;
use crate::proxy::{Proxy, Weather};
use serde_json::json;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// One kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// kill -9, and a new start.
    Killed,
    /// SIGSTOP until the router gave it up, then SIGCONT.
    Stopped,
    /// SIGSTOP and SIGCONT before anybody noticed.
    Paused,
    /// SIGTERM, and a new start when it has left.
    DrainedBySignal,
    /// POST /admin/drain, and a new start when it has left.
    DrainedByCommand,
    /// Another role, and back.
    Role,
    DataCut,
    DataHalfClosed,
    DataThrottled,
    DataDelayed,
    DataFrozen,
    LineCut,
    LineHalfClosed,
    LineDelayed,
    /// The router gives the worker up though it lives.
    LineFrozen,
}

pub(crate) const KINDS: [(Kind, &str); 15] = [
    (Kind::Killed, "kill -9, restart"),
    (Kind::Stopped, "SIGSTOP until given up, SIGCONT"),
    (Kind::Paused, "short SIGSTOP, SIGCONT"),
    (Kind::DrainedBySignal, "SIGTERM drain, restart"),
    (Kind::DrainedByCommand, "POST /admin/drain, restart"),
    (Kind::Role, "POST /admin/role and back"),
    (Kind::DataCut, "worker to worker: cut"),
    (Kind::DataHalfClosed, "worker to worker: half-closed"),
    (Kind::DataThrottled, "worker to worker: throttled"),
    (Kind::DataDelayed, "worker to worker: delayed"),
    (Kind::DataFrozen, "worker to worker: frozen"),
    (Kind::LineCut, "worker to router: cut"),
    (Kind::LineHalfClosed, "worker to router: half-closed"),
    (Kind::LineDelayed, "worker to router: delayed"),
    (Kind::LineFrozen, "worker to router: frozen"),
];

/// Every kind in turn, in an order and on workers that the dice choose.
pub(crate) fn schedule(dice: &mut Dice, count: usize) -> Vec<(Kind, usize)> {
    let mut drawn = Vec::new();
    while drawn.len() < count {
        let mut round = KINDS.map(|(kind, _)| kind);
        dice.shuffle(&mut round);
        for kind in round {
            // Decode workers hold the streams, and are struck more often.
            let seat = *dice.pick(&[0, 1, 2, 2, 3, 3, 4, 4]);
            let behind_proxy = match kind {
                Kind::DataCut
                | Kind::DataHalfClosed
                | Kind::DataThrottled
                | Kind::DataDelayed
                | Kind::DataFrozen => seat.min(3),
                _ => seat,
            };
            drawn.push((kind, behind_proxy));
        }
    }
    drawn.truncate(count);
    drawn
}

/// Does it, and returns when the fleet is whole again.
pub(crate) fn strike(fleet: &mut Fleet, (kind, seat): (Kind, usize), ledger: &Ledger) {
    match kind {
        Kind::Killed => {
            fleet.seats[seat].process().signal("KILL");
            fleet.seats[seat].process().wait();
            fleet.seats[seat].start();
        }
        Kind::Stopped => {
            fleet.seats[seat].process().signal("STOP");
            fleet.wait_lost(seat);
            fleet.seats[seat].process().signal("CONT");
        }
        Kind::Paused => {
            fleet.seats[seat].process().signal("STOP");
            a_while(ledger, 600, Duration::from_millis(300));
            fleet.seats[seat].process().signal("CONT");
        }
        Kind::DrainedBySignal => {
            fleet.seats[seat].process().signal("TERM");
            leave_and_return(fleet, seat);
        }
        Kind::DrainedByCommand => {
            let command = json!({"worker": fleet.seats[seat].name});
            let (status, answer) = fleet.client.post("/admin/drain", &command);
            assert_eq!(status, 202, "{answer}");
            leave_and_return(fleet, seat);
        }
        Kind::Role => change_role(fleet, seat, ledger),
        Kind::DataCut => data(fleet, seat).cut(),
        Kind::DataHalfClosed => data(fleet, seat).half_close(),
        Kind::DataThrottled => spell(data(fleet, seat), Weather::Slow(200_000), ledger),
        Kind::DataDelayed => spell(data(fleet, seat), LATE, ledger),
        Kind::DataFrozen => spell(data(fleet, seat), Weather::Frozen, ledger),
        Kind::LineCut => rejoin(fleet, seat, Proxy::cut),
        Kind::LineHalfClosed => rejoin(fleet, seat, Proxy::half_close),
        Kind::LineDelayed => spell(&fleet.seats[seat].line, LATE, ledger),
        Kind::LineFrozen => {
            fleet.seats[seat].line.turn(Weather::Frozen);
            fleet.wait_lost(seat);
            fleet.seats[seat].line.turn(Weather::Clear);
        }
    }
    fleet.wait_whole();
}

const LATE: Weather = Weather::Late(Duration::from_millis(30));

fn data(fleet: &Fleet, seat: usize) -> &Proxy {
    let proxy = fleet.seats[seat].data.as_ref();
    proxy.expect("the schedule chooses workers behind a proxy")
}

/// A process that drains leaves by itself, and says by its status that nothing was cut off.
fn leave_and_return(fleet: &mut Fleet, seat: usize) {
    let seat = &mut fleet.seats[seat];
    let status = seat.process().wait();
    assert!(
        status.success(),
        "{} left with {status}: {}",
        seat.name,
        seat.logs()
    );
    seat.start();
}

fn change_role(fleet: &mut Fleet, seat: usize, ledger: &Ledger) {
    let (name, leg) = (fleet.seats[seat].name, fleet.seats[seat].leg);
    let other = match leg {
        "decode" => "prefill",
        _ => "both",
    };
    for role in [other, leg] {
        let command = json!({"worker": name, "role": role});
        let (status, answer) = fleet.client.post("/admin/role", &command);
        assert_eq!(status, 202, "{answer}");
        a_while(ledger, 600, Duration::from_secs(2));
    }
}

/// Ends the line to the router, and waits until the worker has come back by itself.
fn rejoin(fleet: &Fleet, seat: usize, end: fn(&Proxy)) {
    let joins = || fleet.router.logs().matches("worker joined").count();
    let before = joins();
    end(&fleet.seats[seat].line);
    wait_for("the worker's return", || (joins() > before).then_some(()));
}

/// Bad weather for a while.
fn spell(proxy: &Proxy, weather: Weather, ledger: &Ledger) {
    proxy.turn(weather);
    a_while(ledger, 2000, Duration::from_millis(1500));
    proxy.turn(Weather::Clear);
}

/// Until clients have heard so much more, or, where they may hear nothing, for so long.
fn a_while(ledger: &Ledger, events: u64, limit: Duration) {
    let heard = || ledger.events.load(Ordering::Relaxed);
    let (from, began) = (heard(), Instant::now());
    while heard() < from + events && began.elapsed() < limit {
        std::thread::park_timeout(Duration::from_millis(10));
    }
}
