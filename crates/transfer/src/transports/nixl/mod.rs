//! Links between hosts over RDMA: the sender's network card writes into a ring of slots at the
//! receiver, through NVIDIA's NIXL, which is loaded if it is installed.
//!
//! Control packets, credit and heartbeats use one TCP connection, as they use the socket between
//! processes of one host. The head of a frame is sent there when its write begins; the write itself
//! carries a note behind its bytes, and the receiver delivers the head once the note has arrived.
//! So the receiver always knows which writes it waits for, and no thread polls the devices while
//! nothing is in flight. The bytes of a slot are verified at their destination, as over shared
//! memory.
//!
//! A sender on another host can be neither observed nor stopped. Therefore it never gets access to
//! a pool: it writes into the ring of its link, which no other link ever uses, and each link has an
//! agent of its own. When the link ends its agent ends, and with it everything that could carry out
//! a late write: the registration of the memory at the card, and threads that copy in place of the
//! card. The ring is unmapped after that. So the receiver is a `PoolWriter::Receiver` to its brain,
//! no block waits for a `Fenced` that could never be reported, and pools of any memory work
//! alike.
//!
//! Owns: the library, the agents and their threads, and the handshake of such links. Never:
//! registers a pool; writes anything after its link has ended.
//! Invariant: an agent lives on one thread; its ring stays mapped until the agent has ended; a slot
//! is filled again only after both ends have finished with its bytes.

mod agent_creation;
mod dial;
#[cfg(test)]
mod hostile;
mod library;
mod metadata;
mod note;
mod pending_writes;
mod poll_pace;
mod process_exit;
mod receiver;
mod transport;
mod writer;

pub(crate) use pending_writes::{PendingWrites, receive_ahead};
pub(crate) use transport::NixlTransport;
pub(crate) use writer::RdmaWriter;

use crate::socket::LinkError;
use crate::transports::Transport;
use crate::transports::shm::RingShape;
use agent_creation::AgentCreations;
use cleave_domain::WorkerRef;
use dial::{dial, receive};
use library::NixlLibrary;
use metadata::{AgentMetadataError, ExpectedMetadata};
use receiver::RdmaReceiver;
use std::error::Error;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// The name by which the loader finds the library.
pub const NIXL_LIBRARY: &str = "libnixl_capi.so";

/// The environment variable with which UCX selects transports.
const TLS_VARIABLE: &str = "UCX_TLS";
/// The environment variable with the network devices that UCX may use.
const DEVICES_VARIABLE: &str = "UCX_NET_DEVICES";

/// UCX transports with which network cards write, and whose memory keys the cards check. `self`
/// reaches no other process.
const NETWORK_CARD_TRANSPORTS: [&str; 21] = [
    "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "ud", "ud_v", "ud_x", "ud_verbs",
    "ud_mlx5", "dc", "dc_x", "dc_mlx5", "gga", "gga_mlx5", "srd", "ugni", "cuda", "self",
];

/// UCX transports within a host with which one process writes into another's memory without the
/// other taking part, even after the other has closed everything: `cma` is a system call on a
/// process id.
const UNFENCEABLE_TRANSPORTS: [&str; 7] = ["cma", "knem", "xpmem", "shm", "sm", "mm", "all"];

/// UCX transports that cannot report a lost peer. The TCP connection of the link reports it.
const TRANSPORTS_WITHOUT_PEER_ERRORS: [&str; 3] = ["posix", "sysv", "self"];

/// The time limit for creating the first agent, which opens every device of this host.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// The loaded NIXL library.
#[derive(Debug)]
pub struct Nixl {
    library: Arc<NixlLibrary>,
    path: PathBuf,
    backend: UcxBackend,
    agent_creations: Arc<AgentCreations>,
}

