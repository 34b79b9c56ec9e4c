//! All links of one worker: where peers are, the outgoing links made on demand, the incoming ones
//! accepted.
//!
//! Invariant: at most one outgoing and one incoming link per peer; a link that ends is reported
//! lost, once, and the next use of it dials anew.

use crate::config::{LinkDown, LinkEvent, LinksConfig, Route};
use crate::link::Link;
use crate::local::{End, LocalNet};
use crate::socket::SocketError;
use crate::{incoming, local, outgoing};
use cleave_domain::{WorkerId, WorkerRef};
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

type Incoming = Option<(WorkerRef, AbortHandle)>;

#[derive(Debug, Default)]
struct Table {
    routes: BTreeMap<WorkerId, (WorkerRef, Route)>,
    outgoing: BTreeMap<WorkerId, Arc<Link>>,
    incoming: BTreeMap<WorkerId, (WorkerRef, AbortHandle)>,
    seats: BTreeMap<WorkerId, Arc<tokio::sync::Mutex<()>>>,
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
    /// first block. A later life of a peer replaces the earlier one; news of an earlier life is
    /// ignored.
    pub fn know(&self, peer: WorkerRef, route: Route) {
        let mut table = self.shared.lock();
        if let Some((known, _)) = table.routes.get(&peer.worker)
            && known.incarnation > peer.incarnation
        {
            return;
        }
        table.routes.insert(peer.worker, (peer, route));
        drop(table);
        if let Err(down) = self.link(peer) {
            debug!(%peer, %down, "not dialled");
        }
    }

    /// The link to a peer, dialled now if there is none. What is sent waits until it stands; if it
    /// cannot be made, `LinkEvent::Lost` follows.
    ///
    /// # Errors
    /// `NoRoute` if nobody said where the peer is, `Outlived` if it has started anew since.
    pub fn link(&self, peer: WorkerRef) -> Result<Arc<Link>, LinkDown> {
        let mut table = self.shared.lock();
        let Some((known, route)) = table.routes.get(&peer.worker).cloned() else {
            return Err(LinkDown::NoRoute(peer));
        };
        if known != peer {
            let wanted = peer;
            return Err(LinkDown::Outlived { wanted, known });
        }
        if let Some(link) = table.outgoing.get(&peer.worker)
            && link.peer() == peer
            && !link.is_broken()
        {
            return Ok(Arc::clone(link));
        }
        let (link, carrier) = Link::new(peer);
        table.outgoing.insert(peer.worker, Arc::clone(&link));
        drop(table);
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
            report(&end.events, peer, &error, "outgoing").await;
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
        let (earlier, seat) = self.lock().incoming_of(peer.worker);
        if let Some((known, task)) = earlier {
            if known.incarnation > peer.incarnation {
                let reason = format!("worker {peer} has been replaced by {known}");
                let error = visitor.reject(reason).await;
                warn!(%peer, %error, "data link turned away");
                return;
            }
            task.abort();
        }
        // The earlier host leaves its seat only after it has told the loss: so the loss is heard
        // before anything that arrives on this link.
        let _seat = seat.lock().await;
        let (config, events) = (self.config.clone(), self.events.clone());
        let task = tokio::spawn(async move { visitor.receive(&config, &events).await });
        let abort = task.abort_handle();
        let task_id = abort.id();
        let _end_with_host = AbortOnDrop(abort.clone());
        self.lock().incoming.insert(peer.worker, (peer, abort));
        let error = task.await.unwrap_or(SocketError::Replaced);
        self.lock().forget_incoming(peer.worker, task_id);
        report(&self.events, peer, &error, "incoming").await;
    }
}

impl Table {
    /// The link that a peer has now, and the seat that its host holds.
    fn incoming_of(&mut self, peer: WorkerId) -> (Incoming, Arc<tokio::sync::Mutex<()>>) {
        let seat = Arc::clone(self.seats.entry(peer).or_default());
        (self.incoming.get(&peer).cloned(), seat)
    }

    fn forget_incoming(&mut self, peer: WorkerId, task: Id) {
        if let Some((_, current)) = self.incoming.get(&peer)
            && current.id() == task
        {
            self.incoming.remove(&peer);
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
