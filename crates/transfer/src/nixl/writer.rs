//! The sending end: slots of this process on their way into the receiver's.
//!
//! Owns: the sender's agent, its thread, and which slots it still reads. Never: fills a slot, or says on the socket that one
//! is on its way.
//! Invariant: a slot is not given back before the agent is done with it; once the writer is closed, nothing more is
//! begun.

use super::leave::{Gated, inside};
use super::library::{Agent, AgentParts, CallError, Order, Remote, Write};
use super::making::{Ready, make};
use super::note;
use super::pace::Pace;
use super::{Names, Nixl, Offer};
use crate::shared_memory::{Ring, Shape};
use std::collections::VecDeque;
use std::sync::mpsc::{self as threads, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// See the module.
#[derive(Debug)]
pub(crate) struct Writer {
    ring: Arc<Ring>,
    /// None once it is closed.
    orders: Mutex<Option<threads::Sender<Slot>>>,
    state: Arc<State>,
}

/// One slot that is to be written, from its beginning.
#[derive(Clone, Copy, Debug)]
struct Slot {
    number: u32,
    len: usize,
}

#[derive(Debug)]
struct State {
    book: Mutex<Book>,
    settled: Notify,
    failed: Notify,
}

#[derive(Debug)]
struct Book {
    /// Slots that the agent still reads.
    is_under_way: Vec<bool>,
    failure: Option<String>,
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a writer is made of.
pub(super) struct WriterParts {
    /// The two agents'.
    pub(super) names: Names,
    pub(super) shape: Shape,
    pub(super) beat: Duration,
    /// Where it writes.
    pub(super) offer: Offer,
}

impl Writer {
    /// Makes a ring like the receiver's, and an agent that writes from it into what the receiver offers.
    ///
    /// # Errors
    /// Why that cannot be done, or not in time.
    pub(super) async fn open(
        nixl: &Arc<Nixl>,
        parts: WriterParts,
        within: Duration,
    ) -> Result<Self, String> {
        let (orders, asked) = threads::channel();
        let state = Arc::new(State {
            book: Mutex::new(Book {
                is_under_way: vec![false; parts.shape.slots_count as usize],
                failure: None,
            }),
            settled: Notify::new(),
            failed: Notify::new(),
        });
        let (own, seen) = (Arc::clone(nixl), Arc::clone(&state));
        let work = move |ready: Ready<_>| {
            let desk = match inside(|| Desk::open(&own, parts)) {
                Ok(desk) => Gated::new(desk),
                Err(reason) => {
                    ready.say(Err(reason));
                    return;
                }
            };
            // Nobody asks any more if the link was given up meanwhile.
            if ready.say(Ok(Arc::clone(&desk.ring))) {
                desk.run(&asked, &seen);
            }
        };
        let ring = make(nixl, ("nixl-out", within), work).await?;
        Ok(Self {
            ring,
            orders: Mutex::new(Some(orders)),
            state,
        })
    }

    /// Slots of this process; they are the receiver's by number.
    pub(crate) fn ring(&self) -> &Arc<Ring> {
        &self.ring
    }

    /// Begins to write a slot that was lent. If that fails, [`Writer::failed`] says so.
    pub(crate) fn write(&self, number: u32, len: usize) {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(orders) = &*orders {
            self.state.lock().is_under_way[number as usize] = true;
            // A thread that has ended has said why.
            let _ = orders.send(Slot { number, len });
        }
    }

    /// Returns when none of these slots is read any more.
    pub(crate) async fn settled(&self, slots: &[u32]) {
        let is_read = |book: &Book, slot: u32| book.is_under_way.get(slot as usize) == Some(&true);
        let is_any = |book: &Book| slots.iter().any(|slot| is_read(book, *slot));
        self.until(|book| !is_any(book)).await;
    }

    /// Returns when nothing is under way any more.
    pub(crate) async fn all_settled(&self) {
        self.until(|book| !book.is_under_way.contains(&true)).await;
    }

    async fn until(&self, is_so: impl Fn(&Book) -> bool) {
        loop {
            let settled = self.state.settled.notified();
            if is_so(&self.state.lock()) {
                return;
            }
            settled.await;
        }
    }

    /// Returns when a write failed, and says why.
    pub(crate) async fn failed(&self) -> String {
        loop {
            let failed = self.state.failed.notified();
            if let Some(failure) = &self.state.lock().failure {
                return failure.clone();
            }
            failed.await;
        }
    }

    /// The link has ended: nothing more is written, and agent and ring go.
    pub(crate) fn close(&self) {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        *orders = None;
    }
}

/// Tells that nothing more is written, however the thread ends.
struct Ending<'a>(&'a State);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lock().failure = Some("the agent's thread panicked".to_owned());
        }
        self.0.failed.notify_waiters();
    }
}

/// What the thread has.
struct Desk {
    // Ends before the ring that it reads.
    agent: Agent,
    remote: Remote,
    ring: Arc<Ring>,
    start: u64,
    beat: Duration,
}

impl Desk {
    fn open(nixl: &Nixl, parts: WriterParts) -> Result<Self, String> {
        let WriterParts {
            names: Names { sender, receiver },
            shape,
            beat,
            offer,
        } = parts;
        let sound = offer.check(&receiver, shape);
        sound.map_err(|error| error.to_string())?;
        let ring = Ring::private(shape).map_err(|error| error.to_string())?;
        let parts = AgentParts {
            name: &sender,
            parameters: &nixl.backend.parameters,
            area: ring.area(),
        };
        let agent = Agent::new(&nixl.library, &parts).map_err(|error| error.to_string())?;
        let remote = agent.know(&offer.metadata);
        let remote = remote.map_err(|error| error.to_string())?;
        Ok(Self {
            agent,
            remote,
            ring,
            start: offer.start,
            beat,
        })
    }

    /// Writes until nobody can ask any more, or a write fails.
    fn run(&self, asked: &threads::Receiver<Slot>, state: &State) {
        let _ending = Ending(state);
        let mut under_way = VecDeque::new();
        let ended = self.attend(asked, state, &mut under_way);
        inside(|| {
            for (_, write) in &mut under_way {
                self.agent.release(write);
            }
        });
        if let Err(error) = ended {
            state.lock().failure = Some(error.to_string());
        }
    }

    fn attend(
        &self,
        asked: &threads::Receiver<Slot>,
        state: &State,
        under_way: &mut VecDeque<(u32, Write)>,
    ) -> Result<(), CallError> {
        let mut pace = Pace::new(self.beat);
        loop {
            let next = match under_way.is_empty() {
                true => asked.recv_timeout(pace.rest()),
                false => asked.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                }),
            };
            match next {
                Ok(slot) => {
                    pace.moved();
                    let write = inside(|| self.begin(slot))?;
                    under_way.push_back((slot.number, write));
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            match under_way.front_mut() {
                // What a device says of itself is taken in.
                None => inside(|| self.agent.notes(|_| {}))?,
                Some((slot, write)) => match inside(|| self.agent.is_done(write))? {
                    false => pace.wait(),
                    true => {
                        pace.moved();
                        inside(|| self.agent.release(write));
                        state.lock().is_under_way[*slot as usize] = false;
                        under_way.pop_front();
                        state.settled.notify_waiters();
                    }
                },
            }
        }
    }

    fn begin(&self, slot: Slot) -> Result<Write, CallError> {
        let start = self.ring.shape().start(slot.number);
        let order = Order {
            from: start,
            to: self.start.wrapping_add(start as u64),
            len: slot.len,
            note: note::write(slot.number),
        };
        self.agent.write(&self.remote, &order)
    }
}
