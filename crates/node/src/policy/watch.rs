//! A policy's file while it changes.
//!
//! Owns: noticing that the file says something else, and reading it. Never: acts on what it says.
//! Invariant: a file that is no policy changes nothing, and is told once, not at every look.
//!
//! The bytes are compared, not the times: a ConfigMap is a link to a folder that is swapped, and what
//! matters is what is read through it.

use super::{PolicyError, PolicyFile, check, read};
use cleave_domain::SloPolicy;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::spawn_blocking;
use tracing::warn;

/// How often a file is looked at.
const PERIOD: Duration = Duration::from_secs(1);

/// What a look at the file brought.
#[derive(Debug)]
pub(crate) enum Reload {
    /// It is another policy, of bytes with that digest.
    Changed(Arc<SloPolicy>, String),
    /// The text changed, or a signal asked, and it says the same.
    Same(String),
    /// It is no policy; the one before stays.
    Rejected(PolicyError),
    /// It cannot be read; the one before stays.
    Unreadable(PolicyError),
}

/// Names bytes in a metric's label.
pub(super) fn digest(bytes: &[u8]) -> String {
    format!("{:016x}", cleave_transfer::checksum(bytes))
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Watch {
    file: PolicyFile,
    seen: Seen,
}

/// What the last look found.
#[derive(Debug, PartialEq)]
enum Seen {
    Bytes(Vec<u8>),
    /// It could not be read, and that was told.
    Unreadable,
    /// Whatever the next look finds is told.
    Nothing,
}

impl Watch {
    pub(crate) fn new(file: PolicyFile) -> Self {
        let seen = Seen::Bytes(file.bytes.clone());
        Self { file, seen }
    }

    /// Looks again and again, at once after SIGHUP, for as long as it is polled.
    pub(crate) async fn run(mut self, mut tell: impl FnMut(Reload)) {
        let mut hangup = signal(SignalKind::hangup())
            .inspect_err(|error| warn!(%error, "SIGHUP will not reload the policy"))
            .ok();
        loop {
            tokio::select! {
                () = tokio::time::sleep(PERIOD) => {}
                () = hung_up(hangup.as_mut()) => self.seen = Seen::Nothing,
            }
            let looked = spawn_blocking(move || {
                let reload = self.look();
                (self, reload)
            });
            // Without a thread to look, the process is ending.
            let Ok((watch, reload)) = looked.await else {
                return;
            };
            self = watch;
            if let Some(reload) = reload {
                tell(reload);
            }
        }
    }

    /// What is new since the last look.
    pub(crate) fn look(&mut self) -> Option<Reload> {
        let path = &self.file.path;
        let bytes = match read(path) {
            Ok(bytes) => bytes,
            Err(_) if self.seen == Seen::Unreadable => return None,
            Err(error) => {
                self.seen = Seen::Unreadable;
                let error = PolicyError::Unreadable(path.clone(), error);
                return Some(Reload::Unreadable(error));
            }
        };
        let found = Seen::Bytes(bytes);
        if found == self.seen {
            return None;
        }
        self.seen = found;
        let Seen::Bytes(bytes) = &self.seen else {
            return None;
        };
        Some(match check(path, bytes) {
            Ok(policy) if policy == *self.file.policy => Reload::Same(digest(bytes)),
            Ok(policy) => {
                self.file.policy = Arc::new(policy);
                Reload::Changed(Arc::clone(&self.file.policy), digest(bytes))
            }
            Err(error) => Reload::Rejected(error),
        })
    }
}

async fn hung_up(signal: Option<&mut Signal>) {
    let heard = match signal {
        Some(signal) => signal.recv().await,
        None => None,
    };
    if heard.is_none() {
        std::future::pending::<()>().await;
    }
}
