//! The flags of `autoscale`.

use crate::values::parse_router;
use clap::Args;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(
    after_help = "The router's policy has a `scaling` part with `mode: act`. Example:
  cleave router --listen 127.0.0.1:8000 --policy policy.yaml &
  cleave autoscale --local --router 127.0.0.1:8000 -- --model ./Qwen2.5-0.5B --threads 4

Ctrl-C or SIGTERM drains every worker, and waits for them; a second one ends them at once."
)]
pub(crate) struct AutoscaleArgs {
    /// Workers are processes of this machine. (On Kubernetes a KEDA scaler or an HPA does this.)
    #[arg(long, required = true)]
    pub(crate) local: bool,
    /// The router whose word is followed, and which the workers serve: host:port, or https://host:port where
    /// its front has a certificate.
    #[arg(long, value_name = "ADDR", value_parser = parse_led)]
    pub(crate) router: Led,
    /// The authorities that may vouch for an https:// server, in PEM; this system's if absent. Read once, at the
    /// start.
    #[arg(long, value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,
    /// The router's admin key; better set in the environment, where others do not see it.
    #[arg(
        long,
        value_name = "KEY",
        env = "CLEAVE_ADMIN_KEY",
        hide_env_values = true
    )]
    pub(crate) admin_key: Option<String>,
    /// After `--`: flags that each `cleave worker` is started with, beside --leg, --router and --name.
    #[arg(last = true, value_name = "FLAG")]
    pub(crate) worker: Vec<String>,
}

/// A router as it is asked, and as workers reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Led {
    pub(crate) url: String,
    pub(crate) address: String,
}

fn parse_led(text: &str) -> Result<Led, String> {
    let (scheme, address) = text.split_once("://").unwrap_or(("http", text));
    if !matches!(scheme, "http" | "https") {
        return Err(format!("`{scheme}://`: http and https are spoken"));
    }
    let address = parse_router(address.trim_end_matches('/'))?;
    Ok(Led {
        url: format!("{scheme}://{address}"),
        address,
    })
}

#[cfg(test)]
mod tests {
    use super::parse_led;

    #[test]
    fn a_router_has_an_address_with_a_scheme_or_without() {
        for (text, url) in [
            ("127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
            ("https://[::1]:8000", "https://[::1]:8000"),
        ] {
            let led = parse_led(text).unwrap();
            assert_eq!(led.url, url);
            assert!(url.ends_with(&led.address) && !led.address.contains('/'));
        }
        for text in ["ftp://h:1", "https://h", "https://h:1/path", "h"] {
            assert!(parse_led(text).is_err(), "{text}");
        }
    }
}