/// The reason for which links cannot use NIXL.
#[derive(Debug, thiserror::Error)]
pub enum NixlError {
    /// The library does not exist, or is another library.
    #[error("cannot load {}: {reason}", .path.display())]
    Load {
        /// The path that was to be loaded.
        path: PathBuf,
        /// The error of the loader.
        reason: String,
    },
    /// The environment selects transports whose writes could not be stopped after the end of a
    /// link.
    #[error(
        "{TLS_VARIABLE}={0} lets a peer write into this process after its link has ended, by \"{1}\": leave it unset, or \
         name others, such as rc,ud"
    )]
    CannotFence(String, String),
    /// UCX can use none of the allowed transports on this host.
    #[error("{}: UCX cannot use {transports} on this host: {reason}", .path.display())]
    NoUsableTransport {
        /// The path of the library.
        path: PathBuf,
        /// The allowed transports, by their names in UCX.
        transports: String,
        /// The error of the library.
        reason: String,
    },
}

/// The configuration of UCX.
#[derive(Clone, Debug, PartialEq, Eq)]
struct UcxBackend {
    parameters: [(&'static str, &'static str); 2],
    /// Whether only network cards carry the bytes.
    is_network_card: bool,
    /// The allowed transports, for logs.
    transports: String,
}

impl Nixl {
    /// Loads the library from `path`, or else by the name that the loader knows, and probes whether
    /// it can use any transport. The probe takes about a second.
    ///
    /// # Errors
    /// `Load` if the library cannot be loaded, `CannotFence` if the environment rules it out,
    /// `NoUsableTransport` if UCX can use none of the allowed transports here.
    pub fn load(path: Option<&Path>) -> Result<Arc<Self>, NixlError> {
        let path = path.unwrap_or(Path::new(NIXL_LIBRARY));
        let backend = UcxBackend::of(std::env::var_os(TLS_VARIABLE).as_deref())?;
        let library = NixlLibrary::load(path.as_os_str()).map_err(|error| NixlError::Load {
            path: path.to_owned(),
            // The text of the loader is the source of the error.
            reason: error
                .source()
                .map_or(error.to_string(), |cause| cause.to_string()),
        })?;
        let nixl = Arc::new(Self {
            library,
            path: path.to_owned(),
            backend,
            agent_creations: Arc::default(),
        });
        let tried = receiver::probe(&nixl, PROBE_TIMEOUT);
        process_exit::register_exit_hook();
        tried.map_err(|reason| NixlError::NoUsableTransport {
            path: path.to_owned(),
            transports: nixl.backend.transports.clone(),
            reason,
        })?;
        if !nixl.uses_network_card() && std::env::var_os(DEVICES_VARIABLE).is_none() {
            let transports = &nixl.backend.transports;
            warn!(
                ways = %transports,
                "NIXL: transports other than network cards accept every client that reaches their ports, on every \
                 interface of this host: name one interface in {DEVICES_VARIABLE}"
            );
        }
        Ok(nixl)
    }

    /// The path that the library was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether only network cards carry the bytes: only then NIXL is preferred to TCP.
    pub fn uses_network_card(&self) -> bool {
        self.backend.is_network_card
    }
}

