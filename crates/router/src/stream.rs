//! Reorders a flight's tokens.
//!
//! Owns: the choice of the client's next output token, and of the attempts it may come from. Never:
//! knows the meaning of an attempt. Invariant: indices come out as 0, 1, 2 … without gap or repeat,
//! and no token of an attempt comes out after a fence that names it or a later one.
//!
//! The first token comes from the prefill worker and the second from the decode worker, each over
//! its own connection, so the second may arrive first; while a sequence moves, two decode workers
//! emit. A token may come twice: a new attempt after a fence begins after the client's last token,
//! but a token of an older attempt may be late.

use std::collections::BTreeMap;

/// One flight's tokens. A body that serves clients keeps one per flight.
#[derive(Clone, Debug)]
pub struct TokenStream<T> {
    next: u32,
    /// The next token, if it is here: almost every token arrives in order and does not wait.
    head: Option<T>,
    out_of_order: BTreeMap<u32, T>,
    /// Lowest attempt that is not fenced.
    unfenced: u32,
}

impl<T> Default for TokenStream<T> {
    fn default() -> Self {
        Self {
            next: 0,
            head: None,
            out_of_order: BTreeMap::new(),
            unfenced: 0,
        }
    }
}

impl<T> TokenStream<T> {
    /// Accepts output token `index` of an attempt; repeats and tokens of fenced attempts are
    /// dropped.
    pub fn accept(&mut self, attempt: u32, index: u32, token: T) {
        if self.is_fenced(attempt) {
            return;
        }
        if index == self.next && !self.out_of_order.contains_key(&index) {
            self.head.get_or_insert(token);
        } else if index > self.next {
            self.out_of_order.entry(index).or_insert(token);
        }
    }

    /// Fences attempts up to this one. Tokens behind a gap are dropped with them: the next attempt
    /// draws them itself.
    pub fn fence(&mut self, attempt: u32) {
        self.unfenced = self.unfenced.max(attempt.saturating_add(1));
        self.head = None;
        self.out_of_order.clear();
    }

    /// Whether an attempt is fenced: its tokens come out no more.
    pub fn is_fenced(&self, attempt: u32) -> bool {
        attempt < self.unfenced
    }

    /// The next token for the client, with its index.
    pub fn poll(&mut self) -> Option<(u32, T)> {
        let head = self.head.take();
        let token = head.or_else(|| self.out_of_order.remove(&self.next))?;
        self.next += 1;
        Some((self.next - 1, token))
    }

    /// Whether a token waits because one before it is missing.
    pub fn has_gap(&self) -> bool {
        self.head.is_some() || !self.out_of_order.is_empty()
    }

    /// Number of tokens that have come out.
    pub fn count(&self) -> u32 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_token_waits_for_the_first() {
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
    fn tokens_of_two_attempts_interleave_during_a_move() {
        let mut stream = TokenStream::default();
        stream.accept(0, 0, 'a');
        stream.accept(1, 2, 'c');
        stream.accept(0, 1, 'b');
        let all: Vec<_> = std::iter::from_fn(|| stream.poll()).collect();
        assert_eq!(all, [(0, 'a'), (1, 'b'), (2, 'c')]);
    }

    // Invariant: I19.
    // Lesson: 16.
    /// Lesson 16: a failed transfer must not be answered with garbage tokens.
    #[test]
    fn nothing_of_a_fenced_attempt_reaches_the_client() {
        let mut stream = TokenStream::default();
        stream.accept(1, 0, 'a');
        assert_eq!(stream.poll(), Some((0, 'a')));
        // Behind a gap: it would be mistaken for the new attempt's.
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
        // An older fence changes nothing.
        stream.fence(0);
        stream.accept(1, 3, 'x');
        assert_eq!(stream.poll(), None);
    }
}
