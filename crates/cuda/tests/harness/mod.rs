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
