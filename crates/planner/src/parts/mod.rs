//! Prices and memory of a worker from parts: hardware, a model, formats and degrees of parallelism.
//!
//! Owns: the catalogue of hardware, the times of kinds of operations, the room for keys and values,
//! and the fit of reached shares to measured steps. Never: measures; knows a fleet or a request.
//! Invariant: more rows or a longer context never cost less, and a device never holds more than its
//! memory.

mod fit;
mod formats;
mod hardware;
mod memory;
mod worker;

pub use fit::{ErrorSummary, FitReport, PhaseErrors, SamplePhase, StepSample, fit};
pub use formats::{KvFormat, WeightFormat};
pub use hardware::{
    Arithmetic, DeviceLink, HARDWARE_VERSION, Hardware, ProductFormat, ReachedShares,
};
pub use worker::{StepLimits, WorkerSetup};
