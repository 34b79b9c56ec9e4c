//! Kubernetes' external metrics API, for a plain HPA.
//!
//! Owns: its discovery documents, its one metric, label selectors. Never distinguishes namespaces:
//! a router has one fleet. Invariant: a selector that cannot be parsed is an error and selects
//! nothing.

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use cleave_fleet::{POOLS, ScalingStatusReader};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::SystemTime;

const GROUP: &str = "external.metrics.k8s.io";
const VERSION: &str = "external.metrics.k8s.io/v1beta1";
/// The one metric: workers wanted, by the labels `pool` and `model`.
const METRIC: &str = "cleave_workers_wanted";

/// Everything under `/apis`, and the health paths that an API server asks.
pub fn external_metrics_routes(answers: ScalingStatusReader) -> Router {
    let metric = format!("/apis/{VERSION}/namespaces/{{namespace}}/{{metric}}");
    Router::new()
        .route("/apis", get(groups))
        .route(&format!("/apis/{GROUP}"), get(group))
        .route(&format!("/apis/{VERSION}"), get(resources))
        .route(&metric, get(values))
        .route("/healthz", get(healthy))
        .route("/livez", get(healthy))
        .route("/readyz", get(healthy))
        .fallback(unknown)
        .with_state(answers)
}

async fn healthy() -> &'static str {
    "ok"
}

fn group_object() -> Value {
    let version = json!({"groupVersion": VERSION, "version": "v1beta1"});
    json!({"name": GROUP, "versions": [version], "preferredVersion": version})
}

async fn groups() -> Json<Value> {
    Json(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group_object()]}))
}

async fn group() -> Json<Value> {
    let mut object = group_object();
    object["kind"] = "APIGroup".into();
    object["apiVersion"] = "v1".into();
    Json(object)
}

async fn resources() -> Json<Value> {
    let resource = json!({
        "name": METRIC,
        "singularName": "",
        "namespaced": true,
        "kind": "ExternalMetricValueList",
        "verbs": ["get"],
    });
    Json(json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": VERSION,
        "resources": [resource],
    }))
}

async fn unknown() -> Response {
    error_status(StatusCode::NOT_FOUND, "NotFound", "no such path")
}

/// An error in Kubernetes' format.
fn error_status(code: StatusCode, reason: &str, message: &str) -> Response {
    let status = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code.as_u16(),
    });
    (code, Json(status)).into_response()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SelectorQuery {
    #[serde(default)]
    label_selector: String,
}

async fn values(
    State(answers): State<ScalingStatusReader>,
    path: Result<Path<(String, String)>, PathRejection>,
    query: Result<Query<SelectorQuery>, QueryRejection>,
) -> Response {
    let (Ok(Path((_, metric))), Ok(Query(SelectorQuery { label_selector }))) = (path, query) else {
        let message = "the path or the query is not UTF-8 text";
        return error_status(StatusCode::BAD_REQUEST, "BadRequest", message);
    };
    if metric != METRIC {
        let message = format!("there is no metric {metric}; there is {METRIC}");
        return error_status(StatusCode::NOT_FOUND, "NotFound", &message);
    }
    let terms = match parse_selector(&label_selector) {
        Ok(terms) => terms,
        Err(message) => return error_status(StatusCode::BAD_REQUEST, "BadRequest", &message),
    };
    let now = prost_types::Timestamp::from(SystemTime::now()).to_string();
    let mut items = Vec::new();
    for (model, status) in answers.statuses().iter() {
        let model = label_value(model);
        let labels = |pool| PoolLabels {
            pool,
            model: &model,
        };
        let chosen = POOLS
            .into_iter()
            .filter(|(pool, _)| terms.iter().all(|term| term.matches(&labels(pool))));
        let chosen: Vec<_> = chosen.collect();
        if chosen.is_empty() {
            continue;
        }
        let target_workers = match status.target_workers() {
            Ok(target_workers) => target_workers,
            Err(unknown) => {
                let code = StatusCode::SERVICE_UNAVAILABLE;
                return error_status(code, "ServiceUnavailable", &unknown.to_string());
            }
        };
        items.extend(chosen.into_iter().map(|(pool, role)| {
            json!({
                "metricName": METRIC,
                "metricLabels": {"pool": pool, "model": model},
                "timestamp": now,
                "value": target_workers.for_role(role).to_string(),
            })
        }));
    }
    Json(json!({
        "kind": "ExternalMetricValueList",
        "apiVersion": VERSION,
        "metadata": {},
        "items": items,
    }))
    .into_response()
}

/// The labels of one value.
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolLabels<'a> {
    pool: &'a str,
    /// Empty before a model is known: then any name selects.
    model: &'a str,
}

/// A model's name as the value of a Kubernetes label: at most 63 letters, digits, `-`, `_` and `.`,
/// the first and the last a letter or a digit.
fn label_value(model: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let plain = model.chars().map(|c| if fits(c) { c } else { '-' });
    let short: String = plain.take(63).collect();
    let ends = |c: char| !c.is_ascii_alphanumeric();
    short.trim_matches(ends).to_owned()
}

