//! libFuzzer target: see `cleave_api::fuzzing::post`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_api::fuzzing::post("/tokenize", bytes);
});
