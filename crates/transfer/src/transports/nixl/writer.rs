//! The sending end of RDMA: writes slots of this process into the receiver's ring.
//!
//! Owns: the agent of the sender, its thread, and the list of slots that it still reads. Never:
//! fills a slot, or announces one on the socket.
//! Invariant: a slot is not returned before the agent has finished reading it; no write begins
//! after the writer is closed.

use super::agent_creation::{CreationReport, create_agent};
use super::library::{
    NixlAgent, NixlAgentParts, NixlCallError, PendingRdmaWrite, RdmaWriteRequest, RemoteAgent,
};
use super::note;
use super::poll_pace::PollPace;
use super::process_exit::{DropInsideLibrary, inside_library};
use super::{AgentNames, Nixl, RingOffer};
use crate::transports::shm::{RingShape, SenderRing};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{self as threads, RecvTimeoutError, TryRecvError};
use std::time::Duration;
use tokio::sync::Notify;

/// The sending end of RDMA.
#[derive(Debug)]
pub(crate) struct RdmaWriter {
    ring: Arc<SenderRing>,
    /// `None` once the writer is closed.
    orders: Mutex<Option<threads::Sender<SlotWrite>>>,
    state: Arc<RdmaWriterState>,
}

/// A slot to write, from its start.
#[derive(Clone, Copy, Debug)]
struct SlotWrite {
    number: u32,
    len: usize,
}

#[derive(Debug)]
struct RdmaWriterState {
    slots: Mutex<SlotsInFlight>,
    settled: Notify,
    failed: Notify,
}

#[derive(Debug)]
struct SlotsInFlight {
    /// The slots that the agent still reads.
    is_in_flight: Vec<bool>,
    failure: Option<String>,
}

impl RdmaWriterState {
    fn lock(&self) -> MutexGuard<'_, SlotsInFlight> {
        self.slots.lock()
    }
}

/// The parameters of a writer.
pub(super) struct RdmaWriterParts {
    /// The names of both agents.
    pub(super) names: AgentNames,
    pub(super) shape: RingShape,
    pub(super) beat: Duration,
    /// The ring to write into.
    pub(super) offer: RingOffer,
}

impl RdmaWriter {
    /// Creates a ring of the same shape as the receiver's, and an agent that writes from it into
    /// the offered ring.
    ///
    /// # Errors
    /// The reason for which that failed or took too long.
    pub(super) async fn open(
        nixl: &Arc<Nixl>,
        parts: RdmaWriterParts,
        within: Duration,
    ) -> Result<Self, String> {
        let (orders, queued_writes) = threads::channel();
        let state = Arc::new(RdmaWriterState {
            slots: Mutex::new(SlotsInFlight {
                is_in_flight: vec![false; parts.shape.slots_count as usize],
                failure: None,
            }),
            settled: Notify::new(),
            failed: Notify::new(),
        });
        let (own, thread_state) = (Arc::clone(nixl), Arc::clone(&state));
        let work = move |ready: CreationReport<_>| {
            let thread = match inside_library(|| RdmaWriterThread::open(&own, parts)) {
                Ok(thread) => DropInsideLibrary::new(thread),
                Err(reason) => {
                    ready.report(Err(reason));
                    return;
                }
            };
            // The receiver of the result is gone if the link was given up meanwhile.
            if ready.report(Ok(Arc::clone(&thread.ring))) {
                thread.run(&queued_writes, &thread_state);
            }
        };
        let ring = create_agent(nixl, "nixl-out", within, work).await?;
        Ok(Self {
            ring,
            orders: Mutex::new(Some(orders)),
            state,
        })
    }

    /// The slots of this process; slot numbers are equal at the receiver.
    pub(crate) fn ring(&self) -> &Arc<SenderRing> {
        &self.ring
    }

    /// Begins the write of a lent slot. A failure is reported by [`RdmaWriter::wait_until_failed`].
    pub(crate) fn write(&self, number: u32, len: usize) {
        let orders = self.orders.lock();
        if let Some(orders) = &*orders {
            self.state.lock().is_in_flight[number as usize] = true;
            // A thread that has ended has reported its failure.
            let _ = orders.send(SlotWrite { number, len });
        }
    }

    /// Returns when none of these slots is read any more.
    pub(crate) async fn wait_until_unread(&self, slots: &[u32]) {
        let is_read =
            |state: &SlotsInFlight, slot: u32| state.is_in_flight.get(slot as usize) == Some(&true);
        let is_any = |state: &SlotsInFlight| slots.iter().any(|slot| is_read(state, *slot));
        self.wait_until(|state| !is_any(state)).await;
    }

