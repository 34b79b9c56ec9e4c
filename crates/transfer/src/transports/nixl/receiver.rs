//! The receiving end of RDMA: a ring that the network card of one sender writes into.
//!
//! Owns: the agent of the receiver, its thread, the ring, and the list of written slots. Never:
//! reads a byte of a slot.
//! Invariant: a slot counts as written only once the note behind its bytes has arrived; the ring
//! stays mapped until the agent has ended, and for as long as a view of it exists.

use super::agent_creation::{CreationReport, create_agent};
use super::library::{NixlAgent, NixlAgentParts, NixlCallError};
use super::note;
use super::poll_pace::PollPace;
use super::process_exit::{DropInsideLibrary, inside_library};
use super::{Nixl, RingOffer};
use crate::transports::shm::{ReceiverRing, RingShape};
use std::sync::Arc;
use std::sync::mpsc::{self as threads, RecvTimeoutError, TryRecvError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};

/// The receiving end of RDMA. After it is dropped, late writes are refused.
#[derive(Debug)]
pub(crate) struct RdmaReceiver {
    requests: threads::Sender<AwaitedSlot>,
    /// The reason for which the agent failed; closed when its thread has ended.
    failure: watch::Receiver<Option<String>>,
}

/// A request to wait for the write of a slot.
#[derive(Debug)]
pub(crate) struct AwaitedSlot {
    pub(crate) slot: u32,
    pub(crate) written: oneshot::Sender<Result<(), String>>,
}

/// The reason for which no further write is received.
#[derive(Debug, thiserror::Error)]
enum RdmaReceiverError {
    #[error("{0}")]
    Call(#[from] NixlCallError),
    #[error("a note behind a written slot was damaged on the way: it names no slot of this link")]
    Damaged,
}

/// The parameters of a receiving end.
pub(super) struct RdmaReceiverParts {
    /// The name of the agent.
    pub(super) name: String,
    pub(super) shape: RingShape,
    pub(super) beat: Duration,
    /// A permit for the memory of one ring; released when agent and ring are gone.
    pub(super) permit: OwnedSemaphorePermit,
}

impl RdmaReceiver {
    /// Creates a ring, and an agent through which a sender may write to it.
    ///
    /// # Errors
    /// The reason for which that failed or took too long.
    pub(super) async fn open(
        nixl: &Arc<Nixl>,
        parts: RdmaReceiverParts,
        within: Duration,
    ) -> Result<(Self, ReceiverRing, RingOffer), String> {
        let (requests, awaited) = threads::channel();
        let (failed, failure) = watch::channel(None);
        let own = Arc::clone(nixl);
        let work = move |ready: CreationReport<_>| {
            let RdmaReceiverParts {
                name,
                shape,
                beat,
                permit,
            } = parts;
            let (mirror, agent, offer) = match inside_library(|| open(&own, &name, shape)) {
                Ok(opened) => opened,
                Err(reason) => {
                    ready.report(Err(reason));
                    return;
                }
            };
            let mut thread = DropInsideLibrary::new(RdmaReceiverThread {
                agent,
                _mirror: mirror.clone(),
                is_written: vec![false; shape.slots_count as usize],
                beat,
            });
            // The receiver of the result is gone if the link was given up meanwhile.
            if ready.report(Ok((mirror, offer)))
                && let Err(error) = thread.run(&awaited)
            {
                failed.send_replace(Some(error.to_string()));
            }
            // The agent is dropped before the ring, and both before the permit, so that another
            // ring may take the memory only after that.
            drop(thread);
            drop(permit);
        };
        let (mirror, offer) = create_agent(nixl, "nixl-in", within, work).await?;
        Ok((Self::from_channels(requests, failure), mirror, offer))
    }

    /// Requests are sent to `requests`.
    pub(crate) fn from_channels(
        requests: threads::Sender<AwaitedSlot>,
        failure: watch::Receiver<Option<String>>,
    ) -> Self {
        Self { requests, failure }
    }

    /// Returns when the announced bytes are in this slot. One slot is awaited at a time.
    ///
    /// # Errors
    /// The reason for which the write never completes.
    pub(crate) async fn wait_until_written(&self, slot: u32) -> Result<(), String> {
        let (written, answer) = oneshot::channel();
        if self.requests.send(AwaitedSlot { slot, written }).is_ok()
            && let Ok(answer) = answer.await
        {
            return answer;
        }
        Err(self.wait_until_failed().await)
    }

