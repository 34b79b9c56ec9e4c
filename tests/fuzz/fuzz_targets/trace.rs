//! libFuzzer target: see `cleave_bench::fuzzing::trace`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_bench::fuzzing::trace(bytes);
});
