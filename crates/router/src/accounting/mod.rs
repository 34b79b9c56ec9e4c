//! The account of the service that flights received.
//!
//! Owns: service per class and tenant with the accuracy of predictions (`tally`), and the outcome
//! of a flight with the times of its stages (`verdict`). Never: decides anything about a flight.
//! Invariant: an account is open exactly as long as a flight of it is.

pub(crate) mod tally;
pub(crate) mod verdict;
