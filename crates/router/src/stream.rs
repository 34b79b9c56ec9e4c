//! Puts a flight's tokens back in order.
//!
//! Owns: which output token the client gets next, and from which attempts. Never: knows what an attempt
//! is. Invariant: indices come out as 0, 1, 2 … without gap or repeat, and nothing that an attempt
//! emitted comes out after a fence that names it or a later one.
//!
//! The first token comes from the prefill worker and the second from the decode worker, each over
//! its own connection, so the second may be here before the first; while a sequence moves, two decode
//! workers emit. A token may come twice: a new attempt after a fence begins where the client's tokens
//! end, but a word of an older one may be late.

use std::collections::BTreeMap;

/// One flight's tokens. Bodies that face clients keep one per flight.
#[derive(Clone, Debug)]
pub struct TokenStream<T> {
    next: u32,
    /// The next one, if it is here: almost every token comes in its turn, and waits for nobody.
    head: Option<T>,
    ahead: BTreeMap<u32, T>,
    /// Attempts before this one are fenced.
    unfenced: u32,
}

impl<T> Default for TokenStream<T> {
    fn default() -> Self {
        Self {
            next: 0,
            head: None,
            ahead: BTreeMap::new(),
            unfenced: 0,
        }
    }
}

impl<T> TokenStream<T> {
    /// Takes output token `index` as an attempt emitted it; a repeat is dropped, and so is anything of
    /// a fenced attempt.
    pub fn accept(&mut self, attempt: u32, index: u32, token: T) {
        if self.is_fenced(attempt) {
            return;
        }
        if index == self.next && !self.ahead.contains_key(&index) {
            self.head.get_or_insert(token);
        } else if index > self.next {
            self.ahead.entry(index).or_insert(token);
        }
    }

    /// Attempts up to this one are over. What waits behind a gap goes with them: the next attempt
    /// draws those tokens itself.
    pub fn fence(&mut self, attempt: u32) {
        self.unfenced = self.unfenced.max(attempt.saturating_add(1));
        self.head = None;
        self.ahead.clear();
    }

    /// Whether an attempt is over for this stream: nothing it emitted comes out any more.
    pub fn is_fenced(&self, attempt: u32) -> bool {
        attempt < self.unfenced
    }

    /// The next token that may go to the client, with its index.
    pub fn poll(&mut self) -> Option<(u32, T)> {
        let head = self.head.take();
        let token = head.or_else(|| self.ahead.remove(&self.next))?;
        self.next += 1;
        Some((self.next - 1, token))
    }

    /// Whether a token that came cannot go out, because one before it is missing.
    pub fn has_gap(&self) -> bool {
        self.head.is_some() || !self.ahead.is_empty()
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
        stream.accept(0, 1, 'b');
        assert_eq!(stream.poll(), None);
        assert!(stream.has_gap());
        stream.accept(0, 0, 'a');
        stream.accept(0, 0, 'a');
        stream.accept(0, 1, 'b');
        assert_eq!(stream.poll(), Some((0, 'a')));
        assert_eq!(stream.poll(), Some((1, 'b')));
        stream.accept(0, 0, 'a');
        assert_eq!(stream.poll(), None);
        assert_eq!(stream.count(), 2);
    }

    #[test]
    fn two_attempts_emit_while_a_sequence_moves() {
        let mut stream = TokenStream::default();
        stream.accept(0, 0, 'a');
        stream.accept(1, 2, 'c');
        stream.accept(0, 1, 'b');
        let all: Vec<_> = std::iter::from_fn(|| stream.poll()).collect();
        assert_eq!(all, [(0, 'a'), (1, 'b'), (2, 'c')]);
    }

    #[test]
    fn lesson_16_nothing_of_a_fenced_attempt_reaches_the_client() {
        let mut stream = TokenStream::default();
        stream.accept(1, 0, 'a');
        assert_eq!(stream.poll(), Some((0, 'a')));
        // Behind a gap: it would be taken for the new attempt's.
        stream.accept(1, 2, 'x');
        stream.fence(1);
        assert!(!stream.has_gap());
        assert!(stream.is_fenced(0) && stream.is_fenced(1) && !stream.is_fenced(2));
        stream.accept(1, 1, 'x');
        stream.accept(0, 1, 'x');
        assert_eq!(stream.poll(), None);
        stream.accept(2, 1, 'b');
        stream.accept(2, 2, 'c');
        let all: Vec<_> = std::iter::from_fn(|| stream.poll()).collect();
        assert_eq!(all, [(1, 'b'), (2, 'c')]);
        // An older fence takes nothing back.
        stream.fence(0);
        stream.accept(1, 3, 'x');
        assert_eq!(stream.poll(), None);
    }
}
