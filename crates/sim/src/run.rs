//! A chaos run: scheduled events, both kinds of brains, and the messages between them.
//!
//! Owns: virtual time. Never: decides anything a brain decides; it performs outputs. Invariant:
//! events are taken in the order of time, then of scheduling; nothing else orders them, so the same
//! world runs the same way.

use crate::bit_flips::{self, LinkChecks, MessageArrival};
use crate::clients::ChaosClients;
use crate::event_log::{EventLog, LogRetention};
use crate::log_text;
use crate::network::{SimNetwork, StreamDirection};
use crate::tape::{LifeTape, TapeMode};
use crate::world::ChaosWorld;
use cleave_domain::{
    BlockHash, Emission, FlightId, HandoffId, Incarnation, Order, Report, RouterId, SplitMix64,
    Tape, TapeRecord, Time, WorkerId, WorkerRef,
};
use cleave_kv::Packet;
use cleave_router::RouterReadiness;
use cleave_testkit::{CellWorker, EventQueue, FrameCells, MatcherFault, WakeTimer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// More events than any world of this size needs; past it the world does not come to rest.
const EVENTS_MAX: u64 = 3_000_000;

/// An event that may happen next.
#[derive(Debug)]
pub(crate) enum ChaosEvent {
    ClientAsks(usize),
    ClientLeaves(usize),
    /// A client stops reading its stream.
    ClientStalls(usize),
    /// A client reads its stream again.
    ClientReadsAgain(usize),
    /// An operator sends a command.
    OperatorCommands(usize),
    /// A report or token reaches a router.
    ToRouter {
        router: usize,
        worker: usize,
        epoch: u64,
        from: WorkerRef,
        message: WorkerMessage,
    },
    /// An order reaches a worker.
    ToWorker {
        router: usize,
        worker: usize,
        epoch: u64,
        order: Order,
    },
    /// An input reaches a router, if it is still in this life.
    RouterInput(RouterId, cleave_router::RouterInput),
    /// A router starts again.
    RouterStarts(usize),
    /// A worker was silent for too long.
    WorkerSilent(WorkerRef),
    /// A one-sided write lands in the other pool.
    WriteLands(Box<OneSidedWrite>),
    /// An input reaches a worker, if it is still in this life.
    WorkerInput(WorkerRef, cleave_sched::WorkerInput),
    /// A packet reaches a worker.
    Packet(Box<PacketInFlight>),
    /// A packet arrives at a worker with a wrong checksum.
    LinkDamaged {
        from: WorkerRef,
        to: WorkerRef,
        epoch: u64,
    },
    /// A message of a stream arrives with a wrong checksum.
    StreamDamaged {
        router: usize,
        worker: usize,
        epoch: u64,
        direction: StreamDirection,
    },
    /// A worker notices that a link broke.
    LinkLost {
        side: WorkerRef,
        peer: WorkerRef,
    },
    /// A worker's disk has written a block.
    DiskWrote(WorkerRef, BlockHash),
    /// A worker's disk has read the blocks of a fetch.
    DiskRead(WorkerRef, HandoffId),
    /// An engine ends its operation.
    EngineDone(WorkerRef),
    /// A link has taken a block's frames.
    BlockSent {
        side: WorkerRef,
        exported: Box<cleave_sched::WorkerInput>,
    },
    /// A router's deadline passes.
    WakeRouter(usize),
    /// A worker's deadline passes.
    WakeWorker(WorkerRef),
    Fault(usize),
    WorkerStarts(usize),
    /// A worker and a router connect again after the connection that ended in this epoch; by then
    /// both have noticed its end.
    Reconnects {
        router: usize,
        worker: usize,
        epoch: u64,
    },
    FaultsEnd,
}

/// A message of a worker to its router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum WorkerMessage {
    Report(Report),
    Token(HandoffId, Emission),
}

/// A packet in flight between workers.
#[derive(Clone, Debug)]
pub(crate) struct PacketInFlight {
    pub(crate) from: WorkerRef,
    pub(crate) to: WorkerRef,
    pub(crate) epoch: u64,
    pub(crate) packet: Packet,
    pub(crate) payload: FrameCells,
    pub(crate) condition: cleave_sched::PayloadCondition,
}

