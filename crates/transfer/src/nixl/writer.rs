//! The sending end: slots of this process on their way into the receiver's.
//!
//! Owns: the sender's agent, its thread, and which slots it still reads. Never: fills a slot, or says on the socket that one
//! is on its way.
//! Invariant: a slot is not given back before the agent is done with it; once the writer is closed, nothing more is
//! begun.

use super::library::{Agent, AgentParts, CallError, Order, Remote, Write};
use super::pace::Pace;
use super::{Nixl, Offer};
use crate::shared_memory::{Ring, Shape};
use std::collections::VecDeque;
use std::sync::mpsc::{self as threads, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};

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

/// What the thread is made of.
struct Parts {
    nixl: Arc<Nixl>,
    name: String,
    ring: Arc<Ring>,
    offer: Offer,
    beat: Duration,
}

impl Writer {
    /// Makes a ring like the receiver's, and an agent that writes from it into what the receiver offers.
    ///
    /// # Errors
    /// Why that cannot be done.
    pub(crate) async fn open(
        nixl: &Arc<Nixl>,
        (name, shape): (String, Shape),
        (offer, beat): (Offer, Duration),
    ) -> Result<Self, String> {
        let nixl = Arc::clone(nixl);
        let (orders, asked) = threads::channel();
        let state = Arc::new(State {
            book: Mutex::new(Book {
                is_under_way: vec![false; shape.slots_count as usize],
                failure: None,
            }),
            settled: Notify::new(),
            failed: Notify::new(),
        });
        let (ready, opened) = oneshot::channel();
        let seen = Arc::clone(&state);
        let work = move || match open(nixl, name, shape, (offer, beat)) {
            Ok((ring, desk)) => {
                // Nobody asks any more if the link was given up meanwhile.
                if ready.send(Ok(Arc::clone(&ring))).is_ok() {
                    desk.run(&asked, &seen);
                }
                drop(desk);
                drop(ring);
            }
            Err(reason) => drop(ready.send(Err(reason))),
        };
        let thread = std::thread::Builder::new().name("nixl-out".into());
        thread.spawn(work).map_err(|error| error.to_string())?;
        let ring = opened.await.map_err(|_| "its thread ended".to_owned())??;
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

/// What the thread has.
struct Desk {
    // Ends before the ring that it reads.
    agent: Agent,
    remote: Remote,
    ring: Arc<Ring>,
    offer: Offer,
    beat: Duration,
}

fn open(
    nixl: Arc<Nixl>,
    name: String,
    shape: Shape,
    (offer, beat): (Offer, Duration),
) -> Result<(Arc<Ring>, Desk), String> {
    let ring = Ring::private(shape).map_err(|error| error.to_string())?;
    let parts = Parts {
        nixl,
        name,
        ring: Arc::clone(&ring),
        offer,
        beat,
    };
    let desk = Desk::new(parts).map_err(|error| error.to_string())?;
    Ok((ring, desk))
}

impl Desk {
    fn new(parts: Parts) -> Result<Self, CallError> {
        let Parts {
            nixl,
            name,
            ring,
            offer,
            beat,
        } = parts;
        let parts = AgentParts {
            name: &name,
            parameters: &nixl.backend.parameters,
            area: ring.area(),
        };
        let agent = Agent::new(&nixl.library, &parts)?;
        let remote = agent.know(&offer.metadata)?;
        Ok(Self {
            agent,
            remote,
            ring,
            offer,
            beat,
        })
    }

    /// Writes until nobody can ask any more, or a write fails.
    fn run(&self, asked: &threads::Receiver<Slot>, state: &State) {
        let mut under_way = VecDeque::new();
        let ended = self.attend(asked, state, &mut under_way);
        for (_, write) in &mut under_way {
            self.agent.release(write);
        }
        let mut book = state.lock();
        if let Err(error) = ended {
            book.failure = Some(error.to_string());
        }
        drop(book);
        state.failed.notify_waiters();
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
                    under_way.push_back((slot.number, self.begin(slot)?));
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            match under_way.front_mut() {
                // What a device says of itself is taken in.
                None => self.agent.notes(|_| {})?,
                Some((slot, write)) => match self.agent.is_done(write)? {
                    false => pace.wait(),
                    true => {
                        pace.moved();
                        self.agent.release(write);
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
            to: self.offer.start.wrapping_add(start as u64),
            len: slot.len,
            note: slot.number.to_le_bytes(),
        };
        self.agent.write(&self.remote, &order)
    }
}
