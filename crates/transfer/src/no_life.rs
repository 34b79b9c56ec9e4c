//! Where processes of a host share no sockets: nobody is at their other end.

/// There is none.
#[derive(Debug)]
pub(crate) enum PeerProcess {}

impl PeerProcess {
    pub(crate) async fn ended(&self) {
        match *self {}
    }
}
