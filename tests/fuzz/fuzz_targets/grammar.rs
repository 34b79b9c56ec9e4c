//! libFuzzer target: see `cleave_grammar::fuzzing::grammar`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    cleave_grammar::fuzzing::grammar(bytes);
});
