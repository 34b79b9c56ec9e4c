//! What clients got.
//!
//! Owns: each client's stream as its own clock saw it, and whether its promise was kept, judged from
//! outside. Never: takes a brain's word for a time; of the router's verdicts only the stage at fault is
//! taken over, and whether it judged otherwise is counted.
//! Invariant: every arrival ends once; what was refused or failed is a miss as what was late is.

use super::worker::token;
use super::{Arrival, Growth, Scenario};
use cleave_domain::{Aim, Ending, FlightId, HandoffId, Slo, Stage, Time, TokenId, Verdict};
use cleave_router::{Decided, Note};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// One client's stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Client {
    /// Tokens that it got.
    pub tokens: u32,
    /// When the first came.
    pub first: Option<Time>,
    /// When the last one came.
    pub last: Time,
    /// How it ended; none if the run stopped before.
    pub end: Option<End>,
    /// The stage at fault, as the router told it.
    pub stage: Option<Stage>,
    /// Whether both legs were one worker's, when it was placed last.
    pub whole: Option<bool>,
    /// Attempts up to this one give it nothing more.
    fenced: Option<u32>,
    /// What it is promised since it was downgraded.
    downgraded: Option<Slo>,
    /// Whatever comes, a target is missed: it counts already.
    missed: bool,
}

/// What became of an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum End {
    /// Every target was met.
    Good,
    /// The first target that was not, in the order of time.
    Late(Aim),
    /// Not taken on.
    Refused,
    /// Broken off.
    Failed,
}

/// The middle and the tail of a sample: nearest ranks. All zero of an empty one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Quantiles {
    /// The median.
    pub p50: Duration,
    /// Nine tenths are at most this.
    pub p90: Duration,
    /// 99 of a hundred are at most this.
    pub p99: Duration,
}

/// What the arrivals of a class got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClassScore {
    /// As arrivals named it; empty for the default class.
    pub class: String,
    /// How many asked.
    pub arrivals: u64,
    /// Every target met.
    pub good: u64,
    /// Done too late, by the first target missed: first token, gap, end.
    pub late: [u64; 3],
    /// Not taken on.
    pub refused: u64,
    /// Broken off.
    pub failed: u64,
    /// Under way when the run was stopped.
    pub unfinished: u64,
    /// From arrival to first token, of all that got one.
    pub ttft: Quantiles,
    /// Mean gap between tokens, of all that got two.
    pub tpot: Quantiles,
    /// Of those late: how often which stage was at fault.
    pub stages: BTreeMap<&'static str, u64>,
}

/// What a run amounts to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Score {
    /// Every class that asked, by name.
    pub classes: Vec<ClassScore>,
    /// All of them as one.
    pub all: ClassScore,
    /// From the first arrival to the last.
    pub span: Duration,
    /// Real devices in the fleet.
    pub devices_count: u32,
    /// Placements on two workers.
    pub split: u64,
    /// Placements on one.
    pub whole: u64,
    /// How often the router's verdict was another than the one from outside.
    pub disputed: u64,
    /// How often what else happened.
    pub counts: BTreeMap<&'static str, u64>,
}

/// A run's score and what it is made of.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The sums.
    pub score: Score,
    /// Every arrival, in order.
    pub clients: Vec<Client>,
    /// See [`super::decisions`].
    pub decisions: Vec<Note>,
    /// Events that happened.
    pub events: u64,
    /// How the fleet's size went, where anybody started workers.
    pub growth: Option<Growth>,
}

impl ClassScore {
    /// Of those who asked, so many thousandths had every target met.
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

impl Score {
    /// Requests per second and device that had every target met, in thousandths.
    pub fn goodput_milli(&self) -> u64 {
        self.per_device_milli(self.all.good)
    }

    /// Requests per second and device that asked, in thousandths.
    pub fn offered_milli(&self) -> u64 {
        self.per_device_milli(self.all.arrivals)
    }

