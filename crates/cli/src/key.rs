//! `cleave key`: an API key for a tenant, and its digest for the policy.
//!
//! Never: writes a key anywhere but to standard output.

use crate::args::KeyArgs;
use anyhow::{Context, bail};
use rand::TryRngCore;
use rand::rngs::OsRng;
use sha2::{Digest, Sha256};
use std::io::{Read, Write};

/// A prefix by which scanners recognize a key in logs and repositories.
const PREFIX: &str = "cleave-";
/// Random bytes of a key: too many to find a key by its digest.
const KEY_BYTES: usize = 32;
/// Limit of a line with a key.
const LINE_BYTES_MAX: u64 = 8 << 10;

/// Prints a new key and its digest, or the digest of the key on standard input.
pub(crate) fn run(args: &KeyArgs) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.digest {
        let key = read_key(std::io::stdin().lock())?;
        return writeln!(out, "{}", digest(&key)).context("cannot write the digest");
    }
    let mut bytes = [0; KEY_BYTES];
    let drawn = OsRng.try_fill_bytes(&mut bytes);
    drawn.context("the system gives no random bytes")?;
    let key = format!("{PREFIX}{}", hex(&bytes));
    let digest = digest(&key);
    writeln!(out, "key: {key}\napi_key_sha256: {digest}").context("cannot write the key")
}

fn read_key(input: impl Read) -> anyhow::Result<String> {
    let mut key = String::new();
    let read = input.take(LINE_BYTES_MAX).read_to_string(&mut key);
    read.context("the key on standard input is not text")?;
    let key = key.trim_end_matches(['\r', '\n']);
    if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        bail!("the key on standard input must be one line of visible ASCII without spaces");
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
    fn a_key_digest_equals_sha256sum() {
        // printf %s one | sha256sum
        let one = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
        for input in ["one", "one\n", "one\r\n"] {
            assert_eq!(digest(&read_key(input.as_bytes()).unwrap()), one);
        }
        for bad in ["", "\n", "two words", "a\nb", "\u{e9}"] {
            assert!(read_key(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }
}
