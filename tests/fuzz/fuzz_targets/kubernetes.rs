//! libFuzzer target: see `cleave_kubernetes::fuzzing::kubernetes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_kubernetes::fuzzing::kubernetes(bytes);
});
