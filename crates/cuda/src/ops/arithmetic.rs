//! How a device rounds, as a name for the fingerprint.
//!
//! Owns: what the name holds. Never: finds any of it out.
//! Invariant: two devices of one name give the same bits for the same work.

use crate::options::Products;

/// Names everything that a sum's last bits may depend on: the chip (tensor cores of two generations may round a
/// step of 16 in two ways), the kernels' sources, whether `wgmma` gives the bits of `mma`, and cublasLt's products.
pub(super) fn arithmetic_name(
    (major, minor): (u32, u32),
    sources: &str,
    (products, has_wgmma): (Products, bool),
) -> String {
    let instructions = match has_wgmma {
        true => "wgmma",
        false => "mma",
    };
    let fast = match products {
        Products::PathIndependent => "",
        Products::Fast => "-fast",
    };
    format!("cuda{fast}-sm{major}{minor}-{instructions}-{sources}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// KV goes only between workers of one name.
    #[test]
    fn anything_that_may_change_a_bit_changes_the_name() {
        let exact = (Products::PathIndependent, true);
        let name = arithmetic_name((9, 0), "0123", exact);
        assert_eq!(name, "cuda-sm90-wgmma-0123");
        for other in [
            arithmetic_name((8, 0), "0123", exact),
            arithmetic_name((10, 0), "0123", exact),
            arithmetic_name((9, 0), "0124", exact),
            arithmetic_name((9, 0), "0123", (Products::PathIndependent, false)),
            arithmetic_name((9, 0), "0123", (Products::Fast, true)),
        ] {
            assert_ne!(name, other);
        }
    }
}
