//! libFuzzer target: see `cleave_engine::fuzzing::checkpoint`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_engine::fuzzing::checkpoint(bytes);
});
