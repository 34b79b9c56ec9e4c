//! All links of one worker: where peers are, the outgoing links made on demand, the incoming ones
//! accepted.
//!
//! Owns: the table of routes and links, and the tasks that carry them. Never: reads or verifies a payload.
//!
//! Each life of a peer is a peer of its own: which lives there are the routers know, and nothing
//! here compares them. Invariant: at most one outgoing and one incoming link per life; a link that
//! ends is reported lost, once, and the next use of it dials anew; nothing is kept of a life that
//! was forgotten.

use crate::address::Route;
use crate::config::{LinkDown, LinkEvent, LinksConfig};
use crate::host::{self, Gate, HostListener, HostStream};
use crate::incoming::{self, Door, Knock, Seat, Visitor};
use crate::life::PeerProcess;
use crate::link::Link;
use crate::local::{self, End, LocalNet};
use crate::nixl;
use crate::outgoing::Errand;
use crate::pools::{Access, Reach};
use crate::setbacks::Setbacks;
use crate::socket::{SocketError, write};
use crate::tcp::{TcpEnd, TcpReader, TcpWriter};
use crate::transport::Transport;
use crate::wire::Message;
use cleave_domain::WorkerRef;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::{debug, info, warn};

/// Incoming connections that have not shown who they are, at most; more wait in the kernel.
const STRANGERS_MAX: usize = 64;

/// A worker's links. Clones are the same links; the last one dropped ends the outgoing ones.
#[derive(Clone, Debug)]
pub struct Links {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: LinksConfig,
    access: Arc<Access>,
    events: mpsc::Sender<LinkEvent>,
    net: LocalNet,
    table: Mutex<Table>,
    /// Told when a route was learned.
    learned: Notify,
    setbacks: Arc<Setbacks>,
    /// One for each ring that peers may write to over NIXL.
    rings: Arc<Semaphore>,
}

/// Where a worker can be reached from outside its process.
#[derive(Debug, Default)]
pub struct Listeners {
    /// Over TCP; the address that peers reach it by is the caller's to know.
    pub tcp: Option<TcpListener>,
    /// From processes of the same host.
    pub host: Option<HostListener>,
}

#[derive(Debug, Default)]
struct Table {
    routes: BTreeMap<WorkerRef, Route>,
    outgoing: BTreeMap<WorkerRef, Arc<Link>>,
    incoming: BTreeMap<WorkerRef, Incoming>,
    /// One host at a time receives from a life, and of those that wait the newest.
    seats: BTreeMap<WorkerRef, Place>,
    /// The last visit of each life that has a seat; its number names the link.
    newest: BTreeMap<WorkerRef, u64>,
    visits_count: u64,
    /// Lives that were given the pool and whose processes have not ended.
    watched: BTreeSet<WorkerRef>,
}

/// A link that is being received.
#[derive(Debug)]
struct Incoming {
    key: u64,
    joining: mpsc::Sender<TcpEnd>,
    replaced: Arc<Notify>,
}

/// Held by the host that receives.
type Place = Arc<tokio::sync::Mutex<()>>;

/// Whether the routers vouch for a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Yes,
    No,
}

