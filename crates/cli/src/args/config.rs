//! The flags of `cleave config`.

use clap::{Args, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;

/// Flags of `cleave config`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave config check cleave.yaml
  cleave config print --port 9000 > cleave.yaml
  cleave serve --config cleave.yaml")]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a configuration file: its keys, their values, and flags that exclude each other.
    #[command(after_help = "Examples:
  cleave config check cleave.yaml
  cleave config check decode.yaml --for worker

The exit status is 1 if the file has a mistake; each is printed with its line and column.")]
    Check(ConfigCheckArgs),
    /// Print the values in force as a configuration file, with the origin of each.
    #[command(after_help = "Examples:
  cleave config print
  cleave config print --config cleave.yaml --port 9000
  cleave config print --for worker --leg decode --router router:8000

Flags after those of `print` are those of the command. An origin is the default, the file, the
environment or the command line. A flag without a value is left out, and a secret is hidden.")]
    Print(ConfigPrintArgs),
}

#[derive(Args, Debug)]
pub(crate) struct ConfigCheckArgs {
    /// The configuration file, in YAML.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// The command whose flags the file has, such as `worker` or `bench run`.
    #[arg(long = "for", value_name = "COMMAND", default_value = "serve")]
    pub(crate) command: String,
}

#[derive(Args, Debug)]
pub(crate) struct ConfigPrintArgs {
    /// The command whose values are printed, such as `worker` or `bench run`.
    #[arg(long = "for", value_name = "COMMAND", default_value = "serve")]
    pub(crate) command: String,
    /// Flags of the command.
    #[arg(
        value_name = "FLAG",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(crate) flags: Vec<OsString>,
}
