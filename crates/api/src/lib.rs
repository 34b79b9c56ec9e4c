//! The HTTP face.
//!
//! Owns: OpenAI-shaped JSON, validation, tokenizer, chat templates, detokenization, stop strings,
//! server-sent events. Never: knows a router or a worker; it talks to a [`Frontend`].
//! Invariant: bad input ends here with a 4xx that names the field; no state is made for it.

mod admin;
mod answer;
mod app;
mod ask;
mod body;
mod book;
mod caller;
mod choice;
mod error;
mod field;
mod flights;
mod frontend;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod gate;
mod generate;
mod json;
mod metrics;
mod model;
mod openapi;
mod quota;
mod record;
mod routes;
mod text;
mod timing;
mod trace_parent;
mod ui;

pub use admin::{
    CommandError, LinkView, Operator, ScalingAnswer, ScalingView, WorkerCommand, WorkerState,
    WorkerView, admin_routes,
};
pub use app::{ApiOptions, App, GiveBack, PromptLog};
pub use book::{Book, Shown, plain_metrics};
pub use error::RETRY_AFTER;
pub use frontend::{
    Caller, Enough, FlightEvent, FlightStream, Frontend, Progress, Readiness, Streams,
};
pub use gate::AdminKey;
pub use metrics::metrics_described;
pub use model::{ModelError, ModelFiles, ModelText, Special};
pub use record::RequestSpan;
pub use routes::metrics_answer;
pub use text::{Start, TextStream};
pub use trace_parent::TraceParent;
pub use ui::{
    Board, ClassRow, FlightsNow, HISTORY_SECONDS, Handoffs, Happening, LinkRow, PoolWanted,
    Quantiles, Scaling, ScalingStep, Second, Verdicts, WINDOW, WorkerRow, ui_routes,
};
