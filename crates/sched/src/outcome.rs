//! Outcomes of copies between the pool and the places below it: host memory and the offload file.
//!
//! Owns: the answers, and whether a content is to blame. Never: an error for a client: what did not come is
//! computed.

use serde::{Deserialize, Serialize};

/// See [`crate::Input::SwappedOut`] and [`crate::Input::SwappedIn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SwapOutcome {
    /// Every block was copied.
    Copied,
    /// Dropped before that.
    Dropped,
    /// The engine could not read or write one, or host memory ran out.
    Broken,
}

/// See [`crate::Input::Shelved`] and [`crate::Input::WrittenOn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KeepOutcome {
    /// It is kept there.
    Copied,
    /// It could not be read or written.
    Broken,
}

/// See [`crate::Input::Fetched`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FetchOutcome {
    /// All of it came.
    Copied,
    /// It was to stop.
    Stopped,
    /// The next one is not kept.
    Missing,
    /// The next one is not what was kept, or is another content.
    Corrupt,
    /// The disk could not read the next one.
    Unreadable,
    /// The engine could not write the next one.
    Broken,
}

impl FetchOutcome {
    /// Whether the next content would fail again.
    pub(crate) fn is_contents_fault(self) -> bool {
        match self {
            Self::Missing | Self::Corrupt | Self::Unreadable => true,
            Self::Copied | Self::Stopped | Self::Broken => false,
        }
    }
}
