//! A GPU for tests: the real one where `CLEAVE_TEST_DEVICE=cuda` says so, or else the stand-in driver, which
//! runs kernels on the processor.
#![allow(clippy::unwrap_used, dead_code)] // Tests, and what they share.

use cleave_cuda::Device;
use cleave_emulator::{StandIn, Variant};
use std::sync::{Arc, OnceLock};

/// The device, or `None` with a message if this machine can neither run nor emulate one.
pub(crate) fn device() -> Option<Arc<Device>> {
    if is_real() {
        return Some(Device::open(0).expect("CLEAVE_TEST_DEVICE=cuda asks for a GPU"));
    }
    if stand_in().is_none() {
        eprintln!("skipped: the emulator needs g++ on x86-64 Linux");
        return None;
    }
    Some(Device::open(0).expect("the stand-in driver has a device"))
}

/// Whether tests run on a real GPU.
pub(crate) fn is_real() -> bool {
    std::env::var("CLEAVE_TEST_DEVICE").is_ok_and(|device| device == "cuda")
}

/// The stand-in driver and compiler, loaded before anything looks for NVIDIA's; none beside a real device.
pub(crate) fn stand_in() -> Option<StandIn> {
    if is_real() {
        return None;
    }
    static LOADED: OnceLock<Option<StandIn>> = OnceLock::new();
    *LOADED.get_or_init(|| {
        let variant = Variant::of_environment();
        let is_there = cleave_emulator::preload(variant);
        is_there.then(|| StandIn::load(variant)).flatten()
    })
}

/// Whether this process has these settings of the stand-in driver, which it reads once; if not, runs the test named so in one
/// that has them. False too where there is no stand-in.
pub(crate) fn has_settings(test: &str, settings: &[(&str, &str)]) -> bool {
    if stand_in().is_none() {
        eprintln!("skipped: needs the stand-in driver, so g++ on x86-64 Linux");
        return false;
    }
    let is_set = |(name, value): &(&str, &str)| std::env::var(name).is_ok_and(|is| is == *value);
    if settings.iter().all(is_set) {
        return true;
    }
    let program = std::env::current_exe().expect("a test knows its program");
    let output = std::process::Command::new(program)
        .args(["--exact", test, "--nocapture"])
        .envs(settings.iter().copied())
        .output()
        .expect("a test program starts again");
    let told = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}{err}");
    assert!(told.contains("1 passed"), "{told}{err}");
    false
}