    /// Returns when the agent has failed, with the reason: nothing more will be written.
    pub(crate) async fn wait_until_failed(&self) -> String {
        let mut failure = self.failure.clone();
        let reason = failure.wait_for(Option::is_some).await;
        // The channel is closed without a reason if the link was given up, or the thread panicked.
        let reason = reason.ok().and_then(|reason| reason.clone());
        reason.unwrap_or_else(|| "the agent's thread has ended".to_owned())
    }
}

/// Creates and drops an agent, to test whether that works.
pub(super) fn probe(nixl: &Arc<Nixl>, within: Duration) -> Result<(), String> {
    let (result_sender, tried) = threads::channel();
    let own = Arc::clone(nixl);
    let work = move || {
        let shape = RingShape {
            slot_bytes: 1,
            slots_count: 1,
        };
        let opened = inside_library(|| {
            let (mirror, agent, _) = open(&own, "cleave-try", shape)?;
            drop(agent);
            drop(mirror);
            Ok(())
        });
        // The receiver of the result is gone if this took too long.
        let _ = result_sender.send(opened);
    };
    let thread = std::thread::Builder::new().name("nixl-try".into());
    thread.spawn(work).map_err(|error| error.to_string())?;
    match tried.recv_timeout(within) {
        Ok(tried) => tried,
        Err(RecvTimeoutError::Timeout) => Err(format!("no agent within {within:?}")),
        Err(RecvTimeoutError::Disconnected) => Err("the agent's thread ended".to_owned()),
    }
}

fn open(
    nixl: &Nixl,
    name: &str,
    shape: RingShape,
) -> Result<(ReceiverRing, NixlAgent, RingOffer), String> {
    let mirror = ReceiverRing::private(shape).map_err(|error| error.to_string())?;
    let area = mirror.area();
    let parts = NixlAgentParts {
        name,
        parameters: &nixl.backend.parameters,
        area,
    };
    let opened = NixlAgent::new(&nixl.library, &parts).and_then(|agent| {
        let metadata = agent.metadata()?;
        Ok((agent, metadata))
    });
    let (agent, metadata) = opened.map_err(|error| error.to_string())?;
    let start = area.start as u64;
    Ok((mirror, agent, RingOffer { start, metadata }))
}

/// The state of the thread.
struct RdmaReceiverThread {
    // Dropped before the memory that it writes to.
    agent: NixlAgent,
    _mirror: ReceiverRing,
    /// For each slot: its note has arrived, and was not requested yet.
    is_written: Vec<bool>,
    beat: Duration,
}

impl RdmaReceiverThread {
    /// Answers requests until no requester is left, or the agent fails.
    fn run(&mut self, requests: &threads::Receiver<AwaitedSlot>) -> Result<(), RdmaReceiverError> {
        let mut pace = PollPace::new(self.beat);
        let mut waiting: Option<AwaitedSlot> = None;
        loop {
            let next = match &waiting {
                None => requests.recv_timeout(pace.idle_pause()),
                Some(_) => requests.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                }),
            };
            match next {
                Ok(awaited) => {
                    pace.reset();
                    waiting = Some(awaited);
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            inside_library(|| self.read_notes())?;
            waiting = waiting.and_then(|awaited| self.answer(awaited));
            if waiting.is_some() {
                pace.pause_while_awaited();
            }
        }
    }

    /// Reads the notes of written slots. A damaged note names no slot, so it ends the link.
    fn read_notes(&mut self) -> Result<(), RdmaReceiverError> {
        let Self {
            agent, is_written, ..
        } = self;
        let mut damaged = false;
        agent.read_notes(|note| {
            let named = note::read(note).and_then(|slot| is_written.get_mut(slot as usize));
            match named {
                Some(is_written) => *is_written = true,
                None => damaged = true,
            }
        })?;
        if damaged {
            Err(RdmaReceiverError::Damaged)
        } else {
            Ok(())
        }
    }

    /// Answers a request if its slot was written; returns the request if it must wait.
    fn answer(&mut self, awaited: AwaitedSlot) -> Option<AwaitedSlot> {
        let AwaitedSlot { slot, written } = awaited;
        match self.is_written.get_mut(slot as usize) {
            Some(is_written) if *is_written => {
                *is_written = false;
                // The requester may have given up the link.
                let _ = written.send(Ok(()));
                None
            }
            _ if written.is_closed() => None,
            _ => Some(AwaitedSlot { slot, written }),
        }
    }
}
