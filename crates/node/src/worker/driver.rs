//! The loop around a worker's brain: hear one fact, do everything the brain asks, wait for the next.
//!
//! Never: decides. Never: blocks: whatever takes long is the engine's thread, a link's task or a
//! router's line, and comes back as a fact.
//! Invariant: the brain is drained before it is told the next thing.

use super::desk::Desk;
use super::directory::Directory;
use super::engine::{EngineHost, Import, Work};
use super::exports::Exports;
use super::facts::{handoff_of, price_of, stopped};
use super::stops::Stops;
use super::swap::{Swap, Way};
use super::tier::Shelving;
use crate::clock::{Clock, reached};
use crate::line::{Downward, LinkState, RouterLine, Upward};
use crate::tape::Recorder;
use crate::telemetry::WorkerMeters;
use crate::trace::{Legs, named};
use cleave_api::WorkerCommand;
use cleave_domain::{
    BlockHash, BlockIndex, Emission, HandoffId, Load, Order, Report, Reserve, Role, RouterId,
    TapeLine, WorkerRef,
};
use cleave_kv::Packet;
use cleave_sched::{Brain, Input, Limits, Note, Output};
use cleave_transfer::{LinkDown, LinkEvent, Links, Passes, Payload, Reach, Route};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tracing::{Level, debug, error, info, warn};

/// What the outside tells a worker's driver.
#[derive(Debug)]
pub(crate) enum WorkerEvent {
    /// A router is connected.
    RouterJoined(RouterLine),
    /// That connection is over.
    RouterLost { router: RouterId, serial: u64 },
    /// A router said something.
    Told {
        router: RouterId,
        serial: u64,
        word: Downward,
    },
    /// An operator said something at this worker's own port.
    Commanded(WorkerCommand),
    /// The process was asked to end.
    Drain,
    /// Stop at once.
    Stop,
}

/// Whose order an operator's command at this worker's own port is: no router's, for none with so large
/// a number is joined.
const OPERATOR: RouterId = RouterId(u64::MAX);

/// What can wake the driver; this list is closed.
enum Event {
    Outside(WorkerEvent),
    Link(LinkEvent),
    Engine(Input),
    Deadline,
}

/// Where facts come from.
pub(crate) struct Ears {
    pub(crate) inbox: mpsc::Receiver<WorkerEvent>,
    pub(crate) links: mpsc::Receiver<LinkEvent>,
    pub(crate) engine: mpsc::UnboundedReceiver<Input>,
}

/// What outputs are done with.
pub(crate) struct Hands {
    pub(crate) engine: EngineHost,
    pub(crate) links: Links,
    /// By which senders in other processes show that they may write here, and this one there.
    pub(crate) passes: Option<Passes>,
    pub(crate) meters: WorkerMeters,
    pub(crate) legs: Legs,
    /// For messages: how this worker is called, and where its blocks are reached.
    pub(crate) name: String,
    pub(crate) data_address: String,
    pub(crate) link_prices: LinkPrices,
    pub(crate) recorder: Recorder,
    pub(crate) desk: Arc<Desk>,
    pub(crate) drained: watch::Sender<bool>,
}

/// Where the prices of links come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkPrices {
    /// From what each was measured at.
    Measured,
    /// They are given with those of the steps.
    Given,
}

/// A worker's brain and its body.
pub(crate) struct Driver {
    clock: Clock,
    brain: Brain,
    block_bytes: u32,
    ears: Ears,
    hands: Hands,
    routers: BTreeMap<RouterId, RouterLine>,
    peers: Directory,
    exports: Exports,
    stops: Stops,
    /// The payload of the frame that the brain is being told of.
    arriving: Option<Payload>,
    /// As the desk and the meters show it.
    shown: Option<Load>,
    /// Facts that came up while the brain was being drained.
    pending: VecDeque<Input>,
    /// Tokens of the input that the brain was told last, to leave together.
    emitted: BTreeMap<RouterId, Vec<(HandoffId, Emission)>>,
}

