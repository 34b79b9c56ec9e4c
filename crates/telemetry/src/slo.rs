//! Series of the SLOs: verdicts, stages, goodput and forecasts, by class.
//!
//! Owns: these series, and the minute that goodput covers. Never judges a request: the brain's
//! notes do; requests that never reached the brain were refused before it. Invariant: every
//! sequence counts once, refused and failed ones too (lesson 25), and a class that no policy names
//! creates no series.

use super::buckets::{
    FloatGauge, HistogramFamily, first_token_seconds, gap_seconds, histograms, ratio_histograms,
};
use crate::observer::{NoteContext, RouterObserver};
use crate::outcome::{RequestVerdict, failure_name, refusal_name};
use crate::series_table::{begin, series_table};
use cleave_domain::{
    Ending, Failure, Refusal, RequestStage, RequestStageTimes, SloMetric, SloPolicy, SloVerdict,
};
use cleave_router::{
    DecisionOutcome, PlacementDecision, PlacementReason, RequestForecast, RouterNote,
};
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Goodput covers the last minute: long enough to be steady, short enough to act on.
const WINDOW: Duration = Duration::from_secs(60);

/// The label of classes that neither this policy nor the previous one names.
const OTHER: &str = "other";

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SloClassLabels {
    class: String,
    model: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SloStageLabels {
    stage: &'static str,
    class: String,
    model: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SloVerdictLabels {
    class: String,
    verdict: &'static str,
    reason: &'static str,
    model: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SloMetricLabels {
    class: String,
    aim: &'static str,
    model: String,
}

/// A class of requests of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct ClassOfModel {
    class: String,
    model: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PlacementReasonLabels {
    reason: &'static str,
}

series_table! {
    /// The series of this process's router, if it has one.
    pub struct SloSeries;

    requests: Family<SloVerdictLabels, Counter>, "cleave_slo_requests",
        "Sequences (a request with n=2 is two) by class, model and verdict: good (all targets met), late (reason: the stage that \
         exceeded its forecast most), refused, failed, invalid, cancelled; only good ones count for goodput";
    downgrades: Family<SloClassLabels, Counter>, "cleave_slo_downgrades",
        "Sequences moved to this class because the targets of their own could not be met";
    goodput: Family<SloClassLabels, FloatGauge>, "cleave_goodput_requests_per_second",
        "Sequences per second over the last minute that met all their targets, by class and model";
    goodput_per_device: Family<SloClassLabels, FloatGauge>, "cleave_goodput_requests_per_second_per_device",
        "Goodput divided by the number of connected devices of the model, by class";
    forecasts: HistogramFamily<SloMetricLabels> = ratio_histograms(), "cleave_forecast_ratio",
        "Real times of requests divided by those predicted at their placement, by target; 1 is exact";
    stages: HistogramFamily<SloStageLabels> = histograms(), "cleave_stage_seconds",
        "Time that completed requests spent in each stage; router_queue, retry, prefill_wait and \
         prefill make up the time to first token";
    ttft: HistogramFamily<SloClassLabels> =
        Family::new_with_constructor(first_token_seconds as fn() -> Histogram),
        "cleave_ttft_seconds",
        "Time from arrival at the router to the first token, of completed requests";
    tpot: HistogramFamily<SloClassLabels> =
        Family::new_with_constructor(gap_seconds as fn() -> Histogram),
        "cleave_tpot_seconds",
        "Mean time between output tokens after the first, of completed requests";
    e2e: HistogramFamily<SloClassLabels> = histograms(), "cleave_e2e_seconds",
        "Time from arrival at the router to the last token, of completed requests";
    reasons: Family<PlacementReasonLabels, Counter>, "cleave_placement_reasons",
        "Placements by reason: split (two workers), both (one worker whose role is both), on_decode \
         or on_prefill (both legs on that worker), load (least loaded: no prices are known), turn (round robin)";
    recent: Arc<Mutex<RecentGoodput>>;
}

impl SloSeries {
    /// Brings the gauges that depend on the time up to date.
    pub(super) fn refresh(&self) {
        let mut recent = self.lock();
        let rates = recent.rates(Instant::now());
        let shown = rates.iter().map(|(key, _)| key.clone()).collect();
        for key in std::mem::replace(&mut recent.shown, shown) {
            if !recent.shown.contains(&key) {
                let labels = key.labels();
                self.goodput.remove(&labels);
                self.goodput_per_device.remove(&labels);
            }
        }
        for (key, rate) in rates {
            let devices = recent.devices.get(&key.model).copied().unwrap_or(0);
            let labels = key.labels();
            self.goodput.get_or_create(&labels).set(rate);
            let each = rate / f64::from(devices.max(1));
            self.goodput_per_device.get_or_create(&labels).set(each);
        }
    }

    fn lock(&self) -> MutexGuard<'_, RecentGoodput> {
        self.recent.lock()
    }
}

impl ClassOfModel {
    fn labels(&self) -> SloClassLabels {
        let Self { class, model } = self.clone();
        SloClassLabels { class, model }
    }
}

/// Goodput of the last minute.
#[derive(Debug, Default)]
struct RecentGoodput {
    /// The models whose classes are shown; one without a name before any is known.
    models: BTreeSet<String>,
    /// Classes of the policy in force.
    classes: BTreeSet<String>,
    /// Classes of the previous policy: its requests may still be under way.
    classes_before: BTreeSet<String>,
    /// Classes whose goodput is shown.
    shown: BTreeSet<ClassOfModel>,
    /// When the first sequence was counted: within the first minute, the rate covers the time since
    /// then.
    since: Option<Instant>,
    /// Seconds since then, and the good sequences of each class in them; the latest last.
    good: VecDeque<(u64, BTreeMap<ClassOfModel, u32>)>,
    /// Connected devices of each model.
    devices: BTreeMap<String, u32>,
}

impl RecentGoodput {
    fn count(&mut self, now: Instant, key: &ClassOfModel) {
        let second = self.second(now);
        if self.good.back().is_none_or(|(last, _)| *last != second) {
            self.good.push_back((second, BTreeMap::new()));
        }
        if let Some((_, counts)) = self.good.back_mut() {
            *counts.entry(key.clone()).or_default() += 1;
        }
        self.forget(second);
    }

    /// Good sequences per second, of every class of the policy and of other classes with some in
    /// the last minute, for each model.
    fn rates(&mut self, now: Instant) -> Vec<(ClassOfModel, f64)> {
        let second = self.second(now);
        self.forget(second);
        let spent = (second + 1).min(WINDOW.as_secs()) as f64;
        let mut sums: BTreeMap<ClassOfModel, u32> = BTreeMap::new();
        for model in &self.models {
            let of_model = self.classes.iter().map(|class| ClassOfModel {
                class: class.clone(),
                model: model.clone(),
            });
            sums.extend(of_model.map(|key| (key, 0)));
        }
        for (key, count) in self.good.iter().flat_map(|(_, counts)| counts) {
            *sums.entry(key.clone()).or_default() += count;
        }
        let rate = |(key, count)| (key, f64::from(count) / spent);
        sums.into_iter().map(rate).collect()
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

/// Counts into these series for a router.
#[derive(Debug)]
pub struct SloMeters {
    series: SloSeries,
}

impl SloMeters {
    pub fn new(series: &SloSeries, policy: &SloPolicy) -> Self {
        let meters = Self {
            series: series.clone(),
        };
        let reasons = REASONS.map(place_reason);
        let reasons = reasons.map(|reason| PlacementReasonLabels { reason });
        begin(&series.reasons, reasons);
        meters.begin_model("");
        meters.policy_changed(policy);
        meters
    }

    /// Shows the classes of a new policy from now on, from zero.
    pub fn policy_changed(&self, policy: &SloPolicy) {
        let names = policy.classes.iter().map(|class| class.name.clone());
        let classes = names.collect();
        let mut recent = self.series.lock();
        if recent.classes != classes {
            recent.classes_before = std::mem::replace(&mut recent.classes, classes);
        }
        let models = recent.models.clone();
        drop(recent);
        for model in &models {
            self.show_classes(model);
        }
    }

    /// Shows the classes of this model from now on, in place of those without a model.
    pub fn begin_model(&self, model: &str) {
        let classes = {
            let mut recent = self.series.lock();
            recent.models.insert(model.to_owned());
            let named = !model.is_empty() && recent.models.remove("");
            if named {
                recent.classes.clone()
            } else {
                BTreeSet::new()
            }
        };
        for class in classes {
            self.series.requests.remove(&good_labels(&class, ""));
        }
        self.show_classes(model);
    }

    /// Shows the goodput of a model that is forgotten no longer.
    pub fn end_model(&self, model: &str) {
        let mut recent = self.series.lock();
        recent.models.remove(model);
        recent.devices.remove(model);
    }

    fn show_classes(&self, model: &str) {
        let classes = self.series.lock().classes.clone();
        let good = classes.iter().map(|class| good_labels(class, model));
        begin(&self.series.requests, good);
    }

    fn decided(&self, decision: &PlacementDecision, model: &str) {
        match &decision.outcome {
            DecisionOutcome::Placed(reason) => {
                let reason = place_reason(*reason);
                self.series
                    .reasons
                    .get_or_create(&PlacementReasonLabels { reason })
                    .inc();
            }
            DecisionOutcome::Downgraded { class } => {
                let key = self.series.key(class, model);
                self.series.downgrades.get_or_create(&key.labels()).inc();
            }
            DecisionOutcome::Waits | DecisionOutcome::Refused(_) => {}
        }
    }

    /// Counts a flight by the brain's note of its outcome, and its ending as its client saw it.
    /// Gives what was counted; `None` if the note is another one.
    pub fn ended(
        &self,
        model: &str,
        judged: RouterNote,
        ending: &Ending,
    ) -> Option<RequestVerdict> {
        let RouterNote::Judged {
            flight: _,
            class,
            tenant: _,
            verdict,
            timing,
            output_tokens,
            forecast,
        } = judged
        else {
            return None;
        };
        let key = self.series.key(&class, model);
        // A stream that lost a token on its way to the client is not good, whatever the workers
        // did.
        let (verdict, reason) = match (verdict, ending) {
            (_, Ending::Refused(refusal)) => ("refused", refusal_name(refusal)),
            (_, Ending::Failed(failure @ Failure::Constraint(_))) => {
                ("invalid", failure_name(failure))
            }
            (_, Ending::Failed(failure)) => ("failed", failure_name(failure)),
            (SloVerdict::Cancelled, _) => ("cancelled", "client_left"),
            (SloVerdict::Refused, _) => ("refused", OTHER),
            (SloVerdict::Failed, _) => ("failed", OTHER),
            // A client that got its stop string, or left too late, is judged as one that stayed.
            (SloVerdict::Good, _) => ("good", "met"),
            (SloVerdict::Late { stage, .. }, _) => ("late", stage.name()),
        };
        self.series.judge(&key, verdict, reason);
        if matches!(verdict, "good" | "late") && output_tokens > 0 {
            self.series.observe(&key, &timing, output_tokens);
            if let Some(forecast) = forecast {
                self.series.compare(&key, &forecast, &timing, output_tokens);
            }
        }
        Some(RequestVerdict {
            class: key.class,
            verdict,
            reason,
            timing,
            output_tokens,
        })
    }
}

impl RouterObserver for SloMeters {
    fn handle_note(&self, note: &RouterNote, context: NoteContext<'_>) {
        match note {
            RouterNote::Decided(decision) => self.decided(decision, context.model),
            RouterNote::Fleet { workers, .. } => {
                let model = context.model.to_owned();
                self.series.lock().devices.insert(model, workers.devices);
            }
            _ => {}
        }
    }
}

impl SloSeries {
    /// Counts a request refused before the brain saw it. Gives what was counted.
    pub fn turned_away(&self, model: &str, class: &str, refusal: &Refusal) -> RequestVerdict {
        let key = self.key(class, model);
        let verdict = RequestVerdict {
            class: key.class.clone(),
            verdict: "refused",
            reason: refusal_name(refusal),
            timing: RequestStageTimes::default(),
            output_tokens: 0,
        };
        self.judge(&key, verdict.verdict, verdict.reason);
        verdict
    }

    /// Good sequences per second over the last minute, by class over all models, and the number of
    /// devices.
    pub fn goodput(&self) -> (Vec<(String, f64)>, u32) {
        let mut recent = self.lock();
        let mut sums: BTreeMap<String, f64> = BTreeMap::new();
        for (key, rate) in recent.rates(Instant::now()) {
            *sums.entry(key.class).or_default() += rate;
        }
        (sums.into_iter().collect(), recent.devices.values().sum())
    }

    fn judge(&self, key: &ClassOfModel, verdict: &'static str, reason: &'static str) {
        let labels = SloVerdictLabels {
            class: key.class.clone(),
            verdict,
            reason,
            model: key.model.clone(),
        };
        self.requests.get_or_create(&labels).inc();
        if verdict == "good" {
            self.lock().count(Instant::now(), key);
        }
    }

    fn observe(&self, key: &ClassOfModel, timing: &RequestStageTimes, output_tokens: u32) {
        let labels = key.labels();
        let see = |series: &HistogramFamily<SloClassLabels>, span: Duration| {
            series.get_or_create(&labels).observe(span.as_secs_f64());
        };
        see(&self.ttft, timing.ttft());
        see(&self.e2e, timing.total());
        if let Some(tpot) = timing.tpot(output_tokens) {
            see(&self.tpot, tpot);
        }
        for stage in RequestStage::ALL {
            let labels = SloStageLabels {
                stage: stage.name(),
                class: key.class.clone(),
                model: key.model.clone(),
            };
            let seconds = timing.stage(stage).as_secs_f64();
            self.stages.get_or_create(&labels).observe(seconds);
        }
    }

    fn compare(
        &self,
        key: &ClassOfModel,
        forecast: &RequestForecast,
        timing: &RequestStageTimes,
        output_tokens: u32,
    ) {
        let pairs = [
            (SloMetric::Ttft, Some(timing.ttft()), forecast.ttft),
            (SloMetric::Tpot, timing.tpot(output_tokens), forecast.tpot),
            (SloMetric::EndToEnd, Some(timing.total()), forecast.e2e),
        ];
        for (aim, real, predicted) in pairs {
            let Some(real) = real.filter(|_| !predicted.is_zero()) else {
                continue;
            };
            let labels = SloMetricLabels {
                class: key.class.clone(),
                aim: aim.name(),
                model: key.model.clone(),
            };
            let ratio = real.as_secs_f64() / predicted.as_secs_f64();
            self.forecasts.get_or_create(&labels).observe(ratio);
        }
    }

    /// The class as a label; all unknown classes share one.
    fn key(&self, class: &str, model: &str) -> ClassOfModel {
        let recent = self.lock();
        let known = recent.classes.contains(class) || recent.classes_before.contains(class);
        ClassOfModel {
            class: if known { class } else { OTHER }.to_owned(),
            model: model.to_owned(),
        }
    }
}

fn good_labels(class: &str, model: &str) -> SloVerdictLabels {
    SloVerdictLabels {
        class: class.to_owned(),
        verdict: "good",
        reason: "met",
        model: model.to_owned(),
    }
}

const REASONS: [PlacementReason; 6] = [
    PlacementReason::Split,
    PlacementReason::Both,
    PlacementReason::OnDecode,
    PlacementReason::OnPrefill,
    PlacementReason::Load,
    PlacementReason::Turn,
];

fn place_reason(reason: PlacementReason) -> &'static str {
    match reason {
        PlacementReason::Split => "split",
        PlacementReason::Both => "both",
        PlacementReason::OnDecode => "on_decode",
        PlacementReason::OnPrefill => "on_prefill",
        PlacementReason::Load => "load",
        PlacementReason::Turn => "turn",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Telemetry;
    use cleave_domain::{FinishReason, FlightId, SloClass, WorkerRef};
    use cleave_router::RoleCounts;

    const DONE: Ending = Ending::Done {
        reason: FinishReason::Length,
    };

    const MODEL: &str = "m";

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

    /// Each stage takes another time; the first four add up to 60 ms.
    fn timing() -> RequestStageTimes {
        let ms = |millis| Duration::from_millis(millis);
        RequestStageTimes {
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

    struct SloMetersFixture {
        telemetry: Telemetry,
        meters: SloMeters,
    }

    impl SloMetersFixture {
        fn new(names: &[&str]) -> Self {
            let telemetry = Telemetry::default();
            let meters = SloMeters::new(&telemetry.slo, &policy(names));
            meters.begin_model(MODEL);
            Self { telemetry, meters }
        }

        fn handle_note(&self, note: &RouterNote) {
            let context = NoteContext {
                flight: note.flight(),
                model: MODEL,
                request: None,
                worker_name: &|worker| worker.to_string(),
            };
            self.meters.handle_note(note, context);
        }

        fn end_flight(&self, class: &str, verdict: SloVerdict, ending: &Ending) {
            let judged = RouterNote::Judged {
                flight: FlightId(7),
                class: class.to_owned(),
                tenant: String::new(),
                verdict,
                timing: timing(),
                output_tokens: 12,
                forecast: Some(Box::new(RequestForecast {
                    prefill: WorkerRef::default(),
                    decode: WorkerRef::default(),
                    cached_tokens: 0,
                    ttft: Duration::from_millis(50),
                    tpot: Duration::from_millis(20),
                    e2e: Duration::ZERO,
                    output_tokens: 12,
                })),
            };
            let counted = self.meters.ended(MODEL, judged, ending);
            assert!(counted.is_some());
        }

        #[track_caller]
        fn assert_shown(&self, lines: &[&str]) {
            // All lines are of one model.
            let text = self.telemetry.text().replace(",model=\"m\"", "");
            for line in lines {
                let there = text.lines().any(|shown| shown == *line);
                assert!(there, "{line} is not in\n{text}");
            }
        }
    }

    #[test]
    fn a_class_has_series_for_each_model() {
        let fixture = SloMetersFixture::new(&["fast"]);
        fixture.meters.begin_model("other");
        fixture.end_flight("fast", SloVerdict::Good, &DONE);
        let text = fixture.telemetry.text();
        let good = |model: &str, count: u32| {
            let labels = "class=\"fast\",verdict=\"good\",reason=\"met\"";
            format!("cleave_slo_requests_total{{{labels},model=\"{model}\"}} {count}")
        };
        for line in [good("m", 1), good("other", 0)] {
            assert!(text.contains(&line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("model=\"\""), "a model is known:\n{text}");
        assert_eq!(fixture.telemetry.slo.goodput().0.len(), 1, "one class");
    }

    // Invariant: I33.
    // Lesson: 25.
    #[tokio::test(start_paused = true)]
    async fn refused_and_failed_requests_count_as_misses() {
        let fixture = SloMetersFixture::new(&["fast", "slow"]);
        fixture.assert_shown(&[
            "cleave_slo_requests_total{class=\"fast\",verdict=\"good\",reason=\"met\"} 0",
        ]);
        let late = Refusal::Late {
            aim: SloMetric::Tpot,
            predicted: Duration::ZERO,
            retry_after: Duration::ZERO,
        };
        let stage = RequestStage::DecodeWait;
        let aim = SloMetric::Ttft;
        fixture.end_flight("fast", SloVerdict::Good, &DONE);
        fixture.end_flight("fast", SloVerdict::Late { aim, stage }, &DONE);
        fixture.end_flight("fast", SloVerdict::Refused, &Ending::Refused(late.clone()));
        fixture.end_flight(
            "fast",
            SloVerdict::Failed,
            &Ending::Failed(Failure::WorkerLost),
        );
        fixture.end_flight("slow", SloVerdict::Cancelled, &Ending::Cancelled);
        // The client had all that it wanted: its stop string came.
        fixture.end_flight("slow", SloVerdict::Good, &Ending::Cancelled);
        // The workers reported success; the client lacks a token.
        fixture.end_flight(
            "slow",
            SloVerdict::Good,
            &Ending::Failed(Failure::WorkerLost),
        );
        let constraint = Failure::Constraint("it is too complex".into());
        fixture.end_flight("slow", SloVerdict::Failed, &Ending::Failed(constraint));
        fixture.telemetry.slo.turned_away(MODEL, "slow", &late);
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
            line("slow", "invalid", "constraint"),
            line("slow", "refused", "slo_tpot_unreachable"),
        ];
        fixture.assert_shown(&lines.each_ref().map(String::as_str));
    }

    // Invariant: I34.
    // Lesson: 23.
    #[tokio::test(start_paused = true)]
    async fn stage_times_add_up_to_ttft_and_e2e() {
        let fixture = SloMetersFixture::new(&["fast"]);
        fixture.end_flight("fast", SloVerdict::Good, &DONE);
        fixture.end_flight("fast", SloVerdict::Good, &DONE);
        fixture.end_flight(
            "fast",
            SloVerdict::Failed,
            &Ending::Failed(Failure::Corrupt),
        );
        fixture.assert_shown(&[
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
        assert!(!fixture.telemetry.text().contains("aim=\"e2e\""));
    }

    #[tokio::test(start_paused = true)]
    async fn goodput_covers_the_last_minute_and_each_device() {
        let fixture = SloMetersFixture::new(&["fast", "slow"]);
        fixture.handle_note(&RouterNote::Fleet {
            workers: RoleCounts {
                prefill: 1,
                decode: 3,
                both: 0,
                devices: 4,
            },
            flights: 0,
            flights_waiting: 0,
        });
        for _ in 0..30 {
            fixture.end_flight("fast", SloVerdict::Good, &DONE);
        }
        // One second has begun: what was good in it is the rate.
        fixture.assert_shown(&["cleave_goodput_requests_per_second{class=\"fast\"} 30.0"]);
        tokio::time::advance(Duration::from_secs(59)).await;
        for _ in 0..15 {
            fixture.end_flight("slow", SloVerdict::Good, &DONE);
        }
        fixture.end_flight(
            "slow",
            SloVerdict::Failed,
            &Ending::Failed(Failure::WorkerLost),
        );
        fixture.assert_shown(&[
            "cleave_goodput_requests_per_second{class=\"fast\"} 0.5",
            "cleave_goodput_requests_per_second_per_device{class=\"fast\"} 0.125",
            "cleave_goodput_requests_per_second{class=\"slow\"} 0.25",
        ]);
        tokio::time::advance(Duration::from_secs(1)).await;
        fixture.assert_shown(&["cleave_goodput_requests_per_second{class=\"fast\"} 0.0"]);
    }

    #[tokio::test(start_paused = true)]
    async fn client_class_names_create_no_metric_series() {
        let fixture = SloMetersFixture::new(&["fast"]);
        for class in 0..100 {
            fixture.end_flight(&format!("made up {class}"), SloVerdict::Good, &DONE);
        }
        let text = fixture.telemetry.text();
        assert!(!text.contains("made up"), "{text}");
        let other =
            "cleave_slo_requests_total{class=\"other\",verdict=\"good\",reason=\"met\"} 100";
        fixture.assert_shown(&[other]);
        fixture.meters.policy_changed(&policy(&["new"]));
        fixture.end_flight("new", SloVerdict::Good, &DONE);
        // A request under the previous policy still ends under its class.
        fixture.end_flight("fast", SloVerdict::Good, &DONE);
        fixture.assert_shown(&[
            "cleave_slo_requests_total{class=\"new\",verdict=\"good\",reason=\"met\"} 1",
            "cleave_slo_requests_total{class=\"fast\",verdict=\"good\",reason=\"met\"} 1",
        ]);
    }

    #[tokio::test(start_paused = true)]
    async fn goodput_of_a_removed_class_disappears() {
        let fixture = SloMetersFixture::new(&["old"]);
        let other = "made up by a client";
        fixture.end_flight(other, SloVerdict::Good, &DONE);
        fixture.assert_shown(&["cleave_goodput_requests_per_second{class=\"other\"} 1.0"]);
        fixture.meters.policy_changed(&policy(&["new"]));
        fixture.end_flight("old", SloVerdict::Good, &DONE);
        fixture.assert_shown(&[
            "cleave_goodput_requests_per_second{class=\"old\"} 1.0",
            "cleave_goodput_requests_per_second{class=\"new\"} 0.0",
        ]);
        tokio::time::advance(WINDOW).await;
        fixture.assert_shown(&["cleave_goodput_requests_per_second{class=\"new\"} 0.0"]);
        let text = fixture.telemetry.text();
        for class in ["old", "other"] {
            let labels = format!("{{class=\"{class}\"}}");
            let goodput = text
                .lines()
                .filter(|line| line.starts_with("cleave_goodput"));
            assert_eq!(
                goodput.filter(|line| line.contains(&labels)).count(),
                0,
                "{text}"
            );
        }
        // Two policies later the name counts as other.
        fixture.meters.policy_changed(&policy(&["newer"]));
        fixture.end_flight("old", SloVerdict::Good, &DONE);
        fixture.assert_shown(&[
            "cleave_slo_requests_total{class=\"old\",verdict=\"good\",reason=\"met\"} 1",
            "cleave_slo_requests_total{class=\"other\",verdict=\"good\",reason=\"met\"} 2",
        ]);
    }

    #[tokio::test(start_paused = true)]
    async fn placement_reasons_and_downgrades_are_counted() {
        let fixture = SloMetersFixture::new(&["fast", "slow"]);
        let decided = |outcome| {
            RouterNote::Decided(Box::new(PlacementDecision {
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
            PlacementReason::Split,
            PlacementReason::OnDecode,
            PlacementReason::Split,
        ] {
            fixture.handle_note(&decided(DecisionOutcome::Placed(reason)));
        }
        let class = "slow".to_owned();
        fixture.handle_note(&decided(DecisionOutcome::Downgraded { class }));
        fixture.assert_shown(&[
            "cleave_placement_reasons_total{reason=\"split\"} 2",
            "cleave_placement_reasons_total{reason=\"on_decode\"} 1",
            "cleave_placement_reasons_total{reason=\"turn\"} 0",
            "cleave_slo_downgrades_total{class=\"slow\"} 1",
        ]);
    }
}
