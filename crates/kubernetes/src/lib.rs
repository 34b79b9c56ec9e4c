//! The interfaces that Kubernetes and its gateways use.
//!
//! Owns: the endpoint picker, by which a gateway asks for the router of a request, and the two
//! services by which autoscalers ask for the number of workers. Never decides how many workers
//! there are to be, nor where a request runs. Invariant: where nothing is known, the answer is an
//! error and never a guess.

#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod picker;
mod scaling;

pub use picker::{Picker, PickerOptions, ProxyTls};
pub use scaling::{ExternalMetricsServer, external_metrics_routes, scaler_routes};

use cleave_server::ServerError;
use cleave_tls::TlsError;

/// The reason why an interface cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// The port cannot be served.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The certificate cannot be made.
    #[error(transparent)]
    Tls(#[from] TlsError),
}