    fn per_device_milli(&self, count: u64) -> u64 {
        let nanos = self.span.as_nanos() * u128::from(self.devices_count);
        let milli = u128::from(count) * 1_000_000_000_000;
        milli.checked_div(nanos).unwrap_or(0) as u64
    }
}

impl Quantiles {
    /// Of a sample in any order.
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

impl Client {
    fn ttft(&self, arrival: &Arrival) -> Option<Duration> {
        Some(self.first?.since(arrival.at))
    }

    fn tpot(&self) -> Option<Duration> {
        let gaps = self.tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some(self.last.since(self.first?) / gaps)
    }

    /// Which target was missed first, if any.
    fn miss(&self, arrival: &Arrival) -> Option<Aim> {
        let slo = self.downgraded.as_ref().unwrap_or(&arrival.slo);
        let over = |took: Option<Duration>, target: Option<Duration>| {
            target.is_some_and(|target| took.is_some_and(|took| took > target))
        };
        let e2e = self.last.since(arrival.at);
        [
            (Aim::Ttft, over(self.ttft(arrival), slo.ttft)),
            (Aim::Tpot, over(self.tpot(), slo.tpot)),
            (Aim::EndToEnd, over(Some(e2e), slo.e2e)),
        ]
        .into_iter()
        .find_map(|(aim, missed)| missed.then_some(aim))
    }
}

/// Everybody who asks.
#[derive(Debug)]
pub(crate) struct Clients<'a> {
    scenario: &'a Scenario,
    all: Vec<Client>,
    ended: usize,
    /// What may be missed yet, of the classes that a run may stop for.
    misses_left: BTreeMap<&'a str, u64>,
    missed_enough: bool,
    disputed: u64,
    split: u64,
    whole: u64,
    counts: BTreeMap<&'static str, u64>,
    /// What the router judged of flights that have not ended.
    judged: BTreeMap<FlightId, Verdict>,
}

/// An arrival's place, from its flight.
fn place(flight: FlightId) -> usize {
    (flight.0 & ((1 << 40) - 1)) as usize
}

impl<'a> Clients<'a> {
    pub(crate) fn new(scenario: &'a Scenario) -> Self {
        let client = Client {
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
            judged: BTreeMap::new(),
        }
    }

    /// Whether some class has missed more than the run goes on for.
    pub(crate) fn missed_enough(&self) -> bool {
        self.missed_enough
    }

    pub(crate) fn all_ended(&self) -> bool {
        self.ended == self.all.len()
    }

    /// A token reaches its client at that time, unless its attempt is over or the client has it.
    pub(crate) fn token(&mut self, handoff: HandoffId, index: u32, at: Time) {
        let client = &mut self.all[place(handoff.flight)];
        let fenced = client.fenced.is_some_and(|last| handoff.attempt <= last);
        if fenced || index != client.tokens || client.end.is_some() {
            return;
        }
        client.tokens += 1;
        client.last = at;
        if client.first.is_none() {
            client.first = Some(at);
            let arrival = &self.scenario.arrivals[place(handoff.flight)];
            if client.miss(arrival) == Some(Aim::Ttft) {
                self.missed(place(handoff.flight));
            }
        }
    }

    /// Counts a miss once, as soon as it is one.
    fn missed(&mut self, place: usize) {
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
        self.all[place(handoff.flight)].fenced = Some(handoff.attempt);
    }

    /// All tokens that a client got.
    pub(crate) fn tokens(&self, flight: FlightId) -> Vec<TokenId> {
        let place = place(flight);
        let first = self.scenario.arrivals[place].prompt.tokens();
        let drawn = 0..self.all[place].tokens;
        drawn.map(|n| token(place as u64, first + n)).collect()
    }

