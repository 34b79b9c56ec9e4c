//! Links between any two hosts: several TCP connections, plain or over TLS.
//!
//! Owns: the connections of such a link. Never: carries a payload on another path.

mod stream;

pub(crate) use stream::{TcpLinkStream, TcpReader, TcpWriter, accept, dial};
