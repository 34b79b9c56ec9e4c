//! The flags of `top`.

use super::ServerKeyArgs;
use clap::Args;
use std::path::PathBuf;

/// The arguments of `cleave top`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave top                                       the server of this machine, port 8000
  cleave top --url http://cleave-router:8001       another host's admin port, with CLEAVE_ADMIN_KEY
  cleave top --once                                one snapshot as text, for scripts and logs
  cleave top --json | jq '.flights'                one line of JSON each second

Keys: q quits, ? explains the others, arrows and page keys scroll through the workers, s sorts by
the next column, r reverses the order, / filters by name, role, state, device or model, p pauses.")]
pub(crate) struct TopArgs {
    /// URL of the router or of `cleave serve`.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub(crate) url: String,
    /// Certificate authorities, in PEM, that an https:// server must be signed by; the system's if
    /// absent.
    #[arg(long, value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) key: ServerKeyArgs,
    /// Print the state once and exit; this is the default if the output is not a terminal.
    #[arg(long)]
    pub(crate) once: bool,
    /// Print JSON: a line each second, or one line with `--once`.
    #[arg(long)]
    pub(crate) json: bool,
}
