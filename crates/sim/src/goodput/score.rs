//! Results of the clients.
//!
//! Owns: each client's stream by the common clock, and whether its targets were met, judged from
//! outside. Never: trusts a brain's times; of the router's verdicts only the stage at fault is
//! used, and verdicts that differ are counted. Invariant: every arrival ends once; refused and
//! failed requests are misses as late ones are.

use super::worker::draw_token;
use super::{FleetHistory, RequestArrival, Scenario};
use cleave_domain::{
    Ending, FlightId, HandoffId, RequestSlo, RequestStage, SloMetric, SloVerdict, Time, TokenId,
};
use cleave_router::{DecisionOutcome, RouterNote};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ClientResult {
    /// Tokens that the client received.
    pub tokens: u32,
    /// Time of the first token.
    pub first: Option<Time>,
    /// Time of the last token.
    pub last: Time,
    /// How it ended; none if the run stopped before.
    pub end: Option<ArrivalEnd>,
    /// The stage at fault, as the router reported it.
    pub stage: Option<RequestStage>,
    /// Whether one worker served both legs at the last placement.
    pub whole: Option<bool>,
    /// Attempts up to this one deliver nothing more.
    fenced: Option<u32>,
    /// Its targets since it was downgraded to another class.
    downgraded: Option<RequestSlo>,
    /// A target is missed already, whatever follows.
    missed: bool,
}

/// The outcome of an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum ArrivalEnd {
    /// Every target was met.
    Good,
    /// The first missed target, in the order of time.
    Late(SloMetric),
    /// Refused before any work.
    Refused,
    /// Failed, or broke off.
    Failed,
}

/// Quantiles of a sample, by nearest rank; all zero for an empty sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LatencyQuantiles {
    pub p50: Duration,
    /// Nine tenths are at most this.
    pub p90: Duration,
    /// 99 of a hundred are at most this.
    pub p99: Duration,
}

/// The results of one class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClassScore {
    /// The class as arrivals name it; empty for the default class.
    pub class: String,
    pub arrivals: u64,
    pub good: u64,
    /// Requests done too late, by the first target missed: TTFT, TPOT, end to end.
    pub late: [u64; 3],
    pub refused: u64,
    pub failed: u64,
    /// Requests in flight when the run was stopped.
    pub unfinished: u64,
    /// Time from arrival to first token, of requests that got one.
    pub ttft: LatencyQuantiles,
    /// Mean gap between tokens, of requests that got two.
    pub tpot: LatencyQuantiles,
    /// Late requests by the stage at fault.
    pub stages: BTreeMap<&'static str, u64>,
}

/// The score of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GoodputScore {
    /// Every class with arrivals, by name.
    pub classes: Vec<ClassScore>,
    /// Score over all classes together.
    pub all: ClassScore,
    /// Time from the first arrival to the last.
    pub span: Duration,
    /// Real devices in the fleet.
    pub devices_count: u32,
    /// Placements on two workers.
    pub split: u64,
    /// Placements on one worker.
    pub whole: u64,
    /// Router verdicts that differ from the outside judgement.
    pub disputed: u64,
    /// Counts of other events, by name.
    pub counts: BTreeMap<&'static str, u64>,
}

/// A run's score and its details.
#[derive(Clone, Debug)]
pub struct GoodputOutcome {
    pub score: GoodputScore,
    /// The result of every arrival, in order.
    pub clients: Vec<ClientResult>,
    pub decisions: Vec<RouterNote>,
    pub events: u64,
    /// The fleet's size over time, if the scenario has an orchestrator.
    pub growth: Option<FleetHistory>,
}

impl ClassScore {
    /// The share of requests that met every target, in thousandths.
    pub fn attainment_permille(&self) -> u64 {
        match self.arrivals {
            0 => 1000,
            arrivals => self.good * 1000 / arrivals,
        }
    }

    /// Arrivals that do not count for goodput.
    pub fn missed(&self) -> u64 {
        self.arrivals - self.good
    }
}

impl GoodputScore {
    /// Requests per second and device that met every target, in thousandths.
    pub fn goodput_milli(&self) -> u64 {
        self.per_device_milli(self.all.good)
    }

    /// Requests per second and device that arrived, in thousandths.
    pub fn offered_milli(&self) -> u64 {
        self.per_device_milli(self.all.arrivals)
    }

    fn per_device_milli(&self, count: u64) -> u64 {
        let nanos = self.span.as_nanos() * u128::from(self.devices_count);
        let milli = u128::from(count) * 1_000_000_000_000;
        milli.checked_div(nanos).unwrap_or(0) as u64
    }
}

impl LatencyQuantiles {
    /// The quantiles of a sample in any order.
    pub fn of(mut sample: Vec<Duration>) -> Self {
        sample.sort_unstable();
        let rank = |percent: usize| {
            let rank = (sample.len() * percent).div_ceil(100).max(1) - 1;
            sample.get(rank).copied().unwrap_or_default()
        };
        Self {
            p50: rank(50),
            p90: rank(90),
            p99: rank(99),
        }
    }
}

