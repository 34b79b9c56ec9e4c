//! Events sent to a client that it has not taken yet.
//!
//! Owns: how many events were sent since the client last took one, and the two facts about it for
//! the brain: the client stalls once the count exceeds its limit, and flows again with the first
//! event it takes. So a slow but steady reader never stalls for long. Never blocks or drops
//! anything: a flight has at most `max_tokens` tokens, so that the queue is bounded, and the engine
//! does not wait.
//! Invariant: `Stalled` and `Flowing` of a flight alternate, in the order in which they became
//! true: both are sent under the lock that decides them.
//!
//! A client that does not read fills its socket first; the HTTP server takes an event from here
//! only when the socket has room for it. So the events that wait here come on top of a full socket.

use super::event::RouterEvent;
use cleave_api::FlightEvent;
use cleave_domain::FlightId;
use parking_lot::Mutex;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

#[derive(Debug)]
pub(crate) struct ClientBacklog {
    events: mpsc::UnboundedSender<FlightEvent>,
    gauge: Arc<StallDetector>,
}

#[derive(Debug)]
pub(crate) struct ClientReceiver {
    events: mpsc::UnboundedReceiver<FlightEvent>,
    gauge: Arc<StallDetector>,
}

#[derive(Debug)]
struct StallDetector {
    flight: FlightId,
    /// The client stalls when more events than this are sent while none is taken.
    unread_max: u32,
    driver: mpsc::UnboundedSender<RouterEvent>,
    state: Mutex<StallState>,
}

#[derive(Debug, Default)]
struct StallState {
    /// Given since the client last took one.
    unread: u32,
    stalled: bool,
}

/// Both ends of one flight's channel; the driver is notified when its client stalls.
pub(crate) fn client_channel(
    flight: FlightId,
    untaken_max: u32,
    driver: mpsc::UnboundedSender<RouterEvent>,
) -> (ClientBacklog, ClientReceiver) {
    let (events, received) = mpsc::unbounded_channel();
    let gauge = Arc::new(StallDetector {
        flight,
        unread_max: untaken_max,
        driver,
        state: Mutex::default(),
    });
    let backlog = ClientBacklog {
        events,
        gauge: Arc::clone(&gauge),
    };
    let receiver = ClientReceiver {
        events: received,
        gauge,
    };
    (backlog, receiver)
}

impl ClientBacklog {
    /// Sends an event to the client; the event is dropped if the client has left.
    pub(crate) fn send(&self, event: FlightEvent) {
        // Counted before it is sent: `taken` then always comes later.
        self.gauge.event_sent();
        let _ = self.events.send(event);
    }
}

impl ClientReceiver {
    pub(crate) fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<FlightEvent>> {
        let event = self.events.poll_recv(context);
        if let Poll::Ready(Some(_)) = &event {
            self.gauge.event_read();
        }
        event
    }

    #[cfg(test)]
    pub(crate) fn try_recv(&mut self) -> Option<FlightEvent> {
        let event = self.events.try_recv().ok()?;
        self.gauge.event_read();
        Some(event)
    }
}

impl StallDetector {
    fn event_sent(&self) {
        let mut state = self.state.lock();
        state.unread = state.unread.saturating_add(1);
        if state.unread > self.unread_max && !state.stalled {
            state.stalled = true;
            self.notify_driver(RouterEvent::Stalled {
                flight: self.flight,
            });
        }
    }

    fn event_read(&self) {
        let mut state = self.state.lock();
        state.unread = 0;
        if std::mem::take(&mut state.stalled) {
            self.notify_driver(RouterEvent::Flowing {
                flight: self.flight,
            });
        }
    }

    fn notify_driver(&self, event: RouterEvent) {
        // A stopped driver has ended every flight.
        let _ = self.driver.send(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Emission, SampledToken};

    fn token() -> FlightEvent {
        FlightEvent::Token(Emission {
            index: 0,
            sampled: SampledToken {
                token: 1,
                scores: None,
            },
            prompt: None,
        })
    }

    /// The next event that the driver receives, as text.
    fn next_message(driver_inbox: &mut mpsc::UnboundedReceiver<RouterEvent>) -> String {
        match driver_inbox.try_recv() {
            Ok(RouterEvent::Stalled { flight }) => format!("stalled {flight}"),
            Ok(RouterEvent::Flowing { flight }) => format!("flowing {flight}"),
            Ok(other) => panic!("{other:?}"),
            Err(_) => String::new(),
        }
    }

    #[test]
    fn an_unread_stream_stalls_once_and_flows_once() {
        let (driver, mut driver_inbox) = mpsc::unbounded_channel();
        let (backlog, mut receiver) = client_channel(FlightId(3), 4, driver);
        for _ in 0..4 {
            backlog.send(token());
        }
        assert_eq!(next_message(&mut driver_inbox), "");
        for _ in 0..3 {
            backlog.send(token());
        }
        assert_eq!(next_message(&mut driver_inbox), "stalled f3");
        assert_eq!(next_message(&mut driver_inbox), "");
        // It reads, if only a little.
        assert!(receiver.try_recv().is_some());
        assert_eq!(next_message(&mut driver_inbox), "flowing f3");
        while receiver.try_recv().is_some() {}
        assert_eq!(next_message(&mut driver_inbox), "");
    }

    #[test]
    fn a_slow_but_steady_reader_never_stalls() {
        let (driver, mut driver_inbox) = mpsc::unbounded_channel();
        let (backlog, mut receiver) = client_channel(FlightId(3), 4, driver);
        for _ in 0..1000 {
            backlog.send(token());
            backlog.send(token());
            assert!(receiver.try_recv().is_some());
        }
        assert_eq!(
            next_message(&mut driver_inbox),
            "",
            "a thousand wait, and it reads"
        );
    }
}