    pub(crate) fn end(&mut self, flight: FlightId, ending: &Ending) {
        let arrival = &self.scenario.arrivals[place(flight)];
        let client = &mut self.all[place(flight)];
        let end = match ending {
            Ending::Done { .. } if client.tokens != arrival.output_tokens.max(1) => End::Failed,
            Ending::Done { .. } => client.miss(arrival).map_or(End::Good, End::Late),
            Ending::Refused(_) => End::Refused,
            Ending::Cancelled | Ending::Failed(_) => End::Failed,
        };
        let before = client.end.replace(end);
        assert_eq!(before, None, "{flight} ended twice");
        self.ended += 1;
        if end != End::Good {
            self.missed(place(flight));
        }
        if let Some(verdict) = self.judged.remove(&flight) {
            self.disputed += u64::from((verdict == Verdict::Good) != (end == End::Good));
        }
    }

    // === notes ===

    pub(crate) fn note(&mut self, note: &Note) {
        match note {
            Note::Judged {
                flight, verdict, ..
            } => {
                self.judged.insert(*flight, *verdict);
                if let Verdict::Late { stage, .. } = verdict {
                    self.all[place(*flight)].stage = Some(*stage);
                }
            }
            Note::Decided(decision) => {
                if let Decided::Downgraded { class } = &decision.outcome {
                    let class = self.scenario.router.policy.class(class);
                    self.all[place(decision.flight)].downgraded = Some(Slo {
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
            Note::Placed {
                handoff,
                prefill,
                decode,
                ..
            } => {
                let whole = prefill == decode;
                self.all[place(handoff.flight)].whole = Some(whole);
                self.whole += u64::from(whole);
                self.split += u64::from(!whole);
            }
            Note::PassedOver { .. } => self.count("passed over"),
            Note::Retried { .. } => self.count("retried"),
            Note::Moved { .. } => self.count("moved"),
            Note::WorkerStuck { .. } => self.count("workers stuck"),
            Note::Stale { .. }
            | Note::Moving { .. }
            | Note::Stayed { .. }
            | Note::CancelFreed { .. }
            | Note::Fleet { .. } => {}
        }
    }

    pub(crate) fn worker_note(&mut self, note: &cleave_sched::Note) {
        use cleave_sched::Note as N;
        match note {
            N::Stepped { .. } => self.count("steps"),
            N::Preempted { .. } => self.count("preempted"),
            N::SwappedOut { .. } => self.count("swapped out"),
            N::HandoffFailed { .. } => self.count("hand-offs failed"),
            N::PrefixLooked { cached_tokens, .. } if *cached_tokens > 0 => {
                self.count("prefix hits");
            }
            _ => {}
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    // === the sum ===

    pub(crate) fn outcome(self, events: u64, decisions: Vec<Note>) -> Outcome {
        let arrivals = &self.scenario.arrivals;
        let mut classes: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (number, arrival) in arrivals.iter().enumerate() {
            classes.entry(&arrival.slo.class).or_default().push(number);
        }
        let all: Vec<usize> = (0..arrivals.len()).collect();
        let ends = arrivals.first().zip(arrivals.last());
        let devices = self.scenario.devices.iter();
        let score = Score {
            classes: classes
                .iter()
                .map(|(class, numbers)| self.class(class, numbers))
                .collect(),
            all: self.class("all", &all),
            span: ends.map_or(Duration::ZERO, |(first, last)| last.at.since(first.at)),
            devices_count: devices.map(|device| device.devices_count).sum(),
            split: self.split,
            whole: self.whole,
            disputed: self.disputed,
            counts: self.counts,
        };
        Outcome {
            score,
            clients: self.all,
            decisions,
            events,
            growth: None,
        }
    }

    fn class(&self, class: &str, numbers: &[usize]) -> ClassScore {
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
                Some(End::Good) => score.good += 1,
                Some(End::Late(aim)) => {
                    score.late[aim as usize] += 1;
                    if let Some(stage) = client.stage {
                        *score.stages.entry(stage.name()).or_default() += 1;
                    }
                }
                Some(End::Refused) => score.refused += 1,
                Some(End::Failed) => score.failed += 1,
                // What is sure of it already.
                None if client.missed => score.late[Aim::Ttft as usize] += 1,
                None => score.unfinished += 1,
            }
        }
        score.ttft = Quantiles::of(ttft);
        score.tpot = Quantiles::of(tpot);
        score
    }
}
