//! libFuzzer target: see `cleave_node::fuzzing::kubernetes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_node::fuzzing::kubernetes(bytes);
});
