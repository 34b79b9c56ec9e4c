//! The flags of the KV tiers below the pool.

use crate::values::{parse_bytes, parse_swap_bytes};
use clap::Args;
use cleave_worker::{DiskOptions, TierOptions};
use std::path::PathBuf;

/// Flags of the tiers that keep evicted cached prefixes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "KV offloading")]
pub(crate) struct TierArgs {
    /// Host memory of each worker for cached prefixes that no longer fit its KV cache, such as
    /// `8GiB`; 0 for none. They are loaded again instead of being recomputed, where that is
    /// predicted to be faster.
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_swap_bytes)]
    pub(crate) kv_offloading_size: u64,
    /// Folder on disk for the same, which survives a restart; requires `--kv-offloading-size`. Each
    /// worker has a file of its own there. The files reveal the contents of prompts and are
    /// readable by this user only.
    #[arg(long, value_name = "DIR", requires = "kv_offloading_size")]
    pub(crate) kv_offloading_dir: Option<PathBuf>,
    /// Limit of the size of each such file.
    #[arg(long, value_name = "SIZE", default_value = "16GiB", value_parser = parse_bytes)]
    pub(crate) kv_offloading_dir_size: u64,
}

impl TierArgs {
    pub(crate) fn options(&self) -> TierOptions {
        let disk = self.kv_offloading_dir.as_ref().map(|folder| DiskOptions {
            folder: folder.clone(),
            bytes: self.kv_offloading_dir_size,
        });
        TierOptions {
            host_bytes: self.kv_offloading_size,
            disk,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct TierFlags {
        #[command(flatten)]
        tier: TierArgs,
    }

    fn options(words: &[&str]) -> Result<TierOptions, clap::Error> {
        let words = std::iter::once(&"cleave").chain(words);
        TierFlags::try_parse_from(words).map(|line| line.tier.options())
    }

    #[test]
    fn offloading_is_off_by_default_and_disk_needs_memory() {
        assert_eq!(options(&[]).unwrap(), TierOptions::default());
        let both = options(&["--kv-offloading-size", "1GiB", "--kv-offloading-dir", "/kv"]);
        let disk = DiskOptions {
            folder: "/kv".into(),
            bytes: 16 << 30,
        };
        let expected = TierOptions {
            host_bytes: 1 << 30,
            disk: Some(disk),
        };
        assert_eq!(both.unwrap(), expected);
        assert!(options(&["--kv-offloading-dir", "/kv"]).is_err());
    }
}