impl ClientResult {
    fn ttft(&self, arrival: &RequestArrival) -> Option<Duration> {
        Some(self.first?.since(arrival.at))
    }

    fn tpot(&self) -> Option<Duration> {
        let gaps = self.tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some(self.last.since(self.first?) / gaps)
    }

    /// The target that was missed first, if any.
    fn miss(&self, arrival: &RequestArrival) -> Option<SloMetric> {
        let slo = self.downgraded.as_ref().unwrap_or(&arrival.slo);
        let over = |took: Option<Duration>, target: Option<Duration>| {
            target.is_some_and(|target| took.is_some_and(|took| took > target))
        };
        let e2e = self.last.since(arrival.at);
        [
            (SloMetric::Ttft, over(self.ttft(arrival), slo.ttft)),
            (SloMetric::Tpot, over(self.tpot(), slo.tpot)),
            (SloMetric::EndToEnd, over(Some(e2e), slo.e2e)),
        ]
        .into_iter()
        .find_map(|(aim, missed)| missed.then_some(aim))
    }
}

#[derive(Debug)]
pub(crate) struct ClientResults<'a> {
    scenario: &'a Scenario,
    all: Vec<ClientResult>,
    ended: usize,
    /// Misses left before the run stops, for the classes that have such a limit.
    misses_left: BTreeMap<&'a str, u64>,
    missed_enough: bool,
    disputed: u64,
    split: u64,
    whole: u64,
    counts: BTreeMap<&'static str, u64>,
    /// The router's verdicts on flights that have not ended.
    router_verdicts: BTreeMap<FlightId, SloVerdict>,
}

/// The index of a flight's arrival.
fn arrival_index(flight: FlightId) -> usize {
    (flight.0 & ((1 << 40) - 1)) as usize
}

impl<'a> ClientResults<'a> {
    pub(crate) fn new(scenario: &'a Scenario) -> Self {
        let client = ClientResult {
            tokens: 0,
            first: None,
            last: Time::ZERO,
            end: None,
            stage: None,
            whole: None,
            fenced: None,
            downgraded: None,
            missed: false,
        };
        Self {
            all: vec![client; scenario.arrivals.len()],
            scenario,
            ended: 0,
            misses_left: scenario
                .misses_max
                .iter()
                .map(|(class, most)| (class.as_str(), *most))
                .collect(),
            missed_enough: false,
            disputed: 0,
            split: 0,
            whole: 0,
            counts: BTreeMap::new(),
            router_verdicts: BTreeMap::new(),
        }
    }

    /// Whether some class has missed more than the run allows.
    pub(crate) fn missed_enough(&self) -> bool {
        self.missed_enough
    }

    pub(crate) fn all_ended(&self) -> bool {
        self.ended == self.all.len()
    }

    /// Delivers a token at this time, unless its attempt is fenced or the client has it.
    pub(crate) fn receive_token(&mut self, handoff: HandoffId, index: u32, at: Time) {
        let client = &mut self.all[arrival_index(handoff.flight)];
        // A resumed stream repeats tokens that the client has; only the next one counts.
        let fenced = client.fenced.is_some_and(|last| handoff.attempt <= last);
        if fenced || index != client.tokens || client.end.is_some() {
            return;
        }
        client.tokens += 1;
        client.last = at;
        if client.first.is_none() {
            client.first = Some(at);
            let arrival = &self.scenario.arrivals[arrival_index(handoff.flight)];
            if client.miss(arrival) == Some(SloMetric::Ttft) {
                self.count_miss(arrival_index(handoff.flight));
            }
        }
    }

    /// Counts a miss once, as soon as it is certain.
    fn count_miss(&mut self, place: usize) {
        if std::mem::replace(&mut self.all[place].missed, true) {
            return;
        }
        let class = self.scenario.arrivals[place].slo.class.as_str();
        if let Some(left) = self.misses_left.get_mut(class) {
            match left.checked_sub(1) {
                Some(fewer) => *left = fewer,
                None => self.missed_enough = true,
            }
        }
    }

    pub(crate) fn fence(&mut self, handoff: HandoffId) {
        self.all[arrival_index(handoff.flight)].fenced = Some(handoff.attempt);
    }

    /// All tokens that a client received.
    pub(crate) fn tokens(&self, flight: FlightId) -> Vec<TokenId> {
        let place = arrival_index(flight);
        let first = self.scenario.arrivals[place].prompt.tokens();
        let drawn = 0..self.all[place].tokens;
        drawn.map(|n| draw_token(place as u64, first + n)).collect()
    }

    pub(crate) fn end(&mut self, flight: FlightId, ending: &Ending) {
        let arrival = &self.scenario.arrivals[arrival_index(flight)];
        let client = &mut self.all[arrival_index(flight)];
        let end = match ending {
            Ending::Done { .. } if client.tokens != arrival.output_tokens.max(1) => {
                ArrivalEnd::Failed
            }
            Ending::Done { .. } => client
                .miss(arrival)
                .map_or(ArrivalEnd::Good, ArrivalEnd::Late),
            Ending::Refused(_) => ArrivalEnd::Refused,
            Ending::Cancelled | Ending::Failed(_) => ArrivalEnd::Failed,
        };
        let before = client.end.replace(end);
        assert_eq!(before, None, "{flight} ended twice");
        self.ended += 1;
        if end != ArrivalEnd::Good {
            self.count_miss(arrival_index(flight));
        }
        if let Some(verdict) = self.router_verdicts.remove(&flight) {
            self.disputed += u64::from((verdict == SloVerdict::Good) != (end == ArrivalEnd::Good));
        }
    }

