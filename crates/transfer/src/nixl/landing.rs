//! The receiving end: a ring that one sender's card writes into.
//!
//! Owns: the receiver's agent, its thread, the ring, and which slots were written. Never: takes a byte out of a slot.
//! Invariant: a slot counts as written only once the note behind its bytes is there; the ring is mapped until the
//! agent has ended, and for as long as anybody reads it.

use super::leave::{Gated, inside};
use super::library::{Agent, AgentParts, CallError};
use super::making::{Ready, make};
use super::note;
use super::pace::Pace;
use super::{Nixl, Offer};
use crate::shared_memory::{Mirror, Shape};
use std::sync::Arc;
use std::sync::mpsc::{self as threads, RecvTimeoutError, TryRecvError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};

/// See the module. Dropped, it refuses what is still on its way.
#[derive(Debug)]
pub(crate) struct Landing {
    asked: threads::Sender<Awaited>,
    /// Why the agent failed; closed when its thread has ended.
    failure: watch::Receiver<Option<String>>,
}

/// Somebody waits for a slot.
#[derive(Debug)]
pub(crate) struct Awaited {
    pub(crate) slot: u32,
    pub(crate) written: oneshot::Sender<Result<(), String>>,
}

/// Why nothing more lands.
#[derive(Debug, thiserror::Error)]
enum LandingError {
    #[error("{0}")]
    Call(#[from] CallError),
    #[error("a note behind a written slot was damaged on the way: it names no slot of this link")]
    Damaged,
}

/// What a ring is made of.
pub(super) struct LandingParts {
    /// The agent's.
    pub(super) name: String,
    pub(super) shape: Shape,
    pub(super) beat: Duration,
    /// One of those that this worker has memory for; given back when agent and ring have gone.
    pub(super) permit: OwnedSemaphorePermit,
}

impl Landing {
    /// Makes a ring, and an agent through which a sender may write to it.
    ///
    /// # Errors
    /// Why that cannot be done, or not in time.
    pub(super) async fn open(
        nixl: &Arc<Nixl>,
        parts: LandingParts,
        within: Duration,
    ) -> Result<(Self, Mirror, Offer), String> {
        let (asked, awaited) = threads::channel();
        let (failed, failure) = watch::channel(None);
        let own = Arc::clone(nixl);
        let work = move |ready: Ready<_>| {
            let LandingParts {
                name,
                shape,
                beat,
                permit,
            } = parts;
            let (mirror, agent, offer) = match inside(|| open(&own, &name, shape)) {
                Ok(opened) => opened,
                Err(reason) => {
                    ready.say(Err(reason));
                    return;
                }
            };
            let mut desk = Gated::new(Desk {
                agent,
                _mirror: mirror.clone(),
                is_written: vec![false; shape.slots_count as usize],
                beat,
            });
            // Nobody asks any more if the link was given up meanwhile.
            if ready.say(Ok((mirror, offer)))
                && let Err(error) = desk.run(&awaited)
            {
                failed.send_replace(Some(error.to_string()));
            }
            // The agent, and then the ring, before another may take its memory.
            drop(desk);
            drop(permit);
        };
        let (mirror, offer) = make(nixl, ("nixl-in", within), work).await?;
        Ok((Self::of(asked, failure), mirror, offer))
    }

    /// What is asked goes to `asked`.
    pub(crate) fn of(
        asked: threads::Sender<Awaited>,
        failure: watch::Receiver<Option<String>>,
    ) -> Self {
        Self { asked, failure }
    }

    /// Returns when what was announced for this slot is in it. One slot is waited for at a time.
    ///
    /// # Errors
    /// Why it never will be.
    pub(crate) async fn written(&self, slot: u32) -> Result<(), String> {
        let (written, answer) = oneshot::channel();
        if self.asked.send(Awaited { slot, written }).is_ok()
            && let Ok(answer) = answer.await
        {
            return answer;
        }
        Err(self.failed().await)
    }

