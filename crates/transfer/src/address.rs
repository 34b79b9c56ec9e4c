//! The data address of a worker, as one text that routers forward without parsing it.
//!
//! Owns: that text, both ways. Never: resolves a name, or connects.
//! Invariant: a written address parses to the same value.
//!
//! The form is `tcp://HOST:PORT` and `shm://HOST_ID/NAME`, separated by commas; a bare `HOST:PORT`
//! is TCP. `nixl://tcp` beside them announces that links over NIXL are made at the TCP address too.
//! Parts with other schemes belong to other releases and are ignored.

use std::fmt;

/// The route to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerRoute {
    /// The peer is in this process, on the same [`crate::LocalNet`].
    Local,
    /// At these addresses; the preferred transport that works is used.
    Remote(DataAddresses),
}

/// The addresses at which a worker listens, for each of its transports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataAddresses {
    /// `host:port` of its TCP listener.
    pub tcp: Option<String>,
    /// Its listener for processes of the same host.
    pub shared_memory: Option<HostAddress>,
    /// Whether links over NIXL are made at the TCP address.
    pub nixl: bool,
}

/// The address of a listener that only processes of one host can reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAddress {
    /// The host and its boot; processes of other hosts do not try the address.
    pub host_id: String,
    /// The name of the socket on that host.
    pub name: String,
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
        Self::Remote(DataAddresses {
            tcp: Some(address.into()),
            ..DataAddresses::default()
        })
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
                None if !part.is_empty() => addresses.tcp = Some(part.to_owned()),
                Some(("tcp", address)) => addresses.tcp = Some(address.to_owned()),
                Some(("shm", address)) => addresses.shared_memory = HostAddress::parse(address),
                Some(("nixl", _)) => addresses.nixl = true,
                _ => {}
            }
        }
        match (&addresses.tcp, &addresses.shared_memory) {
            (None, None) => Err(DataAddressError(announced.to_owned())),
            _ => Ok(addresses),
        }
    }
}

impl HostAddress {
    fn parse(address: &str) -> Option<Self> {
        let (host_id, name) = address.split_once('/')?;
        Some(Self {
            host_id: host_id.to_owned(),
            name: name.to_owned(),
        })
    }
}

impl fmt::Display for DataAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tcp = self.tcp.iter().map(|address| format!("tcp://{address}"));
        let host = self.shared_memory.iter();
        let host = host.map(|HostAddress { host_id, name }| format!("shm://{host_id}/{name}"));
        let nixl = self.nixl.then(|| "nixl://tcp".to_owned());
        let parts: Vec<_> = tcp.chain(host).chain(nixl).collect();
        f.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip_and_unknown_schemes_are_ignored() {
        let addresses = DataAddresses {
            tcp: Some("[::1]:70".into()),
            shared_memory: Some(HostAddress {
                host_id: "a-b".into(),
                name: "cleave/1".into(),
            }),
            nixl: true,
        };
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
