//! Watches the process at the other end of a socket of this host for its end.
//!
//! Owns: the pidfd, which identifies a process even after its number is reused. Never: signals the
//! process.
//! Invariant: a process that is reported as ended has closed all its descriptors, those of its
//! devices too, because the kernel reports the end of a process after closing them. So nothing is
//! copied in its name any more.

use rustix::net::{RecvFlags, recv};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

/// A process of this host that is watched for its end.
#[derive(Debug)]
pub(crate) struct PeerProcess {
    descriptor: AsyncFd<rustix::fd::OwnedFd>,
}

impl PeerProcess {
    /// Watches the process at the other end of the socket. The peer must be waiting for an answer,
    /// so that it sends nothing meanwhile.
    pub(crate) fn of(stream: &UnixStream) -> io::Result<Self> {
        let number = stream.peer_cred()?.pid().and_then(Pid::from_raw);
        let hidden = || io::Error::other("the peer's process cannot be seen from here");
        let descriptor = pidfd_open(number.ok_or_else(hidden)?, PidfdFlags::NONBLOCK)?;
        // If the process had ended before, its number could belong to another process now; but then
        // the socket would be closed.
        let mut byte = [0];
        match recv(stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Err(rustix::io::Errno::AGAIN) => {}
            Ok(_) => return Err(io::Error::other("the peer's process has ended")),
            Err(error) => return Err(error.into()),
        }
        #[expect(
            deprecated,
            reason = "what would be unsound is a value that closes its descriptor early; this one owns it"
        )]
        let descriptor = AsyncFd::new(descriptor)?;
        Ok(Self { descriptor })
    }

    /// Returns once the process has ended.
    pub(crate) async fn wait_ended(&self) {
        // The pidfd becomes readable only at the end of the process. If it cannot be watched, no
        // end is ever reported.
        if self.descriptor.readable().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