impl Links {
    /// No link yet. What happens on them goes to `events`; workers on the same `net` can be
    /// reached by [`Route::Local`].
    pub fn new(config: LinksConfig, events: mpsc::Sender<LinkEvent>, net: LocalNet) -> Self {
        let shared = Shared {
            access: Access::new(config.pools.clone()),
            rings: Arc::new(Semaphore::new(config.rings_max)),
            config,
            events,
            net,
            table: Mutex::default(),
            learned: Notify::new(),
            setbacks: Arc::default(),
        };
        shared.net.enter(shared.end());
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Learns where a peer is, and dials it at once, so that the link has been measured before the
    /// first block.
    pub fn know(&self, peer: WorkerRef, route: Route) {
        self.shared.lock().routes.insert(peer, route);
        self.shared.learned.notify_waiters();
        if let Err(down) = self.link(peer) {
            debug!(%peer, %down, "not dialled");
        }
    }

    /// The peer's life is over, or nobody vouches for it any more. What was sent to it still goes, if
    /// it can; nobody is told when that link ends.
    pub fn forget(&self, peer: WorkerRef) {
        let mut table = self.shared.lock();
        table.routes.remove(&peer);
        table.outgoing.remove(&peer);
        self.shared.setbacks.forget(peer);
    }

    /// Whether this life of a peer can write into this worker's pool itself. One that is known to be on another host
    /// never will.
    pub fn reach(&self, peer: WorkerRef) -> Reach {
        let table = self.shared.lock();
        let is_elsewhere = match table.routes.get(&peer) {
            Some(Route::Remote(addresses)) => {
                let here = addresses.shared_memory.as_ref();
                !here.is_some_and(host::is_here)
            }
            Some(Route::Local) | None => false,
        };
        drop(table);
        match is_elsewhere {
            true => self.shared.access.bar(peer),
            false => self.shared.access.reach(peer),
        }
    }

    /// This life of a peer, if it was not given the pool so far, never will be. Says how far it comes from now on.
    pub fn bar(&self, peer: WorkerRef) -> Reach {
        self.shared.access.bar(peer)
    }

    /// The link to a peer, dialled now if there is none. What is sent waits until it stands; if it
    /// cannot be made, `LinkEvent::Lost` follows.
    ///
    /// # Errors
    /// `NoRoute` if nobody said where the peer is, or it was forgotten.
    pub fn link(&self, peer: WorkerRef) -> Result<Arc<Link>, LinkDown> {
        let mut table = self.shared.lock();
        let Some(route) = table.routes.get(&peer).cloned() else {
            return Err(LinkDown::NoRoute(peer));
        };
        if let Some(link) = table.outgoing.get(&peer)
            && !link.is_broken()
        {
            return Ok(Arc::clone(link));
        }
        let (link, carrier) = Link::new(peer, self.shared.config.passes.clone());
        table.outgoing.insert(peer, Arc::clone(&link));
        drop(table);
        let shared = Arc::downgrade(&self.shared);
        // The task holds no `Links`, so that dropping them closes the queue and ends it.
        let config = self.shared.config.clone();
        let (end, net) = (self.shared.end(), self.shared.net.clone());
        let setbacks = Arc::clone(&self.shared.setbacks);
        tokio::spawn(async move {
            let errand = Errand {
                config: &config,
                peer,
                events: &end.events,
                setbacks: &setbacks,
            };
            let error = match &route {
                Route::Local => local::carry(&net, &end, peer, carrier).await,
                Route::Remote(addresses) => errand.carry(addresses, carrier).await,
            };
            let forgotten = match shared.upgrade() {
                Some(shared) => shared.lock().end_outgoing(peer) == Known::No,
                None => true,
            };
            match forgotten {
                // What was noted of it after it was forgotten goes, too.
                true => setbacks.forget(peer),
                false => report(&end.events, peer, &error, "outgoing").await,
            }
        });
        Ok(link)
    }

    /// Accepts links for as long as it is polled. Dropping it ends them.
    pub async fn serve(self, listeners: Listeners) {
        let Listeners { tcp, host } = listeners;
        let strangers = Arc::new(Semaphore::new(STRANGERS_MAX));
        let mut visits = JoinSet::new();
        loop {
            while visits.try_join_next().is_some() {}
            let permit = Arc::clone(&strangers).acquire_owned().await;
            let permit = permit.expect("the semaphore is never closed");
            let shared = Arc::clone(&self.shared);
            let accepted = tokio::select! {
                accepted = accept_tcp(tcp.as_ref()) => accepted.map(|stream| {
                    visits.spawn(shared.visit_tcp(stream, permit));
                }),
                accepted = accept_host(host.as_ref()) => accepted.map(|stream| {
                    visits.spawn(shared.visit_host(stream, permit));
                }),
            };
            // Out of descriptors, or the peer left already: neither is a reason to stop.
            if let Err(error) = accepted {
                warn!(%error, "cannot accept a data link");
                tokio::time::sleep(self.shared.config.beat).await;
            }
        }
    }
}

async fn accept_tcp(listener: Option<&TcpListener>) -> io::Result<TcpStream> {
    match listener {
        Some(listener) => Ok(listener.accept().await?.0),
        None => std::future::pending().await,
    }
}

async fn accept_host(listener: Option<&HostListener>) -> io::Result<HostStream> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

impl Shared {
    fn end(&self) -> End {
        End {
            me: self.config.me,
            fingerprint: self.config.fingerprint.clone(),
            window: self.config.window(),
            frame_bytes: self.config.frame_bytes(),
            access: Arc::clone(&self.access),
            events: self.events.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the routers vouch for this life of a peer.
    fn knows(&self, peer: WorkerRef) -> bool {
        self.lock().routes.contains_key(&peer)
    }

    /// Waits for the routers' word of a peer that was quicker than it.
    async fn gets_to_know(&self, peer: WorkerRef) -> bool {
        let known = async {
            loop {
                let learned = self.learned.notified();
                if self.knows(peer) {
                    return;
                }
                learned.await;
            }
        };
        let within = self.config.acquaintance_timeout();
        timeout(within, known).await.is_ok()
    }

    async fn visit_tcp(self: Arc<Self>, stream: TcpStream, stranger: OwnedSemaphorePermit) {
        let door = Door {
            config: &self.config,
            // Whoever has shown a certificate of the fleet may know what the fleet is.
            is_known: &|peer| self.config.peers.is_some() || self.knows(peer),
        };
        let knock = incoming::greet(door, stream).await;
        let turned_away = match knock {
            Ok(Knock::Link(visitor)) if !self.config.transports.contains(&Transport::Tcp) => {
                visitor
                    .turn_away("this worker takes no links over TCP")
                    .await
            }
            Ok(Knock::Link(visitor)) => {
                drop(stranger);
                let config = self.config.clone();
                let events = self.events.clone();
                let peer = visitor.peer;
                let receive =
                    async move |seat| incoming::receive(visitor, seat, &config, &events).await;
                return self.host(peer, receive).await;
            }
            Ok(Knock::Approach(visitor)) => return self.visit_ring(visitor, stranger).await,
            Ok(Knock::Join { from, key, stream }) => {
                drop(stranger);
                self.join(from, key, stream).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = turned_away {
            warn!(%error, "data link turned away");
        }
    }

    /// Makes a ring for somebody who asks for one, if the routers vouch for it: a ring is memory that stays.
    async fn visit_ring(
        self: Arc<Self>,
        mut visitor: Visitor<TcpReader, TcpWriter>,
        stranger: OwnedSemaphorePermit,
    ) {
        let peer = visitor.peer;
        let nixl = match self.config.nixl() {
            None => Err("this worker takes no links over NIXL"),
            Some(_) if !self.gets_to_know(peer).await => {
                Err("no router has named this peer to the worker")
            }
            Some(nixl) => Ok(Arc::clone(nixl)),
        };
        drop(stranger);
        let nixl = match nixl {
            Ok(nixl) => nixl,
            Err(reason) => {
                let refusal = Message::NoLanding(reason.to_owned());
                let told = write(&mut visitor.stream.writer, &refusal, &[]).await;
                return warn!(%peer, reason, ?told, "no ring for it");
            }
        };
        let own = Arc::clone(&self);
        let receive = async move |seat| {
            let means = nixl::Means {
                config: &own.config,
                nixl: &nixl,
                rings: &own.rings,
            };
            nixl::receive(visitor, seat, means, &own.events).await
        };
        self.host(peer, receive).await;
    }

    async fn visit_host(self: Arc<Self>, stream: HostStream, stranger: OwnedSemaphorePermit) {
        let visitor = host::greet(&self.config, stream).await;
        drop(stranger);
        match visitor {
            Ok(visitor) => {
                let peer = visitor.peer;
                let own = Arc::clone(&self);
                let receive = async move |seat| {
                    let gate = Gate {
                        events: &own.events,
                        give: &|peer, process| own.give(peer, process),
                    };
                    host::receive(visitor, seat, (&own.config, gate)).await
                };
                self.host(peer, receive).await;
            }
            Err(error) => warn!(%error, "data link turned away"),
        }
    }

    /// Gives the pool to a peer of this host, which keeps it until its process has ended.
    fn give(self: &Arc<Self>, peer: WorkerRef, process: PeerProcess) -> Result<Vec<u8>, String> {
        let handle = self.access.give(peer)?;
        if self.lock().watched.insert(peer) {
            let shared = Arc::downgrade(self);
            tokio::spawn(async move {
                process.ended().await;
                if let Some(shared) = shared.upgrade() {
                    shared.sever(peer).await;
                }
            });
        }
        Ok(handle)
    }

    /// The process of a peer that could write here has ended.
    async fn sever(&self, peer: WorkerRef) {
        // Whoever receives from it leaves its place once everything is said of the link.
        let place = self.lock().seats.get(&peer).cloned();
        if let Some(place) = place {
            drop(place.lock().await);
            self.lock().leave(peer, place);
        }
        self.lock().watched.remove(&peer);
        if self.access.sever(peer) {
            info!(%peer, "its process has ended: it writes here no more");
            // Nobody listens any more when the worker itself is closing.
            let _ = self.events.send(LinkEvent::Severed { peer }).await;
        }
    }

    /// Gives a further stream to the link that it is for.
    async fn join(&self, from: WorkerRef, key: u64, stream: TcpEnd) -> Result<(), SocketError> {
        let mut stream = stream;
        let joining = self.lock().joining(from, key);
        let Some(joining) = joining else {
            let reason = SocketError::NoSuchLink.to_string();
            write(&mut stream.writer, &Message::Reject(reason), &[]).await?;
            return Err(SocketError::NoSuchLink);
        };
        write(&mut stream.writer, &Message::Joined, &[]).await?;
        let joined = joining.send(stream).await;
        joined.map_err(|_| SocketError::NoSuchLink)
    }

    /// Receives from a peer until its link ends, in the place of an earlier link of it.
    async fn host(
        self: Arc<Self>,
        peer: WorkerRef,
        receive: impl AsyncFnOnce(Seat) -> SocketError,
    ) {
        let visit = self.lock().come(peer);
        // The earlier host leaves its place only after it has told the loss: so the loss is heard
        // before anything that arrives on this link.
        let seated = visit.place.lock().await;
        let seat = self.lock().sit(peer, visit.number);
        if let Some(seat) = seat {
            let key = seat.key;
            let error = receive(seat).await;
            self.lock().end_incoming(peer, key);
            report(&self.events, peer, &error, "incoming").await;
        }
        drop(seated);
        self.lock().leave(peer, visit.place);
    }
}

/// A host's turn to receive.
struct Visit {
    number: u64,
    place: Place,
}

impl Table {
    /// A peer wants a new link: the one that it has is to end.
    fn come(&mut self, peer: WorkerRef) -> Visit {
        if let Some(earlier) = self.incoming.get(&peer) {
            earlier.replaced.notify_one();
        }
        self.visits_count += 1;
        self.newest.insert(peer, self.visits_count);
        Visit {
            number: self.visits_count,
            place: Arc::clone(self.seats.entry(peer).or_default()),
        }
    }

    /// The new link of the peer is received from now on, unless a newer one waits already.
    fn sit(&mut self, peer: WorkerRef, number: u64) -> Option<Seat> {
        if self.newest.get(&peer) != Some(&number) {
            return None;
        }
        let key = number;
        let (joining, joined) = mpsc::channel(incoming::STREAMS_MAX);
        let replaced = Arc::new(Notify::new());
        let link = Incoming {
            key,
            joining,
            replaced: Arc::clone(&replaced),
        };
        self.incoming.insert(peer, link);
        Some(Seat {
            key,
            joining: joined,
            replaced,
        })
    }

    /// Where further streams of this link go.
    fn joining(&self, from: WorkerRef, key: u64) -> Option<mpsc::Sender<TcpEnd>> {
        let link = self.incoming.get(&from).filter(|link| link.key == key);
        link.map(|link| link.joining.clone())
    }

    fn end_incoming(&mut self, peer: WorkerRef, key: u64) {
        if let Some(current) = self.incoming.get(&peer)
            && current.key == key
        {
            self.incoming.remove(&peer);
        }
    }

    /// Takes the seat away unless somebody waits for it. Seats are handed out under this table's
    /// lock only, so nobody can come to wait meanwhile.
    fn leave(&mut self, peer: WorkerRef, place: Place) {
        drop(place);
        if let Some(place) = self.seats.get(&peer)
            && Arc::strong_count(place) == 1
        {
            self.seats.remove(&peer);
            self.newest.remove(&peer);
        }
    }

    /// The link that ended is kept no longer; a new one may stand in its place.
    fn end_outgoing(&mut self, peer: WorkerRef) -> Known {
        if self
            .outgoing
            .get(&peer)
            .is_some_and(|link| link.is_broken())
        {
            self.outgoing.remove(&peer);
        }
        match self.routes.contains_key(&peer) {
            true => Known::Yes,
            false => Known::No,
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.net.leave(self.config.me);
    }
}

async fn report(
    events: &mpsc::Sender<LinkEvent>,
    peer: WorkerRef,
    error: &SocketError,
    direction: &str,
) {
    info!(%peer, %error, direction, "link ended");
    let reason = error.to_string();
    // Nobody listens any more when the worker itself is closing.
    let _ = events.send(LinkEvent::Lost { peer, reason }).await;
}
