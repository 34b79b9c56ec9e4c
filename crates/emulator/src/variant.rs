//! How kernels are compiled: plain, or with a sanitizer.
//!
//! Owns: the flags of each, and how a test program is told which it was started for.
//! Never: starts anything.

/// How kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Variant {
    /// Optimised.
    Plain,
    /// With the address and undefined-behaviour sanitizers.
    Address,
    /// With the thread sanitizer: each of a block's threads is one.
    Thread,
}

impl Variant {
    /// What `CLEAVE_STANDIN_VARIANT` names (`plain`, `address`, `thread`), for test programs that are started with a
    /// sanitizer's runtime as a whole; plain if it is not set.
    ///
    /// # Panics
    /// If it is something else.
    pub fn of_environment() -> Variant {
        let all = [Variant::Plain, Variant::Address, Variant::Thread];
        let Ok(name) = std::env::var("CLEAVE_STANDIN_VARIANT") else {
            return Variant::Plain;
        };
        let named = all.into_iter().find(|variant| variant.name() == name);
        named.unwrap_or_else(|| {
            panic!("CLEAVE_STANDIN_VARIANT={name} is none of plain, address, thread")
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Variant::Plain => "plain",
            Variant::Address => "address",
            Variant::Thread => "thread",
        }
    }

    pub(crate) fn kernel_flags(self) -> &'static [&'static str] {
        match self {
            Variant::Plain => &["-O2", "-g1", "-fno-exceptions"],
            Variant::Address => &[
                "-O1",
                "-g",
                "-fno-exceptions",
                "-fno-omit-frame-pointer",
                "-fsanitize=address,undefined",
                "-fno-sanitize-recover=all",
            ],
            Variant::Thread => &[
                "-O1",
                "-g",
                "-fno-exceptions",
                "-fno-omit-frame-pointer",
                "-fsanitize=thread",
            ],
        }
    }

    /// What a source of ours is told if it asks: the few that do speak with the sanitizer, and none is sanitized.
    pub(crate) fn define(self) -> Option<&'static str> {
        match self {
            Variant::Plain => None,
            Variant::Address => Some("EMULATOR_ADDRESS"),
            Variant::Thread => Some("EMULATOR_THREAD"),
        }
    }

    pub(crate) fn link_flags(self) -> &'static [&'static str] {
        match self {
            Variant::Plain => &[],
            Variant::Address => &["-fsanitize=address,undefined"],
            Variant::Thread => &["-fsanitize=thread"],
        }
    }

    /// The sanitizer's library that must be loaded before a program's own.
    pub(crate) fn runtime(self) -> Option<&'static str> {
        match self {
            Variant::Plain => None,
            Variant::Address => Some("libasan.so"),
            Variant::Thread => Some("libtsan.so"),
        }
    }
}
