//! A GPU for tests: the real one if `CLEAVE_TEST_DEVICE=cuda` asks for it, else the stand-in
//! driver, which runs kernels on the processor.

use cleave_cuda::CudaDevice;
use cleave_emulator::{SanitizerVariant, StandInLibrary};
use std::sync::{Arc, OnceLock};

/// Returns the device, or `None` with a message if this machine can neither run nor emulate one.
pub(crate) fn device() -> Option<Arc<CudaDevice>> {
    if is_real() {
        return Some(CudaDevice::open(0).expect("CLEAVE_TEST_DEVICE=cuda asks for a GPU"));
    }
    if stand_in().is_none() {
        eprintln!("skipped: the emulator needs g++ on x86-64 Linux");
        return None;
    }
    Some(CudaDevice::open(0).expect("the stand-in driver has a device"))
}

/// Returns whether tests run on a real GPU.
pub(crate) fn is_real() -> bool {
    std::env::var("CLEAVE_TEST_DEVICE").is_ok_and(|device| device == "cuda")
}

/// Of how many prompts one is run: the emulated GPU takes a second for each, so that
/// `EMULATOR_EVERY_PROMPT` is set for long runs alone.
pub(crate) fn prompts_step(emulated: usize) -> usize {
    let every = is_real() || std::env::var_os("EMULATOR_EVERY_PROMPT").is_some();
    if every { 1 } else { emulated }
}

/// Loads the stand-in driver and compiler before anything looks for NVIDIA's; `None` on a real
/// device.
pub(crate) fn stand_in() -> Option<StandInLibrary> {
    if is_real() {
        return None;
    }
    static LOADED: OnceLock<Option<StandInLibrary>> = OnceLock::new();
    *LOADED.get_or_init(|| {
        let variant = SanitizerVariant::from_environment();
        let is_there = cleave_emulator::preload(variant);
        is_there.then(|| StandInLibrary::load(variant)).flatten()
    })
}

/// Returns whether this process has these settings of the stand-in driver, which reads them once.
/// If not, runs the named test in a process that has them, and returns false; so it does where
/// there is no stand-in.
pub(crate) fn has_stand_in_settings(test: &str, settings: &[(&str, &str)]) -> bool {
    if stand_in().is_none() {
        eprintln!("skipped: needs the stand-in driver, so g++ on x86-64 Linux");
        return false;
    }
    let is_set = |(name, value): &(&str, &str)| std::env::var(name).is_ok_and(|is| is == *value);
    if settings.iter().all(is_set) {
        return true;
    }
    run_alone(test, settings);
    false
}

/// The device for a test that computes for many seconds. A stand-in driver runs one kernel at a
/// time, so each of these tests has a process and a stand-in of its own: `None` here, where the
/// test ran in that process, or where this machine has no device.
pub(crate) fn device_of_its_own(test: &str) -> Option<Arc<CudaDevice>> {
    const ALONE: (&str, &str) = ("CLEAVE_TEST_ALONE", "1");
    if is_real() || std::env::var(ALONE.0).is_ok() || device().is_none() {
        return device();
    }
    run_alone(test, &[ALONE]);
    None
}

/// Runs the named test in a process with these variables, which must pass.
fn run_alone(test: &str, variables: &[(&str, &str)]) {
    let program = std::env::current_exe().expect("a test knows its program");
    let output = std::process::Command::new(program)
        .args(["--exact", test, "--nocapture"])
        .envs(variables.iter().copied())
        .output()
        .expect("a test program starts again");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stdout}{err}");
    assert!(stdout.contains("1 passed"), "{stdout}{err}");
}
