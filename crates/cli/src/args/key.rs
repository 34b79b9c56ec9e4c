//! The flags of `cleave key`.

use clap::Args;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave key                          a random key for a tenant, and its digest for the policy
  cleave key --digest < key.txt       the digest of an existing key")]
pub(crate) struct KeyArgs {
    /// Read a key from standard input and print its SHA-256 instead.
    #[arg(long)]
    pub(crate) digest: bool,
}
