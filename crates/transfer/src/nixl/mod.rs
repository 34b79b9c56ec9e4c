//! Between hosts: the sender's network card writes into a ring of slots at the receiver (RDMA), by NVIDIA's NIXL, which is
//! loaded where it is there.
//!
//! Control packets, credit and signs of life go over one TCP connection, as over the socket of a host. A frame's head goes
//! there too, when its write begins; the write itself carries a note behind its bytes, and the receiver takes the head
//! when it has the note. So whoever waits knows what for, and nobody asks the devices while nothing is under way. What is in
//! a slot is verified where it is used, as over shared memory.
//!
//! A sender on another host can be neither watched nor stopped. Therefore it never reaches a pool: it writes into its
//! link's ring, which no other link ever uses, and for which each link has an agent of its own. When the link ends the
//! agent does, and with it everything that could carry out a late write: the memory's registration at the card, and
//! whoever copies in the card's place. The ring is unmapped after that. So the receiver is a `Writer::Receiver` to its
//! brain, nothing waits for a `Severed` that nobody could say, and pools of any memory work alike.
//!
//! Owns: the library, the agents and their threads, and the handshake of such links. Never: registers a pool; writes
//! anything after its link has ended.
//! Invariant: an agent lives on one thread; its ring is mapped until it has ended; a slot is filled again only after both
//! ends are done with what was in it.

mod dial;
#[cfg(test)]
mod hostile;
mod landing;
mod leave;
mod library;
mod making;
mod metadata;
mod note;
mod pace;
mod writer;

pub(crate) use dial::{Means, dial, receive};
#[cfg(test)]
pub(crate) use landing::Awaited;
pub(crate) use landing::Landing;
pub(crate) use writer::Writer;

use crate::shared_memory::Shape;
use cleave_domain::WorkerRef;
use library::Library;
use making::Late;
use metadata::{Expected, MetadataError};
use std::error::Error;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// What the loader knows the library by.
pub const NIXL_LIBRARY: &str = "libnixl_capi.so";

/// UCX's choice of what carries bytes; the library's own variable.
const TLS_VARIABLE: &str = "UCX_TLS";
/// The network devices that UCX may use, of those that its ways are for.
const DEVICES_VARIABLE: &str = "UCX_NET_DEVICES";

/// The ways of UCX by which network cards write, whose memory keys they check. `self` reaches nobody else.
const BY_CARD: [&str; 21] = [
    "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "ud", "ud_v", "ud_x", "ud_verbs",
    "ud_mlx5", "dc", "dc_x", "dc_mlx5", "gga", "gga_mlx5", "srd", "ugni", "cuda", "self",
];

/// Ways within a host by which one process writes into another's memory with nobody of the other's taking part, also
/// after the other has closed everything: `cma` is a system call on a process's number.
const IRREVOCABLE: [&str; 7] = ["cma", "knem", "xpmem", "shm", "sm", "mm", "all"];

/// Ways that cannot tell that a peer has gone. The link's own connection does.
const BLIND: [&str; 3] = ["posix", "sysv", "self"];

/// How long the first agent may take to open every device of this host.
const TRIED_MAX: Duration = Duration::from_secs(30);

/// NVIDIA's transfer library, loaded.
#[derive(Debug)]
pub struct Nixl {
    library: Arc<Library>,
    path: PathBuf,
    backend: Backend,
    late: Arc<Late>,
}

/// Why links cannot go over NIXL.
#[derive(Debug, thiserror::Error)]
pub enum NixlError {
    /// There is no such library, or another one.
    #[error("cannot load {}: {reason}", .path.display())]
    Load {
        /// Which one was to be loaded.
        path: PathBuf,
        /// The loader's words.
        reason: String,
    },
    /// The environment asks for ways whose writes could not be stopped.
    #[error(
        "{TLS_VARIABLE}={0} lets a peer write into this process after its link has ended, by \"{1}\": leave it unset, or \
         name others, such as rc,ud"
    )]
    Irrevocable(String, String),
    /// There is nothing that it could go over.
    #[error("{}: UCX cannot use {ways} on this host: {reason}", .path.display())]
    NoWay {
        /// Which library.
        path: PathBuf,
        /// What it may go over.
        ways: String,
        /// The library's words.
        reason: String,
    },
}

/// How UCX is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Backend {
    parameters: [(&'static str, &'static str); 2],
    /// Whether nothing but network cards is gone over.
    is_by_card: bool,
    /// What is gone over, for whoever reads the log.
    ways: String,
}

