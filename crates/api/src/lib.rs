//! The HTTP face.
//!
//! Owns: OpenAI-shaped JSON, validation, tokenizer, chat templates, detokenization, stop strings,
//! server-sent events. Never: knows a router or a worker; it talks to a [`Frontend`].
//! Invariant: bad input ends here with a 4xx that names the field; no state is made for it.

mod admin;
mod answer;
mod app;
mod ask;
mod choice;
mod error;
mod field;
mod flights;
mod frontend;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod gate;
mod generate;
mod metrics;
mod model;
mod routes;
mod text;
mod timing;

pub use admin::{
    CommandError, LinkView, Operator, ScalingAnswer, ScalingView, WorkerCommand, WorkerState,
    WorkerView, admin_routes,
};
pub use app::{ApiOptions, App};
pub use error::RETRY_AFTER;
pub use frontend::{Enough, FlightEvent, FlightStream, Frontend, Progress, Readiness};
pub use gate::AdminKey;
pub use model::{ModelError, ModelFiles, ModelText, Special};
pub use text::{Start, TextStream};
