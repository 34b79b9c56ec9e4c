//! libFuzzer target: see `cleave_transfer::fuzzing::frames`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_transfer::fuzzing::frames(bytes);
});