    // === notes ===

    pub(crate) fn note(&mut self, note: &RouterNote) {
        match note {
            RouterNote::Judged {
                flight, verdict, ..
            } => {
                self.router_verdicts.insert(*flight, *verdict);
                if let SloVerdict::Late { stage, .. } = verdict {
                    self.all[arrival_index(*flight)].stage = Some(*stage);
                }
            }
            RouterNote::Decided(decision) => {
                if let DecisionOutcome::Downgraded { class } = &decision.outcome {
                    let class = self.scenario.router.policy.class(class);
                    self.all[arrival_index(decision.flight)].downgraded = Some(RequestSlo {
                        class: class.name.clone(),
                        tenant: decision.tenant.clone(),
                        ttft: class.ttft,
                        tpot: class.tpot,
                        e2e: class.e2e,
                        priority: class.priority,
                    });
                    self.count("downgraded");
                }
            }
            RouterNote::Placed {
                handoff,
                prefill,
                decode,
                ..
            } => {
                let whole = prefill == decode;
                self.all[arrival_index(handoff.flight)].whole = Some(whole);
                self.whole += u64::from(whole);
                self.split += u64::from(!whole);
            }
            RouterNote::PassedOver { .. } => self.count("passed over"),
            RouterNote::Retried { .. } => self.count("retried"),
            RouterNote::Moved { .. } => self.count("moved"),
            RouterNote::WorkerStuck { .. } => self.count("workers stuck"),
            RouterNote::PrefixDropped { .. } => self.count("prefixes dropped"),
            RouterNote::Stale { .. }
            | RouterNote::Moving { .. }
            | RouterNote::MigrationAborted { .. }
            | RouterNote::CancelFreed { .. }
            | RouterNote::Fleet { .. } => {}
        }
    }

    pub(crate) fn worker_note(&mut self, note: &cleave_sched::WorkerNote) {
        use cleave_sched::WorkerNote as N;
        match note {
            N::Stepped { .. } => self.count("steps"),
            N::Preempted { .. } => self.count("preempted"),
            N::SwappedOut { .. } => self.count("swapped out"),
            N::HandoffFailed { .. } => self.count("hand-offs failed"),
            N::PrefixLookedUp { cached_tokens, .. } if *cached_tokens > 0 => {
                self.count("prefix hits");
            }
            _ => {}
        }
    }

    fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
    }

    // === the sum ===

    pub(crate) fn outcome(self, events: u64, decisions: Vec<RouterNote>) -> GoodputOutcome {
        let arrivals = &self.scenario.arrivals;
        let mut classes: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (number, arrival) in arrivals.iter().enumerate() {
            classes.entry(&arrival.slo.class).or_default().push(number);
        }
        let all: Vec<usize> = (0..arrivals.len()).collect();
        let ends = arrivals.first().zip(arrivals.last());
        let devices = self.scenario.devices.iter();
        let score = GoodputScore {
            classes: classes
                .iter()
                .map(|(class, numbers)| self.class_score(class, numbers))
                .collect(),
            all: self.class_score("all", &all),
            span: ends.map_or(Duration::ZERO, |(first, last)| last.at.since(first.at)),
            devices_count: devices.map(|device| device.devices_count).sum(),
            split: self.split,
            whole: self.whole,
            disputed: self.disputed,
            counts: self.counts,
        };
        GoodputOutcome {
            score,
            clients: self.all,
            decisions,
            events,
            growth: None,
        }
    }

    fn class_score(&self, class: &str, numbers: &[usize]) -> ClassScore {
        let mut score = ClassScore {
            class: class.to_owned(),
            arrivals: numbers.len() as u64,
            ..ClassScore::default()
        };
        let (mut ttft, mut tpot) = (Vec::new(), Vec::new());
        for number in numbers {
            let client = &self.all[*number];
            ttft.extend(client.ttft(&self.scenario.arrivals[*number]));
            tpot.extend(client.tpot());
            match client.end {
                Some(ArrivalEnd::Good) => score.good += 1,
                Some(ArrivalEnd::Late(aim)) => {
                    score.late[aim as usize] += 1;
                    if let Some(stage) = client.stage {
                        *score.stages.entry(stage.name()).or_default() += 1;
                    }
                }
                Some(ArrivalEnd::Refused) => score.refused += 1,
                Some(ArrivalEnd::Failed) => score.failed += 1,
                // A missed TTFT is certain already.
                None if client.missed => score.late[SloMetric::Ttft as usize] += 1,
                None => score.unfinished += 1,
            }
        }
        score.ttft = LatencyQuantiles::of(ttft);
        score.tpot = LatencyQuantiles::of(tpot);
        score
    }
}