/// One condition of a label selector, on our labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SelectorTerm {
    pub(super) key: String,
    /// The values to match; `None` tests whether the label exists.
    pub(super) values: Option<Vec<String>>,
    /// Whether the condition is negated.
    pub(super) is_negated: bool,
}

impl SelectorTerm {
    pub(super) fn matches(&self, labels: &PoolLabels<'_>) -> bool {
        let value = match self.key.as_str() {
            "pool" => Some(labels.pool),
            "model" if labels.model.is_empty() => return true,
            "model" => Some(labels.model),
            _ => None,
        };
        let named = |values: &Vec<String>| {
            value.is_some_and(|value| values.iter().any(|other| other == value))
        };
        self.values.as_ref().map_or(value.is_some(), named) != self.is_negated
    }
}

/// `a=b`, `a==b`, `a!=b`, `a in (b,c)`, `a notin (b,c)`, `a`, `!a`, with commas between.
pub(super) fn parse_selector(selector: &str) -> Result<Vec<SelectorTerm>, String> {
    let mut terms = Vec::new();
    let mut rest = selector.trim();
    while !rest.is_empty() {
        let end = end_of_term(rest);
        let (one, more) = rest.split_at(end);
        terms.push(
            parse_term(one.trim())
                .ok_or_else(|| format!("cannot parse the label selector `{one}`"))?,
        );
        rest = more.strip_prefix(',').unwrap_or(more).trim();
    }
    Ok(terms)
}

/// The end of the first term: the first comma outside of brackets.
fn end_of_term(text: &str) -> usize {
    let mut depth = 0i32;
    let found = text.char_indices().find(|(_, c)| {
        depth += i32::from(*c == '(') - i32::from(*c == ')');
        *c == ',' && depth <= 0
    });
    found.map_or(text.len(), |(at, _)| at)
}

fn parse_term(text: &str) -> Option<SelectorTerm> {
    let of = |key: &str, values: Option<Vec<String>>, not| {
        let key = key.trim();
        let plain = |text: &str, signs: &str| {
            let fits = |c: char| c.is_ascii_alphanumeric() || signs.contains(c);
            text.chars().all(fits)
        };
        let mut meant = values.iter().flatten();
        let sound = !key.is_empty() && plain(key, "-_./") && meant.all(|one| plain(one, "-_."));
        sound.then(|| SelectorTerm {
            key: key.to_owned(),
            values,
            is_negated: not,
        })
    };
    if let Some((key, list)) = text.split_once('(') {
        let list = list.trim_end().strip_suffix(')')?;
        let values = list
            .split(',')
            .map(|value| value.trim().to_owned())
            .collect();
        let (key, word) = key.trim().rsplit_once(' ')?;
        return match word {
            "in" => of(key, Some(values), false),
            "notin" => of(key, Some(values), true),
            _ => None,
        };
    }
    let one = |value: &str| Some(vec![value.trim().to_owned()]);
    if let Some((key, value)) = text.split_once("!=") {
        return of(key, one(value), true);
    }
    if let Some((key, value)) = text.split_once("==").or(text.split_once('=')) {
        return of(key, one(value), false);
    }
    match text.strip_prefix('!') {
        Some(key) => of(key, None, true),
        None => of(text, None, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_name_becomes_a_label_value() {
        for (name, value) in [
            ("demo", "demo"),
            ("meta-llama/Llama-3.1", "meta-llama-Llama-3.1"),
            ("/models/x/", "models-x"),
            ("", ""),
        ] {
            assert_eq!(label_value(name), value);
        }
        assert_eq!(label_value(&"a".repeat(99)).len(), 63);
    }

    #[test]
    fn label_selectors_select_as_in_kubernetes() {
        let chosen = |selector: &str| -> Result<Vec<&str>, String> {
            let terms = parse_selector(selector)?;
            let fits = |pool: &&str| {
                let labels = PoolLabels { pool, model: "a" };
                terms.iter().all(|term| term.matches(&labels))
            };
            Ok(POOLS
                .into_iter()
                .map(|(pool, _)| pool)
                .filter(fits)
                .collect())
        };
        let of = |selector| chosen(selector).unwrap();
        assert_eq!(of("pool=prefill"), ["prefill"]);
        assert_eq!(of("pool==decode"), ["decode"]);
        assert_eq!(of("pool!=decode"), ["prefill", "both"]);
        assert_eq!(of("pool in (decode, both)"), ["decode", "both"]);
        assert_eq!(of("pool notin (decode,both),pool"), ["prefill"]);
        assert_eq!(of(""), ["prefill", "decode", "both"]);
        assert_eq!(of("!pool"), [""; 0]);
        assert_eq!(of("app=x,pool=prefill"), [""; 0]);
        assert_eq!(of("model=a,pool=prefill"), ["prefill"]);
        assert_eq!(of("model=b,pool=prefill"), [""; 0]);
        assert_eq!(of("model notin (b),pool=both"), ["both"]);
        for wrong in [
            "pool in decode)",
            "pool within (a)",
            "=x",
            "a b",
            "pool in (a",
            "pool in (a),b)",
            "pool=a=b",
        ] {
            assert!(chosen(wrong).is_err(), "{wrong}");
        }
    }
}
