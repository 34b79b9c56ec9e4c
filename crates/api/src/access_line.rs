//! One log line about each HTTP request.
//!
//! Owns: the fields of the line, which the parts of a request fill in, and its level. Never: text
//! or tokens of a prompt or an answer, unless `--log-prompts` is given; the query of a path.
//! Invariant: each request has exactly one line, written when its answer is complete or its client
//! has left.

use crate::app::PromptLog;
use crate::error::ApiError;
use crate::frontend::ServingWorkers;
use crate::timing::millis;
use crate::trace_parent::TraceParent;
use axum::http::Method;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The events of lines at the level `info`.
const TARGET: &str = "access";

/// Routes that are asked every few seconds, whose lines would hide the others.
const PROBES: [&str; 6] = ["/health", "/live", "/load", "/metrics", "/ping", "/ready"];

/// Whether each request is logged at the level `info`; otherwise it is at `debug`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    #[default]
    Off,
    On,
}

/// The line of one request. Clones are one line, which is written when the last one is dropped.
#[derive(Clone)]
pub(crate) struct AccessLine(Arc<LineParts>);

/// The request as it arrived.
pub(crate) struct RequestHead {
    pub(crate) method: Method,
    /// The path without its query.
    pub(crate) path: String,
    pub(crate) request_id: Arc<str>,
    pub(crate) trace: Option<TraceParent>,
}

struct LineParts {
    head: RequestHead,
    access_log: AccessLog,
    prompts: PromptLog,
    began: Instant,
    workers: ServingWorkers,
    rest: Mutex<LineRest>,
}

/// Everything that is known later than the request's head.
#[derive(Clone, Debug, Default)]
struct LineRest {
    status: Option<u16>,
    error: Option<ErrorFields>,
    work: Option<RequestWork>,
}

#[derive(Clone, Debug)]
struct ErrorFields {
    code: Option<&'static str>,
    param: Option<String>,
    message: Option<String>,
}

/// The work of a request to generate.
#[derive(Clone, Debug)]
pub(crate) struct RequestWork {
    /// `completed`, `cancelled`, `refused`, `failed` or `invalid`.
    pub(crate) ending: &'static str,
    /// The served name of the model, once it is known.
    pub(crate) model: Option<String>,
    /// The class whose targets count.
    pub(crate) class: Option<String>,
    pub(crate) sequences: usize,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) output_tokens: u64,
    pub(crate) ttft: Option<Duration>,
    /// The mean gap between tokens of a sequence.
    pub(crate) tpot: Option<Duration>,
}

impl AccessLine {
    pub(crate) fn begin(head: RequestHead, access_log: AccessLog, prompts: PromptLog) -> Self {
        Self(Arc::new(LineParts {
            head,
            access_log,
            prompts,
            began: Instant::now(),
            workers: ServingWorkers::default(),
            rest: Mutex::default(),
        }))
    }

    /// The list that the serving side fills with the request's workers.
    pub(crate) fn workers(&self) -> ServingWorkers {
        self.0.workers.clone()
    }

    pub(crate) fn set_status(&self, status: u16) {
        self.0.rest.lock().status = Some(status);
    }

    /// Sets the reason of a refusal or failure. Its message may quote what the client sent.
    pub(crate) fn set_error(&self, error: &ApiError) {
        let shown = self.0.prompts == PromptLog::Shown;
        self.0.rest.lock().error = Some(ErrorFields {
            code: error.code(),
            param: error.param().map(str::to_owned),
            message: shown.then(|| error.object().to_string()),
        });
    }

    pub(crate) fn set_work(&self, work: RequestWork) {
        self.0.rest.lock().work = Some(work);
    }
}

/// Writes an event with the fields of a line, at a level that is known when this is compiled.
macro_rules! write_line {
    ($level:ident, $line:expr, $rest:expr) => {{
        let LineParts { head, began, workers, .. } = $line;
        let LineRest { status, error, work } = $rest;
        let (error, work) = (error.as_ref(), work.as_ref());
        let error_text = |read: fn(&ErrorFields) -> Option<&str>| error.and_then(read);
        let count = |read: fn(&RequestWork) -> u64| work.map(read);
        let span = |read: fn(&RequestWork) -> Option<Duration>| work.and_then(read).map(millis);
        tracing::event!(
            target: TARGET,
            tracing::Level::$level,
            method = head.method.as_str(),
            path = head.path,
            status,
            ending = work.map(|work| work.ending),
            reason = error_text(|error| error.code),
            param = error_text(|error| error.param.as_deref()),
            error = error_text(|error| error.message.as_deref()),
            model = work.and_then(|work| work.model.as_deref()),
            class = work.and_then(|work| work.class.as_deref()),
            workers = workers.names(),
            sequences = count(|work| work.sequences as u64),
            prompt_tokens = count(|work| work.prompt_tokens),
            cached_tokens = count(|work| work.cached_tokens),
            output_tokens = count(|work| work.output_tokens),
            ttft_ms = span(|work| work.ttft),
            tpot_ms = span(|work| work.tpot),
            total_ms = millis(began.elapsed()),
            request_id = &*head.request_id,
            trace_id = head.trace.map(display),
            "request over"
        );
    }};
}

impl Drop for LineParts {
    fn drop(&mut self) {
        let rest = std::mem::take(self.rest.get_mut());
        let has_failed = rest
            .work
            .as_ref()
            .is_some_and(|work| work.ending == "failed");
        let is_probe = PROBES.contains(&self.head.path.as_str());
        if has_failed {
            write_line!(WARN, &*self, rest);
        } else if self.access_log == AccessLog::On && !is_probe {
            write_line!(INFO, &*self, rest);
        } else {
            write_line!(DEBUG, &*self, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::PROBES;
    use crate::routes::PROBE_ROUTES;

    #[test]
    fn every_probe_is_a_route_and_every_route_of_them_a_probe() {
        let routes = PROBE_ROUTES.iter().map(|route| route.path);
        // People ask for the version, and no system does so every few seconds.
        let mut routes: Vec<&str> = routes.filter(|path| *path != "/version").collect();
        routes.sort_unstable();
        assert_eq!(routes, PROBES);
    }
}
