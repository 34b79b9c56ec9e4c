//! The run: an agenda of events, the two kinds of brains, and what happens between them.
//!
//! Owns: virtual time. Never: decides anything a brain decides; it carries out.
//! Invariant: events are taken in the order of time, then of being planned; nothing else orders
//! them, so the same world runs the same way.

use crate::body::{Body, Payload, Taping};
use crate::clients::Clients;
use crate::damage::{self, Arrival, Checks};
use crate::dice::Dice;
use crate::journal::{Journal, Keep};
use crate::net::Net;
use crate::tape;
use crate::words;
use crate::world::World;
use cleave_domain::{
    BlockHash, Emission, HandoffId, Incarnation, Order, Report, RouterId, Tape, TapeLine, Time,
    WorkerId, WorkerRef,
};
use cleave_kv::Packet;
use cleave_router::Readiness;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// More events than any world of this size needs; past it nothing is coming to rest.
const EVENTS_MAX: u64 = 3_000_000;

/// Everything that can happen next.
#[derive(Debug)]
pub(crate) enum Event {
    /// A client asks.
    Asks(usize),
    /// A client leaves.
    Leaves(usize),
    /// A client takes nothing any more.
    Stalls(usize),
    /// It reads again.
    Flows(usize),
    /// An operator wants something.
    Wishes(usize),
    /// A report or token reaches a router.
    ToRouter {
        router: usize,
        worker: usize,
        epoch: u64,
        from: WorkerRef,
        word: Word,
    },
    /// An order reaches a worker.
    ToWorker {
        router: usize,
        worker: usize,
        epoch: u64,
        order: Order,
    },
    /// A life of a router notices something.
    RouterHears(RouterId, cleave_router::Input),
    /// A router starts again.
    RouterStarts(usize),
    /// A worker has said nothing for too long.
    Silent(WorkerRef),
    /// A one-sided write reaches the other pool.
    Lands(Box<Write>),
    /// A life of a worker notices something.
    WorkerHears(WorkerRef, cleave_sched::Input),
    /// A packet reaches a worker.
    Packet(Box<Parcel>),
    /// A message from a worker reaches another, and its checksum does not fit.
    LinkDamaged {
        from: WorkerRef,
        to: WorkerRef,
        epoch: u64,
    },
    /// The same between a router and a worker.
    StreamDamaged {
        router: usize,
        worker: usize,
        epoch: u64,
    },
    /// A worker notices that a link broke.
    LinkLost { side: WorkerRef, peer: WorkerRef },
    /// A worker's disk has written a content.
    DiskWrote(WorkerRef, BlockHash),
    /// A worker's disk has read what a fetch waits for.
    DiskRead(WorkerRef, HandoffId),
    /// An engine is done with what it did.
    EngineDone(WorkerRef),
    /// A link has taken a block's frames.
    Shipped {
        side: WorkerRef,
        exported: Box<cleave_sched::Input>,
    },
    /// A brain asked to be woken.
    WakeRouter(usize),
    /// As above.
    WakeWorker(WorkerRef),
    /// The next fault.
    Fault(usize),
    /// A process starts.
    Starts(usize),
    /// A worker and a router find each other again after the connection that ended in this epoch;
    /// by then both have noticed its end.
    Meets {
        router: usize,
        worker: usize,
        epoch: u64,
    },
    /// Faults are over.
    Heals,
}

/// What a worker says over its stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Word {
    Report(Report),
    Token(HandoffId, Emission),
}

/// A packet under way.
#[derive(Clone, Debug)]
pub(crate) struct Parcel {
    pub(crate) from: WorkerRef,
    pub(crate) to: WorkerRef,
    pub(crate) epoch: u64,
    pub(crate) packet: Packet,
    pub(crate) payload: Payload,
    pub(crate) condition: cleave_sched::Condition,
}

/// A one-sided write under way.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) from: WorkerRef,
    pub(crate) epoch: u64,
    pub(crate) export: cleave_sched::Export,
    pub(crate) payload: Payload,
    /// What arrives, if not that.
    pub(crate) damaged: Option<Payload>,
}

/// A worker's place, alive or not.
#[derive(Debug, Default)]
pub(crate) struct Seat {
    pub(crate) life: u64,
    pub(crate) body: Option<Body>,
    pub(crate) frozen_until: Time,
    /// Its engine stands still.
    pub(crate) hung_until: Time,
    /// What its last life left on disk.
    pub(crate) disk: BTreeMap<BlockHash, Payload>,
    /// When it starts again once a drain is done.
    pub(crate) back: std::time::Duration,
}

