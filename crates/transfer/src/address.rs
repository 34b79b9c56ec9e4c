//! Where a worker can be reached, as one text that routers pass on without reading it.
//!
//! Owns: that text, both ways. Never: resolves a name, or tries whether anybody is there.
//! Invariant: what is written is read back as it was.
//!
//! `tcp://HOST:PORT` and `shm://HOST_ID/NAME`, with commas; a bare `HOST:PORT` is TCP. `nixl://tcp` beside them says that
//! links over NIXL are made at the TCP address too. Parts of other schemes belong to other releases and are passed over.

use std::fmt;

/// How to reach a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// It is in this process, on the same [`crate::LocalNet`].
    Local,
    /// At these addresses; the best that works is taken.
    Remote(Addresses),
}

/// Where a worker listens, for each transport it has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// `host:port` of its TCP listener.
    pub tcp: Option<String>,
    /// Its listener for processes of the same host.
    pub shared_memory: Option<HostAddress>,
    /// Whether links over NIXL are made at the TCP address.
    pub nixl: bool,
}

/// A listener that only processes of one host can reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAddress {
    /// Which host, in which boot of it: others need not try.
    pub host_id: String,
    /// The name of the socket there.
    pub name: String,
}

/// A text that names no way to reach a worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "data address \"{0}\" names no transport that this release has: expected tcp://HOST:PORT, \
     shm://HOST_ID/NAME, or both with a comma"
)]
pub struct AddressError(String);

impl Route {
    /// Reads what a worker announced; nothing at all means that it is in this process.
    ///
    /// # Errors
    /// If there is something, but no transport of this release.
    pub fn parse(announced: &str) -> Result<Self, AddressError> {
        match announced.is_empty() {
            true => Ok(Self::Local),
            false => Addresses::parse(announced).map(Self::Remote),
        }
    }

    /// Over TCP alone.
    pub fn tcp(address: impl Into<String>) -> Self {
        Self::Remote(Addresses {
            tcp: Some(address.into()),
            ..Addresses::default()
        })
    }
}

impl Addresses {
    /// Reads what [`fmt::Display`] wrote.
    ///
    /// # Errors
    /// If no part of it is a transport of this release.
    pub fn parse(announced: &str) -> Result<Self, AddressError> {
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
            (None, None) => Err(AddressError(announced.to_owned())),
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

impl fmt::Display for Addresses {
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
    fn an_address_comes_back_and_strange_parts_are_passed_over() {
        let addresses = Addresses {
            tcp: Some("[::1]:70".into()),
            shared_memory: Some(HostAddress {
                host_id: "a-b".into(),
                name: "cleave/1".into(),
            }),
            nixl: true,
        };
        let text = addresses.to_string();
        assert_eq!(text, "tcp://[::1]:70,shm://a-b/cleave/1,nixl://tcp");
        assert_eq!(Addresses::parse(&text).unwrap(), addresses);
        let newer = format!("rdma://x/y,{text}");
        assert_eq!(Addresses::parse(&newer).unwrap(), addresses);
    }

    #[test]
    fn an_address_of_an_earlier_release_is_tcp() {
        assert_eq!(Route::parse("h:7"), Ok(Route::tcp("h:7")));
        assert_eq!(Route::parse(""), Ok(Route::Local));
    }

    #[test]
    fn an_address_without_a_known_transport_is_an_error_that_shows_it() {
        for bad in ["rdma://x", ",", "shm://nothing", "nixl://tcp"] {
            let error = Route::parse(bad).unwrap_err().to_string();
            assert!(error.contains(bad), "{error}");
        }
    }
}
