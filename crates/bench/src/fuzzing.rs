//! What a user gives as a trace, for tests and libFuzzer.

use crate::trace::{self, Trace};
use std::fs;

/// A trace's file. Gives whether it was taken.
///
/// # Panics
/// If one without requests, or with requests out of order, is taken.
pub fn trace(bytes: &[u8]) -> bool {
    let path = std::env::temp_dir().join(format!("cleave-trace-{}", std::process::id()));
    fs::write(&path, bytes).expect("a writable folder for temporary files");
    let read = trace::read(&path, None);
    drop(fs::remove_file(&path));
    if let Ok(Trace::Timed(rows)) = &read {
        assert!(!rows.is_empty());
        assert!(rows.is_sorted_by_key(|row| row.at));
    }
    read.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_trace_is_refused_or_in_order() {
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
        cleave_fuzz::hold("trace", &samples, 3_000, |bytes| {
            trace(bytes);
        });
    }
}
