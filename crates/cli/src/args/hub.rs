//! The flags of the commands of the cache: `pull`, `list`, `rm`.

use clap::Args;
use cleave_hub::HubModel;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave pull Qwen/Qwen3-0.6B
  cleave pull Qwen/Qwen3-0.6B@refs/pr/1 && cleave serve --model Qwen/Qwen3-0.6B@refs/pr/1

The cache is that of Python's huggingface_hub, and so are the variables HF_HOME, HF_HUB_CACHE,
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.")]
pub(crate) struct PullArgs {
    /// Model or adapter of the hub, with a branch, a tag or a commit after `@`; `main` if absent.
    #[arg(value_name = "ORG/NAME[@REVISION]")]
    pub(crate) model: HubModel,
    /// Leave a model alone that the cache has whole, without asking the hub for a newer commit.
    #[arg(long)]
    pub(crate) if_absent: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave list
  cleave list --json | jq -r '.[].name'")]
pub(crate) struct ListArgs {
    /// Print JSON: an array with an object for each snapshot, and one for each model with
    /// parts of downloads, whose `commit` is null.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave rm Qwen/Qwen3-0.6B             every revision of it
  cleave rm Qwen/Qwen3-0.6B@v1          one revision; files that another one has stay")]
pub(crate) struct RmArgs {
    /// Model of the cache; all revisions of it if none is given.
    #[arg(value_name = "ORG/NAME[@REVISION]")]
    pub(crate) model: HubModel,
}
