//! The flags of `autoscale`.

use crate::values::parse_router;
use clap::Args;

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
    /// The router whose word is followed, and which the workers serve.
    #[arg(long, value_name = "ADDR", value_parser = parse_router)]
    pub(crate) router: String,
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
