//! Fuzz target for trace files, for tests and libFuzzer.

use crate::trace::{self, TraceContent};
use std::fs;

/// Reads a trace file; says whether it was accepted.
///
/// # Panics
/// If a trace without requests, or with requests out of order, is accepted.
pub fn trace(bytes: &[u8]) -> bool {
    let path = std::env::temp_dir().join(format!("cleave-trace-{}", std::process::id()));
    fs::write(&path, bytes).expect("a writable folder for temporary files");
    let read = trace::read(&path, None);
    drop(fs::remove_file(&path));
    if let Ok(TraceContent::Timed(rows)) = &read {
        assert!(!rows.is_empty());
        assert!(rows.is_sorted_by_key(|row| row.at));
    }
    read.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_trace_is_refused_or_read_in_order() {
        let file = |name: &str| {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/");
            fs::read(folder.to_owned() + name).unwrap()
        };
        let names = [
            "mooncake_conversation.jsonl",
            "azure2023_conv.csv",
            "llmservingsim.csv",
        ];
        let samples = names.map(file);
        assert!(samples.iter().all(|sample| trace(sample)));
        cleave_fuzz::check_samples("trace", &samples, 3_000, |bytes| {
            trace(bytes);
        });
    }
}