impl UcxBackend {
    /// The configuration for the transports that the environment names.
    fn of(tls: Option<&OsStr>) -> Result<Self, NixlError> {
        let tls = tls.map(OsStr::to_string_lossy).unwrap_or_default();
        let (names, is_negated) = match tls.strip_prefix('^') {
            Some(names) => (names, true),
            None => (&*tls, false),
        };
        // A backslash selects exactly this transport; the text after a colon limits its use.
        let names = names.split(',').map(|name| name.trim_start_matches('\\'));
        let names = names.filter_map(|name| name.split(':').next());
        let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
        let irrevocable = if is_negated {
            // `shm` names all transports within a host.
            (!names.contains(&"shm") && !names.contains(&"sm")).then_some("shm")
        } else {
            names
                .iter()
                .copied()
                .find(|name| UNFENCEABLE_TRANSPORTS.contains(name))
        };
        if let Some(unfenceable) = irrevocable {
            return Err(NixlError::CannotFence(
                tls.to_string(),
                unfenceable.to_owned(),
            ));
        }
        let is_blind = !names.is_empty()
            && !is_negated
            && names
                .iter()
                .all(|name| TRANSPORTS_WITHOUT_PEER_ERRORS.contains(name));
        let is_by_card = if is_negated {
            names.contains(&"tcp")
        } else {
            names
                .iter()
                .all(|name| NETWORK_CARD_TRANSPORTS.contains(name))
        };
        let transports = if names.is_empty() {
            format!("network cards ({TLS_VARIABLE} is not set)")
        } else {
            format!("{TLS_VARIABLE}={tls}")
        };
        Ok(Self {
            parameters: [
                // The library does not override the environment. `ib` selects every kind of network
                // card and nothing else: a transport over TCP would write wherever any client of
                // its port says. Failures are reported by status codes; with a lower log level UCX
                // would also print every lost peer.
                ("engine_config", "TLS=ib,LOG_LEVEL=fatal"),
                (
                    "ucx_error_handling_mode",
                    if is_blind { "none" } else { "peer" },
                ),
            ],
            is_network_card: is_by_card,
            transports,
        })
    }
}

fn failure(reason: String) -> LinkError {
    LinkError::Transport(Transport::Nixl, reason)
}

/// A ring offered by a receiver: its address in the receiver's process, and the metadata of the
/// receiver's agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RingOffer {
    pub(crate) start: u64,
    pub(crate) metadata: Vec<u8>,
}

impl RingOffer {
    /// Checks that the offer is the agreed ring of the agreed agent; the library may read it only
    /// then.
    fn check(&self, agent: &str, shape: RingShape) -> Result<(), AgentMetadataError> {
        let memory = (self.start, shape.bytes());
        metadata::check(&self.metadata, ExpectedMetadata { agent, memory })
    }
}

/// The agent names of a link. The key makes them unique within a process, which may have links to
/// several incarnations of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AgentNames {
    sender: String,
    receiver: String,
}

impl AgentNames {
    fn of(from: WorkerRef, to: WorkerRef, key: u64) -> Self {
        Self {
            sender: format!("cleave-{from}-to-{to}-{key}"),
            receiver: format!("cleave-{to}-from-{from}-{key}"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn handling(tls: &str) -> Result<&'static str, String> {
        let tls = (!tls.is_empty()).then_some(OsStr::new(tls));
        let backend = UcxBackend::of(tls).map_err(|error| error.to_string())?;
        Ok(backend.parameters[1].1)
    }

    // Lesson: 2.
    #[test]
    fn transports_that_cannot_be_fenced_are_refused() {
        for bad in [
            "all",
            "shm",
            "tcp,cma",
            "sm",
            "^tcp",
            "tcp,xpmem,posix",
            "tcp,\\cma",
            "cma:aux,tcp",
            "^cma",
        ] {
            let error = handling(bad).unwrap_err();
            assert!(error.contains(bad), "{error}");
        }
        for good in ["", "tcp", "rc,ud,tcp", "^shm", "tcp,posix", "rc_x,self"] {
            assert_eq!(handling(good), Ok("peer"), "{good}");
        }
        for blind in ["posix", "posix,self", "sysv"] {
            assert_eq!(handling(blind), Ok("none"), "{blind}");
        }
    }

    #[test]
    fn a_missing_library_is_an_error_with_its_path() {
        let error = Nixl::load(Some(Path::new("/nowhere/libnixl.so"))).unwrap_err();
        assert!(error.to_string().contains("/nowhere/libnixl.so"), "{error}");
    }

    /// The C library has none of these functions.
    #[test]
    fn a_library_without_nixl_functions_is_an_error() {
        let error = Nixl::load(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(error.to_string().contains("nixl_capi_"), "{error}");
    }
}
