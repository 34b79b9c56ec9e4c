//! The data address of a worker, as one text that routers forward without parsing it.
//!
//! Owns: that text, both ways. Never: resolves a name, or connects.
//! Invariant: a written address parses to the same value.
//!
//! The form is one `SCHEME://…` for each transport that has a part, separated by commas:
//! `tcp://HOST:PORT` and `shm://HOST_ID/NAME`; a bare `HOST:PORT` is TCP. `nixl://tcp` beside them
//! announces that links over NIXL are made at the TCP address too. Parts with other schemes belong
//! to other releases and are ignored.

use crate::transports::{Transport, TransportReach};
use std::collections::BTreeMap;
use std::fmt;

/// The route to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerRoute {
    /// The peer is in this process, on the same [`crate::LocalNet`].
    Local,
    /// At these addresses; the preferred transport that works is used.
    Remote(DataAddresses),
}

/// The addresses at which a worker listens: the part of each transport that has one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataAddresses {
    parts: BTreeMap<Transport, String>,
}

/// The form of a transport's part of a data address; the name of the transport begins it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AddressScheme {
    /// Whether the part only adds to those of other transports; alone it is no address.
    pub(crate) is_addition: bool,
    /// Whether a text after `SCHEME://` is a part; another one is ignored.
    pub(crate) is_valid: fn(&str) -> bool,
}

/// An address without a known transport.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "data address \"{0}\" names no transport that this release has: expected tcp://HOST:PORT, \
     shm://HOST_ID/NAME, or both with a comma"
)]
pub struct DataAddressError(String);

impl PeerRoute {
    /// Parses an announced address; an empty one means that the worker is in this process.
    ///
    /// # Errors
    /// If the text is not empty and names no transport of this release.
    pub fn parse(announced: &str) -> Result<Self, DataAddressError> {
        if announced.is_empty() {
            Ok(Self::Local)
        } else {
            DataAddresses::parse(announced).map(Self::Remote)
        }
    }

    /// A route over TCP only.
    pub fn tcp(address: impl Into<String>) -> Self {
        Self::Remote(DataAddresses::default().with(Transport::Tcp, address))
    }

    /// The part of a transport.
    pub(crate) fn part(&self, transport: Transport) -> Option<&str> {
        match self {
            Self::Local => None,
            Self::Remote(addresses) => addresses.part(transport),
        }
    }
}

impl DataAddresses {
    /// Parses the output of [`fmt::Display`].
    ///
    /// # Errors
    /// If no part names a transport of this release.
    pub fn parse(announced: &str) -> Result<Self, DataAddressError> {
        let mut addresses = Self::default();
        for part in announced.split(',') {
            match part.split_once("://") {
                None if !part.is_empty() => addresses = addresses.with(Transport::Tcp, part),
                None => {}
                Some((scheme, text)) => addresses.parse_part(scheme, text),
            }
        }
        let mut places = addresses.parts.keys();
        if places.any(|transport| scheme(*transport).is_some_and(|scheme| !scheme.is_addition)) {
            Ok(addresses)
        } else {
            Err(DataAddressError(announced.to_owned()))
        }
    }

    /// Of two parts of one transport the last counts.
    fn parse_part(&mut self, name: &str, text: &str) {
        for transport in Transport::ALL {
            let Some(scheme) = scheme(transport).filter(|_| transport.name() == name) else {
                continue;
            };
            if (scheme.is_valid)(text) {
                self.parts.insert(transport, text.to_owned());
            } else {
                self.parts.remove(&transport);
            }
        }
    }

    /// The addresses with this part of a transport: the text after `SCHEME://`.
    ///
    /// # Panics
    /// If the transport has no part.
    pub fn with(mut self, transport: Transport, part: impl Into<String>) -> Self {
        assert!(
            scheme(transport).is_some(),
            "{transport} has no part of an address"
        );
        self.parts.insert(transport, part.into());
        self
    }

    /// The addresses without the part of a transport.
    pub fn without(mut self, transport: Transport) -> Self {
        self.parts.remove(&transport);
        self
    }

    /// The part of a transport: the text after `SCHEME://`.
    pub fn part(&self, transport: Transport) -> Option<&str> {
        self.parts.get(&transport).map(String::as_str)
    }

    /// Whether another host can reach one of the addresses.
    pub(crate) fn leads_between_hosts(&self) -> bool {
        let mut transports = self.parts.keys();
        transports.any(|transport| {
            let is_place = scheme(*transport).is_some_and(|scheme| !scheme.is_addition);
            is_place && transport.reach() == TransportReach::Network
        })
    }
}

fn scheme(transport: Transport) -> Option<AddressScheme> {
    transport.implementation().scheme()
}

impl fmt::Display for DataAddresses {
    /// The addresses from the farthest reach on, and then the additions to them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.parts.iter().rev();
        let mut parts: Vec<_> = parts
            .filter_map(|(transport, text)| {
                let is_addition = scheme(*transport)?.is_addition;
                Some((is_addition, format!("{transport}://{text}")))
            })
            .collect();
        parts.sort_by_key(|(is_addition, _)| *is_addition);
        let parts: Vec<_> = parts.into_iter().map(|(_, part)| part).collect();
        f.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip_and_unknown_schemes_are_ignored() {
        let addresses = DataAddresses::default()
            .with(Transport::Tcp, "[::1]:70")
            .with(Transport::SharedMemory, "a-b/cleave/1")
            .with(Transport::Nixl, "tcp");
        let text = addresses.to_string();
        assert_eq!(text, "tcp://[::1]:70,shm://a-b/cleave/1,nixl://tcp");
        assert_eq!(DataAddresses::parse(&text).unwrap(), addresses);
        let newer = format!("rdma://x/y,{text}");
        assert_eq!(DataAddresses::parse(&newer).unwrap(), addresses);
    }

    #[test]
    fn a_bare_host_and_port_is_a_tcp_address() {
        assert_eq!(PeerRoute::parse("h:7"), Ok(PeerRoute::tcp("h:7")));
        assert_eq!(PeerRoute::parse(""), Ok(PeerRoute::Local));
    }

    #[test]
    fn an_address_without_a_known_transport_is_an_error() {
        for bad in ["rdma://x", ",", "shm://nothing", "nixl://tcp"] {
            let error = PeerRoute::parse(bad).unwrap_err().to_string();
            assert!(error.contains(bad), "{error}");
        }
    }
}
