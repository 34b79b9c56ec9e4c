//! Receivers of the brains' notes.
//!
//! A driver gives each note to every observer of one list, in its order. Never: an observer that
//! answers, so that no other one depends on it.

use crate::trace::RequestContext;
use cleave_domain::{FlightId, WorkerRef};
use cleave_router::RouterNote;
use cleave_sched::WorkerNote;
use std::sync::Arc;

/// Receives the notes of a router's brain. Its readers are other tasks, so it is shared with them
/// and locks what it changes.
pub trait RouterObserver {
    fn handle_note(&self, note: &RouterNote, context: NoteContext<'_>);
}

/// Facts of the body about a router's note.
#[derive(Clone, Copy)]
pub struct NoteContext<'a> {
    /// The flight that the note is about.
    pub flight: Option<FlightId>,
    /// The model whose pool made the note; empty before a model is known.
    pub model: &'a str,
    /// The id and trace of its request; `None` unless notes are logged.
    pub request: Option<&'a Arc<RequestContext>>,
    /// Gives the name of a worker.
    pub worker_name: &'a dyn Fn(&WorkerRef) -> String,
}

/// Receives the notes of a worker's brain.
pub trait WorkerObserver {
    fn handle_note(&mut self, note: &WorkerNote);
}
