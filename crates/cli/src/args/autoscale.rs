//! The flags of `autoscale`.

use super::ServerKeyArgs;
use crate::values::{parse_model_name, parse_router};
use clap::Args;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(
    next_help_heading = "Autoscaling",
    after_help = "Example:
  cleave router --listen 127.0.0.1:8000 --policy policy.yaml &
  cleave autoscale --local --router 127.0.0.1:8000 -- --model ./Qwen2.5-0.5B --threads 4

The router's policy needs a `scaling` part with `mode: act`. Ctrl-C or SIGTERM drains every worker
and waits for them; a second signal ends them at once."
)]
pub(crate) struct AutoscaleArgs {
    /// Run the workers as processes of this machine. (On Kubernetes a KEDA scaler or an HPA does
    /// this.)
    #[arg(long, required = true)]
    pub(crate) local: bool,
    /// The router that decides the number of workers, and that the workers serve: host:port, or
    /// https://host:port if its port has a certificate.
    #[arg(long, value_name = "ADDR", value_parser = parse_router_endpoint)]
    pub(crate) router: RouterEndpoint,
    /// The model whose workers are started, where the router serves several: its name in the
    /// policy's `models`. Each worker is started with it.
    #[arg(long, value_name = "NAME", value_parser = parse_model_name)]
    pub(crate) served_model_name: Option<String>,
    /// Certificate authorities, in PEM, that an https:// server must be signed by; the system's if
    /// absent. Read once, at the start.
    #[arg(long, value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) key: ServerKeyArgs,
    /// Flags after `--`: each `cleave worker` is started with them, in addition to --leg, --router
    /// and --name.
    #[arg(last = true, value_name = "FLAG")]
    pub(crate) worker: Vec<String>,
}

/// A router, as a URL for requests and as an address for workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RouterEndpoint {
    pub(crate) url: String,
    pub(crate) address: String,
}

fn parse_router_endpoint(text: &str) -> Result<RouterEndpoint, String> {
    let (scheme, address) = text.split_once("://").unwrap_or(("http", text));
    if !matches!(scheme, "http" | "https") {
        return Err(format!("unknown scheme `{scheme}://`: use http or https"));
    }
    let address = parse_router(address.trim_end_matches('/'))?;
    Ok(RouterEndpoint {
        url: format!("{scheme}://{address}"),
        address,
    })
}

#[cfg(test)]
mod tests {
    use super::parse_router_endpoint;

    #[test]
    fn a_router_address_may_have_a_scheme() {
        for (text, url) in [
            ("127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
            ("https://[::1]:8000", "https://[::1]:8000"),
        ] {
            let led = parse_router_endpoint(text).unwrap();
            assert_eq!(led.url, url);
            assert!(url.ends_with(&led.address) && !led.address.contains('/'));
        }
        for text in ["ftp://h:1", "https://h", "https://h:1/path", "h"] {
            assert!(parse_router_endpoint(text).is_err(), "{text}");
        }
    }
}
