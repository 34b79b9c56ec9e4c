//! Placement: the choice of the workers for a flight, and its admission.
//!
//! Owns: the reading of a flight's needs (`rules`), the fleet as a policy sees it (`candidates`,
//! `devices`, `prefix`), predictions (`forecast`), the choice (`judge` by forecast, `policy` by
//! load), admission with the passes over the queue (`admit`) and the first order (`start`). Never:
//! knows the further way of an attempt.
//! Invariant: a choice changes nothing; `admit` and `start` act on it.

pub(crate) mod admit;
pub(crate) mod candidates;
pub(crate) mod devices;
pub(crate) mod forecast;
pub(crate) mod judge;
pub mod policy;
pub(crate) mod prefix;
pub(crate) mod rules;
mod start;
