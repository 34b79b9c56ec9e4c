//! CUDA kernels and their driver on the host's processor, for tests on machines without a GPU.
//!
//! Owns: an emulator that runs each thread of a block as a fiber (`cpp/scheduler.cpp`), so that the
//! kernels of `kernels/` run unchanged; a stand-in for the driver's library over it
//! (`cpp/driver/`), with queues for streams, captures, faults and memory shared between processes;
//! stand-ins for cublasLt and NVRTC; and the functions that build and load them. Never: part of
//! what ships. It proves what a program and its kernels compute, not how fast. Invariant: what the
//! device leaves undefined is an error here, or changes with the seed.
//!
//! A test loads the library before anything asks for a driver; a later load of `libcuda.so.1` in
//! this process gets this one, since it has that name:
//!
//! ```no_run
//! use cleave_emulator::{SanitizerVariant, StandInLibrary};
//! let Some(stand_in) = StandInLibrary::load(SanitizerVariant::Plain) else { return };
//! stand_in.set_seed(7);
//! stand_in.plan_faults("alloc@3");
//! ```
//!
//! [`preload`] does that, and the same for cublasLt and NVRTC.
//!
//! A sanitizer's library needs its runtime in the process from the beginning: the test starts
//! itself again with [`sanitized_command`], and loads [`SanitizerVariant::from_environment`] there.
//! `cpp/driver/state.h` and `cpp/driver/faults.h` list all settings. [`driver_library_of`] builds
//! kernels of another folder, with its own table.
#![allow(unsafe_code)]
// Libraries are loaded at run time and called by function types that this crate declares.

mod compile;
mod sources;
pub mod table;
mod variant;

pub use variant::SanitizerVariant;

use compile::{CompanionLibrary, Compiler};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};
use parking_lot::Mutex;
use sources::EmulatorSources;
use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Exit status of a program in which a sanitizer reported an error.
pub const SANITIZER_EXIT: i32 = 66;

/// Builds `libcuda.so.1` with the kernels of `kernels/table.txt` on first use; none without g++, on
/// another platform than x86-64 Linux, or without the sources.
///
/// # Panics
/// If it does not compile; the message holds the compiler's output.
pub fn driver_library(variant: SanitizerVariant) -> Option<&'static Path> {
    driver_library_of(&manifest().join("../../kernels"), variant)
}

/// Builds the driver's library with the kernels of another folder, which has a `table.txt` too.
///
/// # Panics
/// If it does not compile; the message holds the compiler's output.
pub fn driver_library_of(kernels: &Path, variant: SanitizerVariant) -> Option<&'static Path> {
    build_once(&LibraryKey::Driver(kernels.to_path_buf(), variant))
}

/// Builds `libcublasLt.so.13`, which works with any variant of the driver that is loaded before its
/// first call.
///
/// # Panics
/// If it does not compile; the message holds the compiler's output.
pub fn cublas_lt() -> Option<&'static Path> {
    build_once(&LibraryKey::Companion(CompanionLibrary::CublasLt))
}

/// Builds `libnvrtc.so.13` for programs that compile their kernels at start; this one compiles
/// nothing.
///
/// # Panics
/// If it does not compile; the message holds the compiler's output.
pub fn nvrtc() -> Option<&'static Path> {
    build_once(&LibraryKey::Companion(CompanionLibrary::Nvrtc))
}

/// Loads all three libraries for the rest of this process; false where they cannot be built.
///
/// # Panics
/// If a built library cannot be loaded.
pub fn preload(variant: SanitizerVariant) -> bool {
    let beside = [cublas_lt(), nvrtc()];
    StandInLibrary::load(variant).is_some()
        && beside
            .into_iter()
            .flatten()
            .map(StandInLibrary::open)
            .count()
            == beside.len()
}

/// Prepares a program in which a variant's library can be loaded, and names the variant in its
/// environment. A sanitizer reports to the program's stderr and ends it with [`SANITIZER_EXIT`].
pub fn sanitized_command(variant: SanitizerVariant, program: &OsStr) -> Option<Command> {
    let Some(runtime) = variant.runtime() else {
        return Some(Command::new(program));
    };
    let runtime = compiler()?.library(runtime)?;
    // The thread sanitizer needs fixed addresses, hence setarch; the variables are for the others.
    // It must ignore calls in this program's own modules, since it does not see their
    // synchronisation.
    let mut command = Command::new("setarch");
    command.arg("-R").arg("env");
    command.arg(format!("LD_PRELOAD={}", runtime.display()));
    command.arg(format!("CLEAVE_STANDIN_VARIANT={}", variant.name()));
    command.arg(format!(
        "ASAN_OPTIONS=detect_leaks=0:exitcode={SANITIZER_EXIT}"
    ));
    command.arg(format!(
        "UBSAN_OPTIONS=print_stacktrace=1:exitcode={SANITIZER_EXIT}"
    ));
    command.arg(format!(
        "TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode={SANITIZER_EXIT}"
    ));
    command.arg(program);
    Some(command)
}

