//! Decodes postcard from another process.
//!
//! Invariant: decoding takes a bounded part of the stack, and memory in proportion to the bytes
//! that are there: up to fifty times as much, for lists of empty texts.

use postcard::Deserializer;
use postcard::de_flavors::{Flavor, Slice};
use serde::de::DeserializeOwned;

/// Stack that decoding may take; sound messages take a tenth of it, and a thread has eight times as
/// much.
const STACK_BYTES_MAX: usize = 256 << 10;

/// Decodes the value at the start of the bytes. Returns it and the bytes after it.
///
/// # Errors
/// If the bytes are another value's, or its types are nested too deeply.
pub fn decode_bounded<T: DeserializeOwned>(bytes: &[u8]) -> postcard::Result<(T, &[u8])> {
    let mut decoder = Deserializer::from_flavor(StackBoundedBytes {
        bytes: Slice::new(bytes),
        stack_start: stack_address(),
    });
    let value = T::deserialize(&mut decoder)?;
    Ok((value, decoder.finalize()?))
}

/// Encoded bytes that give out once decoding is too deep in the stack: a failure holds another one,
/// and so on, at a byte each.
struct StackBoundedBytes<'a> {
    bytes: Slice<'a>,
    stack_start: usize,
}

impl<'a> Flavor<'a> for StackBoundedBytes<'a> {
    type Remainder = &'a [u8];
    type Source = &'a [u8];

    #[inline]
    fn pop(&mut self) -> postcard::Result<u8> {
        if stack_address().abs_diff(self.stack_start) > STACK_BYTES_MAX {
            return Err(postcard::Error::DeserializeBadEncoding);
        }
        self.bytes.pop()
    }

    #[inline]
    fn try_take_n(&mut self, count: usize) -> postcard::Result<&'a [u8]> {
        self.bytes.try_take_n(count)
    }

    /// With it no list reserves room for more items than there are bytes.
    #[inline]
    fn size_hint(&self) -> Option<usize> {
        self.bytes.size_hint()
    }

    fn finalize(self) -> postcard::Result<&'a [u8]> {
        self.bytes.finalize()
    }
}

/// The address of a variable of the calling function, roughly.
#[inline]
fn stack_address() -> usize {
    let here = 0_u8;
    std::ptr::from_ref(&here).addr()
}
