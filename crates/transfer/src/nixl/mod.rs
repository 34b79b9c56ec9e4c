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
mod library;
mod pace;
mod writer;

pub(crate) use dial::{dial, receive};
pub(crate) use landing::Landing;
pub(crate) use writer::Writer;

use library::Library;
use std::error::Error;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the loader knows the library by.
pub const NIXL_LIBRARY: &str = "libnixl_capi.so";

/// UCX's choice of what carries bytes; the library's own variable.
const TLS_VARIABLE: &str = "UCX_TLS";

/// Ways within a host by which one process writes into another's memory with nobody of the other's taking part, also
/// after the other has closed everything: `cma` is a system call on a process's number.
const IRREVOCABLE: [&str; 7] = ["cma", "knem", "xpmem", "shm", "sm", "mm", "all"];

/// Ways that cannot tell that a peer has gone. The link's own connection does.
const BLIND: [&str; 3] = ["posix", "sysv", "self"];

/// NVIDIA's transfer library, loaded.
#[derive(Debug)]
pub struct Nixl {
    library: Arc<Library>,
    path: PathBuf,
    backend: Backend,
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
         name others, such as rc,ud,tcp or tcp,posix"
    )]
    Irrevocable(String, String),
}

/// How UCX is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Backend {
    parameters: [(&'static str, &'static str); 2],
}

impl Nixl {
    /// Loads the library from `path`, or else by the name that the loader knows.
    ///
    /// # Errors
    /// `Load` if that cannot be done, `Irrevocable` if the environment rules it out.
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
        Ok(Arc::new(Self {
            library,
            path: path.to_owned(),
            backend,
        }))
    }

    /// What it was loaded by.
    pub fn path(&self) -> &Path {
        &self.path
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
        // Within a host there are better links than these. The library leaves what the environment says as it is.
        let without_memory = ("engine_config", "TLS=^shm");
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
        let handling = if is_blind { "none" } else { "peer" };
        Ok(Self {
            parameters: [without_memory, ("ucx_error_handling_mode", handling)],
        })
    }
}

/// What a receiver tells of its ring: where it lies in its process, and what its agent is reached by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) start: u64,
    pub(crate) metadata: Vec<u8>,
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
