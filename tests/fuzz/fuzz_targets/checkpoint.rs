//! libFuzzer target: see `cleave_checkpoint::fuzzing::checkpoint`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_checkpoint::fuzzing::checkpoint(bytes);
});
