//! Rounding of weights at load.
//!
//! Owns: the formats that a user may ask for, and the choice for each matrix.

use super::InnerSlices;
use cleave_checkpoint::rounding::{MX_GROUP, NV_GROUP, RoundedForm};

/// Group sizes of int4, the largest first: it reads the fewest scales.
const INT4_GROUPS: [usize; 3] = [128, 64, 32];

/// Format to which the dense projections of a checkpoint are rounded when they are loaded, experts'
/// too. Embedding, router, norms and biases are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantize {
    /// Int 8 with a scale for each row of a weight.
    Int8,
    /// Int 4 with a scale for each 128 elements of a row, or 64 or 32 if 128 does not divide the
    /// slices.
    Int4,
    /// Float 8 (e4m3) with a scale for each row of a weight.
    Fp8,
    /// Float 4 (e2m1) with a power of two for each 32 elements of a row.
    Mxfp4,
    /// Float 4 (e2m1) with a float 8 for each 16 elements of a row, and a factor for each matrix.
    Nvfp4,
}

impl Quantize {
    /// Formats in the order of the command line's help.
    pub const ALL: [Self; 5] = [Self::Int8, Self::Int4, Self::Fp8, Self::Mxfp4, Self::Nvfp4];

    /// Name as the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Fp8 => "fp8",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// Format of a matrix with these slices: they are whole groups, and int 8 stands in where none
    /// divides them.
    pub fn form(self, slices: &InnerSlices) -> RoundedForm {
        let divides =
            |group: &usize| !slices.elements().is_empty() && slices.are_multiples_of(*group);
        match self {
            Self::Int8 => RoundedForm::Int8,
            Self::Int4 => {
                let group = INT4_GROUPS.into_iter().find(divides);
                group.map_or(RoundedForm::Int8, |group| RoundedForm::Int4 { group })
            }
            Self::Fp8 => RoundedForm::Fp8,
            Self::Mxfp4 if divides(&MX_GROUP) => RoundedForm::Mxfp4,
            Self::Nvfp4 if divides(&NV_GROUP) => RoundedForm::Nvfp4,
            Self::Mxfp4 | Self::Nvfp4 => RoundedForm::Int8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_whole_groups_or_weights_have_eight_bits() {
        let form = |quantize: Quantize, slices: &InnerSlices| quantize.form(slices);
        let int4 = |group| RoundedForm::Int4 { group };
        let int8 = RoundedForm::Int8;
        let whole = InnerSlices::whole;
        for (slices, expected) in [
            (
                whole(256),
                [int4(128), RoundedForm::Mxfp4, RoundedForm::Nvfp4],
            ),
            (
                whole(192),
                [int4(64), RoundedForm::Mxfp4, RoundedForm::Nvfp4],
            ),
            (
                whole(2880),
                [int4(64), RoundedForm::Mxfp4, RoundedForm::Nvfp4],
            ),
            (whole(688), [int8, int8, RoundedForm::Nvfp4]),
            (whole(24), [int8; 3]),
            (
                InnerSlices::halved(256, 16, 8),
                [int4(32), RoundedForm::Mxfp4, RoundedForm::Nvfp4],
            ),
        ] {
            let all = [Quantize::Int4, Quantize::Mxfp4, Quantize::Nvfp4];
            assert_eq!(all.map(|each| form(each, &slices)), expected, "{slices:?}");
            assert_eq!(form(Quantize::Fp8, &slices), RoundedForm::Fp8);
        }
    }
}
