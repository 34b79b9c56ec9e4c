//! Links between workers of one process: parcels change hands, bytes are not copied.

use crate::config::LinkEvent;
use crate::credit::Account;
use crate::link::{Carrier, Parcel};
use crate::payload::Payload;
use crate::socket::SocketError;
use cleave_domain::{Fingerprint, WorkerId, WorkerRef};
use cleave_kv::Packet;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc;

/// Who is in this process. Clones are the same net.
#[derive(Clone, Debug, Default)]
pub struct LocalNet {
    ends: Arc<Mutex<BTreeMap<WorkerId, End>>>,
}

/// A worker as its neighbours see it.
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub(crate) me: WorkerRef,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) window: u32,
    pub(crate) events: mpsc::Sender<LinkEvent>,
}

impl LocalNet {
    pub(crate) fn enter(&self, end: End) {
        self.lock().insert(end.me.worker, end);
    }

    pub(crate) fn leave(&self, me: WorkerRef) {
        let mut ends = self.lock();
        if ends.get(&me.worker).is_some_and(|end| end.me == me) {
            ends.remove(&me.worker);
        }
    }

    /// Finds a worker in the life asked for.
    fn find(&self, peer: WorkerRef) -> Option<End> {
        let found = self.lock().get(&peer.worker).cloned();
        found.filter(|end| end.me == peer)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerId, End>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Carries one link within the process. Returns why it ended.
pub(crate) async fn carry(
    net: &LocalNet,
    near: &End,
    peer: WorkerRef,
    carrier: Carrier,
) -> SocketError {
    let Some(far) = net.find(peer) else {
        return SocketError::Refused(format!("worker {peer} is not in this process"));
    };
    if far.fingerprint != near.fingerprint {
        let (ours, theirs) = (&near.fingerprint.0, &far.fingerprint.0);
        return SocketError::Refused(format!(
            "KV does not fit: worker {} has fingerprint \"{ours}\", worker {peer} has \"{theirs}\"",
            near.me
        ));
    }
    let Carrier { credit, mut queue } = carrier;
    let account = Account::new(far.window);
    let granted = LinkEvent::Granted { peer };
    credit.add_permits(far.window as usize);
    if near.events.send(granted).await.is_err() {
        return SocketError::Closing;
    }
    loop {
        tokio::select! {
            bytes = account.returned() => {
                credit.add_permits(usize::try_from(bytes).expect("bounded by a u32 window"));
                if near.events.send(LinkEvent::Granted { peer }).await.is_err() {
                    return SocketError::Closing;
                }
            }
            parcel = queue.recv() => {
                let Some(parcel) = parcel else { return SocketError::Closing };
                let Some(event) = arrival(near.me, &account, parcel) else {
                    return SocketError::Overdrawn;
                };
                if far.events.send(event).await.is_err() {
                    return SocketError::Closed;
                }
            }
            () = far.events.closed() => return SocketError::Closed,
        }
    }
}

/// The bytes are the very ones that were sent: they cannot have changed on the way.
fn arrival(from: WorkerRef, account: &Arc<Account>, parcel: Parcel) -> Option<LinkEvent> {
    let Parcel { packet, payload } = parcel;
    let payload = match packet {
        Packet::Frame { .. } => {
            let hold = account.take(payload.len() as u64)?;
            Some(Payload::new(payload, hold))
        }
        _ => None,
    };
    Some(LinkEvent::Arrived {
        from,
        packet,
        intact: true,
        payload,
    })
}
