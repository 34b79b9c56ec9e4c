//! What came of the promises: verdicts, stages, goodput, forecasts, by class.
//!
//! Owns: these series, and the minute that goodput is of. Never: judges a request: the brain's notes
//! did; what never reached the brain was refused before it. Invariant: every sequence counts once,
//! refused and failed ones too (lesson 25), and a class that no policy named makes no series.

use super::router::{reason, refused};
use super::{
    FloatGauge, Histograms, first_token_seconds, gap_seconds, histograms, ratio_histograms,
};
use crate::router::Judgement;
use cleave_api::Book;
use cleave_domain::{Aim, Ending, FlightId, Refusal, SloPolicy, Stage, Timing, Verdict};
use cleave_router::{Decided, Decision, Forecast, Note, PlaceReason};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Goodput is of the last minute: long enough to be steady, short enough to act on.
const WINDOW: Duration = Duration::from_secs(60);

/// A class that neither this policy nor the one before it named.
const OTHER: &str = "other";

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Class {
    class: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Staged {
    stage: &'static str,
    class: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Judged {
    class: String,
    verdict: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Aimed {
    class: String,
    aim: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

/// The series of this process's router, if it has one.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    requests: Family<Judged, Counter>,
    stages: Histograms<Staged>,
    ttft: Histograms<Class>,
    tpot: Histograms<Class>,
    e2e: Histograms<Class>,
    goodput: Family<Class, FloatGauge>,
    goodput_each: Family<Class, FloatGauge>,
    forecasts: Histograms<Aimed>,
    reasons: Family<Reason, Counter>,
    downgrades: Family<Class, Counter>,
    recent: Arc<Mutex<Recent>>,
}

impl Series {
    pub(super) fn register(book: &mut Book) -> Self {
        let series = Self {
            requests: Family::default(),
            stages: histograms(),
            ttft: Family::new_with_constructor(first_token_seconds as fn() -> Histogram),
            tpot: Family::new_with_constructor(gap_seconds as fn() -> Histogram),
            e2e: histograms(),
            goodput: Family::default(),
            goodput_each: Family::default(),
            forecasts: ratio_histograms(),
            reasons: Family::default(),
            downgrades: Family::default(),
            recent: Arc::default(),
        };
        series.register_verdicts(book);
        series.register_times(book);
        book.register(
            "cleave_placement_reasons",
            "Placements by why: split (two workers), both (one that serves both legs by its role), \
             on_decode, on_prefill, load (nothing is known of times), turn",
            series.reasons.clone(),
        );
        series
    }

    fn register_verdicts(&self, book: &mut Book) {
        book.register(
            "cleave_slo_requests",
            "Sequences (a request with n=2 is two) by class and verdict: good (met), late (reason: the stage that took the most \
             beyond its forecast), refused, failed, cancelled; only good ones count for goodput",
            self.requests.clone(),
        );
        book.register(
            "cleave_slo_downgrades",
            "Sequences that became one of this class because their own could not be kept",
            self.downgrades.clone(),
        );
        book.register(
            "cleave_goodput_requests_per_second",
            "Sequences of the last minute that met all their targets, by class",
            self.goodput.clone(),
        );
        book.register(
            "cleave_goodput_requests_per_second_per_device",
            "The same for each connected worker",
            self.goodput_each.clone(),
        );
        book.register(
            "cleave_forecast_ratio",
            "Real times of requests by those predicted when they were placed; 1 is right",
            self.forecasts.clone(),
        );
    }

    fn register_times(&self, book: &mut Book) {
        book.register(
            "cleave_stage_seconds",
            "Where the time of requests that were done went; the first four make up the time to \
             first token",
            self.stages.clone(),
        );
        book.register(
            "cleave_ttft_seconds",
            "From arrival at the router to the first token, of requests that were done",
            self.ttft.clone(),
        );
        book.register(
            "cleave_tpot_seconds",
            "Mean gap between output tokens after the first, of requests that were done",
            self.tpot.clone(),
        );
        book.register(
            "cleave_e2e_seconds",
            "From arrival at the router to the last token, of requests that were done",
            self.e2e.clone(),
        );
    }

    /// Brings what depends on the time of day up to it.
    pub(super) fn refresh(&self) {
        let mut recent = self.lock();
        let (rates, devices) = recent.rates(Instant::now());
        let shown = rates.iter().map(|(class, _)| class.clone()).collect();
        for class in std::mem::replace(&mut recent.shown, shown) {
            if !recent.shown.contains(&class) {
                let labels = Class { class };
                self.goodput.remove(&labels);
                self.goodput_each.remove(&labels);
            }
        }
        for (class, rate) in rates {
            let labels = Class { class };
            self.goodput.get_or_create(&labels).set(rate);
            let each = rate / f64::from(devices.max(1));
            self.goodput_each.get_or_create(&labels).set(each);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last minute.
#[derive(Debug, Default)]
struct Recent {
    /// Of the policy that holds.
    classes: BTreeSet<String>,
    /// Of the one before: what it promised may still be under way.
    classes_before: BTreeSet<String>,
    /// Whose goodput is told.
    shown: BTreeSet<String>,
    /// When the first was counted: before a minute has passed, the rate is of what has.
    since: Option<Instant>,
    /// Seconds since then, and how many of each class were good in them; the latest last.
    good: VecDeque<(u64, BTreeMap<String, u32>)>,
    devices: u32,
}

impl Recent {
    fn count(&mut self, now: Instant, class: &str) {
        let second = self.second(now);
        if self.good.back().is_none_or(|(last, _)| *last != second) {
            self.good.push_back((second, BTreeMap::new()));
        }
        if let Some((_, counts)) = self.good.back_mut() {
            *counts.entry(class.to_owned()).or_default() += 1;
        }
        self.forget(second);
    }

    /// Good ones per second, of every class of the policy and of what else was good in the last
    /// minute; and the devices they were of.
    fn rates(&mut self, now: Instant) -> (Vec<(String, f64)>, u32) {
        let second = self.second(now);
        self.forget(second);
        let spent = (second + 1).min(WINDOW.as_secs()) as f64;
        let mut sums: BTreeMap<String, u32> = BTreeMap::new();
        for class in &self.classes {
            sums.insert(class.clone(), 0);
        }
        for (class, count) in self.good.iter().flat_map(|(_, counts)| counts) {
            *sums.entry(class.clone()).or_default() += count;
        }
        let rate = |(class, count)| (class, f64::from(count) / spent);
        (sums.into_iter().map(rate).collect(), self.devices)
    }

    fn second(&mut self, now: Instant) -> u64 {
        let since = *self.since.get_or_insert(now);
        now.saturating_duration_since(since).as_secs()
    }

    fn forget(&mut self, second: u64) {
        let past = |at: u64| at + WINDOW.as_secs() <= second;
        while self.good.front().is_some_and(|(at, _)| past(*at)) {
            self.good.pop_front();
        }
    }
}

/// The router's hand on these series.
#[derive(Debug)]
pub(crate) struct PromiseMeters {
    series: Series,
    /// Judged, and their end is about to be said.
    judged: BTreeMap<FlightId, Note>,
}

impl PromiseMeters {
    pub(crate) fn new(series: &Series, policy: &SloPolicy) -> Self {
        let meters = Self {
            series: series.clone(),
            judged: BTreeMap::new(),
        };
        for reason in REASONS {
            let reason = place_reason(reason);
            drop(meters.series.reasons.get_or_create(&Reason { reason }));
        }
        meters.follow(policy);
        meters
    }

    /// Its classes may be shown from now on, from zero.
    pub(crate) fn follow(&self, policy: &SloPolicy) {
        let names = policy.classes.iter().map(|class| class.name.clone());
        let classes = names.collect();
        let mut recent = self.series.lock();
        if recent.classes != classes {
            recent.classes_before = std::mem::replace(&mut recent.classes, classes);
        }
        for class in &policy.classes {
            let class = class.name.clone();
            let good = Judged {
                class,
                verdict: "good",
                reason: "met",
            };
            drop(self.series.requests.get_or_create(&good));
        }
    }

    /// Takes what the brain noted.
    pub(crate) fn hear(&mut self, note: &Note) {
        match note {
            Note::Judged { flight, .. } => drop(self.judged.insert(*flight, note.clone())),
            Note::Decided(decision) => self.decided(decision),
            Note::Fleet { workers, .. } => self.series.lock().devices = workers.devices,
            _ => {}
        }
    }

    fn decided(&self, decision: &Decision) {
        match &decision.outcome {
            Decided::Placed(reason) => {
                let reason = place_reason(*reason);
                self.series.reasons.get_or_create(&Reason { reason }).inc();
            }
            Decided::Downgraded { class } => {
                let class = self.series.known(class);
                self.series.downgrades.get_or_create(&Class { class }).inc();
            }
            Decided::Waits | Decided::Refused(_) => {}
        }
    }

    /// A flight ended so, as its client saw it; or had been ended from outside. Says what was counted.
    pub(crate) fn ended(&mut self, flight: FlightId, ending: Option<&Ending>) -> Option<Judgement> {
        let judged = self.judged.remove(&flight);
        let ending = ending?;
        let Some(Note::Judged {
            flight: _,
            class,
            tenant: _,
            verdict,
            timing,
            output_tokens,
            forecast,
        }) = judged
        else {
            return None;
        };
        let class = self.series.known(&class);
        // What lost a token on its way to the client is worth nothing, whatever the workers did.
        let (verdict, reason) = match (verdict, ending) {
            (_, Ending::Refused(refusal)) => ("refused", refused(refusal)),
            (_, Ending::Failed(failure)) => ("failed", reason(failure)),
            (Verdict::Cancelled, _) => ("cancelled", "client_left"),
            (Verdict::Refused, _) => ("refused", OTHER),
            (Verdict::Failed, _) => ("failed", OTHER),
            // A client that met its stop string, or left too late, is judged as one that stayed.
            (Verdict::Good, _) => ("good", "met"),
            (Verdict::Late { stage, .. }, _) => ("late", stage.name()),
        };
        self.series.judge(&class, verdict, reason);
        if matches!(verdict, "good" | "late") && output_tokens > 0 {
            self.series.observe(&class, &timing, output_tokens);
            if let Some(forecast) = forecast {
                self.series
                    .compare(&class, &forecast, (&timing, output_tokens));
            }
        }
        Some(Judgement {
            class,
            verdict,
            reason,
            timing,
            output_tokens,
        })
    }
}

impl Series {
    /// Turned away before the brain saw it. Says what was counted.
    pub(crate) fn turned_away(&self, class: &str, refusal: &Refusal) -> Judgement {
        let judgement = Judgement {
            class: self.known(class),
            verdict: "refused",
            reason: refused(refusal),
            timing: Timing::default(),
            output_tokens: 0,
        };
        self.judge(&judgement.class, judgement.verdict, judgement.reason);
        judgement
    }

    /// Good ones per second over the last minute, by class, and the devices they were of.
    pub(crate) fn goodput(&self) -> (Vec<(String, f64)>, u32) {
        self.lock().rates(Instant::now())
    }

    fn judge(&self, class: &str, verdict: &'static str, reason: &'static str) {
        let labels = Judged {
            class: class.to_owned(),
            verdict,
            reason,
        };
        self.requests.get_or_create(&labels).inc();
        if verdict == "good" {
            self.lock().count(Instant::now(), class);
        }
    }

    fn observe(&self, class: &str, timing: &Timing, output_tokens: u32) {
        let labels = Class {
            class: class.to_owned(),
        };
        let see = |series: &Histograms<Class>, span: Duration| {
            series.get_or_create(&labels).observe(span.as_secs_f64());
        };
        see(&self.ttft, timing.ttft());
        see(&self.e2e, timing.total());
        if let Some(tpot) = timing.tpot(output_tokens) {
            see(&self.tpot, tpot);
        }
        for stage in Stage::ALL {
            let labels = Staged {
                stage: stage.name(),
                class: class.to_owned(),
            };
            let seconds = timing.of(stage).as_secs_f64();
            self.stages.get_or_create(&labels).observe(seconds);
        }
    }

    fn compare(&self, class: &str, forecast: &Forecast, (timing, output_tokens): (&Timing, u32)) {
        let pairs = [
            (Aim::Ttft, Some(timing.ttft()), forecast.ttft),
            (Aim::Tpot, timing.tpot(output_tokens), forecast.tpot),
            (Aim::EndToEnd, Some(timing.total()), forecast.e2e),
        ];
        for (aim, real, predicted) in pairs {
            let Some(real) = real.filter(|_| !predicted.is_zero()) else {
                continue;
            };
            let labels = Aimed {
                class: class.to_owned(),
                aim: aim.name(),
            };
            let ratio = real.as_secs_f64() / predicted.as_secs_f64();
            self.forecasts.get_or_create(&labels).observe(ratio);
        }
    }

    /// The class as a label.
    fn known(&self, class: &str) -> String {
        let recent = self.lock();
        match recent.classes.contains(class) || recent.classes_before.contains(class) {
            true => class.to_owned(),
            false => OTHER.to_owned(),
        }
    }
}

const REASONS: [PlaceReason; 6] = [
    PlaceReason::Split,
    PlaceReason::Both,
    PlaceReason::OnDecode,
    PlaceReason::OnPrefill,
    PlaceReason::Load,
    PlaceReason::Turn,
];

fn place_reason(reason: PlaceReason) -> &'static str {
    match reason {
        PlaceReason::Split => "split",
        PlaceReason::Both => "both",
        PlaceReason::OnDecode => "on_decode",
        PlaceReason::OnPrefill => "on_prefill",
        PlaceReason::Load => "load",
        PlaceReason::Turn => "turn",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Telemetry;
    use cleave_domain::{Failure, FinishReason, Refusal, SloClass, WorkerRef};
    use cleave_router::Census;

    const DONE: Ending = Ending::Done {
        reason: FinishReason::Length,
    };

    fn policy(names: &[&str]) -> SloPolicy {
        let class = |name: &&str| SloClass {
            name: (*name).to_owned(),
            ..SloClass::default()
        };
        SloPolicy {
            classes: names.iter().map(class).collect(),
            default_class: names[0].to_owned(),
            ..SloPolicy::default()
        }
    }

    /// Each stage takes ten times as many milliseconds as its number, from 1 on.
    fn timing() -> Timing {
        let ms = |millis| Duration::from_millis(millis);
        Timing {
            router_queue: ms(4),
            retry: ms(6),
            prefill_wait: ms(20),
            prefill: ms(30),
            transfer: ms(40),
            decode_wait: ms(50),
            first_decode: ms(60),
            decode: ms(70),
        }
    }

    struct Desk {
        telemetry: Telemetry,
        meters: PromiseMeters,
        flights: u64,
    }

    impl Desk {
        fn new(names: &[&str]) -> Self {
            let telemetry = Telemetry::default();
            let meters = PromiseMeters::new(&telemetry.promises, &policy(names));
            Self {
                telemetry,
                meters,
                flights: 0,
            }
        }

        fn ends(&mut self, class: &str, verdict: Verdict, ending: &Ending) {
            self.flights += 1;
            let flight = FlightId(self.flights);
            self.meters.hear(&Note::Judged {
                flight,
                class: class.to_owned(),
                tenant: String::new(),
                verdict,
                timing: timing(),
                output_tokens: 12,
                forecast: Some(Box::new(Forecast {
                    prefill: WorkerRef::default(),
                    decode: WorkerRef::default(),
                    cached_tokens: 0,
                    ttft: Duration::from_millis(50),
                    tpot: Duration::from_millis(20),
                    e2e: Duration::ZERO,
                    output_tokens: 12,
                })),
            });
            self.meters.ended(flight, Some(ending));
        }

        #[track_caller]
        fn shows(&self, lines: &[&str]) {
            let text = self.telemetry.text();
            for line in lines {
                let there = text.lines().any(|shown| shown == *line);
                assert!(there, "{line} is not in\n{text}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lesson_25_refused_and_failed_requests_were_no_misses() {
        let mut desk = Desk::new(&["fast", "slow"]);
        desk.shows(&[
            "cleave_slo_requests_total{class=\"fast\",verdict=\"good\",reason=\"met\"} 0",
        ]);
        let late = Refusal::Late {
            aim: Aim::Tpot,
            predicted: Duration::ZERO,
            retry_after: Duration::ZERO,
        };
        let stage = Stage::DecodeWait;
        let aim = Aim::Ttft;
        desk.ends("fast", Verdict::Good, &DONE);
        desk.ends("fast", Verdict::Late { aim, stage }, &DONE);
        desk.ends("fast", Verdict::Refused, &Ending::Refused(late.clone()));
        desk.ends(
            "fast",
            Verdict::Failed,
            &Ending::Failed(Failure::WorkerLost),
        );
        desk.ends("slow", Verdict::Cancelled, &Ending::Cancelled);
        // It had all that it wanted: a stop string came.
        desk.ends("slow", Verdict::Good, &Ending::Cancelled);
        // The workers said that all is well; its client lacks a token.
        desk.ends("slow", Verdict::Good, &Ending::Failed(Failure::WorkerLost));
        desk.telemetry.promises.turned_away("slow", &late);
        let line = |class: &str, verdict: &str, reason: &str| {
            format!(
                "cleave_slo_requests_total{{class=\"{class}\",verdict=\"{verdict}\",reason=\"{reason}\"}} 1"
            )
        };
        let lines = [
            line("fast", "good", "met"),
            line("fast", "late", "decode_wait"),
            line("fast", "refused", "slo_tpot_unreachable"),
            line("fast", "failed", "worker_lost"),
            line("slow", "cancelled", "client_left"),
            line("slow", "good", "met"),
            line("slow", "failed", "worker_lost"),
            line("slow", "refused", "slo_tpot_unreachable"),
        ];
        desk.shows(&lines.each_ref().map(String::as_str));
    }

    #[tokio::test(start_paused = true)]
    async fn lesson_23_stages_of_what_was_done_add_up() {
        let mut desk = Desk::new(&["fast"]);
        desk.ends("fast", Verdict::Good, &DONE);
        desk.ends("fast", Verdict::Good, &DONE);
        desk.ends("fast", Verdict::Failed, &Ending::Failed(Failure::Corrupt));
        desk.shows(&[
            "cleave_stage_seconds_sum{stage=\"router_queue\",class=\"fast\"} 0.008",
            "cleave_stage_seconds_sum{stage=\"retry\",class=\"fast\"} 0.012",
            "cleave_stage_seconds_sum{stage=\"prefill_wait\",class=\"fast\"} 0.04",
            "cleave_stage_seconds_sum{stage=\"prefill\",class=\"fast\"} 0.06",
            "cleave_stage_seconds_sum{stage=\"transfer\",class=\"fast\"} 0.08",
            "cleave_stage_seconds_sum{stage=\"decode_wait\",class=\"fast\"} 0.1",
            "cleave_stage_seconds_sum{stage=\"first_decode\",class=\"fast\"} 0.12",
            "cleave_stage_seconds_sum{stage=\"decode\",class=\"fast\"} 0.14",
            "cleave_ttft_seconds_sum{class=\"fast\"} 0.12",
            "cleave_ttft_seconds_count{class=\"fast\"} 2",
            "cleave_tpot_seconds_sum{class=\"fast\"} 0.04",
            "cleave_e2e_seconds_sum{class=\"fast\"} 0.56",
            // 60 ms were 50 in the forecast; a tpot of 20 was right; of e2e there was none.
            "cleave_forecast_ratio_sum{class=\"fast\",aim=\"ttft\"} 2.4",
            "cleave_forecast_ratio_sum{class=\"fast\",aim=\"tpot\"} 2.0",
        ]);
        assert!(!desk.telemetry.text().contains("aim=\"e2e\""));
    }

    #[tokio::test(start_paused = true)]
    async fn goodput_is_of_the_last_minute_and_of_each_device() {
        let mut desk = Desk::new(&["fast", "slow"]);
        desk.meters.hear(&Note::Fleet {
            workers: Census {
                prefill: 1,
                decode: 3,
                both: 0,
                devices: 4,
            },
            flights: 0,
            flights_waiting: 0,
        });
        for _ in 0..30 {
            desk.ends("fast", Verdict::Good, &DONE);
        }
        // One second has begun: what was good in it is the rate.
        desk.shows(&["cleave_goodput_requests_per_second{class=\"fast\"} 30.0"]);
        tokio::time::advance(Duration::from_secs(59)).await;
        for _ in 0..15 {
            desk.ends("slow", Verdict::Good, &DONE);
        }
        desk.ends(
            "slow",
            Verdict::Failed,
            &Ending::Failed(Failure::WorkerLost),
        );
        desk.shows(&[
            "cleave_goodput_requests_per_second{class=\"fast\"} 0.5",
            "cleave_goodput_requests_per_second_per_device{class=\"fast\"} 0.125",
            "cleave_goodput_requests_per_second{class=\"slow\"} 0.25",
        ]);
        tokio::time::advance(Duration::from_secs(1)).await;
        desk.shows(&["cleave_goodput_requests_per_second{class=\"fast\"} 0.0"]);
    }

    #[tokio::test(start_paused = true)]
    async fn clients_could_make_as_many_series_as_they_liked() {
        let mut desk = Desk::new(&["fast"]);
        for class in 0..100 {
            desk.ends(&format!("made up {class}"), Verdict::Good, &DONE);
        }
        let text = desk.telemetry.text();
        assert!(!text.contains("made up"), "{text}");
        let other =
            "cleave_slo_requests_total{class=\"other\",verdict=\"good\",reason=\"met\"} 100";
        desk.shows(&[other]);
        desk.meters.follow(&policy(&["new"]));
        desk.ends("new", Verdict::Good, &DONE);
        // What was promised before the policy changed still ends.
        desk.ends("fast", Verdict::Good, &DONE);
        desk.shows(&[
            "cleave_slo_requests_total{class=\"new\",verdict=\"good\",reason=\"met\"} 1",
            "cleave_slo_requests_total{class=\"fast\",verdict=\"good\",reason=\"met\"} 1",
        ]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_goodput_of_a_class_that_is_gone_was_shown_for_ever() {
        let mut desk = Desk::new(&["old"]);
        let other = "made up by a client";
        desk.ends(other, Verdict::Good, &DONE);
        desk.shows(&["cleave_goodput_requests_per_second{class=\"other\"} 1.0"]);
        desk.meters.follow(&policy(&["new"]));
        desk.ends("old", Verdict::Good, &DONE);
        desk.shows(&[
            "cleave_goodput_requests_per_second{class=\"old\"} 1.0",
            "cleave_goodput_requests_per_second{class=\"new\"} 0.0",
        ]);
        tokio::time::advance(WINDOW).await;
        desk.shows(&["cleave_goodput_requests_per_second{class=\"new\"} 0.0"]);
        let text = desk.telemetry.text();
        for class in ["old", "other"] {
            let told = format!("{{class=\"{class}\"}}");
            let goodput = text
                .lines()
                .filter(|line| line.starts_with("cleave_goodput"));
            assert_eq!(
                goodput.filter(|line| line.contains(&told)).count(),
                0,
                "{text}"
            );
        }
        // Two policies later it is nobody's name.
        desk.meters.follow(&policy(&["newer"]));
        desk.ends("old", Verdict::Good, &DONE);
        desk.shows(&[
            "cleave_slo_requests_total{class=\"old\",verdict=\"good\",reason=\"met\"} 1",
            "cleave_slo_requests_total{class=\"other\",verdict=\"good\",reason=\"met\"} 2",
        ]);
    }

    #[tokio::test(start_paused = true)]
    async fn why_a_pair_was_chosen_and_a_class_left_is_counted() {
        let mut desk = Desk::new(&["fast", "slow"]);
        let decided = |outcome| {
            Note::Decided(Box::new(Decision {
                flight: FlightId(1),
                class: "fast".to_owned(),
                tenant: String::new(),
                waited: Duration::ZERO,
                ttft_permille: 1000,
                tpot_permille: 1000,
                considered: Vec::new(),
                outcome,
            }))
        };
        for reason in [
            PlaceReason::Split,
            PlaceReason::OnDecode,
            PlaceReason::Split,
        ] {
            desk.meters.hear(&decided(Decided::Placed(reason)));
        }
        let class = "slow".to_owned();
        desk.meters.hear(&decided(Decided::Downgraded { class }));
        desk.shows(&[
            "cleave_placement_reasons_total{reason=\"split\"} 2",
            "cleave_placement_reasons_total{reason=\"on_decode\"} 1",
            "cleave_placement_reasons_total{reason=\"turn\"} 0",
            "cleave_slo_downgrades_total{class=\"slow\"} 1",
        ]);
        // A flight that was ended from outside leaves nothing behind.
        desk.meters.ended(FlightId(9), None);
        assert!(desk.meters.judged.is_empty());
    }
}
