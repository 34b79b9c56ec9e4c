//! The flags of `top`.

use clap::Args;
use std::path::PathBuf;

/// `cleave top`.
#[derive(Args, Debug)]
#[command(
    after_help = "Keys: q ends, arrows and pages move through the workers, s sorts by the next column, r turns
the order, / filters by name, p pauses.

Examples:
  cleave top                                       the server of this machine, port 8000
  cleave top --url http://cleave-router:8001       its admin port elsewhere, with CLEAVE_ADMIN_KEY set
  cleave top --once                                one picture as text, for scripts and logs
  cleave top --json | jq '.flights'                one line of JSON each second"
)]
pub(crate) struct TopArgs {
    /// The router, or `cleave serve`, to look at.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub(crate) url: String,
    /// The authorities that may vouch for an https:// server, in PEM; this system's if absent.
    #[arg(long, value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,
    /// The server's admin key, if it has one; better set in the environment.
    #[arg(
        long,
        value_name = "KEY",
        env = "CLEAVE_ADMIN_KEY",
        hide_env_values = true
    )]
    pub(crate) admin_key: Option<String>,
    /// Show it once and exit; so does an output that is no terminal.
    #[arg(long)]
    pub(crate) once: bool,
    /// As JSON: a line each second, or one line with `--once`.
    #[arg(long)]
    pub(crate) json: bool,
}
