//! libFuzzer target: see `cleave_text::fuzzing::calls`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_text::fuzzing::calls(bytes);
});
