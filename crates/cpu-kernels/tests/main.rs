//! The parts of the kernels that need no model: numbers of f16, and the names of instruction sets.
//! Products and attention are tested through `Ops`, in `cleave-cpu`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use cleave_cpu_kernels::isa::Isa;
use cleave_cpu_kernels::simd::plain::f16;
use half::f16 as Expected;

#[test]
fn every_f16_widens_as_in_the_half_crate() {
    for bits in 0..=u16::MAX {
        let (found, expected) = (f16(bits), Expected::from_bits(bits).to_f32());
        assert!(
            found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
            "{bits:#x}: {found} is not {expected}"
        );
    }
}

#[test]
fn isa_names_parse_back_and_unknown_ones_are_refused() {
    for isa in Isa::ALL {
        assert_eq!(isa.name().parse(), Ok(isa));
    }
    assert!("sse9".parse::<Isa>().unwrap_err().contains("avx2"));
}

#[test]
fn the_detected_isa_is_available() {
    assert!(Isa::detect().available());
    assert!(Isa::Plain.available());
}
