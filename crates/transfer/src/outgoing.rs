//! The sending end: dials by the best transport that works, then lets the link carry messages until
//! it breaks.
//!
//! Owns: the order in which transports are tried, fallback and backoff. Never: decides which
//! messages are sent, or keeps anything of a link that has ended.
//! Invariant: a transport that both ends announced and that does not work is reported
//! ([`LinkEvent::FellBack`]) before the next one is tried. A transport that only one end has is
//! reported, too, if it would have been worth having.

mod established;
mod stream;

pub(crate) use established::{DialledTransport, EstablishedLink, measure_link};
pub(crate) use stream::{CREDIT_BEYOND_WINDOW, lend_slot};

use crate::address::PeerRoute;
use crate::config::{LinkEvent, LinksConfig};
use crate::dial_backoff::{BACKOFF_MIN, DialBackoff};
use crate::link::LinkCarrier;
use crate::socket::LinkError;
use crate::transports::local::LocalAttachment;
use crate::transports::{DialChoice, DialTurn, Transport};
use cleave_domain::WorkerRef;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// An outgoing link: its two ends, and the receiver of its events.
#[derive(Clone, Copy)]
pub(crate) struct OutboundLink<'a> {
    pub(crate) config: &'a LinksConfig,
    pub(crate) peer: WorkerRef,
    pub(crate) events: &'a mpsc::Sender<LinkEvent>,
    /// Recent failures of transports that back off.
    pub(crate) dial_backoff: &'a DialBackoff,
    /// This worker among those of its process.
    pub(crate) local: &'a LocalAttachment,
}

/// One step on the way through the transports.
enum DialStep<'a> {
    Dial(DialOption<'a>),
    /// A transport that only one end has, with the reason.
    Missing(Transport, &'static str),
}

/// A transport that both ends have, with its address.
#[derive(Clone, Copy)]
struct DialOption<'a> {
    transport: Transport,
    address: &'a str,
}

impl<'a> DialStep<'a> {
    fn option(&self) -> Option<DialOption<'a>> {
        match self {
            Self::Dial(option) => Some(*option),
            Self::Missing(..) => None,
        }
    }
}