impl Driver {
    /// `found` is what an earlier life of the worker left on disk.
    pub(crate) fn new(limits: Limits, found: Vec<BlockHash>, ears: Ears, mut hands: Hands) -> Self {
        let block_bytes = limits.capacity.block_bytes;
        hands.recorder.worker(TapeLine::Born { limits: &limits });
        Self {
            clock: Clock::start(),
            brain: Brain::new(limits),
            block_bytes,
            ears,
            hands,
            routers: BTreeMap::new(),
            peers: Directory::default(),
            exports: Exports::default(),
            stops: Stops::default(),
            arriving: None,
            shown: None,
            pending: match found.is_empty() {
                true => VecDeque::new(),
                false => VecDeque::from([Input::FoundOnDisk { contents: found }]),
            },
            emitted: BTreeMap::new(),
        }
    }

    /// Runs until told to stop, or nobody is left to tell it anything.
    pub(crate) async fn run(mut self) {
        self.settle();
        loop {
            match self.next_event().await {
                Some(Event::Outside(WorkerEvent::Stop)) | None => return,
                Some(Event::Outside(event)) => self.hear_outside(event),
                Some(Event::Link(event)) => self.hear_link(event),
                Some(Event::Engine(answer)) => self.hear(answer),
                Some(Event::Deadline) => self.hear(Input::Woke),
            }
        }
    }

    async fn next_event(&mut self) -> Option<Event> {
        let deadline = self.brain.deadline();
        // In one order always, so that the same facts at the same moments give the same decisions. The
        // engine and links say no more than they were asked for, so routers come to be heard.
        tokio::select! {
            biased;
            () = reached(self.clock, deadline) => Some(Event::Deadline),
            answer = self.ears.engine.recv() => answer.map(Event::Engine),
            event = self.ears.links.recv() => event.map(Event::Link),
            event = self.ears.inbox.recv() => event.map(Event::Outside),
        }
    }

    /// Tells the brain one fact, and does all that follows from it.
    fn hear(&mut self, input: Input) {
        self.pending.push_back(input);
        self.settle();
    }

    /// Tells the brain all that is pending, and what comes up meanwhile.
    fn settle(&mut self) {
        while let Some(input) = self.pending.pop_front() {
            let at = self.clock.now();
            let line = TapeLine::Heard { at, input: &input };
            self.hands.recorder.worker(line);
            self.brain.handle(at, input);
            while let Some(output) = self.brain.poll() {
                self.hands
                    .recorder
                    .worker(TapeLine::Said { output: &output });
                self.perform(output);
            }
            for (router, tokens) in std::mem::take(&mut self.emitted) {
                self.say(router, Upward::Emissions(tokens));
            }
            self.hands.recorder.flush();
            assert!(
                self.arriving.is_none(),
                "the brain neither imported nor discarded a frame"
            );
        }
        self.show();
    }

    /// What the routers hear of the load, the operator and the meters see, whether a router is
    /// connected or not.
    fn show(&mut self) {
        let load = self.brain.load();
        if self.shown.replace(load) != Some(load) {
            self.hands.desk.loaded(load);
            self.hands.meters.loaded(load);
        }
    }

