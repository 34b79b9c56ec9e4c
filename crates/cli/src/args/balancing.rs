//! The flags of a router that shares its fleet with other routers, behind a load balancer or a
//! gateway.
//!
//! Owns: these flags. Never: holds a default that a library crate holds, too.

use crate::values::{SecondsArg, parse_router, parse_seconds_or_zero};
use clap::{Args, ValueEnum};
use cleave_api::ApiOptions;
use cleave_kubernetes::{PickerOptions, ProxyTls};
use std::net::SocketAddr;
use std::time::Duration;

/// Flags of the streams to clients.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Clients")]
pub(crate) struct StreamArgs {
    /// Seconds of silence after which a stream gets a comment, so that no proxy closes the
    /// connection. This includes the time before the first token: the status is then 200, and a
    /// later error is an event in the stream. 0 sends no comments.
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(keep_alive_default()), value_parser = parse_seconds_or_zero)]
    pub(crate) sse_keep_alive: SecondsArg,
}

fn keep_alive_default() -> Duration {
    ApiOptions::default().keep_alive.unwrap_or_default()
}

impl StreamArgs {
    /// Converts the flag into the option of the HTTP side.
    pub(crate) fn keep_alive(self) -> Option<Duration> {
        let SecondsArg(span) = self.sse_keep_alive;
        (!span.is_zero()).then_some(span)
    }
}

/// Flags of the peer routers of a fleet that may have no workers.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Other routers")]
pub(crate) struct PeerRouterArgs {
    /// The fleet's routers, which may include this one: host:port, several separated by commas; a
    /// name stands for all its addresses. Each is asked for /load once a second. While no worker is
    /// connected, the requests that wait at any of them count as demand at each, so that an
    /// autoscaler may ask any router. The requests use `--peer-tls` if it is set, and then any port
    /// of the routers; otherwise they are in clear text and must go to the port of `--admin-listen`
    /// where clients use TLS.
    #[arg(long, value_name = "ADDR", value_delimiter = ',', value_parser = parse_router)]
    pub(crate) fellow_routers: Vec<String>,
}

/// Flags of the endpoint picker of a Kubernetes gateway.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Endpoint picker")]
pub(crate) struct PickerArgs {
    /// Also be an endpoint picker at this address, for a gateway's InferencePool whose endpoints
    /// are routers (Envoy's ext_proc, gRPC). The usual port is 9002.
    #[arg(long, value_name = "ADDR", requires = "picker_endpoints")]
    pub(crate) ext_proc_listen: Option<SocketAddr>,
    /// TLS between gateways and `--ext-proc-listen`. InferencePools expect TLS, so it is on unless
    /// the value is `off`. By default the picker uses the certificate of `--ssl-certfile`, or a
    /// self-signed one if there is none.
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        requires = "ext_proc_listen",
        requires_if("front", "ssl_certfile")
    )]
    pub(crate) ext_proc_tls: Option<ExtProcTls>,
    /// The routers to pick from, including this one: host:port of their client port, several
    /// separated by commas; a name stands for all its addresses. Each is asked for /ready and /load
    /// twice a second, by `--peer-tls` if it is set, otherwise in clear text.
    #[arg(long, value_name = "ADDR", value_delimiter = ',', requires = "ext_proc_listen", value_parser = parse_router)]
    pub(crate) picker_endpoints: Vec<String>,
    /// Port at which the picker asks each router for /ready and /load: its `--admin-listen`. The
    /// client port if absent. Required where clients use TLS and `--peer-tls` is not set.
    #[arg(long, value_name = "PORT", requires = "picker_endpoints", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) picker_admin_port: Option<u16>,
}

/// Certificate of the endpoint picker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExtProcTls {
    /// The certificate of `--ssl-certfile`, reloaded when it changes.
    Front,
    /// A certificate made at the start, for gateways that verify none.
    SelfSigned,
    /// No TLS: gRPC in clear text (h2c).
    Off,
}

impl PickerArgs {
    /// Converts the flags into the options of the node.
    pub(crate) fn options(&self) -> Option<PickerOptions> {
        let listen = self.ext_proc_listen?.to_string();
        let tls = match self.ext_proc_tls {
            Some(ExtProcTls::Off) => ProxyTls::Off,
            Some(ExtProcTls::SelfSigned) => ProxyTls::SelfSigned,
            Some(ExtProcTls::Front) => ProxyTls::Front,
            None => ProxyTls::default(),
        };
        Some(PickerOptions {
            listen,
            tls,
            endpoints: self.picker_endpoints.clone(),
            admin_port: self.picker_admin_port,
        })
    }
}
