//! A worker's links: packets and blocks to its peers, and the events of the links to them.

use super::{LinkPriceSource, WorkerDriver};
use crate::engine::EngineWork;
use crate::facts::{price_of, stopped};
use cleave_domain::WorkerRef;
use cleave_fleet::{FromWorker, LinkState};
use cleave_kv::Packet;
use cleave_sched::WorkerInput;
use cleave_transfer::{LinkDown, LinkEvent, PoolAccess};
use tracing::{debug, info, warn};

impl WorkerDriver {
    pub(super) fn handle_link_event(&mut self, event: LinkEvent) {
        match event {
            LinkEvent::Arrived {
                from,
                packet,
                condition,
                payload,
            } => {
                if let Packet::Stopped { handoff } = packet {
                    self.stops.answered(from, handoff);
                }
                self.payload_arriving = payload;
                self.handle(WorkerInput::Arrived {
                    from,
                    packet,
                    condition,
                });
            }
            LinkEvent::InvalidGrant { peer } => {
                warn!(%peer, "peer attempted a write without a valid grant: its link ends");
                self.effects.meters.write_refused();
            }
            LinkEvent::CreditGranted { peer } => self.pump(peer),
            LinkEvent::Measured { peer, speed } => {
                // No router names this peer any more, and nothing would remove its link from the
                // view again.
                if !self.peers.knows(peer.worker) {
                    return;
                }
                let bytes_per_second = speed.bytes_per_second;
                let latency_ms = speed.latency.as_secs_f64() * 1e3;
                let transport = speed.transport;
                info!(%peer, %transport, latency_ms, bytes_per_second, "link measured");
                self.effects.meters.link_measured(peer, speed);
                let link = LinkState {
                    peer,
                    transport: transport.to_string(),
                    bytes_per_second,
                    latency: speed.latency,
                };
                self.effects.admin.link_measured(&link);
                for router in self.routers.keys().copied().collect::<Vec<_>>() {
                    self.send_to_router(router, FromWorker::Link(link.clone()));
                }
                if self.effects.link_prices == LinkPriceSource::Measured {
                    let price = price_of(speed);
                    self.handle(WorkerInput::LinkMeasured { peer, price });
                }
            }
            LinkEvent::FellBack {
                peer,
                from,
                to,
                reason,
            } => {
                warn!(%peer, %from, %to, reason, "link falls back to a slower transport");
                self.effects.meters.link_fell_back(peer);
            }
            // It is logged where it is found.
            LinkEvent::Lost { peer, reason: _ } => self.link_lost(peer),
            LinkEvent::Fenced { peer } => {
                self.stops.take_all(peer);
                self.handle(WorkerInput::Fenced { peer });
            }
        }
        self.drain_brain();
    }

    /// Drops incarnations that no router names any more.
    pub(super) fn forget_peers(&mut self, gone: Vec<WorkerRef>) {
        for peer in gone {
            self.link_lost(peer);
            // A peer that could write here may still do so until its process has ended.
            if self.effects.links.deny_pool(peer) == PoolAccess::Never {
                for handoff in self.stops.take_all(peer) {
                    self.pending.push_back(stopped(peer, handoff));
                }
            }
            self.effects.links.remove_peer(peer);
            if !self.peers.knows(peer.worker) {
                self.effects.meters.link_forgotten(peer.worker);
                self.effects.admin.forget_link(peer.worker);
            }
        }
    }

    pub(super) fn send_packet(&mut self, to: WorkerRef, packet: Packet) {
        if let Packet::Stop { handoff } = packet {
            // A peer that cannot write here need not be asked to stop. A peer without a known
            // address will never be able to.
            let links = &self.effects.links;
            let reach = match links.link(to) {
                Err(LinkDown::NoRoute(_)) => links.deny_pool(to),
                Err(LinkDown::Broken(_)) | Ok(_) => links.pool_access(to),
            };
            if reach == PoolAccess::Never {
                return self.pending.push_back(stopped(to, handoff));
            }
            self.stops.requested(to, handoff);
        }
        let sent = self
            .effects
            .links
            .link(to)
            .and_then(|link| link.send(packet));
        if let Err(down) = sent {
            debug!(%to, %down, "cannot send");
            self.link_lost(to);
        }
    }

    /// Sends as many waiting blocks to this peer as its credit allows.
    pub(super) fn pump(&mut self, peer: WorkerRef) {
        while let Some(export) = self.exports.next(peer) {
            let (handoff, unit) = (export.handoff, export.unit());
            let link = match self.effects.links.link(peer) {
                Ok(link) => link,
                Err(down) => {
                    debug!(%peer, %down, "cannot export");
                    return self.link_lost(peer);
                }
            };
            let Some(permit) = link.reserve(handoff, self.capacity.unit_bytes(unit)) else {
                return; // `CreditReceiver` comes when there is credit again.
            };
            if let Some(export) = self.exports.pop(peer) {
                self.effects.engine.push(EngineWork::Read(export, permit));
            }
        }
    }

    fn link_lost(&mut self, peer: WorkerRef) {
        self.pending.extend(self.exports.drop_peer(peer));
        self.pending.push_back(WorkerInput::LinkLost { peer });
    }
}
