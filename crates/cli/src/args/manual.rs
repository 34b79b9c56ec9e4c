//! Flags of `cleave completions` and `cleave man`.

use clap::Args;
use clap_complete::Shell;
use std::path::PathBuf;

/// Flags of `cleave completions`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cleave completions bash > ~/.local/share/bash-completion/completions/cleave
  cleave completions zsh > \"${fpath[1]}/_cleave\"
  cleave completions fish > ~/.config/fish/completions/cleave.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell that reads the script.
    #[arg(value_name = "SHELL")]
    pub(crate) shell: Shell,
}

/// Flags of `cleave man`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cleave man | man -l -                         read the first page
  cleave man --out /usr/local/share/man/man1    a page for each command")]
pub(crate) struct ManArgs {
    /// Write one page for each command into this folder, which is created if it is missing;
    /// without it the first page goes to standard output.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: Option<PathBuf>,
}
