//! Stop strings.
//!
//! Owns: finding stop strings across token boundaries, and holding back text that may begin one.
//! Never: stops a flight. Invariant: the stop string that ends a text depends on the text alone,
//! not on its division into tokens: the one that is complete first, and among these the longest.

use std::sync::Arc;

/// Searches for stop strings in text that arrives in pieces.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Arc<[String]>,
    held: String,
}

/// The stop string that ended a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopMatch {
    index: usize,
}

impl StopStrings {
    pub fn new(stops: Arc<[String]>) -> Self {
        Self {
            stops,
            held: String::new(),
        }
    }

    /// Returns the stop string itself.
    pub fn get(&self, stopped: &StopMatch) -> &str {
        &self.stops[stopped.index]
    }

    /// Takes the next text; returns the text that can be sent, up to and without a stop string.
    pub fn push(&mut self, text: &str) -> (String, Option<StopMatch>) {
        self.held.push_str(text);
        let found = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        // The minimum is the match that ends first and, of these, begins first.
        if let Some((_, start, stop)) = found.min() {
            let mut out = std::mem::take(&mut self.held);
            out.truncate(start);
            return (out, Some(StopMatch { index: stop }));
        }
        // The longest beginning of any stop string stays held.
        let keep = self
            .stops
            .iter()
            .map(|stop| overlap(&self.held, stop))
            .max()
            .unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// Returns the held text at the end: it was no stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Returns the number of bytes at the end of `text` that begin `stop`; `text` does not contain
/// `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    (1..=longest)
        .rev()
        .find(|&length| {
            stop.is_char_boundary(length) && text.as_bytes().ends_with(&stop.as_bytes()[..length])
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut search = StopStrings::new(stops.into());
        let mut out = String::new();
        for piece in pieces {
            let (text, stopped) = search.push(piece);
            out += &text;
            if let Some(stopped) = stopped {
                return (out, Some(search.get(&stopped).to_owned()));
            }
        }
        out += &search.finish();
        (out, None)
    }

    #[test]
    fn a_stop_string_across_pieces_is_found() {
        assert_eq!(
            run(&["STOP"], &["a S", "TO", "P b"]),
            ("a ".into(), Some("STOP".into()))
        );
        assert_eq!(
            run(&["STOP"], &["a S", "TO", "OP b"]),
            ("a STOOP b".into(), None)
        );
        assert_eq!(
            run(&["aab"], &["aa", "ab"]),
            ("a".into(), Some("aab".into()))
        );
        assert_eq!(
            run(&["。"], &["你好", "。再"]),
            ("你好".into(), Some("。".into()))
        );
        assert_eq!(
            run(&["bc", "abcd"], &["xabcd"]),
            ("xa".into(), Some("bc".into()))
        );
        assert_eq!(
            run(&["b", "ab"], &["xa", "b"]),
            ("x".into(), Some("ab".into()))
        );
    }

    proptest! {
        #[test]
        fn the_stop_does_not_depend_on_token_boundaries(
            text in "[abc]{0,40}",
            stops in prop::collection::vec("[abc]{1,4}", 0..4),
            cuts in prop::collection::vec(0usize..6, 0..40),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut pieces = Vec::new();
            let mut rest = text.as_str();
            for cut in cuts {
                let (piece, more) = rest.split_at(cut.min(rest.len()));
                pieces.push(piece);
                rest = more;
            }
            pieces.push(rest);
            let characters: Vec<&str> = text.split("").collect();
            prop_assert_eq!(run(&stops, &pieces), run(&stops, &characters));
            let (out, stopped) = run(&stops, &pieces);
            prop_assert!(text.starts_with(&out));
            prop_assert_eq!(stopped.is_some(), stops.iter().any(|stop| text.contains(stop)));
        }
    }
}
