//! CUDA kernels and their driver on the host's processor, for tests on machines without a GPU.
//!
//! Owns: an emulator that runs each thread of a block as a fiber (`cpp/scheduler.cpp`), so that the kernels of
//! `kernels/` run as they are; a stand-in for the driver's library over it (`cpp/driver/`), with queues for streams,
//! captures, faults and memory shared between processes; stand-ins for cublasLt and NVRTC; and the way to get them.
//! Never: part of what ships. It proves what a program and its kernels compute, not how fast.
//! Invariant: what the device leaves undefined is an error here, or changes with the seed.
//!
//! A test loads the library before anything asks for a driver; whoever opens `libcuda.so.1` in this process
//! afterwards gets this one, since it goes by that name:
//!
//! ```no_run
//! use cleave_emulator::{StandIn, Variant};
//! let Some(stand_in) = StandIn::load(Variant::Plain) else { return };
//! stand_in.seed(7);
//! stand_in.faults("alloc@3");
//! ```
//!
//! [`preload`] does that, and the same for cublasLt and NVRTC.
//!
//! A sanitizer's library needs its runtime in the process from the beginning: the test starts itself again with
//! [`command`], and loads [`Variant::of_environment`] there. Everything that can be set is in `cpp/driver/state.h` and
//! `cpp/driver/faults.h`. Kernels of a folder of one's own, with its own table, come by [`library_of`].
#![allow(unsafe_code)]
// Libraries are loaded, and called by functions that only we know the types of.

mod compile;
pub mod table;

pub use compile::Variant;

use compile::{Beside, Compiler, Sources};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};
use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

/// What a sanitizer's finding makes a program end with.
pub const FOUND_EXIT: i32 = 66;

/// `libcuda.so.1` with the kernels of `kernels/table.txt`, compiled on first use; none without a g++, or not on
/// x86-64 Linux, or without the sources.
///
/// # Panics
/// If it does not compile; the compiler's words are in the message.
pub fn library(variant: Variant) -> Option<&'static Path> {
    library_of(&manifest().join("../../kernels"), variant)
}

/// The same with the kernels of another folder, which has a `table.txt` too.
///
/// # Panics
/// If it does not compile; the compiler's words are in the message.
pub fn library_of(kernels: &Path, variant: Variant) -> Option<&'static Path> {
    made(&Wanted::Driver(kernels.to_path_buf(), variant))
}

/// `libcublasLt.so.13`; it works with any variant of the driver that is loaded before its first call.
///
/// # Panics
/// If it does not compile; the compiler's words are in the message.
pub fn cublas_lt() -> Option<&'static Path> {
    made(&Wanted::Beside(Beside::CublasLt))
}

/// `libnvrtc.so.13`, for a program that compiles its kernels when it starts; this one compiles nothing.
///
/// # Panics
/// If it does not compile; the compiler's words are in the message.
pub fn nvrtc() -> Option<&'static Path> {
    made(&Wanted::Beside(Beside::Nvrtc))
}

/// Loads all three, for good and for everybody in this process; false where they cannot be built.
///
/// # Panics
/// If they are there and cannot be loaded.
pub fn preload(variant: Variant) -> bool {
    let beside = [cublas_lt(), nvrtc()];
    StandIn::load(variant).is_some()
        && beside.into_iter().flatten().map(StandIn::open).count() == beside.len()
}

/// Starts a program such that a variant's library can be loaded in it, and says which in its environment. What a sanitizer finds is on its stderr,
/// and it ends with [`FOUND_EXIT`].
pub fn command(variant: Variant, program: &OsStr) -> Option<Command> {
    let Some(runtime) = variant.runtime() else {
        return Some(Command::new(program));
    };
    let runtime = compiler()?.library(runtime)?;
    // The thread sanitizer wants addresses where it expects them, hence setarch; the variables are not for that one.
    // It must not judge this program by its calls alone, as it does not see what orders them.
    let mut command = Command::new("setarch");
    command.arg("-R").arg("env");
    command.arg(format!("LD_PRELOAD={}", runtime.display()));
    command.arg(format!("CLEAVE_STANDIN_VARIANT={}", variant.name()));
    command.arg(format!("ASAN_OPTIONS=detect_leaks=0:exitcode={FOUND_EXIT}"));
    command.arg(format!(
        "UBSAN_OPTIONS=print_stacktrace=1:exitcode={FOUND_EXIT}"
    ));
    command.arg(format!(
        "TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode={FOUND_EXIT}"
    ));
    command.arg(program);
    Some(command)
}

