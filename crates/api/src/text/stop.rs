//! Stop strings.
//!
//! Owns: finding them across the borders of tokens, and holding back what could be the beginning
//! of one. Never: stops a flight. Invariant: which stop string ends a text depends on the text
//! alone, not on how it was cut into tokens: the one that is complete first, of these the longest.

use std::sync::Arc;

/// Looks for stop strings in text that arrives in pieces.
#[derive(Clone, Debug)]
pub(crate) struct StopStrings {
    stops: Arc<[String]>,
    held: String,
}

/// A stop string was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stopped {
    /// Index of the stop string.
    pub(crate) stop: usize,
}

impl StopStrings {
    pub(crate) fn new(stops: Arc<[String]>) -> Self {
        Self {
            stops,
            held: String::new(),
        }
    }

    pub(crate) fn get(&self, stopped: &Stopped) -> &str {
        &self.stops[stopped.stop]
    }

    /// Takes the next text; gives the text that can go out, up to and without a stop string.
    pub(crate) fn push(&mut self, text: &str) -> (String, Option<Stopped>) {
        self.held.push_str(text);
        let found = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        if let Some((_, start, stop)) = found.min() {
            let mut out = std::mem::take(&mut self.held);
            out.truncate(start);
            return (out, Some(Stopped { stop }));
        }
        let keep = self
            .stops
            .iter()
            .map(|stop| overlap(&self.held, stop))
            .max()
            .unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// The text is over: nothing that is held was a stop string.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// How many bytes at the end of `text` begin `stop`, `stop` itself not being there.
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
    fn a_stop_string_across_tokens_was_missed() {
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
        fn the_cut_into_tokens_changed_where_a_text_stops(
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