impl Nixl {
    /// Loads the library from `path`, or else by the name that the loader knows, and tries whether it finds anything to
    /// go over. That takes a second.
    ///
    /// # Errors
    /// `Load` if there is none, `Irrevocable` if the environment rules it out, `NoWay` if this host has no network card
    /// for it.
    pub fn load(path: Option<&Path>) -> Result<Arc<Self>, NixlError> {
        let path = path.unwrap_or(Path::new(NIXL_LIBRARY));
        let backend = Backend::of(std::env::var_os(TLS_VARIABLE).as_deref())?;
        let library = Library::load(path.as_os_str()).map_err(|error| NixlError::Load {
            path: path.to_owned(),
            // The loader's own words are behind the call's name.
            reason: error
                .source()
                .map_or(error.to_string(), |cause| cause.to_string()),
        })?;
        let nixl = Arc::new(Self {
            library,
            path: path.to_owned(),
            backend,
            late: Arc::default(),
        });
        let tried = landing::try_out(&nixl, TRIED_MAX);
        leave::before_the_end();
        tried.map_err(|reason| NixlError::NoWay {
            path: path.to_owned(),
            ways: nixl.backend.ways.clone(),
            reason,
        })?;
        if !nixl.is_by_card() && std::env::var_os(DEVICES_VARIABLE).is_none() {
            let ways = &nixl.backend.ways;
            warn!(
                %ways,
                "NIXL: what is not done by network cards trusts whoever reaches its ports, on every interface of this \
                 host: name one in {DEVICES_VARIABLE}"
            );
        }
        Ok(nixl)
    }

    /// What it was loaded by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether network cards write, and nobody in their place: only that is better than TCP.
    pub fn is_by_card(&self) -> bool {
        self.backend.is_by_card
    }
}

impl Backend {
    /// What goes with the ways that the environment names.
    fn of(tls: Option<&OsStr>) -> Result<Self, NixlError> {
        let tls = tls.map(OsStr::to_string_lossy).unwrap_or_default();
        let (names, is_negated) = match tls.strip_prefix('^') {
            Some(names) => (names, true),
            None => (&*tls, false),
        };
        // A backslash asks for just this way, and what follows a colon is for which of its uses.
        let names = names.split(',').map(|name| name.trim_start_matches('\\'));
        let names = names.filter_map(|name| name.split(':').next());
        let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
        let irrevocable = match is_negated {
            // `shm` is the name of them all.
            true => (!names.contains(&"shm") && !names.contains(&"sm")).then_some("shm"),
            false => names
                .iter()
                .copied()
                .find(|name| IRREVOCABLE.contains(name)),
        };
        if let Some(way) = irrevocable {
            return Err(NixlError::Irrevocable(tls.to_string(), way.to_owned()));
        }
        let is_blind =
            !names.is_empty() && !is_negated && names.iter().all(|name| BLIND.contains(name));
        let is_by_card = match is_negated {
            true => names.contains(&"tcp"),
            false => names.iter().all(|name| BY_CARD.contains(name)),
        };
        let ways = match names.is_empty() {
            true => format!("network cards ({TLS_VARIABLE} is not set)"),
            false => format!("{TLS_VARIABLE}={tls}"),
        };
        Ok(Self {
            parameters: [
                // The library leaves what the environment says as it is. By `ib` every kind of network card is meant, and
                // nothing else: what carries bytes over TCP writes wherever whoever reaches its port says. What fails is
                // told by its status: a peer's end is no news for everybody who reads what this process prints.
                ("engine_config", "TLS=ib,LOG_LEVEL=fatal"),
                (
                    "ucx_error_handling_mode",
                    if is_blind { "none" } else { "peer" },
                ),
            ],
            is_by_card,
            ways,
        })
    }
}

/// What a receiver tells of its ring: where it lies in its process, and what its agent is reached by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) start: u64,
    pub(crate) metadata: Vec<u8>,
}

impl Offer {
    /// Whether it is the ring that was agreed, of the agent that was; only then the library may see it.
    fn check(&self, agent: &str, shape: Shape) -> Result<(), MetadataError> {
        let memory = (self.start, shape.bytes());
        metadata::check(&self.metadata, Expected { agent, memory })
    }
}

/// The agents of a link, by its key: no two that one process hears of have one name, because it may have links to several
/// lives of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Names {
    sender: String,
    receiver: String,
}

impl Names {
    fn of((from, to): (WorkerRef, WorkerRef), key: u64) -> Self {
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
        let backend = Backend::of(tls).map_err(|error| error.to_string())?;
        Ok(backend.parameters[1].1)
    }

    #[test]
    fn lesson_02_a_way_that_writes_after_the_end_of_its_link_is_not_taken() {
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
    fn a_library_that_is_not_there_is_told_by_its_name() {
        let error = Nixl::load(Some(Path::new("/nowhere/libnixl.so"))).unwrap_err();
        assert!(error.to_string().contains("/nowhere/libnixl.so"), "{error}");
    }

    /// The C library is one, and has none of these functions.
    #[test]
    fn another_library_is_told_from_it() {
        let error = Nixl::load(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(error.to_string().contains("nixl_capi_"), "{error}");
    }
}
