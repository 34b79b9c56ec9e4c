//! The flags of a router among others, behind a load balancer or a gateway.
//!
//! Owns: these flags. Never: holds a default that a part holds too.

use crate::values::{Seconds, parse_drain, parse_router};
use clap::{Args, ValueEnum};
use cleave_api::ApiOptions;
use cleave_node::{PickerOptions, ProxyTls};
use std::net::SocketAddr;
use std::time::Duration;

/// What streams say while there is nothing to say.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Clients")]
pub(crate) struct StreamArgs {
    /// A stream on which nothing was sent for so long gets a comment, in seconds, so that no proxy takes it
    /// for dead; also before its first token: then the status is 200, and what goes wrong later is an
    /// event. 0 for never.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(keep_alive_default()), value_parser = parse_drain)]
    pub(crate) sse_keep_alive: Seconds,
}

fn keep_alive_default() -> Duration {
    ApiOptions::default().keep_alive.unwrap_or_default()
}

impl StreamArgs {
    /// As the HTTP face takes it.
    pub(crate) fn keep_alive(self) -> Option<Duration> {
        let Seconds(span) = self.sse_keep_alive;
        (!span.is_zero()).then_some(span)
    }
}

/// The other routers of a fleet that may have no worker.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Other routers")]
pub(crate) struct FellowArgs {
    /// The fleet's routers, this one perhaps among them: host:port, several with commas; a name stands for all
    /// its addresses. Asked for /load once a second: while no worker is connected, whoever waits at any of
    /// them is demand at each, so that an autoscaler may ask whichever it likes. Asked by `--peer-tls`
    /// where there is one, at any of their ports; otherwise in clear, so at that of `--admin-listen`
    /// where clients speak TLS.
    #[arg(long, value_name = "ADDR", value_delimiter = ',', value_parser = parse_router)]
    pub(crate) fellow_routers: Vec<String>,
}

/// The endpoint picker of a Kubernetes gateway.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Endpoint picker")]
pub(crate) struct PickerArgs {
    /// Be an endpoint picker too, for a gateway's InferencePool whose endpoints are routers (Envoy's ext_proc,
    /// gRPC), at this address; 9002 is the usual port.
    #[arg(long, value_name = "ADDR", requires = "picker_endpoints")]
    pub(crate) ext_proc_listen: Option<SocketAddr>,
    /// How gateways speak to `--ext-proc-listen`: by TLS unless it says `off`, as InferencePools have it. By default
    /// they are shown the certificate of `--ssl-certfile`, and a self-signed one where there is none.
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        requires = "ext_proc_listen",
        requires_if("front", "ssl_certfile")
    )]
    pub(crate) ext_proc_tls: Option<ExtProcTls>,
    /// The routers to pick from, this one among them: host:port of their requests, several with commas; a name
    /// stands for all its addresses. Each is asked for /ready and /load twice a second: by `--peer-tls` where
    /// there is one, otherwise in clear.
    #[arg(long, value_name = "ADDR", value_delimiter = ',', requires = "ext_proc_listen", value_parser = parse_router)]
    pub(crate) picker_endpoints: Vec<String>,
    /// The port at which each of them is asked, its `--admin-listen`; by default that of its requests. Needed where
    /// clients speak TLS and there is no `--peer-tls`.
    #[arg(long, value_name = "PORT", requires = "picker_endpoints", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) picker_admin_port: Option<u16>,
}

/// What a gateway is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExtProcTls {
    /// The certificate of `--ssl-certfile`, followed while it changes.
    Front,
    /// A certificate made at the start, for gateways that verify none.
    SelfSigned,
    /// Nothing: gRPC in clear text (h2c).
    Off,
}

impl PickerArgs {
    /// As the node takes it.
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