/// A stand-in driver that is loaded for good.
#[derive(Clone, Copy, Debug)]
pub struct StandIn {
    library: &'static Library,
}

impl StandIn {
    /// Loads the variant with the kernels that ship.
    ///
    /// # Panics
    /// If it is there and cannot be loaded.
    pub fn load(variant: Variant) -> Option<StandIn> {
        library(variant).map(StandIn::open)
    }

    /// Loads a library that [`library`] or [`library_of`] named.
    ///
    /// # Panics
    /// If it cannot be loaded.
    pub fn open(path: &Path) -> StandIn {
        // SAFETY: the library's initialisers list kernels and touch nothing else.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        StandIn {
            library: Box::leak(Box::new(library)),
        }
    }

    /// Any function of the library.
    ///
    /// # Safety
    /// `F` is the type that the function of that name has.
    pub unsafe fn function<F>(&self, name: &str) -> Option<Symbol<F>> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.library.get(name) }.ok()
    }

    /// Plans faults in the place of those planned before, in the words of `faults.h`; "" takes all back.
    ///
    /// # Panics
    /// If that is no list of faults.
    pub fn faults(&self, list: &str) {
        let text = CString::new(list).expect("a list of faults has no zero byte");
        // SAFETY: `int cleave_standin_faults(const char*)`, which reads the text during the call only.
        let count = unsafe {
            let plan = self
                .function::<unsafe extern "C" fn(*const c_char) -> c_int>("cleave_standin_faults");
            plan.expect("our own library")(text.as_ptr())
        };
        assert!(count >= 0, "`{list}` is no list of faults");
    }

    /// Draws the order of work from here on. 0: the order of submission.
    pub fn seed(&self, seed: u64) {
        // SAFETY: `void cleave_standin_seed(uint64_t)`.
        unsafe {
            let set = self.function::<unsafe extern "C" fn(u64)>("cleave_standin_seed");
            set.expect("our own library")(seed);
        }
    }

    /// How often something was done since the library was loaded; `state.cpp` has the names.
    pub fn count(&self, what: &str) -> u64 {
        let text = CString::new(what).expect("a name has no zero byte");
        // SAFETY: `uint64_t cleave_standin_count(const char*)`, which reads the text during the call only.
        unsafe {
            let count =
                self.function::<unsafe extern "C" fn(*const c_char) -> u64>("cleave_standin_count");
            count.expect("our own library")(text.as_ptr())
        }
    }

    /// The last line that emulator or driver had to say, such as why a launch failed.
    pub fn message(&self) -> String {
        let mut bytes = vec![0_u8; 512];
        // SAFETY: `size_t cleave_standin_message(char*, size_t)` writes at most that many bytes, with a zero at the end.
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

/// A library, by what goes into it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Wanted {
    Driver(PathBuf, Variant),
    Beside(Beside),
}

/// Looks once for each library in a process; what an earlier one compiled is found.
fn made(wanted: &Wanted) -> Option<&'static Path> {
    static MADE: Mutex<BTreeMap<Wanted, &'static Path>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = made.get(wanted) {
        return Some(path);
    }
    let compiler = compiler()?;
    let sources = Sources::of(manifest());
    if !sources.cpp.exists() {
        return None;
    }
    let result = match wanted {
        Wanted::Driver(kernels, variant) => compiler.stand_in(&sources, kernels, *variant),
        Wanted::Beside(library) => compiler.beside(&sources, *library),
    };
    for warning in compiler.warnings() {
        eprintln!("{warning}");
    }
    let path: &'static Path = match result {
        Ok(path) => Box::leak(path.into_boxed_path()),
        Err(error) => panic!("{error}"),
    };
    made.insert(wanted.clone(), path);
    Some(path)
}
