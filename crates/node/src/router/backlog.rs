//! What was given to a client and waits for it.
//!
//! Owns: how much a client was given since it last took something, and the two facts that the brain
//! hears of it: it stalls once that is more than it may be, and flows again with the first thing it
//! takes. So a reader that is slow and steady never stalls for long. Never: blocks or drops anything:
//! a flight has `max_tokens` tokens at most, so what waits is bounded, and the engine that draws them
//! waits for nobody.
//! Invariant: `Stalled` and `Flowing` of a flight alternate, in the order in which they became true:
//! both are said under the lock that decides them.
//!
//! A client that does not read fills its socket first; the HTTP face draws an event from here only
//! when the socket has room for it. So what waits here is more than a socket holds.

use super::driver::RouterEvent;
use cleave_api::FlightEvent;
use cleave_domain::FlightId;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// The giving end.
#[derive(Debug)]
pub(crate) struct Backlog {
    events: mpsc::UnboundedSender<FlightEvent>,
    gauge: Arc<Gauge>,
}

/// The client's end.
#[derive(Debug)]
pub(crate) struct Receiver {
    events: mpsc::UnboundedReceiver<FlightEvent>,
    gauge: Arc<Gauge>,
}

#[derive(Debug)]
struct Gauge {
    flight: FlightId,
    /// More than so many events given while none is taken are a stall.
    untaken_max: u32,
    driver: mpsc::UnboundedSender<RouterEvent>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Given since the client last took one.
    untaken: u32,
    stalled: bool,
}

/// Both ends for one flight; the driver hears when its client stalls.
pub(crate) fn line(
    flight: FlightId,
    untaken_max: u32,
    driver: mpsc::UnboundedSender<RouterEvent>,
) -> (Backlog, Receiver) {
    let (events, received) = mpsc::unbounded_channel();
    let gauge = Arc::new(Gauge {
        flight,
        untaken_max,
        driver,
        state: Mutex::default(),
    });
    let backlog = Backlog {
        events,
        gauge: Arc::clone(&gauge),
    };
    let receiver = Receiver {
        events: received,
        gauge,
    };
    (backlog, receiver)
}

impl Backlog {
    /// Gives the client something; nobody hears it if it has left.
    pub(crate) fn send(&self, event: FlightEvent) {
        // Counted first: taking it is then the later of the two.
        self.gauge.given();
        let _ = self.events.send(event);
    }
}

impl Receiver {
    pub(crate) fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<FlightEvent>> {
        let event = self.events.poll_recv(context);
        if let Poll::Ready(Some(_)) = &event {
            self.gauge.taken();
        }
        event
    }

    #[cfg(test)]
    pub(crate) fn try_recv(&mut self) -> Option<FlightEvent> {
        let event = self.events.try_recv().ok()?;
        self.gauge.taken();
        Some(event)
    }
}

impl Gauge {
    fn given(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.untaken = state.untaken.saturating_add(1);
        if state.untaken > self.untaken_max && !state.stalled {
            state.stalled = true;
            self.say(RouterEvent::Stalled {
                flight: self.flight,
            });
        }
    }

    fn taken(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.untaken = 0;
        if std::mem::take(&mut state.stalled) {
            self.say(RouterEvent::Flowing {
                flight: self.flight,
            });
        }
    }

    fn say(&self, event: RouterEvent) {
        // A stopped driver has ended every flight.
        let _ = self.driver.send(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Emission, Sampled};

    fn token() -> FlightEvent {
        FlightEvent::Token(Emission {
            index: 0,
            sampled: Sampled {
                token: 1,
                scores: None,
            },
            prompt: None,
        })
    }

    /// What the driver hears.
    fn said(heard: &mut mpsc::UnboundedReceiver<RouterEvent>) -> String {
        match heard.try_recv() {
            Ok(RouterEvent::Stalled { flight }) => format!("stalled {flight}"),
            Ok(RouterEvent::Flowing { flight }) => format!("flowing {flight}"),
            Ok(other) => panic!("{other:?}"),
            Err(_) => String::new(),
        }
    }

    #[test]
    fn a_client_that_does_not_read_is_said_to_stall_once_and_to_flow_once() {
        let (driver, mut heard) = mpsc::unbounded_channel();
        let (backlog, mut receiver) = line(FlightId(3), 4, driver);
        for _ in 0..4 {
            backlog.send(token());
        }
        assert_eq!(said(&mut heard), "");
        for _ in 0..3 {
            backlog.send(token());
        }
        assert_eq!(said(&mut heard), "stalled f3");
        assert_eq!(said(&mut heard), "");
        // It reads, if only a little.
        assert!(receiver.try_recv().is_some());
        assert_eq!(said(&mut heard), "flowing f3");
        while receiver.try_recv().is_some() {}
        assert_eq!(said(&mut heard), "");
    }

    #[test]
    fn a_client_that_reads_all_the_time_was_cut_off_for_being_slower_than_the_model() {
        let (driver, mut heard) = mpsc::unbounded_channel();
        let (backlog, mut receiver) = line(FlightId(3), 4, driver);
        for _ in 0..1000 {
            backlog.send(token());
            backlog.send(token());
            assert!(receiver.try_recv().is_some());
        }
        assert_eq!(said(&mut heard), "", "a thousand wait, and it reads");
    }
}
