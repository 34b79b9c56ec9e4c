//! libFuzzer target: see `cleave_fleet::fuzzing::grpc`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_fleet::fuzzing::grpc(bytes);
});
