//! The receiving end: a ring that one sender's card writes into.
//!
//! Owns: the receiver's agent, its thread, the ring, and which slots were written. Never: takes a byte out of a slot.
//! Invariant: a slot counts as written only once the note behind its bytes is there; the ring is mapped until the
//! agent has ended, and for as long as anybody reads it.

use super::library::{Agent, AgentParts, CallError};
use super::pace::Pace;
use super::{Nixl, Offer};
use crate::shared_memory::{Mirror, Shape};
use std::sync::Arc;
use std::sync::mpsc::{self as threads, RecvTimeoutError, TryRecvError};
use std::time::Duration;
use tokio::sync::oneshot;

/// See the module. Dropped, it refuses what is still on its way.
#[derive(Debug)]
pub(crate) struct Landing {
    asked: threads::Sender<Awaited>,
}

/// Somebody waits for a slot.
#[derive(Debug)]
struct Awaited {
    slot: u32,
    written: oneshot::Sender<Result<(), String>>,
}

impl Landing {
    /// Makes a ring, and an agent through which a sender may write to it.
    ///
    /// # Errors
    /// Why that cannot be done.
    pub(crate) async fn open(
        nixl: &Arc<Nixl>,
        (name, shape): (String, Shape),
        beat: Duration,
    ) -> Result<(Self, Mirror, Offer), String> {
        let nixl = Arc::clone(nixl);
        let (asked, awaited) = threads::channel();
        let (ready, opened) = oneshot::channel();
        let work = move || match open(&nixl, &name, shape) {
            Ok((mirror, agent, offer)) => {
                let desk = Desk {
                    agent,
                    _mirror: mirror.clone(),
                    is_written: vec![false; shape.slots_count as usize],
                    beat,
                };
                // Nobody asks any more if the link was given up meanwhile.
                if ready.send(Ok((mirror, offer))).is_ok() {
                    desk.run(&awaited);
                }
            }
            Err(reason) => drop(ready.send(Err(reason))),
        };
        let thread = std::thread::Builder::new().name("nixl-in".into());
        thread.spawn(work).map_err(|error| error.to_string())?;
        let opened = opened.await.map_err(|_| "its thread ended".to_owned())?;
        let (mirror, offer) = opened?;
        Ok((Self { asked }, mirror, offer))
    }

    /// Returns when what was announced for this slot is in it. One slot is waited for at a time.
    ///
    /// # Errors
    /// Why it never will be.
    pub(crate) async fn written(&self, slot: u32) -> Result<(), String> {
        let (written, answer) = oneshot::channel();
        let gone = || "the agent's thread has ended".to_owned();
        let asked = self.asked.send(Awaited { slot, written });
        asked.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
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
    /// Answers until nobody can ask any more.
    fn run(mut self, asked: &threads::Receiver<Awaited>) {
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
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Err(error) = self.hear() {
                if let Some(Awaited { written, .. }) = waiting {
                    let _ = written.send(Err(error.to_string()));
                }
                return;
            }
            waiting = waiting.and_then(|awaited| self.answer(awaited));
            if waiting.is_some() {
                pace.wait();
            }
        }
    }

    /// Takes in which slots were written. A note that no sender of ours makes is nobody's.
    fn hear(&mut self) -> Result<(), CallError> {
        let Self {
            agent, is_written, ..
        } = self;
        agent.notes(|note| {
            let slot = note.try_into().map(u32::from_le_bytes);
            if let Ok(slot) = slot
                && let Some(is_written) = is_written.get_mut(slot as usize)
            {
                *is_written = true;
            }
        })
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
