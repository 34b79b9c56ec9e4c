//! libFuzzer target: see `cleave_policy::fuzzing::policy`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_policy::fuzzing::policy(bytes);
});
