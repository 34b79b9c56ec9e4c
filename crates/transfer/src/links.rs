//! All links of one worker: where peers are, the outgoing links made on demand, the incoming ones
//! accepted.
//!
//! Each life of a peer is a peer of its own: which lives there are the routers know, and nothing
//! here compares them. Invariant: at most one outgoing and one incoming link per life; a link that
//! ends is reported lost, once, and the next use of it dials anew; nothing is kept of a life that
//! was forgotten.

use crate::config::{LinkDown, LinkEvent, LinksConfig, Route};
use crate::link::Link;
use crate::local::{End, LocalNet};
use crate::socket::SocketError;
use crate::{incoming, local, outgoing};
use cleave_domain::WorkerRef;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, Id, JoinSet};
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
    events: mpsc::Sender<LinkEvent>,
    net: LocalNet,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    routes: BTreeMap<WorkerRef, Route>,
    outgoing: BTreeMap<WorkerRef, Arc<Link>>,
    incoming: BTreeMap<WorkerRef, AbortHandle>,
    /// One host at a time receives from a life.
    seats: BTreeMap<WorkerRef, Place>,
}

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
            config,
            events,
            net,
            table: Mutex::default(),
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
        let (link, carrier) = Link::new(peer);
        table.outgoing.insert(peer, Arc::clone(&link));
        drop(table);
        let shared = Arc::downgrade(&self.shared);
        // The task holds no `Links`, so that dropping them closes the queue and ends it.
        let config = self.shared.config.clone();
        let (end, net) = (self.shared.end(), self.shared.net.clone());
        tokio::spawn(async move {
            let error = match &route {
                Route::Local => local::carry(&net, &end, peer, carrier).await,
                Route::Tcp(address) => {
                    outgoing::carry(&config, peer, address, carrier, &end.events).await
                }
            };
            let forgotten = match shared.upgrade() {
                Some(shared) => shared.lock().end_outgoing(peer) == Known::No,
                None => true,
            };
            if !forgotten {
                report(&end.events, peer, &error, "outgoing").await;
            }
        });
        Ok(link)
    }

    /// Accepts links on `listener` for as long as it is polled. Dropping it ends them.
    pub async fn serve(self, listener: TcpListener) {
        let strangers = Arc::new(Semaphore::new(STRANGERS_MAX));
        let mut visits = JoinSet::new();
        loop {
            while visits.try_join_next().is_some() {}
            let strangers = Arc::clone(&strangers);
            let permit = strangers.acquire_owned().await;
            let permit = permit.expect("the semaphore is never closed");
            match listener.accept().await {
                Ok((stream, address)) => {
                    let shared = Arc::clone(&self.shared);
                    visits.spawn(async move {
                        let visitor = incoming::greet(&shared.config, stream).await;
                        drop(permit);
                        match visitor {
                            Ok(visitor) => shared.host(visitor).await,
                            Err(error) => warn!(%address, %error, "data link turned away"),
                        }
                    });
                }
                // Out of descriptors, or the peer left already: neither is a reason to stop.
                Err(error) => {
                    warn!(%error, "cannot accept a data link");
                    tokio::time::sleep(self.shared.config.beat).await;
                }
            }
        }
    }
}

impl Shared {
    fn end(&self) -> End {
        End {
            me: self.config.me,
            fingerprint: self.config.fingerprint.clone(),
            window: self.config.window(),
            events: self.events.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives from a peer until its link ends, in the place of an earlier link of it.
    async fn host(self: Arc<Self>, visitor: incoming::Visitor) {
        let peer = visitor.peer;
        let (earlier, seat) = self.lock().incoming_of(peer);
        if let Some(task) = earlier {
            task.abort();
        }
        // The earlier host leaves its seat only after it has told the loss: so the loss is heard
        // before anything that arrives on this link.
        let seated = seat.lock().await;
        let (config, events) = (self.config.clone(), self.events.clone());
        let task = tokio::spawn(async move { visitor.receive(&config, &events).await });
        let abort = task.abort_handle();
        let task_id = abort.id();
        let _end_with_host = AbortOnDrop(abort.clone());
        self.lock().incoming.insert(peer, abort);
        let error = task.await.unwrap_or(SocketError::Replaced);
        self.lock().end_incoming(peer, task_id);
        report(&self.events, peer, &error, "incoming").await;
        drop(seated);
        self.lock().leave(peer, seat);
    }
}

impl Table {
    /// The link that a peer has now, and the seat that its host holds.
    fn incoming_of(&mut self, peer: WorkerRef) -> (Option<AbortHandle>, Place) {
        let seat = Arc::clone(self.seats.entry(peer).or_default());
        (self.incoming.get(&peer).cloned(), seat)
    }

    fn end_incoming(&mut self, peer: WorkerRef, task: Id) {
        if let Some(current) = self.incoming.get(&peer)
            && current.id() == task
        {
            self.incoming.remove(&peer);
        }
    }

    /// Takes the seat away unless somebody waits for it. Seats are handed out under this table's
    /// lock only, so nobody can come to wait meanwhile.
    fn leave(&mut self, peer: WorkerRef, seat: Place) {
        drop(seat);
        if let Some(seat) = self.seats.get(&peer)
            && Arc::strong_count(seat) == 1
        {
            self.seats.remove(&peer);
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

struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
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
