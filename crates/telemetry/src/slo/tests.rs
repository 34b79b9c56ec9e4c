//! The series of targets and of their classes.

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
    let other = "cleave_slo_requests_total{class=\"other\",verdict=\"good\",reason=\"met\"} 100";
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