/// A one-sided write in flight.
#[derive(Clone, Debug)]
pub(crate) struct OneSidedWrite {
    pub(crate) from: WorkerRef,
    pub(crate) epoch: u64,
    pub(crate) export: cleave_sched::BlockExport,
    pub(crate) payload: FrameCells,
    /// The cells that land instead, if the write was damaged.
    pub(crate) damaged: Option<FrameCells>,
}

/// A worker's process, running or not.
#[derive(Debug, Default)]
pub(crate) struct SimProcess {
    pub(crate) incarnation: u64,
    pub(crate) body: Option<CellWorker>,
    pub(crate) wake: WakeTimer,
    pub(crate) tape: LifeTape,
    /// Blocks in quarantine, from the brain's last note.
    pub(crate) quarantined: u32,
    pub(crate) frozen_until: Time,
    /// The time until which its engine hangs.
    pub(crate) hung_until: Time,
    /// The disk content that its last life left.
    pub(crate) disk_left: BTreeMap<BlockHash, FrameCells>,
    /// The time from the end of a drain to the next start.
    pub(crate) restart_after: std::time::Duration,
}

#[derive(Debug)]
pub(crate) struct SimRouterProcess {
    pub(crate) pools: cleave_router::RouterPools,
    /// The router's id in its present life.
    pub(crate) id: RouterId,
    /// The time until which it is down, if it is.
    pub(crate) down_until: Option<Time>,
    pub(crate) wake: WakeTimer,
    pub(crate) drained: bool,
    /// Connected workers of each model, from the router's last note.
    pub(crate) workers: BTreeMap<std::sync::Arc<str>, u32>,
    /// The router's last reported readiness for each model.
    pub(crate) readiness: BTreeMap<std::sync::Arc<str>, RouterReadiness>,
    pub(crate) tape: LifeTape,
}

impl SimRouterProcess {
    /// The readiness that it last reported for a model.
    pub(crate) fn readiness_of(&self, model: &str) -> RouterReadiness {
        let reported = self.readiness.get(model).copied();
        reported.unwrap_or(RouterReadiness::NONE)
    }
}

#[derive(Debug)]
pub(crate) struct ChaosRun<'a> {
    pub(crate) world: &'a ChaosWorld,
    pub(crate) now: Time,
    events: EventQueue<ChaosEvent>,
    pub(crate) workers: Vec<SimProcess>,
    pub(crate) routers: Vec<SimRouterProcess>,
    pub(crate) net: SimNetwork,
    pub(crate) clients: ChaosClients,
    pub(crate) rng: SplitMix64,
    /// Draws the messages that are damaged, and the bit of each.
    pub(crate) flip_rng: SplitMix64,
    checks: LinkChecks,
    pub(crate) matcher_fault: Option<MatcherFault>,
    pub(crate) log: EventLog,
    pub(crate) faults_over: bool,
    pub(crate) no_restarts: bool,
    pub(crate) taping: TapeMode,
    pub(crate) tapes: Vec<Vec<String>>,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

impl<'a> ChaosRun<'a> {
    pub(crate) fn new(world: &'a ChaosWorld, options: &crate::ChaosOptions) -> Self {
        let taping = if options.tape {
            TapeMode::On
        } else {
            TapeMode::Off
        };
        let router = |router| SimRouterProcess {
            pools: cleave_router::RouterPools::new(world.router.clone()),
            id: router_id(router, 0),
            down_until: None,
            wake: WakeTimer::default(),
            drained: false,
            workers: BTreeMap::new(),
            readiness: BTreeMap::new(),
            tape: LifeTape::begin(taping, || {
                let limits = world.router.clone();
                Tape::Router(TapeRecord::Started { limits })
            }),
        };
        let mut run = Self {
            world,
            now: Time::ZERO,
            events: EventQueue::default(),
            workers: world
                .workers
                .iter()
                .map(|_| SimProcess::default())
                .collect(),
            routers: (0..world.routers_count).map(router).collect(),
            net: SimNetwork::default(),
            clients: ChaosClients::of(world),
            rng: SplitMix64::new(!world.seed),
            flip_rng: bit_flips::flip_rng(!world.seed),
            checks: options.link_checks,
            matcher_fault: options.matcher_fault,
            log: EventLog::new(if options.log {
                LogRetention::All
            } else {
                LogRetention::Last
            }),
            faults_over: false,
            no_restarts: false,
            taping,
            tapes: Vec::new(),
            counts: BTreeMap::new(),
        };
        run.schedule_world();
        run
    }

