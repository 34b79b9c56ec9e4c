//! The number of workers wanted, for the orchestrators that start them.
//!
//! Owns: the two interfaces by which orchestrators ask for the last decision of the router's brain.
//! Never decides; never starts or stops a worker. Invariant: where nothing is known, or
//! nothing is to change, the answer is an error and never a number: orchestrators then change
//! nothing.

mod external;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod https;
mod keda;

pub use external::external_metrics_routes;
pub use https::ExternalMetricsServer;
pub use keda::scaler_routes;