    /// Returns when no write is in progress.
    pub(crate) async fn wait_until_idle(&self) {
        self.wait_until(|state| !state.is_in_flight.contains(&true))
            .await;
    }

    async fn wait_until(&self, condition: impl Fn(&SlotsInFlight) -> bool) {
        loop {
            let settled = self.state.settled.notified();
            if condition(&self.state.lock()) {
                return;
            }
            settled.await;
        }
    }

    /// Returns when a write failed, with the reason.
    pub(crate) async fn wait_until_failed(&self) -> String {
        loop {
            let failed = self.state.failed.notified();
            if let Some(failure) = &self.state.lock().failure {
                return failure.clone();
            }
            failed.await;
        }
    }

    /// Closes the writer at the end of the link: no write begins any more, and agent and ring are
    /// dropped.
    pub(crate) fn close(&self) {
        let mut orders = self.orders.lock();
        *orders = None;
    }
}

/// Notifies waiters of the end of the thread, also during a panic.
struct ReportEndOnDrop<'a>(&'a RdmaWriterState);

impl Drop for ReportEndOnDrop<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lock().failure = Some("the agent's thread panicked".to_owned());
        }
        self.0.failed.notify_waiters();
    }
}

/// The state of the thread.
struct RdmaWriterThread {
    // Dropped before the ring that it reads.
    agent: NixlAgent,
    remote: RemoteAgent,
    ring: Arc<SenderRing>,
    start: u64,
    beat: Duration,
}

impl RdmaWriterThread {
    fn open(nixl: &Nixl, parts: RdmaWriterParts) -> Result<Self, String> {
        let RdmaWriterParts {
            names: AgentNames { sender, receiver },
            shape,
            beat,
            offer,
        } = parts;
        let sound = offer.check(&receiver, shape);
        sound.map_err(|error| error.to_string())?;
        let ring = SenderRing::private(shape).map_err(|error| error.to_string())?;
        let parts = NixlAgentParts {
            name: &sender,
            parameters: &nixl.backend.parameters,
            area: ring.area(),
        };
        let agent = NixlAgent::new(&nixl.library, &parts).map_err(|error| error.to_string())?;
        let remote = agent.load_remote(&offer.metadata);
        let remote = remote.map_err(|error| error.to_string())?;
        Ok(Self {
            agent,
            remote,
            ring,
            start: offer.start,
            beat,
        })
    }

    /// Writes slots until the writer is closed, or a write fails.
    fn run(&self, queued_writes: &threads::Receiver<SlotWrite>, state: &RdmaWriterState) {
        let _ending = ReportEndOnDrop(state);
        let mut pending_writes = VecDeque::new();
        let ended = self.serve_writes(queued_writes, state, &mut pending_writes);
        inside_library(|| {
            for (_, write) in &mut pending_writes {
                self.agent.release(write);
            }
        });
        if let Err(error) = ended {
            state.lock().failure = Some(error.to_string());
        }
    }

    fn serve_writes(
        &self,
        queued_writes: &threads::Receiver<SlotWrite>,
        state: &RdmaWriterState,
        pending_writes: &mut VecDeque<(u32, PendingRdmaWrite)>,
    ) -> Result<(), NixlCallError> {
        let mut pace = PollPace::new(self.beat);
        loop {
            let next = if pending_writes.is_empty() {
                queued_writes.recv_timeout(pace.idle_pause())
            } else {
                queued_writes.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                })
            };
            match next {
                Ok(slot) => {
                    pace.reset();
                    let write = inside_library(|| self.begin_write(slot))?;
                    pending_writes.push_back((slot.number, write));
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            match pending_writes.front_mut() {
                // Drives the library, so that events of the devices are handled.
                None => inside_library(|| self.agent.read_notes(|_| {}))?,
                Some((slot, write)) => {
                    if inside_library(|| self.agent.poll_done(write))? {
                        pace.reset();
                        inside_library(|| self.agent.release(write));
                        state.lock().is_in_flight[*slot as usize] = false;
                        pending_writes.pop_front();
                        state.settled.notify_waiters();
                    } else {
                        pace.pause_while_awaited()
                    }
                }
            }
        }
    }

    fn begin_write(&self, slot: SlotWrite) -> Result<PendingRdmaWrite, NixlCallError> {
        let start = self.ring.shape().start(slot.number);
        let order = RdmaWriteRequest {
            from: start,
            to: self.start.wrapping_add(start as u64),
            len: slot.len,
            note: note::write(slot.number),
        };
        self.agent.write(&self.remote, &order)
    }
}
