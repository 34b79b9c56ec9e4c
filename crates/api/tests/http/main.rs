//! The routes as clients see them, with a scripted frontend.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod answers;
mod background;
mod constraints;
mod cross_origin;
mod custom_tools;
mod endings;
mod input;
mod item_references;
mod keys;
mod messages;
mod models;
mod operations;
mod pooled;
mod ranges;
mod responses;
mod scripted_server;
mod slo;
mod stored_responses;
mod threads;
mod tools;
mod ui;
