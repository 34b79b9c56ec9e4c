//! How kernels are compiled: plain, or with a sanitizer.
//!
//! Owns: the flags of each variant, and the environment variable that names it to a test program.
//! Never: starts a program.

/// How kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SanitizerVariant {
    Plain,
    /// With the address and undefined-behaviour sanitizers.
    Address,
    /// With the thread sanitizer: each thread of a block is a thread to it.
    Thread,
}

impl SanitizerVariant {
    /// The variant that `CLEAVE_STANDIN_VARIANT` names (`plain`, `address`, `thread`), for test
    /// programs that start with a sanitizer's runtime; plain if it is not set.
    ///
    /// # Panics
    /// If it names no variant.
    pub fn from_environment() -> SanitizerVariant {
        let all = [
            SanitizerVariant::Plain,
            SanitizerVariant::Address,
            SanitizerVariant::Thread,
        ];
        let Ok(name) = std::env::var("CLEAVE_STANDIN_VARIANT") else {
            return SanitizerVariant::Plain;
        };
        let named = all.into_iter().find(|variant| variant.name() == name);
        named.unwrap_or_else(|| {
            panic!("CLEAVE_STANDIN_VARIANT={name} is none of plain, address, thread")
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            SanitizerVariant::Plain => "plain",
            SanitizerVariant::Address => "address",
            SanitizerVariant::Thread => "thread",
        }
    }

    pub(crate) fn kernel_flags(self) -> &'static [&'static str] {
        match self {
            SanitizerVariant::Plain => &["-O2", "-g1", "-fno-exceptions"],
            SanitizerVariant::Address => &[
                "-O0",
                "-g1",
                "-fno-exceptions",
                "-fno-omit-frame-pointer",
                "-fsanitize=address,undefined",
                "-fno-sanitize-recover=all",
            ],
            SanitizerVariant::Thread => &[
                "-O0",
                "-g1",
                "-fno-exceptions",
                "-fno-omit-frame-pointer",
                "-fsanitize=thread",
            ],
        }
    }

    /// Macro for those of our own sources that call the sanitizer's interface; none of them is
    /// compiled with the sanitizer.
    pub(crate) fn define(self) -> Option<&'static str> {
        match self {
            SanitizerVariant::Plain => None,
            SanitizerVariant::Address => Some("EMULATOR_ADDRESS"),
            SanitizerVariant::Thread => Some("EMULATOR_THREAD"),
        }
    }

    pub(crate) fn link_flags(self) -> &'static [&'static str] {
        match self {
            SanitizerVariant::Plain => &[],
            SanitizerVariant::Address => &["-fsanitize=address,undefined"],
            SanitizerVariant::Thread => &["-fsanitize=thread"],
        }
    }

    /// The sanitizer's library that must be loaded before all others.
    pub(crate) fn runtime(self) -> Option<&'static str> {
        match self {
            SanitizerVariant::Plain => None,
            SanitizerVariant::Address => Some("libasan.so"),
            SanitizerVariant::Thread => Some("libtsan.so"),
        }
    }
}
