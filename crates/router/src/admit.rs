//! Whether a request is taken on, and what becomes of one whose target cannot be met.
//!
//! Owns: admission, classes' `unmet` actions, the looks at the line, and the decisions' record. Never:
//! predicts; `forecast` does. Invariant: a request with a target is placed only where that is predicted
//! to be met, and told as soon as it cannot be. What has failed once, or has a token with its client,
//! is never refused for its target.
//!
//! **Who may overtake.** A look goes down the line in its order. One that would meet its target nowhere
//! holds up nobody. One that finds no room
//! may be overtaken by those of other queues that do, [`OVERTAKEN_MAX`] times; from then on the line
//! stands until it is placed, so that what is large does not starve. One without targets that gives way
//! to those that have some holds up only its own queue; it may starve until its time to wait is over.
//! By load and by turns nobody overtakes.

#[cfg(test)]
mod tests;

use crate::alarm::Alarm;
use crate::brain::{Brain, Draining};
use crate::candidates::Placing;
use crate::event::{Decided, Decision, Forecast, Mode, Note};
use crate::flight::Flight;
use crate::forecast::{Manners, Miss, Need};
use crate::line::{Kind, Place, Queue};
use crate::policy::{Ask, NoPlace};
use crate::tally::Payer;
use cleave_domain::{Aim, Ending, FlightId, Refusal, Request, SloClass, SloPolicy, Time, Unmet};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How often one that finds no room is overtaken at most.
const OVERTAKEN_MAX: u32 = 16;
/// Flights that find no place in one look at most.
const TRIES: u32 = 8;
/// Between two looks for news, where what is found is judged by prices: every worker's report is news.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Answers are expected to be as long as this share of those of late at most, in thousandths.
const ANSWER_PERMILLE: usize = 750;
/// And those of others that are in the way, as this share of them.
const LONG_PERMILLE: usize = 950;
/// Who gives way leaves this part of the tightest gap that any class promises.
const SPARED: u32 = 8;
/// What a client is told that could not be served on an idle fleet either.
const NEVER: Duration = Duration::from_secs(30);

impl Flight {
    pub(crate) fn payer(&self) -> Payer<'_> {
        Payer {
            class: &self.place.queue.class,
            tenant: &self.place.queue.tenant,
        }
    }

    /// Whether it may still be refused.
    pub(crate) fn is_new(&self) -> bool {
        self.failure.is_none() && !self.given()
    }
}

impl Placing {
    pub(crate) fn miss(&self) -> Option<Miss> {
        self.outlook.and_then(|outlook| outlook.miss)
    }
}

impl Brain {
    pub(crate) fn submitted(&mut self, id: FlightId, request: Arc<Request>) {
        assert!(!self.flights.contains_key(&id), "{id} was submitted twice");
        self.arrivals += 1;
        let refusal = if self.draining != Draining::No {
            Some(Refusal::Draining)
        } else if self.flights.len() >= self.limits.flights_max as usize {
            let retry_after = self.retry_after();
            Some(Refusal::QueueFull { retry_after })
        } else {
            None
        };
        let place = self.place(id, &request, (self.arrivals, self.now));
        let sizes = self.fleet.block_sizes();
        let unmet = self.limits.policy.class(&request.slo.class).unmet.clone();
        let mut flight = Flight::new(place, request, sizes, self.now);
        flight.unmet = unmet;
        self.tally.open(flight.payer());
        self.came(&flight.request);
        self.flights.insert(id, flight);
        match refusal {
            Some(refusal) => self.refuse(id, refusal, Vec::new()),
            None => self.admit(id),
        }
    }

    /// Where a request of that arrival stands.
    fn place(&self, id: FlightId, request: &Request, (arrival, since): (u64, Time)) -> Place {
        let class = self.limits.policy.class(&request.slo.class);
        let tokens = (request.prompt.len() + request.generated.len()) as u32;
        let alone = self.fleet.prompt_alone(tokens);
        Place {
            queue: Queue {
                kind: Kind::New,
                priority: request.slo.priority,
                class: Arc::from(class.name.as_str()),
                tenant: Arc::from(account(&self.limits.policy, &request.slo.tenant)),
            },
            urgency: request.priority,
            latest: match (&class.unmet, due(request)) {
                (_, None) => Time::END,
                (Unmet::Queue(limit), Some(_)) => since + *limit,
                (_, Some(due)) => since + due.saturating_sub(alone),
            },
            arrival,
            flight: id,
        }
    }

