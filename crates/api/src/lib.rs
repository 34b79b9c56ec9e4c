//! The HTTP face.
//!
//! Owns: OpenAI-shaped JSON, validation, tokenizer, chat templates, detokenization, stop strings,
//! server-sent events. Never: knows a router or a worker; it talks to a [`Frontend`].
//! Invariant: bad input ends here with a 4xx that names the field; no state is made for it.

mod frontend;

pub use frontend::{FlightEvent, FlightStream, Frontend, Readiness};