#[derive(Debug)]
pub(crate) struct RouterSeat {
    pub(crate) brain: cleave_router::Brain,
    /// Which router, in which life.
    pub(crate) id: RouterId,
    /// Until when it is dead, if it is.
    pub(crate) down_until: Option<Time>,
    pub(crate) wake: Option<Time>,
    pub(crate) drained: bool,
    /// Workers that the router last said it is connected with.
    pub(crate) workers: u32,
    /// What the router last said of requests that come.
    pub(crate) readiness: Readiness,
    pub(crate) tape: Option<Vec<String>>,
}

#[derive(Debug)]
pub(crate) struct Run<'a> {
    pub(crate) world: &'a World,
    pub(crate) now: Time,
    agenda: BTreeMap<(Time, u64), Event>,
    planned: u64,
    pub(crate) seats: Vec<Seat>,
    pub(crate) routers: Vec<RouterSeat>,
    pub(crate) net: Net,
    pub(crate) clients: Clients,
    pub(crate) dice: Dice,
    /// The messages that are damaged, and the bit of each.
    pub(crate) flips: Dice,
    checks: Checks,
    pub(crate) journal: Journal,
    pub(crate) healed: bool,
    /// Nobody starts again.
    pub(crate) closing: bool,
    pub(crate) taping: Taping,
    pub(crate) tapes: Vec<Vec<String>>,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

impl<'a> Run<'a> {
    pub(crate) fn new(world: &'a World, options: &crate::Options) -> Self {
        let router = |router| RouterSeat {
            brain: cleave_router::Brain::new(world.router.clone()),
            id: router_life(router, 0),
            down_until: None,
            wake: None,
            drained: false,
            workers: 0,
            readiness: Readiness::NONE,
            tape: options.tape.then(|| {
                let limits = world.router.clone();
                vec![tape::write(&Tape::Router(TapeLine::Born { limits }))]
            }),
        };
        let mut run = Self {
            world,
            now: Time::ZERO,
            agenda: BTreeMap::new(),
            planned: 0,
            seats: world.workers.iter().map(|_| Seat::default()).collect(),
            routers: (0..world.routers_count).map(router).collect(),
            net: Net::default(),
            clients: Clients::of(world),
            dice: Dice::new(!world.seed),
            flips: damage::dice(!world.seed),
            checks: options.checks,
            journal: Journal::new(match options.log {
                true => Keep::All,
                false => Keep::Last,
            }),
            healed: false,
            closing: false,
            taping: match options.tape {
                true => Taping::On,
                false => Taping::Off,
            },
            tapes: Vec::new(),
            counts: BTreeMap::new(),
        };
        run.plan_world();
        run
    }

    fn plan_world(&mut self) {
        for worker in 0..self.seats.len() {
            self.plan(Time::ZERO, Event::Starts(worker));
        }
        for (index, arrival) in self.world.requests.iter().enumerate() {
            self.plan(arrival.at, Event::Asks(index));
            if let Some(at) = arrival.leaves {
                self.plan(at, Event::Leaves(index));
            }
            if let Some((at, span)) = arrival.stalls {
                self.plan(at, Event::Stalls(index));
                self.plan(at + span, Event::Flows(index));
            }
        }
        for (index, wish) in self.world.wishes.iter().enumerate() {
            self.plan(wish.at, Event::Wishes(index));
        }
        for (index, (at, _)) in self.world.faults.iter().enumerate() {
            self.plan(*at, Event::Fault(index));
        }
        self.plan(self.world.heal_at, Event::Heals);
    }

    pub(crate) fn plan(&mut self, at: Time, event: Event) {
        self.planned += 1;
        self.agenda.insert((at.max(self.now), self.planned), event);
    }

    pub(crate) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Runs the world to its end: faults, healing, rest, and a drained fleet.
    pub(crate) fn go(&mut self) -> Result<(), String> {
        self.rest()?;
        self.check_rest()?;
        self.drain_all()?;
        self.rest()?;
        self.check_drained()
    }

