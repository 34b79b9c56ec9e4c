//! The flags of what faces clients and operators: certificates, ports, and what a connection may cost.

use crate::values::{Seconds, parse_body_bytes, parse_body_memory, parse_drain, parse_seconds};
use clap::Args;
use cleave_api::ApiOptions;
use cleave_node::{CertificateFiles, HttpLimits};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

/// Flags show and take what the parts hold as their defaults.
static API: LazyLock<ApiOptions> = LazyLock::new(ApiOptions::default);
static HTTP: LazyLock<HttpLimits> = LazyLock::new(HttpLimits::default);

/// Of `serve` and `router`.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "HTTP")]
pub(crate) struct FaceArgs {
    /// Certificate that clients are shown, in PEM, with those that lead to an authority; they speak TLS
    /// then. Followed while it changes.
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    pub(crate) ssl_certfile: Option<PathBuf>,
    /// Private key of `--ssl-certfile`, in PEM.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_keyfile: Option<PathBuf>,
    /// Address of /admin, with /metrics, /health and /ready; it is where clients are if absent. Port 0
    /// picks a free one.
    #[arg(long, value_name = "ADDR")]
    pub(crate) admin_listen: Option<SocketAddr>,
    /// After SIGTERM /ready says 503 and everything else goes on for so long, in seconds: until balancers
    /// have noticed. Then it drains.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(Duration::ZERO), value_parser = parse_drain)]
    pub(crate) shutdown_delay: Seconds,
    /// Connections at once, of clients and workers; half of the files that the system lets it open at most.
    #[arg(long, value_name = "N", default_value_t = HTTP.connections_max, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_connections: u32,
    /// Requests at once on one connection of HTTP/2.
    #[arg(long, value_name = "N", default_value_t = HTTP.streams_max, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_streams: u32,
    /// Largest request body, such as 8MiB.
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = parse_body_bytes)]
    pub(crate) max_body: usize,
    /// Memory for all request bodies at once, such as 64MiB: four times what has arrived of a body, while it is
    /// read. Further ones wait for some seconds and are then told to come back. One of `--max-body` always finds
    /// room. Chat templates take memory apart: at most 8 MiB and 16 bytes for each byte of the body for one
    /// rendering, and as many renderings at once as there are cores, of short bodies and of long ones each.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_body_memory)]
    pub(crate) body_memory: usize,
    /// How long the headers of a request may take from their first byte on, and a TLS handshake, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(HTTP.headers_wait_max), value_parser = parse_seconds)]
    pub(crate) header_timeout: Seconds,
    /// How long the body of a request may take, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(API.body_wait_max), value_parser = parse_seconds)]
    pub(crate) body_timeout: Seconds,
    /// How long a connection may stand without a request, in seconds; more than balancers keep theirs.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(HTTP.idle_max), value_parser = parse_seconds)]
    pub(crate) idle_timeout: Seconds,
    /// How long a client may take nothing of an answer, in seconds. (`--reader-wait` is about its tokens.)
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(HTTP.stall_max), value_parser = parse_seconds)]
    pub(crate) stall_timeout: Seconds,
}

impl FaceArgs {
    /// Both files, where there are any.
    pub(crate) fn certificate(&self) -> Option<CertificateFiles> {
        let (certificate, key) = (self.ssl_certfile.clone()?, self.ssl_keyfile.clone()?);
        Some(CertificateFiles { certificate, key })
    }

    pub(crate) fn limits(&self) -> HttpLimits {
        HttpLimits {
            connections_max: self.max_connections,
            streams_max: self.max_streams,
            headers_wait_max: self.header_timeout.0,
            idle_max: self.idle_timeout.0,
            stall_max: self.stall_timeout.0,
        }
    }
}