    /// Places a flight that is not in the line, or lets it wait, or ends it.
    fn admit(&mut self, id: FlightId) {
        match self.find(id) {
            Err(NoPlace::NoWorker) => match self.hope() {
                Some(start_max) => self.wait_for_workers(id, start_max),
                None => self.refuse(id, Refusal::NoWorker, Vec::new()),
            },
            Err(NoPlace::TooLong { tokens_max }) => {
                self.refuse(id, Refusal::TooLong { tokens_max }, Vec::new());
            }
            Ok(placing) => match placing.miss() {
                Some(miss) => self.unmet(id, miss, placing.considered),
                None if self.is_next(id) => self.start(id, &placing),
                None => {
                    self.wait(id);
                    if self.overtakes() {
                        self.look_soon();
                    }
                }
            },
            Err(NoPlace::Busy) => match self.too_long_a_wait(id) {
                Some(late) => self.unmet(id, late, Vec::new()),
                None => self.wait(id),
            },
        }
    }

    /// Whether the line, if the flight stood in it, would have it next.
    fn is_next(&mut self, id: FlightId) -> bool {
        if self.line.len() == 0 {
            return true;
        }
        let Some(place) = self.flights.get(&id).map(|flight| flight.place.clone()) else {
            return false;
        };
        self.line.join(&place);
        let next = self.head();
        self.line.leave(&place);
        next == Some(id)
    }

    /// No worker has room: whether it could be in time once one has, behind those who wait.
    fn too_long_a_wait(&self, id: FlightId) -> Option<Miss> {
        let flight = self.flights.get(&id)?;
        let need = self.need(flight)?;
        let (aim, target) = match need.ttft {
            Some(ttft) => (Aim::Ttft, ttft),
            None => (Aim::EndToEnd, need.prompt_left()? + need.counted),
        };
        let query = self.query(flight, Some(&need));
        let relief = self.fleet.relief(&query)?;
        let census = self.fleet.census();
        let decodes = census.decode + census.both;
        let workers = decodes.min(census.devices).max(1);
        let room = relief * (self.line.len() / workers + 1);
        let alone = self.fleet.alone_least(&query);
        let predicted = need.counted + need.ttft_by.stretch(room + alone);
        let clears = (alone <= target).then(|| predicted.saturating_sub(target));
        (predicted > target).then_some(Miss {
            aim,
            predicted,
            clears,
        })
    }