    /// Until nothing is planned.
    fn rest(&mut self) -> Result<(), String> {
        while let Some(((at, _), event)) = self.agenda.pop_first() {
            self.now = at;
            if self.journal.count > EVENTS_MAX {
                return Err(format!("no rest after {EVENTS_MAX} events"));
            }
            if let Some(until) = self.held_up(&event) {
                self.plan(until, event);
                continue;
            }
            let Some(words) = self.happen(event)? else {
                continue;
            };
            let state = self.state();
            self.journal.line(at, &words, &state);
        }
        Ok(())
    }

    /// Until when the process that the event is for stands still.
    fn held_up(&self, event: &Event) -> Option<Time> {
        let worker = match event {
            Event::ToWorker { worker, .. } => *worker,
            Event::WorkerHears(who, _)
            | Event::EngineDone(who)
            | Event::DiskWrote(who, _)
            | Event::DiskRead(who, _)
            | Event::WakeWorker(who) => index(*who),
            Event::Packet(parcel) => index(parcel.to),
            Event::LinkDamaged { to, .. } => index(*to),
            Event::LinkLost { side, .. } | Event::Shipped { side, .. } => index(*side),
            _ => return None,
        };
        let seat = &self.seats[worker];
        let until = match event {
            Event::EngineDone(_) => seat.frozen_until.max(seat.hung_until),
            _ => seat.frozen_until,
        };
        (until > self.now).then_some(until)
    }

    /// Lets one event happen; says what it was, or nothing if it came to nothing.
    fn happen(&mut self, event: Event) -> Result<Option<String>, String> {
        match event {
            Event::Asks(client) => self.ask(client).map(Some),
            Event::Leaves(client) => self.leave(client),
            Event::ToRouter {
                router,
                worker,
                epoch,
                from,
                word,
            } => {
                if self.net.stream(router, worker).epoch != epoch {
                    return Ok(None);
                }
                self.router_told(router, from, word).map(Some)
            }
            Event::ToWorker {
                router,
                worker,
                epoch,
                order,
            } => {
                if self.net.stream(router, worker).epoch != epoch {
                    return Ok(None);
                }
                self.worker_told(worker, router, order).map(Some)
            }
            Event::RouterHears(life, input) => self.if_there(life, input),
            Event::WorkerHears(who, input) => self.if_alive(who, "hears", input),
            Event::Packet(parcel) => self.packet(*parcel),
            Event::LinkDamaged { from, to, epoch } => Ok(self.link_damaged(from, to, epoch)),
            Event::StreamDamaged {
                router,
                worker,
                epoch,
            } => Ok(self.stream_damaged(router, worker, epoch)),
            Event::LinkLost { side, peer } => self.link_lost(side, peer),
            Event::EngineDone(who) => self.engine_done(who),
            Event::DiskWrote(who, content) => self.disk_wrote(who, content),
            Event::DiskRead(who, handoff) => self.disk_read(who, handoff),
            Event::Shipped { side, exported } => self.shipped(side, *exported),
            Event::WakeRouter(router) => self.wake_router(router),
            Event::WakeWorker(who) => self.wake_worker(who),
            Event::Fault(fault) => self.fault(fault).map(Some),
            Event::Starts(worker) => self.start(worker),
            Event::Meets {
                router,
                worker,
                epoch,
            } => {
                if self.net.stream(router, worker).epoch != epoch {
                    return Ok(None);
                }
                self.meet(router, worker)
            }
            Event::Stalls(client) => self.stall(client),
            Event::Flows(client) => self.flow(client),
            Event::Wishes(wish) => self.wish(wish),
            Event::RouterStarts(router) => self.router_starts(router).map(Some),
            Event::Silent(who) => self.silent(who),
            Event::Lands(write) => self.lands(*write),
            Event::Heals => {
                self.healed = true;
                Ok(Some("-- heals       faults are over".to_owned()))
            }
        }
    }

    fn worker_told(
        &mut self,
        worker: usize,
        router: usize,
        order: Order,
    ) -> Result<String, String> {
        let router = self.routers[router].id;
        let words = format!("w{:x} ordered     {}", worker + 1, words::order(&order));
        if order == Order::Drain {
            self.begins_to_drain(worker);
        }
        let input = cleave_sched::Input::Ordered { router, order };
        self.worker_hears(worker, input)?;
        Ok(words)
    }

