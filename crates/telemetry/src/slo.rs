//! Series of the SLOs: verdicts, stages, goodput and forecasts, by class.
//!
//! Owns: these series, and the minute that goodput covers. Never judges a request: the brain's
//! notes do; requests that never reached the brain were refused before it. Invariant: every
//! sequence counts once, refused and failed ones too (lesson 25), and a class that no policy names
//! creates no series.

mod tokens;

pub use tokens::TokenCounters;

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
        "Time from submission to the first token, of completed sequences (before it the HTTP server reads the request: \
         cleave_request_read_seconds)";
    tpot: HistogramFamily<SloClassLabels> =
        Family::new_with_constructor(gap_seconds as fn() -> Histogram),
        "cleave_tpot_seconds",
        "Mean time between a sequence's output tokens after the first, of completed sequences \
         (cleave_http_inter_token_latency_seconds has each gap)";
    e2e: HistogramFamily<SloClassLabels> = histograms(), "cleave_e2e_seconds",
        "Time from submission to the last token, of completed sequences";
    prompt_tokens: Family<SloClassLabels, Counter>, "cleave_router_prompt_tokens",
        "Prompt tokens of sequences that got their first token or their vector, each sequence once, by class and model";
    cached_tokens: Family<SloClassLabels, Counter>, "cleave_router_cached_tokens",
        "Part of cleave_router_prompt_tokens_total that came from a prefix cache, by class and model";
    output_tokens: Family<SloClassLabels, Counter>, "cleave_router_output_tokens",
        "Output tokens passed on to clients, each once whatever attempts drew it, by class and model";
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
            self.series.end_tokens(&class_labels(&class, ""));
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
        for class in &classes {
            self.series.begin_tokens(&class_labels(class, model));
        }
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

fn class_labels(class: &str, model: &str) -> SloClassLabels {
    SloClassLabels {
        class: class.to_owned(),
        model: model.to_owned(),
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
mod tests;