    /// The flight's target cannot be met: its class says what becomes of it.
    pub(crate) fn unmet(&mut self, id: FlightId, late: Miss, considered: Vec<Forecast>) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let until = |limit: &Duration| flight.submitted + *limit;
        // A policy that was checked leads to an end; one on a tape may not.
        let downgrades_max = self.limits.policy.classes.len() as u32;
        let class = self.class_of(flight);
        match &flight.unmet {
            // What would be missed on an idle fleet too is not waited for.
            Unmet::Queue(limit) if self.now < until(limit) && late.clears.is_some() => {
                if !self.line.contains(&flight.place) {
                    self.wait(id);
                }
            }
            Unmet::Downgrade(to) if to != &class.name && flight.downgrades < downgrades_max => {
                let to = self.limits.policy.class(to).clone();
                self.downgrade(id, &to, considered);
            }
            Unmet::Reject | Unmet::Queue(_) | Unmet::Downgrade(_) => {
                let Miss {
                    aim,
                    predicted,
                    clears,
                } = late;
                let refusal = Refusal::Late {
                    aim,
                    predicted,
                    retry_after: bounded(clears.unwrap_or(NEVER)),
                };
                self.refuse(id, refusal, considered);
            }
        }
    }

    fn downgrade(&mut self, id: FlightId, to: &SloClass, considered: Vec<Forecast>) {
        let class = to.name.clone();
        let decided = Decided::Downgraded {
            class: class.clone(),
        };
        self.decide(id, decided, considered);
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        self.line.leave(&flight.place);
        self.alarms.set(id, Alarm::Step, None);
        let policy = Arc::clone(&self.limits.policy);
        let mut request = Request::clone(&flight.request);
        request.slo.class = class;
        request.slo.priority = policy.priority_for(&request.slo.tenant, to.priority);
        (request.slo.ttft, request.slo.tpot, request.slo.e2e) = (to.ttft, to.tpot, to.e2e);
        let place = self.place(id, &request, (flight.place.arrival, flight.submitted));
        // What it was to cost the class that it leaves, that class is given back.
        self.tally.charge(flight.payer(), -flight.charged, &policy);
        self.tally.close(flight.payer());
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.place = place;
            flight.request = Arc::new(request);
            flight.unmet = to.unmet.clone();
            flight.downgrades += 1;
            flight.charged = 0;
            flight.wait_until = None;
            self.tally.open(flight.payer());
        }
        self.admit(id);
    }

    /// It will not be taken on.
    pub(crate) fn refuse(&mut self, id: FlightId, refusal: Refusal, considered: Vec<Forecast>) {
        self.decide(id, Decided::Refused(refusal.clone()), considered);
        self.end(id, Ending::Refused(refusal));
    }

    /// The latest moment to begin it has come, or all of its time to wait has passed.
    pub(crate) fn waited_out(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let by_time = self.limits.mode == Mode::Slo && flight.is_new();
        let Some(due) = due(&flight.request).filter(|_| by_time) else {
            return self.give_up(id);
        };
        let need = self.need(flight);
        let query = self.query(flight, need.as_ref());
        let alone = self.fleet.alone_least(&query);
        let queues = matches!(flight.unmet, Unmet::Queue(_));
        // Its prefix may be cached somewhere: then it may begin later than was thought.
        let last = flight.submitted + due.saturating_sub(alone);
        if !queues && last > self.now {
            return match flight.wait_until.filter(|at| *at > self.now) {
                Some(at) => self.alarms.set(id, Alarm::Step, Some(at.min(last))),
                None => self.give_up(id),
            };
        }
        let relief = need.and_then(|_| self.fleet.relief(&query));
        let miss = Miss {
            aim: match flight.request.slo.ttft {
                Some(_) => Aim::Ttft,
                None => Aim::EndToEnd,
            },
            predicted: self.now.since(flight.submitted) + alone,
            clears: Some(relief.unwrap_or_else(|| self.retry_after())),
        };
        self.unmet(id, miss, Vec::new());
    }

    // === looking at the line ===

    /// Whether one that finds no place may be overtaken.
    pub(crate) fn overtakes(&self) -> bool {
        self.limits.mode == Mode::Slo && self.fleet.priced()
    }

    /// Who is to be placed next.
    pub(crate) fn head(&self) -> Option<FlightId> {
        self.next_of(&BTreeSet::new(), &BTreeSet::new())
    }

    fn next_of(&self, closed: &BTreeSet<Queue>, passed: &BTreeSet<FlightId>) -> Option<FlightId> {
        let turn = Some(self.fleet.turns());
        let is_passed = |id| {
            let flight = self.flights.get(&id);
            let waits_on = |flight: &Flight| flight.homeless == turn || flight.pauses(self.now);
            passed.contains(&id) || flight.is_none_or(waits_on)
        };
        self.line.first(&self.tally, closed, is_passed)
    }

    /// Places whom it can, in the line's order.
    pub(crate) fn serve_line(&mut self) {
        let mut closed = BTreeSet::new();
        let mut overtaken: Vec<FlightId> = Vec::new();
        let mut passed = BTreeSet::new();
        let mut tries = 0;
        while let Some(id) = self.next_of(&closed, &passed).filter(|_| tries < TRIES) {
            let queue = self.flights.get(&id).map(|f| f.place.stands_in());
            match self.seek(id) {
                Ok(placing) => match placing.miss() {
                    None => {
                        self.start(id, &placing);
                        self.count_overtaken(&overtaken);
                    }
                    Some(miss) => {
                        tries += 1;
                        passed.insert(id);
                        self.unmet(id, miss, placing.considered);
                    }
                },
                // It holds nobody up.
                Err(NoPlace::TooLong { .. } | NoPlace::NoWorker) => {}
                Err(NoPlace::Busy) => {
                    tries += 1;
                    // The fleet is full, whatever a worker refused it for before.
                    if let Some(flight) = self.flights.get_mut(&id) {
                        flight.refused = None;
                    }
                    let stands = self.stands(id);
                    if stands == Stands::Firm {
                        break;
                    }
                    if stands == Stands::Patient {
                        overtaken.push(id);
                    }
                    closed.extend(queue);
                }
            }
        }
    }

    fn count_overtaken(&mut self, flights: &[FlightId]) {
        for id in flights {
            if let Some(flight) = self.flights.get_mut(id) {
                flight.overtaken += 1;
            }
        }
    }

    fn stands(&self, id: FlightId) -> Stands {
        let Some(flight) = self.flights.get(&id).filter(|_| self.overtakes()) else {
            return Stands::Firm;
        };
        if self.gives_way(flight) {
            Stands::Aside
        } else if flight.overtaken < OVERTAKEN_MAX {
            Stands::Patient
        } else {
            Stands::Firm
        }
    }

    /// News of room, or of time: whoever waits is looked at, but not for each word of each worker.
    pub(crate) fn look_soon(&mut self) {
        let at = self.looked_at + LOOK_EVERY;
        if self.line.len() == 0 {
            self.look_at = None;
        } else if self.now >= at {
            self.looked_at = self.now;
            self.look_at = None;
            self.serve_line();
        } else {
            self.look_at = Some(at);
        }
    }

    // === what a flight needs ===

    pub(crate) fn class_of(&self, flight: &Flight) -> &SloClass {
        self.limits.policy.class(&flight.place.queue.class)
    }

    /// Whether it takes only what those with targets leave.
    fn gives_way(&self, flight: &Flight) -> bool {
        let aims =
            |class: &SloClass| class.ttft.is_some() || class.tpot.is_some() || class.e2e.is_some();
        let slo = &flight.request.slo;
        let none = slo.ttft.is_none() && slo.tpot.is_none() && slo.e2e.is_none();
        none && flight.is_new() && self.limits.policy.classes.iter().any(aims)
    }

    /// Whether some classes have targets and others have none.
    pub(crate) fn anybody_gives_way(&self) -> bool {
        let aims =
            |class: &SloClass| class.ttft.is_some() || class.tpot.is_some() || class.e2e.is_some();
        let classes = &self.limits.policy.classes;
        classes.iter().any(aims) && !classes.iter().all(aims)
    }

    /// None where times do not decide, or nothing is known of them.
    pub(crate) fn need(&self, flight: &Flight) -> Option<Need> {
        if !self.overtakes() {
            return None;
        }
        let request = &flight.request;
        let generated = request.generated.len() as u32;
        let left = request.stop.max_tokens.saturating_sub(generated).max(1);
        let class = self.class_of(flight);
        let usual = self.tally.answer_tokens(&class.name, ANSWER_PERMILLE);
        let usual = usual.unwrap_or(self.limits.expected_output_tokens);
        let long = self.tally.answer_tokens(&class.name, LONG_PERMILLE);
        let long = long.unwrap_or(self.limits.expected_output_tokens.saturating_mul(2));
        let slo = Some(&request.slo).filter(|_| flight.is_new());
        let gaps = self
            .limits
            .policy
            .classes
            .iter()
            .filter_map(|class| class.tpot);
        Some(Need {
            ask: Ask::of(request, self.limits.expected_output_tokens),
            now: self.now,
            priority: request.slo.priority,
            output_long: long.saturating_sub(generated).clamp(1, left),
            output: usual.saturating_sub(generated).clamp(1, left),
            waited: self.now.since(flight.submitted),
            counted: match flight.unmet {
                Unmet::Queue(_) => Duration::ZERO,
                Unmet::Reject | Unmet::Downgrade(_) => self.now.since(flight.submitted),
            },
            ttft: slo.and_then(|slo| slo.ttft),
            tpot: slo.and_then(|slo| slo.tpot),
            e2e: slo.and_then(|slo| slo.e2e),
            ttft_by: self.tally.ttft(&class.name, self.now),
            tpot_by: self.tally.tpot(&class.name, self.now),
            others: self.tally.tpot_worst(self.now),
            spares: gaps.min().map(|gap| gap - gap / SPARED),
            manners: if !flight.is_new() {
                Manners::Resumed
            } else if self.gives_way(flight) {
                Manners::GivesWay
            } else {
                Manners::New
            },
        })
    }

    /// Says what was decided about the flight, and why.
    pub(crate) fn decide(&mut self, id: FlightId, outcome: Decided, considered: Vec<Forecast>) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let slo = &flight.request.slo;
        let named = &self.class_of(flight).name;
        let decision = Decision {
            flight: id,
            class: slo.class.clone(),
            tenant: slo.tenant.clone(),
            waited: self.now.since(flight.submitted),
            ttft_permille: self.tally.ttft(named, self.now).permille(),
            tpot_permille: self.tally.tpot(named, self.now).permille(),
            considered,
            outcome,
        };
        self.note(Note::Decided(Box::new(decision)));
    }
}

/// How one that finds no room takes being overtaken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stands {
    /// It is not counted.
    Aside,
    /// It is, up to a number.
    Patient,
    /// It is not overtaken.
    Firm,
}

/// On whose account a tenant is served. Those without a share of their own are on one together, or
/// whoever makes up names would have as many shares as names.
fn account<'a>(policy: &SloPolicy, tenant: &'a str) -> &'a str {
    let known = policy.tenants.iter().any(|one| one.name == tenant);
    if known { tenant } else { "" }
}

/// When its prompt has to be done at the latest, from its arrival on.
fn due(request: &Request) -> Option<Duration> {
    let slo = &request.slo;
    slo.ttft.into_iter().chain(slo.e2e).min()
}

fn bounded(retry_after: Duration) -> Duration {
    retry_after.clamp(Duration::from_millis(1), NEVER)
}