/// A stand-in library, loaded for the rest of the process.
#[derive(Clone, Copy, Debug)]
pub struct StandInLibrary {
    library: &'static Library,
}

impl StandInLibrary {
    /// Loads the variant with the kernels that ship.
    ///
    /// # Panics
    /// If the built library cannot be loaded.
    pub fn load(variant: SanitizerVariant) -> Option<StandInLibrary> {
        driver_library(variant).map(StandInLibrary::open)
    }

    /// Loads a library that [`driver_library`] or [`driver_library_of`] named.
    ///
    /// # Panics
    /// If it cannot be loaded.
    pub fn open(path: &Path) -> StandInLibrary {
        // SAFETY: the library's initialisers list kernels and touch nothing else.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        StandInLibrary {
            library: Box::leak(Box::new(library)),
        }
    }

    /// Looks up any function of the library.
    ///
    /// # Safety
    /// `F` is the type of the function with that name.
    pub unsafe fn function<F>(&self, name: &str) -> Option<Symbol<F>> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.library.get(name) }.ok()
    }

    /// Replaces all planned faults by this list, in the syntax of `faults.h`; "" removes all.
    ///
    /// # Panics
    /// If the list is invalid.
    pub fn plan_faults(&self, list: &str) {
        let text = CString::new(list).expect("a list of faults has no zero byte");
        // SAFETY: `int cleave_standin_faults(const char*)`, which reads the text during the call
        // only.
        let count = unsafe {
            let plan = self
                .function::<unsafe extern "C" fn(*const c_char) -> c_int>("cleave_standin_faults");
            plan.expect("our own library")(text.as_ptr())
        };
        assert!(count >= 0, "`{list}` is not a list of faults");
    }

    /// Seeds the order of queued work; 0 is the order of submission.
    pub fn set_seed(&self, seed: u64) {
        // SAFETY: `void cleave_standin_seed(uint64_t)`.
        unsafe {
            let set = self.function::<unsafe extern "C" fn(u64)>("cleave_standin_seed");
            set.expect("our own library")(seed);
        }
    }

    /// Calls of one kind since the library was loaded; `state.cpp` has the names.
    pub fn calls_count(&self, call: &str) -> u64 {
        let text = CString::new(call).expect("a name has no zero byte");
        // SAFETY: `uint64_t cleave_standin_count(const char*)`, which reads the text during the
        // call only.
        unsafe {
            let count =
                self.function::<unsafe extern "C" fn(*const c_char) -> u64>("cleave_standin_count");
            count.expect("our own library")(text.as_ptr())
        }
    }

    /// The last message of the emulator or driver, such as the cause of a failed launch.
    pub fn last_message(&self) -> String {
        let mut bytes = vec![0_u8; 512];
        // SAFETY: `size_t cleave_standin_message(char*, size_t)` writes at most that many bytes,
        // with a zero at the end.
        unsafe {
            let message = self.function::<unsafe extern "C" fn(*mut u8, usize) -> usize>(
                "cleave_standin_message",
            );
            message.expect("our own library")(bytes.as_mut_ptr(), bytes.len());
        }
        bytes.truncate(bytes.iter().position(|&byte| byte == 0).unwrap_or(0));
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn manifest() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn compiler() -> Option<&'static Compiler> {
    static FOUND: OnceLock<Option<Compiler>> = OnceLock::new();
    let is_possible = cfg!(all(target_os = "linux", target_arch = "x86_64"));
    let find = || Compiler::find(Path::new(env!("OUT_DIR"))).filter(|_| is_possible);
    FOUND.get_or_init(find).as_ref()
}

/// A library, identified by its inputs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LibraryKey {
    Driver(PathBuf, SanitizerVariant),
    Companion(CompanionLibrary),
}

/// Builds a library once in a process; objects and libraries of earlier processes are reused.
fn build_once(key: &LibraryKey) -> Option<&'static Path> {
    static MADE: Mutex<BTreeMap<LibraryKey, &'static Path>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock();
    if let Some(path) = made.get(key) {
        return Some(path);
    }
    let compiler = compiler()?;
    let sources = EmulatorSources::of(manifest());
    if !sources.cpp.exists() {
        return None;
    }
    let result = match key {
        LibraryKey::Driver(kernels, variant) => compiler.build_driver(&sources, kernels, *variant),
        LibraryKey::Companion(library) => compiler.build_companion(&sources, *library),
    };
    for warning in compiler.warnings() {
        eprintln!("{warning}");
    }
    let path: &'static Path = match result {
        Ok(path) => Box::leak(path.into_boxed_path()),
        Err(error) => panic!("{error}"),
    };
    made.insert(key.clone(), path);
    Some(path)
}
