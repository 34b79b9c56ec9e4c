//! The routes as clients see them, with a scripted serving side behind.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod answers;
mod endings;
mod input;
mod keys;
mod operations;
mod promises;
mod stage;
mod ui;
