//! The flags with the admin key of a server that a command asks.

use clap::Args;
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
pub(crate) struct ServerKeyArgs {
    /// The server's admin key, if it has one. Set it in the environment, where other users cannot
    /// see it.
    #[arg(long, value_name = "KEY")]
    pub(crate) admin_key: Option<String>,
    /// File whose one line is that key; read once, at the start.
    #[arg(long, value_name = "FILE", conflicts_with = "admin_key")]
    pub(crate) admin_key_file: Option<PathBuf>,
}
