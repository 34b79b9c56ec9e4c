//! The flags of a router among others, behind a load balancer or a gateway.
//!
//! Owns: these flags. Never: holds a default that a part holds too.

use crate::values::{Seconds, parse_drain, parse_router};
use clap::Args;
use cleave_api::ApiOptions;
use cleave_node::PickerOptions;
use std::net::SocketAddr;
use std::time::Duration;

/// What streams say while there is nothing to say.
#[derive(Args, Clone, Copy, Debug)]
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
pub(crate) struct FellowArgs {
    /// The fleet's routers, this one perhaps among them: host:port where each answers /load by plain HTTP
    /// (of `--admin-listen`, where there is TLS), several with commas; a name stands for all its
    /// addresses. Asked once a second: while no worker is connected, whoever waits at any of them is
    /// demand at each, so that an autoscaler may ask whichever it likes.
    #[arg(long, value_name = "ADDR", value_delimiter = ',', value_parser = parse_router)]
    pub(crate) fellow_routers: Vec<String>,
}

/// The endpoint picker of a Kubernetes gateway.
#[derive(Args, Clone, Debug)]
pub(crate) struct PickerArgs {
    /// Be an endpoint picker too, for a gateway's InferencePool whose endpoints are routers (Envoy's ext_proc,
    /// gRPC in clear text), at this address; 9002 is the usual port.
    #[arg(long, value_name = "ADDR", requires = "picker_endpoints")]
    pub(crate) ext_proc_listen: Option<SocketAddr>,
    /// The routers to pick from, this one among them: host:port, several with commas; a name stands for all
    /// its addresses. Each is asked for /ready and /load twice a second.
    #[arg(long, value_name = "ADDR", value_delimiter = ',', requires = "ext_proc_listen", value_parser = parse_router)]
    pub(crate) picker_endpoints: Vec<String>,
}

impl PickerArgs {
    /// As the node takes it.
    pub(crate) fn options(&self) -> Option<PickerOptions> {
        let listen = self.ext_proc_listen?.to_string();
        let endpoints = self.picker_endpoints.clone();
        Some(PickerOptions { listen, endpoints })
    }
}
