//! The name of a device's rounding, for the fingerprint.
//!
//! Owns: the form of the name. Never: finds out its parts.
//! Invariant: two devices with the same name give the same bits for the same work.

use crate::options::MatmulMode;

/// Returns a name of everything that a sum's last bits may depend on: the chip (tensor cores of two
/// generations may round a step of 16 differently), the kernels' sources, whether `wgmma` gives the
/// bits of `mma`, and cublasLt's products.
pub(super) fn arithmetic_name(
    capability: (u32, u32),
    sources: &str,
    products: MatmulMode,
    has_wgmma: bool,
) -> String {
    let (major, minor) = capability;
    let instructions = if has_wgmma { "wgmma" } else { "mma" };
    let fast = match products {
        MatmulMode::PathIndependent => "",
        MatmulMode::Fast => "-fast",
    };
    format!("cuda{fast}-sm{major}{minor}-{instructions}-{sources}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::every_kernel;
    use crate::images::SOURCES_HASH;
    use crate::ops::CudaOps;
    use crate::options::CudaOptions;
    use cleave_engine::ops::{Ops, Precision};

    #[test]
    fn the_arithmetic_of_a_device_names_the_kernel_sources() {
        let Some(device) = every_kernel::device() else {
            return;
        };
        let options = CudaOptions::new(Precision::Bf16);
        let ops = CudaOps::new(&device, &options).expect("a backend");
        let name = ops.arithmetic();
        assert!(name.split('-').any(|part| part == SOURCES_HASH), "{name}");
    }

    /// Workers exchange KV only if their names are equal.
    #[test]
    fn the_arithmetic_name_covers_all_that_may_change_a_bit() {
        let exact = MatmulMode::PathIndependent;
        let name = arithmetic_name((9, 0), "0123", exact, true);
        assert_eq!(name, "cuda-sm90-wgmma-0123");
        for other in [
            arithmetic_name((8, 0), "0123", exact, true),
            arithmetic_name((10, 0), "0123", exact, true),
            arithmetic_name((9, 0), "0124", exact, true),
            arithmetic_name((9, 0), "0123", exact, false),
            arithmetic_name((9, 0), "0123", MatmulMode::Fast, true),
        ] {
            assert_ne!(name, other);
        }
    }
}