    fn schedule_world(&mut self) {
        for worker in 0..self.workers.len() {
            self.schedule(Time::ZERO, ChaosEvent::WorkerStarts(worker));
        }
        for (index, arrival) in self.world.requests.iter().enumerate() {
            self.schedule(arrival.at, ChaosEvent::ClientAsks(index));
            if let Some(at) = arrival.leaves_at {
                self.schedule(at, ChaosEvent::ClientLeaves(index));
            }
            if let Some((at, span)) = arrival.stalls {
                self.schedule(at, ChaosEvent::ClientStalls(index));
                self.schedule(at + span, ChaosEvent::ClientReadsAgain(index));
            }
        }
        for (index, command) in self.world.commands.iter().enumerate() {
            self.schedule(command.at, ChaosEvent::OperatorCommands(index));
        }
        for (index, (at, _)) in self.world.faults.iter().enumerate() {
            self.schedule(*at, ChaosEvent::Fault(index));
        }
        self.schedule(self.world.faults_end_at, ChaosEvent::FaultsEnd);
    }

    pub(crate) fn schedule(&mut self, at: Time, event: ChaosEvent) {
        self.events.push(at.max(self.now), event);
    }

    pub(crate) fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
    }

    /// Counts what happened to a flight, if it has a constraint.
    pub(crate) fn count_constrained(&mut self, name: &'static str, flight: FlightId) {
        if self.clients.is_constrained(flight) {
            self.count(name);
        }
    }

    /// Runs the world to its end: faults, recovery, rest, and a drained fleet.
    pub(crate) fn run_to_end(&mut self) -> Result<(), String> {
        self.run_until_idle()?;
        self.check_rest()?;
        self.drain_all()?;
        self.run_until_idle()?;
        self.check_drained()
    }

    /// Runs until no event is scheduled.
    fn run_until_idle(&mut self) -> Result<(), String> {
        while let Some((at, event)) = self.events.pop() {
            self.now = at;
            if self.log.count > EVENTS_MAX {
                return Err(format!("no rest after {EVENTS_MAX} events"));
            }
            // A frozen or hung process handles the event when it continues.
            if let Some(until) = self.delayed_until(&event) {
                self.schedule(until, event);
                continue;
            }
            let Some(words) = self.apply(event)? else {
                continue;
            };
            let state = self.state_columns();
            self.log.append(at, &words, &state);
        }
        Ok(())
    }

    /// The time until which the event's process is frozen or hung.
    fn delayed_until(&self, event: &ChaosEvent) -> Option<Time> {
        let worker = match event {
            ChaosEvent::ToWorker { worker, .. } => *worker,
            ChaosEvent::WorkerInput(worker_ref, _)
            | ChaosEvent::EngineDone(worker_ref)
            | ChaosEvent::DiskWrote(worker_ref, _)
            | ChaosEvent::DiskRead(worker_ref, _)
            | ChaosEvent::WakeWorker(worker_ref) => worker_index(*worker_ref),
            ChaosEvent::Packet(envelope) => worker_index(envelope.to),
            ChaosEvent::LinkDamaged { to, .. } => worker_index(*to),
            ChaosEvent::LinkLost { side, .. } | ChaosEvent::BlockSent { side, .. } => {
                worker_index(*side)
            }
            _ => return None,
        };
        let process = &self.workers[worker];
        let until = match event {
            ChaosEvent::EngineDone(_) => process.frozen_until.max(process.hung_until),
            _ => process.frozen_until,
        };
        (until > self.now).then_some(until)
    }

    /// Applies one event; gives its log text, or nothing if it had no effect.
    fn apply(&mut self, event: ChaosEvent) -> Result<Option<String>, String> {
        match event {
            ChaosEvent::ClientAsks(client) => self.client_asks(client).map(Some),
            ChaosEvent::ClientLeaves(client) => self.client_leaves(client),
            ChaosEvent::ToRouter {
                router,
                worker,
                epoch,
                from,
                message,
            } => {
                if self.net.stream(router, worker).epoch != epoch {
                    return Ok(None);
                }
                self.deliver_to_router(router, from, message).map(Some)
            }
            ChaosEvent::ToWorker {
                router,
                worker,
                epoch,
                order,
            } => {
                if self.net.stream(router, worker).epoch != epoch {
                    return Ok(None);
                }
                self.deliver_order(worker, router, order).map(Some)
            }
            ChaosEvent::RouterInput(id, input) => self.router_input_if_alive(id, input),
            ChaosEvent::WorkerInput(worker_ref, input) => {
                self.worker_input_if_alive(worker_ref, "hears", input)
            }
            ChaosEvent::Packet(envelope) => self.packet(*envelope),
            ChaosEvent::LinkDamaged { from, to, epoch } => Ok(self.link_damaged(from, to, epoch)),
            ChaosEvent::StreamDamaged {
                router,
                worker,
                epoch,
                direction,
            } => Ok(self.stream_damaged(router, worker, epoch, direction)),
            ChaosEvent::LinkLost { side, peer } => self.link_lost(side, peer),
            ChaosEvent::EngineDone(worker_ref) => self.engine_done(worker_ref),
            ChaosEvent::DiskWrote(worker_ref, content) => self.disk_wrote(worker_ref, content),
            ChaosEvent::DiskRead(worker_ref, handoff) => self.disk_read(worker_ref, handoff),
            ChaosEvent::BlockSent { side, exported } => self.shipped(side, *exported),
            ChaosEvent::WakeRouter(router) => self.wake_router(router),
            ChaosEvent::WakeWorker(worker_ref) => self.wake_worker(worker_ref),
            ChaosEvent::Fault(fault) => self.fault(fault).map(Some),
            ChaosEvent::WorkerStarts(worker) => self.start(worker),
            ChaosEvent::Reconnects {
                router,
                worker,
                epoch,
            } => {
                if self.net.stream(router, worker).epoch != epoch {
                    return Ok(None);
                }
                self.connect(router, worker)
            }
            ChaosEvent::ClientStalls(client) => self.stall(client),
            ChaosEvent::ClientReadsAgain(client) => self.flow(client),
            ChaosEvent::OperatorCommands(command) => self.perform_command(command),
            ChaosEvent::RouterStarts(router) => self.router_starts(router).map(Some),
            ChaosEvent::WorkerSilent(worker_ref) => self.silent(worker_ref),
            ChaosEvent::WriteLands(write) => self.lands(*write),
            ChaosEvent::FaultsEnd => {
                self.faults_over = true;
                Ok(Some("-- heals       faults are over".to_owned()))
            }
        }
    }

    fn deliver_order(
        &mut self,
        worker: usize,
        router: usize,
        order: Order,
    ) -> Result<String, String> {
        let router = self.routers[router].id;
        let words = format!("w{:x} ordered     {}", worker + 1, log_text::order(&order));
        if order == Order::Drain {
            self.begins_to_drain(worker);
        }
        let input = cleave_sched::WorkerInput::Ordered { router, order };
        self.feed_worker(worker, input)?;
        Ok(words)
    }

    /// Gives a router an input, if it is still in this life.
    fn router_input_if_alive(
        &mut self,
        id: RouterId,
        input: cleave_router::RouterInput,
    ) -> Result<Option<String>, String> {
        let Some(router) = self.router_index(id) else {
            return Ok(None);
        };
        let words = format!(
            "r{:x} hears       {}",
            router + 1,
            log_text::router_input(&input)
        );
        self.feed_router(router, input)?;
        Ok(Some(words))
    }

    pub(crate) fn worker_input_if_alive(
        &mut self,
        worker: WorkerRef,
        verb: &str,
        input: cleave_sched::WorkerInput,
    ) -> Result<Option<String>, String> {
        if self.body(worker).is_none() {
            return Ok(None);
        }
        let words = format!("{} {verb:<11} {}", worker.worker, log_text::input(&input));
        self.feed_worker(worker_index(worker), input)?;
        Ok(Some(words))
    }

    /// Sends a message through the link's check; `rate` of 100,000 have one bit flipped.
    pub(crate) fn transmit<M>(&mut self, message: M, rate: u32) -> MessageArrival<M>
    where
        M: Serialize + DeserializeOwned,
    {
        if self.faults_over || !bit_flips::is_hit(&mut self.flip_rng, rate) {
            return MessageArrival::Received(message);
        }
        bit_flips::flip_random_bit(&message, &mut self.flip_rng, self.checks)
    }

    // === clients and routers ===

    fn client_asks(&mut self, client: usize) -> Result<String, String> {
        let index = client;
        let client = &self.clients.all[index];
        let router = client.router;
        let request = std::sync::Arc::clone(&client.request);
        if self.routers[router].down_until.is_some() {
            self.clients.end_with_router(index);
            return Ok(format!("r{:x} asked       and is not there", router + 1));
        }
        let flight = self.clients.ask(index, self.routers[router].id);
        let model = std::sync::Arc::clone(&self.world.request_models[index]);
        let submitted = cleave_router::RouterInput::Submitted { flight, request };
        self.feed_router(router, cleave_router::PoolInput::of_model(model, submitted))?;
        Ok(format!("r{:x} asked       {flight}", router + 1))
    }

    fn client_leaves(&mut self, client: usize) -> Result<Option<String>, String> {
        if !self.clients.leave(client) {
            return Ok(None);
        }
        let client = &self.clients.all[client];
        let (router, flight) = (client.router, client.flight);
        self.feed_router(
            router,
            cleave_router::RouterInput::Cancelled {
                flight,
                why: cleave_router::CancelReason::Left,
            },
        )?;
        if self.clients.unended_flights().contains(&flight) {
            return Err(format!("{flight} did not end at once when its client left"));
        }
        Ok(Some(format!("r{:x} left        {flight}", router + 1)))
    }

    // === the state, in columns ===

    fn state_columns(&self) -> String {
        let flights = self.clients.all.iter();
        let under_way = flights
            .filter(|c| c.submitted && c.ending.is_none())
            .count();
        let mut state = format!("{under_way:>3}");
        for (process, about) in self.workers.iter().zip(&self.world.workers) {
            let role = about.role.to_string();
            let role = &role[..1];
            match &process.body {
                None => state.push_str(&format!(" | {role}x {:>9}", "")),
                Some(body) => {
                    let load = body.brain.load();
                    let all = about.capacity.blocks_count;
                    let held = all - load.blocks_free.min(all);
                    let mark = if process.frozen_until > self.now {
                        'z'
                    } else {
                        body.state_symbol()
                    };
                    let queue = load.queue_tokens;
                    state.push_str(&format!(" | {role}{mark} {held:>2}/{all:<2} q{queue:<3}"));
                }
            }
        }
        state
    }

    /// The index of a router, if it is in this life.
    pub(crate) fn router_index(&self, id: RouterId) -> Option<usize> {
        self.routers.iter().position(|process| process.id == id)
    }

    /// The worker in exactly this life, if it runs.
    pub(crate) fn body(&self, worker: WorkerRef) -> Option<&CellWorker> {
        let body = self.workers.get(worker_index(worker))?.body.as_ref()?;
        (body.worker == worker).then_some(body)
    }

    pub(crate) fn take_tapes(&mut self) {
        for process in &mut self.routers {
            self.tapes.extend(process.tape.take());
        }
        for process in &mut self.workers {
            self.tapes.extend(process.tape.take());
        }
    }
}

pub(crate) fn worker_index(worker: WorkerRef) -> usize {
    worker.worker.0 as usize - 1
}

/// The id of a router in one of its lives.
pub(crate) fn router_id(router: usize, incarnation: u64) -> RouterId {
    RouterId(incarnation << 8 | (router as u64 + 1))
}

pub(crate) fn worker_ref(worker: usize, incarnation: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(worker as u64 + 1),
        incarnation: Incarnation(incarnation),
    }
}
