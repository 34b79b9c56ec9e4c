//! The flags of `cleave key`.

use clap::Args;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave key                               a random key for a tenant, and what the policy holds of it
  cleave key --digest < key.txt            what the policy holds of a key that there is already")]
pub(crate) struct KeyArgs {
    /// Read a key from the standard input and print its SHA-256.
    #[arg(long)]
    pub(crate) digest: bool,
}
