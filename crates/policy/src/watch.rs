//! Follows a policy's file.
//!
//! Owns: noticing that the file changed, and reading it. Never acts on its content. Invariant: an
//! invalid file changes nothing, and is reported once, not at every look.
//!
//! Bytes are compared, not times: a ConfigMap is a symlink to a folder that is swapped, and only
//! the content read through it counts.

use super::{PolicyError, PolicyFile, check, read};
use cleave_domain::SloPolicy;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::spawn_blocking;
use tracing::warn;
use twox_hash::XxHash3_64;

/// How often the file is read.
const PERIOD: Duration = Duration::from_secs(1);

/// The result of a look at the file.
#[derive(Debug)]
pub enum PolicyReload {
    /// It is another policy, with the digest of its bytes.
    Changed(Arc<SloPolicy>, String),
    /// The bytes changed, or a signal asked, and the policy is the same.
    Same(String),
    /// It is no valid policy; the previous one stays.
    Rejected(PolicyError),
    /// It cannot be read; the previous one stays.
    Unreadable(PolicyError),
}

/// The digest of bytes, for a metric's label.
pub(super) fn digest(bytes: &[u8]) -> String {
    format!("{:016x}", XxHash3_64::oneshot(bytes))
}

/// Follows the file of a policy that was read.
#[derive(Debug)]
pub struct PolicyWatcher {
    file: PolicyFile,
    last_read: LastPolicyRead,
}

/// The result of the last look.
#[derive(Debug, PartialEq)]
enum LastPolicyRead {
    Bytes(Vec<u8>),
    /// It could not be read, and that was reported.
    Unreadable,
    /// None: the result of the next look is reported in any case.
    ForceReport,
}

impl PolicyWatcher {
    /// A watcher that compares the file with what was read as `file`.
    pub fn new(file: PolicyFile) -> Self {
        let last_read = LastPolicyRead::Bytes(file.bytes.clone());
        Self { file, last_read }
    }

    /// Looks again and again, at once after SIGHUP, for as long as it is polled.
    pub async fn run(mut self, mut report: impl FnMut(PolicyReload)) {
        let mut hangup = signal(SignalKind::hangup())
            .inspect_err(|error| warn!(%error, "SIGHUP will not reload the policy"))
            .ok();
        loop {
            tokio::select! {
                () = tokio::time::sleep(PERIOD) => {}
                () = hangup_received(hangup.as_mut()) => self.last_read = LastPolicyRead::ForceReport,
            }
            let looked = spawn_blocking(move || {
                let reload = self.poll_file();
                (self, reload)
            });
            // Without a thread to look, the process is ending.
            let Ok((watch, reload)) = looked.await else {
                return;
            };
            self = watch;
            if let Some(reload) = reload {
                report(reload);
            }
        }
    }

    /// The change since the last look, if any.
    pub(super) fn poll_file(&mut self) -> Option<PolicyReload> {
        let path = &self.file.path;
        let bytes = match read(path) {
            Ok(bytes) => bytes,
            Err(_) if self.last_read == LastPolicyRead::Unreadable => return None,
            Err(error) => {
                self.last_read = LastPolicyRead::Unreadable;
                let error = PolicyError::Unreadable(path.clone(), error);
                return Some(PolicyReload::Unreadable(error));
            }
        };
        let found = LastPolicyRead::Bytes(bytes);
        if found == self.last_read {
            return None;
        }
        self.last_read = found;
        let LastPolicyRead::Bytes(bytes) = &self.last_read else {
            return None;
        };
        Some(match check(path, bytes) {
            Ok(policy) if policy == *self.file.policy => PolicyReload::Same(digest(bytes)),
            Ok(policy) => {
                self.file.policy = Arc::new(policy);
                PolicyReload::Changed(Arc::clone(&self.file.policy), digest(bytes))
            }
            Err(error) => PolicyReload::Rejected(error),
        })
    }
}

async fn hangup_received(signal: Option<&mut Signal>) {
    let received = match signal {
        Some(signal) => signal.recv().await,
        None => None,
    };
    if received.is_none() {
        std::future::pending::<()>().await;
    }
}