    /// Returns when the agent has failed, and says why: nothing more will be written.
    pub(crate) async fn failed(&self) -> String {
        let mut failure = self.failure.clone();
        let reason = failure.wait_for(Option::is_some).await;
        // Closed without a word: nobody was to hear of it, or the thread panicked.
        let reason = reason.ok().and_then(|reason| reason.clone());
        reason.unwrap_or_else(|| "the agent's thread has ended".to_owned())
    }
}

/// Makes an agent and ends it, to see whether that can be done.
pub(super) fn try_out(nixl: &Arc<Nixl>, within: Duration) -> Result<(), String> {
    let (told, tried) = threads::channel();
    let own = Arc::clone(nixl);
    let work = move || {
        let shape = Shape {
            slot_bytes: 1,
            slots_count: 1,
        };
        let opened = inside(|| {
            let (mirror, agent, _) = open(&own, "cleave-try", shape)?;
            drop(agent);
            drop(mirror);
            Ok(())
        });
        // Nobody waits any more if it took too long.
        let _ = told.send(opened);
    };
    let thread = std::thread::Builder::new().name("nixl-try".into());
    thread.spawn(work).map_err(|error| error.to_string())?;
    match tried.recv_timeout(within) {
        Ok(tried) => tried,
        Err(RecvTimeoutError::Timeout) => Err(format!("no agent within {within:?}")),
        Err(RecvTimeoutError::Disconnected) => Err("the agent's thread ended".to_owned()),
    }
}

fn open(nixl: &Nixl, name: &str, shape: Shape) -> Result<(Mirror, Agent, Offer), String> {
    let mirror = Mirror::private(shape).map_err(|error| error.to_string())?;
    let area = mirror.area();
    let parts = AgentParts {
        name,
        parameters: &nixl.backend.parameters,
        area,
    };
    let opened = Agent::new(&nixl.library, &parts).and_then(|agent| {
        let metadata = agent.metadata()?;
        Ok((agent, metadata))
    });
    let (agent, metadata) = opened.map_err(|error| error.to_string())?;
    let start = area.start as u64;
    Ok((mirror, agent, Offer { start, metadata }))
}

/// What the thread has.
struct Desk {
    // Ends before the memory that it is written to.
    agent: Agent,
    _mirror: Mirror,
    /// By slot: its note is there, and nobody has asked yet.
    is_written: Vec<bool>,
    beat: Duration,
}

impl Desk {
    /// Answers until nobody can ask any more, or the agent fails.
    fn run(&mut self, asked: &threads::Receiver<Awaited>) -> Result<(), LandingError> {
        let mut pace = Pace::new(self.beat);
        let mut waiting: Option<Awaited> = None;
        loop {
            let next = match &waiting {
                None => asked.recv_timeout(pace.rest()),
                Some(_) => asked.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                }),
            };
            match next {
                Ok(awaited) => {
                    pace.moved();
                    waiting = Some(awaited);
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            inside(|| self.hear())?;
            waiting = waiting.and_then(|awaited| self.answer(awaited));
            if waiting.is_some() {
                pace.wait();
            }
        }
    }

    /// Takes in which slots were written. Nobody could tell which slot a damaged note was for, so it ends
    /// the link.
    fn hear(&mut self) -> Result<(), LandingError> {
        let Self {
            agent, is_written, ..
        } = self;
        let mut damaged = false;
        agent.notes(|note| {
            let named = note::read(note).and_then(|slot| is_written.get_mut(slot as usize));
            match named {
                Some(is_written) => *is_written = true,
                None => damaged = true,
            }
        })?;
        match damaged {
            true => Err(LandingError::Damaged),
            false => Ok(()),
        }
    }

    /// Gives it back if it must wait on.
    fn answer(&mut self, awaited: Awaited) -> Option<Awaited> {
        let Awaited { slot, written } = awaited;
        match self.is_written.get_mut(slot as usize) {
            Some(is_written) if *is_written => {
                *is_written = false;
                // Whoever asked may have given the link up.
                let _ = written.send(Ok(()));
                None
            }
            _ if written.is_closed() => None,
            _ => Some(Awaited { slot, written }),
        }
    }
}
