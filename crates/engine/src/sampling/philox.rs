//! Philox4x32-10, a counter-based random function (Salmon et al., "Parallel Random Numbers: As
//! Easy as 1, 2, 3", SC 2011).
//!
//! Owns: the function, and the random number of a draw.
//! Never: holds state: the number for a position does not depend on earlier draws.
//! Invariant: the same key and counter give the same bits everywhere.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Philox4x32 with ten rounds.
fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let product = |index: usize, word: u32| {
            let wide = u64::from(MULTIPLIERS[index]) * u64::from(word);
            ((wide >> 32) as u32, wide as u32)
        };
        let (high_0, low_0) = product(0, counter[0]);
        let (high_1, low_1) = product(1, counter[2]);
        counter = [
            high_1 ^ counter[1] ^ key[0],
            low_1,
            high_0 ^ counter[3] ^ key[1],
            low_0,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// A uniform number below 2^53 for a seed and a position in the sequence.
pub(super) fn draw_bits(seed: u64, position: u64) -> u64 {
    let words = philox4x32(
        [position as u32, (position >> 32) as u32, 0, 0],
        [seed as u32, (seed >> 32) as u32],
    );
    (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the authors' Random123 library publishes (kat_vectors).
    #[test]
    fn philox_matches_the_published_known_answers() {
        let answers = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, answer) in answers {
            assert_eq!(philox4x32(counter, key), answer);
        }
    }

    #[test]
    fn draw_bits_are_uniform_below_2_to_53() {
        let draws: Vec<u64> = (0..4096).map(|position| draw_bits(7, position)).collect();
        assert!(draws.iter().all(|bits| *bits < 1 << 53));
        let shares = draws.iter().map(|bits| *bits as f64 / (1u64 << 53) as f64);
        let mean = shares.sum::<f64>() / draws.len() as f64;
        assert!((mean - 0.5).abs() < 0.02, "mean {mean}");
    }
}
