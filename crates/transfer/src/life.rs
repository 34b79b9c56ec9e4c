//! The process at the other end of a socket of this host, and its end.
//!
//! Owns: the descriptor that stands for a process, whatever becomes of its number. Never: signals it.
//! Invariant: a process that is said to have ended has given back all its descriptors, those of its devices too: the
//! kernel tells of the end of a process after it has closed them. So nothing is copied in its name any more.

use rustix::net::{RecvFlags, recv};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

/// See the module.
#[derive(Debug)]
pub(crate) struct PeerProcess {
    descriptor: AsyncFd<rustix::fd::OwnedFd>,
}

impl PeerProcess {
    /// Who is at the other end, now that it waits for an answer: it sends nothing meanwhile.
    pub(crate) fn of(stream: &UnixStream) -> io::Result<Self> {
        let number = stream.peer_cred()?.pid().and_then(Pid::from_raw);
        let hidden = || io::Error::other("the peer's process cannot be seen from here");
        let descriptor = pidfd_open(number.ok_or_else(hidden)?, PidfdFlags::NONBLOCK)?;
        // Had it ended before, the number could be another's by now, and the socket would be closed.
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

    /// Returns once it has ended.
    pub(crate) async fn ended(&self) {
        // It becomes readable then, and never otherwise; and what cannot be waited for is never said to be.
        if self.descriptor.readable().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
