//! A model in this process, for a chat without a server.
//!
//! Owns: the fleet of one worker, as `cleave serve` has it. Never: serves another machine; its port
//! is a free one of the loopback interface.

use crate::args::ChatArgs;
use crate::model;
use cleave_domain::Role;
use cleave_node::{FleetModel, FleetNode, FleetPorts, RouterOptions, RunningFleet};
use cleave_worker::WorkerOptions;
use std::time::Duration;
use tokio::runtime::Runtime;

/// The fleet and its address.
pub(super) struct LocalModel {
    fleet: RunningFleet,
}

impl LocalModel {
    /// Loads the model and starts to serve it.
    ///
    /// # Errors
    /// If the model cannot be loaded, or the port not bound.
    pub(super) fn start(args: &ChatArgs, runtime: &Runtime) -> anyhow::Result<Self> {
        let router = RouterOptions::default();
        let listen = "127.0.0.1:0".to_owned();
        let ports = runtime.block_on(FleetPorts::open(&listen, &router))?;
        let loaded = model::load(&args.model, &args.engine)?;
        let engine = loaded.only_engine(&args.engine)?;
        let defaults = WorkerOptions::new("chat", Role::Both);
        let options = WorkerOptions {
            queue_max: args.engine.max_queue.unwrap_or(defaults.queue_max),
            prefix_cache: !args.engine.no_prefix_cache,
            speculation: args.speculation.speculative_config.0,
            ..defaults
        };
        let node = FleetNode {
            listen,
            router,
            models: vec![FleetModel {
                workers: vec![(options, engine)],
                files: loaded.files,
            }],
        };
        let fleet = runtime.block_on(async {
            let fleet = node.start_at(ports).await?;
            fleet.ready().await;
            anyhow::Ok(fleet)
        })?;
        cleave_cpu::trim_allocator();
        Ok(Self { fleet })
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.fleet.address())
    }

    /// Ends it at once: no answer is open.
    pub(super) fn end(self, runtime: &Runtime) {
        runtime.block_on(self.fleet.drain(Duration::ZERO));
    }
}
