//! Rules of the repository: code, documents and dependencies. None of them starts a server.
//!
//! Owns: the list of its tests. Never: links a client or an engine, so that it is built soon.

mod docs;
mod root;
mod supply;
mod tidy;

use root::root;