    fn hear_outside(&mut self, event: WorkerEvent) {
        match event {
            WorkerEvent::RouterJoined(line) => {
                let router = line.router;
                info!(%router, "router joined");
                if self.routers.remove(&router).is_some() {
                    self.lose_router(router);
                }
                self.routers.insert(router, line);
                // First of all: a line that is over already is lost to the brain after it joined.
                self.hear(Input::RouterJoined { router });
                for link in self.hands.desk.links() {
                    self.tell(router, Upward::Link(link));
                }
                self.settle();
            }
            WorkerEvent::RouterLost { router, serial } => {
                if self
                    .routers
                    .get(&router)
                    .is_some_and(|line| line.serial == serial)
                {
                    self.routers.remove(&router);
                    info!(%router, "router lost");
                    self.lose_router(router);
                }
            }
            WorkerEvent::Told {
                router,
                serial,
                word,
            } => {
                // A word from a connection that was replaced meanwhile belongs to nobody.
                if self
                    .routers
                    .get(&router)
                    .is_some_and(|line| line.serial == serial)
                {
                    self.hear_router(router, word);
                }
            }
            WorkerEvent::Commanded(WorkerCommand::Drain) => {
                self.hands.desk.leaves();
                self.hear(Input::Draining);
            }
            WorkerEvent::Commanded(WorkerCommand::Serve(role)) => {
                self.serve(role);
                let order = Order::Serve { role };
                let router = OPERATOR;
                self.hear(Input::Ordered { router, order });
            }
            WorkerEvent::Drain => {
                self.hands.desk.leaves();
                self.hear(Input::Draining);
            }
            WorkerEvent::Stop => {}
        }
    }

    fn hear_router(&mut self, router: RouterId, word: Downward) {
        match word {
            Downward::Peer {
                worker,
                data_address,
            } => {
                self.peers.name(worker, router);
                match Route::parse(&data_address) {
                    Ok(route) => self.hands.links.know(worker, route),
                    // Hand-offs with it will find no route, and fail.
                    Err(error) => warn!(peer = %worker, %error, "no way to this worker"),
                }
            }
            Downward::PeerGone { worker } => {
                let gone = self.peers.strike(worker, router);
                self.forget(gone);
                self.settle();
            }
            Downward::NameTaken { data_address } => {
                // The line ends after this; it is dialled again in case the other one leaves.
                error!(
                    name = self.hands.name,
                    %router,
                    here = self.hands.data_address,
                    there = data_address,
                    "another worker of this name started later and is connected to the router: \
                     this one is cut off; give one of the two another name (--name)"
                );
            }
            Downward::Pass { handoff, pass } => {
                self.change_passes(|passes| passes.hold(handoff, pass));
            }
            Downward::Order { order, mark } => {
                self.hands.legs.ordered(&order, mark);
                match &order {
                    Order::Drain => self.hands.desk.leaves(),
                    Order::Serve { role } => self.serve(*role),
                    Order::Reserve(reserve) => self.make_pass(router, reserve),
                    Order::Prefill(_)
                    | Order::Migrate(_)
                    | Order::Renew { .. }
                    | Order::Cancel { .. }
                    | Order::PassOn(_) => {}
                }
                self.hear(Input::Ordered { router, order });
            }
        }
    }

    /// Whoever is to write to what is about to be reserved is given what it takes; if it is not reserved,
    /// that opens nothing.
    fn make_pass(&mut self, router: RouterId, reserve: &Reserve) {
        let Some(passes) = &self.hands.passes else {
            return;
        };
        let handoff = reserve.handoff;
        let pass = passes.make(handoff, reserve.sender, &reserve.request.slo.tenant);
        self.tell(router, Upward::Pass { handoff, pass });
    }

    fn change_passes(&self, change: impl FnOnce(&Passes)) {
        if let Some(passes) = &self.hands.passes {
            change(passes);
            self.hands.meters.passes(passes.held_count());
        }
    }

    /// The brain is about to hear that it serves these legs from now on.
    fn serve(&mut self, role: Role) {
        info!(name = self.hands.name, %role, "serves these legs from now on");
        self.hands.desk.serves(role);
        self.hands.meters.serves(role);
        self.change_passes(|_| {});
    }

