//! Output tokens to text, as they come.

mod stop;
mod stream;

pub(crate) use stop::StopStrings;
pub use stream::{Start, TextStream};
