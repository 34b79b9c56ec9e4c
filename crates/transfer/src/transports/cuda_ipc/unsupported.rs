//! The stand-in on systems without sockets between processes of one host: no link can become one
//! from device to device.

use super::{DialChoice, DialFuture, LinkTransport, shm};
use crate::address::PeerRoute;
use crate::config::LinksConfig;
use crate::outgoing::OutboundLink;

/// The transport from device to device, which leads to no peer.
pub(crate) struct CudaIpcTransport;

impl LinkTransport for CudaIpcTransport {
    fn dial_choice<'a>(&self, _config: &LinksConfig, _route: &'a PeerRoute) -> DialChoice<'a> {
        DialChoice::Unusable
    }

    fn dial<'a>(&'a self, link: OutboundLink<'a>, address: &'a str) -> DialFuture<'a> {
        shm::SharedMemoryTransport.dial(link, address)
    }
}

/// Cannot exist on this system.
#[derive(Debug)]
pub(crate) enum PeerProcess {}

impl PeerProcess {
    pub(crate) async fn wait_ended(&self) {
        match *self {}
    }
}