    fn hear_link(&mut self, event: LinkEvent) {
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
                self.arriving = payload;
                self.hear(Input::Arrived {
                    from,
                    packet,
                    condition,
                });
            }
            LinkEvent::Forged { peer } => {
                warn!(%peer, "a peer wanted to write what it has no pass for");
                self.hands.meters.pass_refused();
            }
            LinkEvent::Granted { peer } => self.pump(peer),
            LinkEvent::Measured { peer, speed } => {
                // Nobody vouches for it any more, and nobody would take it off the page again.
                if !self.peers.has(peer.worker) {
                    return;
                }
                let (latency, bytes_per_second) = (speed.latency, speed.bytes_per_second);
                let transport = speed.transport;
                info!(%peer, %transport, ?latency, bytes_per_second, "link measured");
                self.hands.meters.link_measured(peer, speed);
                let link = LinkState {
                    peer,
                    transport: transport.to_string(),
                    bytes_per_second,
                    latency,
                };
                self.hands.desk.measured(&link);
                for router in self.routers.keys().copied().collect::<Vec<_>>() {
                    self.tell(router, Upward::Link(link.clone()));
                }
                if self.hands.link_prices == LinkPrices::Measured {
                    let price = price_of(speed);
                    self.hear(Input::LinkMeasured { peer, price });
                }
            }
            LinkEvent::FellBack {
                peer,
                from,
                to,
                reason,
            } => {
                warn!(%peer, %from, %to, reason, "link falls back to a slower transport");
                self.hands.meters.link_fell_back(peer);
            }
            LinkEvent::Lost { peer, reason } => {
                warn!(%peer, reason, "link lost");
                self.lose(peer);
            }
            LinkEvent::Severed { peer } => {
                self.stops.take(peer);
                self.hear(Input::Severed { peer });
            }
        }
        self.settle();
    }

    fn perform(&mut self, output: Output) {
        match output {
            Output::Step(plan) => self.hands.engine.push(Work::Step(plan)),
            Output::Tell { router, report } => {
                self.hands.legs.reported(&report);
                if let Report::Refused { handoff, .. } | Report::Stayed { handoff, .. } = &report {
                    self.change_passes(|passes| passes.forget(*handoff));
                }
                self.tell(router, Upward::Report(report));
            }
            Output::Emit { handoff, emission } => {
                self.hands.legs.emitted(handoff, &emission);
                let emitted = self.emitted.entry(handoff.flight.router()).or_default();
                emitted.push((handoff, emission));
            }
            Output::Export(export) => {
                self.exports.push(export);
                self.pump(export.to);
            }
            Output::Send { to, packet } => self.send(to, packet),
            Output::Import {
                handoff,
                part,
                block,
            } => {
                let arrived = self.arriving.take();
                let payload = arrived.expect("the brain imports the frame that just arrived");
                self.hands.engine.push(Work::Write(Import {
                    handoff,
                    part,
                    block,
                    payload,
                }));
            }
            Output::Discard { .. } => drop(self.arriving.take()),
            Output::SwapOut { handoff, blocks } => self.swap(handoff, blocks, Way::Out),
            Output::SwapIn { handoff, blocks } => self.swap(handoff, blocks, Way::In),
            Output::SwapDrop { handoff } => {
                self.pending.extend(self.hands.engine.drop_swapped(handoff));
            }
            Output::Shelve { content, block } => {
                let bytes = self.block_bytes;
                self.hands.engine.push(Work::Shelve(Shelving {
                    content,
                    block,
                    bytes,
                }));
            }
            Output::WriteOn { content } => self.hands.engine.write_on(content),
            Output::Fetch { handoff, blocks } => self.hands.engine.fetch(handoff, blocks),
            Output::FetchStop { handoff } => self.hands.engine.stop_fetch(handoff),
            Output::TierDrop { content, place } => self.hands.engine.drop_kept(content, place),
            Output::Forget { handoff } => {
                self.pending.extend(self.exports.forget(handoff));
                self.pending.extend(self.hands.engine.forget(handoff));
                self.change_passes(|passes| passes.forget(handoff));
            }
            Output::Drained => {
                self.hands.drained.send_replace(true);
            }
            Output::Note(note) => self.note(&note),
        }
    }

    fn note(&mut self, note: &Note) {
        let Hands { legs, name, .. } = &self.hands;
        if tracing::enabled!(Level::DEBUG) {
            let mark = handoff_of(note).and_then(|handoff| legs.mark(handoff));
            let (request_id, trace) = named(mark);
            debug!(
                worker = name,
                request_id,
                trace_id = trace.map(display),
                ?note
            );
        }
        self.hands.legs.noted(note);
        self.hands.meters.count(note);
    }

    fn swap(&self, handoff: HandoffId, blocks: Vec<BlockIndex>, way: Way) {
        let swap = Swap::new(handoff, blocks, way);
        self.hands.engine.push(Work::Swap(swap));
    }

    /// Tokens that were emitted before are said before.
    fn tell(&mut self, router: RouterId, word: Upward) {
        if let Some(tokens) = self.emitted.remove(&router) {
            self.say(router, Upward::Emissions(tokens));
        }
        self.say(router, word);
    }

    /// A router whose line is full does not read it: it is lost.
    fn say(&mut self, router: RouterId, word: Upward) {
        let Some(line) = self.routers.get(&router) else {
            return; // It left meanwhile; the brain knows, or is about to hear.
        };
        if let Err(error) = line.out.try_send(word) {
            warn!(%router, %error, "router lost: it does not take what it is told");
            self.routers.remove(&router);
            self.pending.push_back(Input::RouterLost { router });
            let gone = self.peers.strike_all(router);
            self.forget(gone);
        }
    }

    /// Its flights end first, while the peers they concern can still be told.
    fn lose_router(&mut self, router: RouterId) {
        self.hear(Input::RouterLost { router });
        self.hands.legs.router_lost(router);
        self.change_passes(|passes| passes.forget_router(router));
        let gone = self.peers.strike_all(router);
        self.forget(gone);
        self.settle();
    }

    /// Lives that no router vouches for any more.
    fn forget(&mut self, gone: Vec<WorkerRef>) {
        for peer in gone {
            self.lose(peer);
            // One that could write here may still, until its process has ended.
            if self.hands.links.bar(peer) == Reach::Never {
                for handoff in self.stops.take(peer) {
                    self.pending.push_back(stopped(peer, handoff));
                }
            }
            self.hands.links.forget(peer);
            if !self.peers.has(peer.worker) {
                self.hands.meters.link_forgotten(peer.worker);
                self.hands.desk.forget(peer.worker);
            }
        }
    }

    fn send(&mut self, to: WorkerRef, packet: Packet) {
        if let Packet::Stop { handoff } = packet {
            // Who cannot write here need not be asked, nor be there to answer. Of whom nobody says where it is, none
            // will.
            let links = &self.hands.links;
            let reach = match links.link(to) {
                Err(LinkDown::NoRoute(_)) => links.bar(to),
                Err(LinkDown::Broken(_)) | Ok(_) => links.reach(to),
            };
            if reach == Reach::Never {
                return self.pending.push_back(stopped(to, handoff));
            }
            self.stops.ask(to, handoff);
        }
        let sent = self.hands.links.link(to).and_then(|link| link.send(packet));
        if let Err(down) = sent {
            debug!(%to, %down, "cannot send");
            self.lose(to);
        }
    }

    /// Sends as many waiting blocks to this peer as it has granted credit for.
    fn pump(&mut self, peer: WorkerRef) {
        while let Some(handoff) = self.exports.next(peer).map(|export| export.handoff) {
            let link = match self.hands.links.link(peer) {
                Ok(link) => link,
                Err(down) => {
                    debug!(%peer, %down, "cannot export");
                    return self.lose(peer);
                }
            };
            let Some(permit) = link.reserve(handoff, self.block_bytes) else {
                return; // `Granted` comes when there is credit again.
            };
            if let Some(export) = self.exports.pop(peer) {
                self.hands.engine.push(Work::Read(export, permit));
            }
        }
    }

    fn lose(&mut self, peer: WorkerRef) {
        self.pending.extend(self.exports.drop_peer(peer));
        self.pending.push_back(Input::LinkLost { peer });
    }
}
