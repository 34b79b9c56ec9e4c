//! How a router is set up: plain data, each default on its field.
//!
//! Owns: the defaults. Never checks anything: the command line does.
//! Invariant: a default stands on its field, and nowhere else.

use cleave_api::ApiOptions;
use cleave_fleet::SILENCE_DEFAULT;
use cleave_gateway::GatewayOptions;
use cleave_policy::PolicyFile;
use cleave_server::HttpLimits;
use cleave_telemetry::TraceOptions;
use cleave_tls::CertificateFiles;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq)]
pub struct RouterOptions {
    /// Limits of its brain.
    pub limits: cleave_router::RouterLimits,
    /// The SLO policy, in a file that is followed while it changes; it replaces the policy of
    /// `limits`. Default none.
    pub policy: Option<PolicyFile>,
    /// The served names of the models whose workers may join. Default none is named: the workers
    /// that come decide.
    pub served_models: Vec<String>,
    /// Settings of the HTTP API.
    pub api: ApiOptions,
    /// `host:port` for Kubernetes' external metrics API, by HTTPS. Default nowhere.
    pub external_metrics_listen: Option<String>,
    /// `host:port` of the fleet's other routers; this one may be among them, and a name may stand
    /// for several. Their waiting requests count here while no worker is connected. Default none.
    pub peer_routers: Vec<String>,
    /// Where the brain's tape goes. Default nowhere.
    pub tape: Option<PathBuf>,
    /// Where traces go. Default nowhere.
    pub traces: TraceOptions,
    /// A worker that sends nothing for this long counts as lost, and its streams continue
    /// elsewhere. Default 5 s.
    pub silence_max: Duration,
    /// Tokens given to a client, beyond what its socket holds, before it takes one; with more it
    /// counts as stalled. Default 256.
    pub reader_backlog_max: u32,
    /// Limits on the connections of clients and workers.
    pub http: HttpLimits,
    /// The certificate for clients. Default none: clients connect without TLS.
    pub certificate: Option<CertificateFiles>,
    /// The folder with the certificates by which the fleet's processes know each other: `tls.crt`,
    /// `tls.key`, `ca.crt`. With it only workers that have one may join. Default none: any worker
    /// may.
    pub peer_tls: Option<PathBuf>,
    /// `host:port` of `/admin`, the probes and the metrics. Default none: they share the clients'
    /// port.
    pub admin_listen: Option<String>,
}

impl Default for RouterOptions {
    fn default() -> Self {
        Self {
            limits: cleave_router::RouterLimits::default(),
            policy: None,
            served_models: Vec::new(),
            api: ApiOptions::default(),
            external_metrics_listen: None,
            peer_routers: Vec::new(),
            tape: None,
            traces: TraceOptions::default(),
            silence_max: SILENCE_DEFAULT,
            reader_backlog_max: 256,
            http: HttpLimits::default(),
            certificate: None,
            peer_tls: None,
            admin_listen: None,
        }
    }
}

impl RouterOptions {
    /// The part for the router's body.
    pub(crate) fn gateway(&self) -> GatewayOptions {
        GatewayOptions {
            limits: self.limits.clone(),
            policy: self.policy.clone(),
            served_models: self.served_models.clone(),
            tape: self.tape.clone(),
            silence_max: self.silence_max,
            reader_backlog_max: self.reader_backlog_max,
        }
    }
}