    /// Lets a router hear something, if it still lives this life.
    fn if_there(
        &mut self,
        life: RouterId,
        input: cleave_router::Input,
    ) -> Result<Option<String>, String> {
        let Some(router) = self.router(life) else {
            return Ok(None);
        };
        let words = format!(
            "r{:x} hears       {}",
            router + 1,
            words::router_input(&input)
        );
        self.router_hears(router, input)?;
        Ok(Some(words))
    }

    pub(crate) fn if_alive(
        &mut self,
        who: WorkerRef,
        verb: &str,
        input: cleave_sched::Input,
    ) -> Result<Option<String>, String> {
        if self.body(who).is_none() {
            return Ok(None);
        }
        let words = format!("{} {verb:<11} {}", who.worker, words::input(&input));
        self.worker_hears(index(who), input)?;
        Ok(Some(words))
    }

    /// The arrival of a message; so many in 100,000 have one bit flipped.
    pub(crate) fn arrival<M>(&mut self, message: M, rate: u32) -> Arrival<M>
    where
        M: Serialize + DeserializeOwned,
    {
        if self.healed || !damage::hits(&mut self.flips, rate) {
            return Arrival::Read(message);
        }
        damage::flip(&message, &mut self.flips, self.checks)
    }

    // === clients and routers ===

    fn ask(&mut self, client: usize) -> Result<String, String> {
        let index = client;
        let client = &self.clients.all[index];
        let router = client.router;
        let request = std::sync::Arc::clone(&client.request);
        if self.routers[router].down_until.is_some() {
            self.clients.cut_off(index);
            return Ok(format!("r{:x} asked       and is not there", router + 1));
        }
        let flight = self.clients.ask(index, self.routers[router].id);
        self.router_hears(router, cleave_router::Input::Submitted { flight, request })?;
        Ok(format!("r{:x} asked       {flight}", router + 1))
    }

    fn leave(&mut self, client: usize) -> Result<Option<String>, String> {
        if !self.clients.leave(client) {
            return Ok(None);
        }
        let client = &self.clients.all[client];
        let (router, flight) = (client.router, client.flight);
        self.router_hears(
            router,
            cleave_router::Input::Cancelled {
                flight,
                why: cleave_router::CancelReason::Left,
            },
        )?;
        if self.clients.waiting().contains(&flight) {
            return Err(format!("{flight} was left and did not end at once"));
        }
        Ok(Some(format!("r{:x} left        {flight}", router + 1)))
    }

    // === the state, in columns ===

    fn state(&self) -> String {
        let flights = self.clients.all.iter();
        let under_way = flights
            .filter(|c| c.submitted && c.ending.is_none())
            .count();
        let mut state = format!("{under_way:>3}");
        for (seat, about) in self.seats.iter().zip(&self.world.workers) {
            let role = about.role.to_string();
            let role = &role[..1];
            match &seat.body {
                None => state.push_str(&format!(" | {role}x {:>9}", "")),
                Some(body) => {
                    let load = body.brain.load();
                    let all = about.capacity.blocks_count;
                    let held = all - load.blocks_free.min(all);
                    let mark = match seat.frozen_until > self.now {
                        true => 'z',
                        false => body.mark(),
                    };
                    let queue = load.queue_tokens;
                    state.push_str(&format!(" | {role}{mark} {held:>2}/{all:<2} q{queue:<3}"));
                }
            }
        }
        state
    }

    /// Which router this is, if it is in that life.
    pub(crate) fn router(&self, life: RouterId) -> Option<usize> {
        self.routers.iter().position(|seat| seat.id == life)
    }

    /// The body of exactly this life, if it is alive.
    pub(crate) fn body(&self, who: WorkerRef) -> Option<&Body> {
        let body = self.seats.get(index(who))?.body.as_ref()?;
        (body.me == who).then_some(body)
    }

    pub(crate) fn take_tapes(&mut self) {
        for seat in &mut self.routers {
            self.tapes.extend(seat.tape.take());
        }
        for seat in &mut self.seats {
            self.tapes
                .extend(seat.body.as_mut().and_then(Body::take_tape));
        }
    }
}

pub(crate) fn index(who: WorkerRef) -> usize {
    who.worker.0 as usize - 1
}

/// A router in one of its lives.
pub(crate) fn router_life(router: usize, life: u64) -> RouterId {
    RouterId(life << 8 | (router as u64 + 1))
}

pub(crate) fn life(worker: usize, life: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(worker as u64 + 1),
        incarnation: Incarnation(life),
    }
}
