//! libFuzzer target: see `cleave_node::fuzzing::policy`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_node::fuzzing::policy(bytes);
});
