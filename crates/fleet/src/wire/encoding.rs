//! The encoding of everything that router and worker tell each other once they know to be of one
//! protocol: postcard, of the types themselves.
//!
//! Owns: values to bytes and back. Never knows a type: each derives its own form. Invariant: a
//! value that is decoded used every byte and is within its bounds; decoding takes bounded stack and
//! memory ([`decode_bounded`]).

use super::FleetWireError;
use super::bounds::Bounded;
use cleave_transfer::decode_bounded;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    postcard::to_allocvec(value).expect("a vector grows as it is filled")
}

/// Decodes a value of this kind, which errors name.
///
/// # Errors
/// If the bytes are another value's, or more, or the value is out of its bounds.
pub(crate) fn decode<T>(kind: &'static str, bytes: &[u8]) -> Result<T, FleetWireError>
where
    T: DeserializeOwned + Bounded,
{
    let Ok((mut value, [])) = decode_bounded::<T>(bytes) else {
        return Err(FleetWireError::Unreadable(kind));
    };
    value.bound()?;
    Ok(value)
}
