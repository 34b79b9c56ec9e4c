//! `cleave key`: an API key for a tenant, and the digest that a policy holds of it.
//!
//! Never: writes a key anywhere but to the standard output.

use crate::args::KeyArgs;
use anyhow::{Context, bail};
use rand::TryRngCore;
use rand::rngs::OsRng;
use sha2::{Digest, Sha256};
use std::io::{Read, Write};

/// So that a key is known for one where it must not be, in logs and repositories.
const PREFIX: &str = "cleave-";
/// Random bytes of a key: none is ever guessed from its digest.
const KEY_BYTES: usize = 32;
/// A longer line is no key.
const LINE_BYTES_MAX: u64 = 8 << 10;

/// Prints a new key and its digest, or the digest of the one that comes in.
pub(crate) fn run(args: &KeyArgs) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.digest {
        let key = key_of(std::io::stdin().lock())?;
        return writeln!(out, "{}", digest(&key)).context("cannot write the digest");
    }
    let mut bytes = [0; KEY_BYTES];
    let drawn = OsRng.try_fill_bytes(&mut bytes);
    drawn.context("the system gives no random bytes")?;
    let key = format!("{PREFIX}{}", hex(&bytes));
    let digest = digest(&key);
    writeln!(out, "key: {key}\napi_key_sha256: {digest}").context("cannot write the key")
}

/// One line.
fn key_of(input: impl Read) -> anyhow::Result<String> {
    let mut key = String::new();
    let read = input.take(LINE_BYTES_MAX).read_to_string(&mut key);
    read.context("the key on the standard input is not text")?;
    let key = key.trim_end_matches(['\r', '\n']);
    if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        bail!("the key on the standard input is to be one line of visible ASCII without spaces");
    }
    Ok(key.to_owned())
}

fn digest(key: &str) -> String {
    hex(&Sha256::digest(key.as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_known_by_the_digest_that_others_compute() {
        // printf %s one | sha256sum
        let one = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
        for input in ["one", "one\n", "one\r\n"] {
            assert_eq!(digest(&key_of(input.as_bytes()).unwrap()), one);
        }
        for bad in ["", "\n", "two words", "a\nb", "\u{e9}"] {
            assert!(key_of(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }
}
