//! Damaged samples, with which every test run checks the parsers of outside bytes.
//!
//! Owns: seeds, and the ways to damage them. Never: uses feedback of the parser; libFuzzer does,
//! with the same functions and seeds, in `scripts/ci/fuzz.sh`.
//! Invariant: the same seeds give the same bytes on every machine.

use cleave_domain::SplitMix64;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

/// The environment variable with a folder: every sample is written there as a file, in a folder
/// named after its target, for libFuzzer.
pub const CORPUS: &str = "CLEAVE_FUZZ_CORPUS";

/// Limit of the length of an input.
const BYTES_MAX: usize = 1 << 16;

/// Numbers that parsers often mishandle, as text.
const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "-0",
    "1e999",
    "0.1",
    "255",
    "65536",
    "2147483648",
    "4294967296",
    "9223372036854775808",
    "18446744073709551616",
    "NaN",
];

/// Runs `check` on every sample, every seed in `tests/fuzz/seeds/<target>`, and `count` damaged
/// copies of them.
///
/// # Panics
/// If `check` panics, after the bytes have been written to standard error in a form that can be
/// pasted into a test; or if there is neither a sample nor a seed.
pub fn check_samples(target: &str, samples: &[Vec<u8>], count: usize, check: impl Fn(&[u8])) {
    let mut seeds = stored_seeds(&root().join("tests/fuzz/seeds").join(target));
    seeds.extend_from_slice(samples);
    assert!(
        !seeds.is_empty(),
        "`{target}` has neither samples nor seeds"
    );
    if let Some(corpus) = std::env::var_os(CORPUS) {
        write(&Path::new(&corpus).join(target), &seeds);
    }
    let mut rng = DamageRng::of(target);
    let whole = seeds.iter().cloned();
    let damaged = (0..count).map(|_| rng.damaged_sample(&seeds));
    for bytes in whole.chain(damaged) {
        let outcome = catch_unwind(AssertUnwindSafe(|| check(&bytes)));
        if let Err(panic) = outcome {
            eprintln!("`{target}` on b\"{}\"", bytes.escape_ascii());
            resume_unwind(panic);
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The files of a folder, by name; empty if the folder does not exist.
fn stored_seeds(folder: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("a readable folder").path())
        .collect();
    paths.sort();
    paths
        .iter()
        .map(|path| fs::read(path).expect("a readable seed"))
        .collect()
}

fn write(folder: &Path, seeds: &[Vec<u8>]) {
    fs::create_dir_all(folder).expect("a folder for the corpus");
    for (index, seed) in seeds.iter().enumerate() {
        fs::write(folder.join(format!("sample-{index}")), seed).expect("a writable corpus");
    }
}

/// The source of damages.
struct DamageRng(SplitMix64);

impl DamageRng {
    fn of(target: &str) -> Self {
        let fold = |state: u64, byte: u8| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Self(SplitMix64::new(
            target.bytes().fold(0xcbf2_9ce4_8422_2325, fold),
        ))
    }

    fn draw(&mut self) -> u64 {
        self.0.draw()
    }

    /// A number below `count`, which is not 0.
    fn below(&mut self, count: usize) -> usize {
        (self.draw() % count as u64) as usize
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// One of the seeds with one to four damages.
    fn damaged_sample(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = self.pick(seeds).clone();
        for _ in 0..=self.below(4) {
            self.damage_once(&mut bytes, seeds);
        }
        bytes.truncate(BYTES_MAX);
        bytes
    }

    fn damage_once(&mut self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        if bytes.is_empty() {
            bytes.push(self.draw() as u8);
            return;
        }
        let at = self.below(bytes.len());
        let some = 1 + self.below(16);
        let end = (at + some).min(bytes.len());
        match self.below(9) {
            0 => bytes[at] ^= 1 << self.below(8),
            1 => {
                bytes[at] =
                    *self.pick(&[0, 1, 0x7f, 0x80, 0xff, b'"', b'{', b'[', b'\\', b'\n', b':'])
            }
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(at..end)),
            4 => {
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            5 => {
                let other = self.pick(seeds);
                let from = self.below(other.len().max(1)).min(other.len());
                let rest = other[from..].to_vec();
                bytes.splice(at.., rest);
            }
            6 => {
                let number = self.draw() >> self.below(64);
                let length = *self.pick(&[2, 4, 8]);
                bytes.splice(at..end, number.to_le_bytes()[..length].iter().copied());
            }
            7 => self.replace_number(bytes, at),
            _ => {
                let depth = 1 + self.below(300);
                let open = *self.pick(b"[{(- ");
                bytes.splice(at..at, std::iter::repeat_n(open, depth));
            }
        }
    }

    /// Replaces the next digits from `at` on by another number, or inserts one.
    fn replace_number(&mut self, bytes: &mut Vec<u8>, at: usize) {
        let from = bytes[at..].iter().position(u8::is_ascii_digit);
        let from = from.map_or(at, |offset| at + offset);
        let digits = bytes[from..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit());
        let end = from + digits.count();
        let number = self.pick(&NUMBERS);
        bytes.splice(from..end, number.bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn shown(target: &str) -> Vec<Vec<u8>> {
        let shown = RefCell::new(Vec::<Vec<u8>>::new());
        let sample = br#"{"count": 17}"#.to_vec();
        check_samples(target, &[sample], 500, |bytes| {
            shown.borrow_mut().push(bytes.to_vec());
        });
        shown.into_inner()
    }

    #[test]
    fn the_same_target_gives_the_same_bytes() {
        let first = shown("numbers");
        assert_eq!(first.len(), 501);
        assert_eq!(first, shown("numbers"));
        assert_ne!(first, shown("others"));
    }

    #[test]
    fn damage_is_small_and_varied() {
        let mut bytes = shown("numbers");
        let sample = bytes[0].clone();
        let close = |bytes: &&Vec<u8>| bytes.starts_with(&sample[..4]);
        assert!(bytes.iter().filter(close).count() > 100);
        bytes.sort();
        bytes.dedup();
        assert!(bytes.len() > 400, "{}", bytes.len());
    }

    #[test]
    fn a_panic_of_the_parser_fails_the_test() {
        let fell = catch_unwind(|| {
            check_samples("numbers", &[b"17".to_vec()], 500, |bytes| {
                assert!(bytes.len() < 5, "too long");
            });
        });
        let panic = fell.expect_err("some are longer");
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"too long"));
    }
}
