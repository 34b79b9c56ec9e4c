//! A GPU for tests: the real one where `CLEAVE_TEST_DEVICE=cuda` says so, or else the stand-in driver, which
//! runs kernels on the processor.
#![allow(clippy::unwrap_used)] // Tests, and what they share.

use cleave_cuda::Device;
use cleave_emulator::Variant;
use std::sync::Arc;

/// The device, or `None` with a message if this machine can neither run nor emulate one.
pub fn device() -> Option<Arc<Device>> {
    if std::env::var("CLEAVE_TEST_DEVICE").is_ok_and(|device| device == "cuda") {
        return Some(Device::open(0).expect("CLEAVE_TEST_DEVICE=cuda asks for a GPU"));
    }
    if !cleave_emulator::preload(Variant::Plain) {
        eprintln!("skipped: the emulator needs g++ on x86-64 Linux");
        return None;
    }
    Some(Device::open(0).expect("the stand-in driver has a device"))
}