impl OutboundLink<'_> {
    /// Carries one link from dialling to its end, by the best transport that works. Returns the
    /// reason for the end.
    pub(crate) async fn carry(self, route: &PeerRoute, carrier: LinkCarrier) -> LinkError {
        let steps = dial_steps(self.config, route);
        for (index, step) in steps.iter().enumerate() {
            let next = steps[index + 1..].iter().find_map(DialStep::option);
            let option = match step {
                DialStep::Dial(option) => *option,
                DialStep::Missing(transport, reason) => {
                    if let Some(next) = next
                        && let Err(closing) = self
                            .report_fallback(*transport, next.transport, (*reason).to_owned())
                            .await
                    {
                        return closing;
                    }
                    continue;
                }
            };
            let error = match self.backoff_error(option.transport, next) {
                Some(error) => error,
                None => {
                    let transport = option.transport.implementation();
                    match transport.dial(self, option.address).await {
                        Ok(link) => return link.carry(self, carrier).await,
                        Err(error) => self.record_failure(option.transport, error),
                    }
                }
            };
            let is_needed = !carrier.queue.is_closed() || !carrier.queue.is_empty();
            let next = next.filter(|_| is_needed && !error.is_independent_of_transport());
            let Some(next) = next else {
                return error;
            };
            let (from, to) = (option.transport, next.transport);
            if let Err(closing) = self.report_fallback(from, to, error.to_string()).await {
                return closing;
            }
        }
        let peer = self.peer;
        let leads_here = match route {
            PeerRoute::Local => true,
            PeerRoute::Remote(addresses) => addresses.leads_between_hosts(),
        };
        let reason = if leads_here {
            "none of the transports that this worker may use reaches it"
        } else {
            "it can be reached only from its own host, and this is another host"
        };
        LinkError::RejectedHere(format!("worker {peer}: {reason}"))
    }

    /// The reason for which a transport is skipped after recent failures, unless it is the last.
    fn backoff_error(
        self,
        transport: Transport,
        next: Option<DialOption<'_>>,
    ) -> Option<LinkError> {
        next?;
        let is_delayed = transport.implementation().backs_off();
        let reason = self.dial_backoff.reason_to_wait(self.peer, transport);
        let reason = reason.filter(|_| is_delayed)?;
        Some(LinkError::Transport(transport, reason))
    }

    /// Records a failure of a transport that backs off, unless the peer cannot be reached at all or
    /// refuses the link.
    fn record_failure(self, transport: Transport, error: LinkError) -> LinkError {
        let is_no_peer = matches!(error, LinkError::Connect(..) | LinkError::NotAPeer(_));
        if transport.implementation().backs_off()
            && !is_no_peer
            && !error.is_independent_of_transport()
        {
            let reason = match &error {
                LinkError::Transport(of, reason) if *of == transport => reason.clone(),
                other => other.to_string(),
            };
            self.dial_backoff
                .record_failure(self.peer, transport, reason);
        }
        error
    }

    /// Records the end of an established link. If writes fail soon after the measured ones
    /// succeeded, the next dial uses another transport. This must run before the link is seen to be
    /// broken, because the next dial may begin then.
    fn record_end(self, transport: Transport, since: Instant, error: &LinkError) {
        if !transport.implementation().backs_off() {
            return;
        }
        match error {
            LinkError::Transport(of, reason)
                if *of == transport && since.elapsed() < BACKOFF_MIN =>
            {
                self.dial_backoff
                    .record_failure(self.peer, transport, reason.clone());
            }
            _ => self.dial_backoff.clear(self.peer, transport),
        }
    }

    /// Reports that another transport is tried, or used, in place of a preferred one.
    pub(crate) async fn report_fallback(
        self,
        from: Transport,
        to: Transport,
        reason: String,
    ) -> Result<(), LinkError> {
        let sent = self.events.send(LinkEvent::FellBack {
            peer: self.peer,
            from,
            to,
            reason,
        });
        sent.await.map_err(|_| LinkError::Closing)
    }
}

/// The transports to try, and those that only one end has; the preferred first.
fn dial_steps<'a>(config: &LinksConfig, route: &'a PeerRoute) -> Vec<DialStep<'a>> {
    let mut steps = Vec::new();
    for transport in Transport::ALL {
        match transport.implementation().dial_choice(config, route) {
            DialChoice::Dial(turn, address) => {
                let option = DialOption { transport, address };
                steps.push((turn, DialStep::Dial(option)));
            }
            DialChoice::Missing(reason) => {
                steps.push((DialTurn::InOrder, DialStep::Missing(transport, reason)));
            }
            DialChoice::Unusable => {}
        }
    }
    steps.sort_by_key(|(turn, _)| *turn);
    steps.into_iter().map(|(_, step)| step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DataAddresses;
    use cleave_domain::{Fingerprint, Incarnation, WorkerId};

    // Lesson: 18.
    #[test]
    fn a_transport_of_one_end_is_reported_before_the_next() {
        let me = WorkerRef {
            worker: WorkerId(1),
            incarnation: Incarnation(1),
        };
        let config = LinksConfig::new(me, Fingerprint("f".into()), 4096);
        let addresses = DataAddresses::default()
            .with(Transport::Tcp, "h:1")
            .with(Transport::Nixl, "tcp");
        let route = PeerRoute::Remote(addresses);
        assert!(matches!(
            dial_steps(&config, &route)[..],
            [
                DialStep::Missing(Transport::Nixl, "this worker has no NIXL library"),
                DialStep::Dial(DialOption {
                    transport: Transport::Tcp,
                    address: "h:1"
                }),
            ]
        ));
        let within = dial_steps(&config, &PeerRoute::Local);
        assert!(matches!(
            within[..],
            [DialStep::Dial(DialOption {
                transport: Transport::Local,
                ..
            })]
        ));
    }
}
