//! Puts a flight's tokens back in order.
//!
//! Owns: which output token the client gets next. Never: sees who sent a token or why.
//! Invariant: indices come out as 0, 1, 2 … without gap or repeat.
//!
//! The first token comes from the prefill worker and the second from the decode worker, each over
//! its own connection, so the second may be here before the first. After a retry a token may come
//! twice; both are the same token, for a draw depends only on seed and position.

use std::collections::BTreeMap;

/// One flight's tokens. Bodies that face clients keep one per flight.
#[derive(Clone, Debug)]
pub struct TokenStream<T> {
    next: u32,
    ahead: BTreeMap<u32, T>,
}

impl<T> Default for TokenStream<T> {
    fn default() -> Self {
        Self {
            next: 0,
            ahead: BTreeMap::new(),
        }
    }
}

impl<T> TokenStream<T> {
    /// Takes output token `index`; a repeat is dropped.
    pub fn accept(&mut self, index: u32, token: T) {
        if index >= self.next {
            self.ahead.entry(index).or_insert(token);
        }
    }

    /// The next token that may go to the client, with its index.
    pub fn poll(&mut self) -> Option<(u32, T)> {
        let token = self.ahead.remove(&self.next)?;
        self.next += 1;
        Some((self.next - 1, token))
    }

    /// Whether a token that came cannot go out, because one before it is missing.
    pub fn has_gap(&self) -> bool {
        !self.ahead.is_empty()
    }

    /// A new attempt draws the tokens again: those of the old one that wait are not waited for.
    pub fn restart(&mut self) {
        self.ahead.clear();
    }

    /// How many tokens have come out.
    pub fn count(&self) -> u32 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_token_overtakes_the_first() {
        let mut stream = TokenStream::default();
        stream.accept(1, 'b');
        assert_eq!(stream.poll(), None);
        assert!(stream.has_gap());
        stream.accept(0, 'a');
        stream.accept(0, 'a');
        stream.accept(1, 'b');
        assert_eq!(stream.poll(), Some((0, 'a')));
        assert_eq!(stream.poll(), Some((1, 'b')));
        stream.accept(0, 'a');
        assert_eq!(stream.poll(), None);
        assert_eq!(stream.count(), 2);
        stream.accept(3, 'x');
        stream.restart();
        assert!(!stream.has_gap());
    }
}
