//! Commands to workers that concern no flight: of an operator, and of the autoscaler.
//!
//! Owns: their orders. Never: changes what is known of a worker, except that it will drain.
//! Invariant: every router with the same fleet relays gossip over the same workers.

use crate::event::{OperatorRequest, RouterOutput};
use crate::flight::steps::FlightSteps;
use cleave_domain::{Order, ScalingGossip, WorkerId, WorkerRef};
use cleave_planner::scaling::ScalerOutput;
use std::sync::Arc;

/// Workers that relay gossip to other routers; more than one, so that one that is stuck or lost
/// does not prevent agreement.
const RELAYS: usize = 3;

impl FlightSteps<'_> {
    /// Passes an operator's command on. Nothing changes here until the worker reports that it
    /// complies.
    pub(crate) fn commanded(&mut self, worker: WorkerId, command: OperatorRequest) {
        let Some(worker) = self.legs().fleet.incarnation_of(worker) else {
            return;
        };
        let order = match command {
            OperatorRequest::Drain => Order::Drain,
            OperatorRequest::Serve(role) => Order::Serve { role },
        };
        self.legs().send_order(worker, order);
        // The answer to a drain is certain, so new requests avoid the worker at once.
        if command == OperatorRequest::Drain {
            self.drains(worker);
        }
    }

    /// Performs an output of the autoscaler.
    pub(crate) fn perform_scaling(&mut self, output: ScalerOutput) {
        match output {
            ScalerOutput::SendGossip(gossip) => self.relay_gossip(&Arc::new(gossip)),
            ScalerOutput::Flip { worker, role } => {
                self.commanded(worker, OperatorRequest::Serve(role));
            }
            ScalerOutput::Decided(decision) => {
                self.legs()
                    .context
                    .emit(RouterOutput::WorkersWanted(decision));
            }
        }
    }

    fn relay_gossip(&mut self, gossip: &Arc<ScalingGossip>) {
        let legs = self.legs();
        let able = legs.fleet.workers().filter(|worker| !worker.stuck());
        let carriers: Vec<WorkerRef> = able.map(|worker| worker.me).take(RELAYS).collect();
        for carrier in carriers {
            legs.send_order(carrier, Order::Relay(Arc::clone(gossip)));
        }
    }
}
