//! Slices of the inner dimension of row-parallel products: attention's output projection and the
//! MLP's down projection.
//!
//! Owns: the number of slices, and where they end.
//! Never: computes a sum.
//! Invariant: slices depend on the model and on the groups of its stored weights alone, never on a
//! device, on rows, or on how many ranks share a product. An aligned half, quarter or eighth of the
//! slices is a run of the inner dimension, cut as the whole is.

use crate::spec::{AttentionSpec, Mixer, ModelSpec};
use crate::tensors::Projection;
use std::ops::Range;

/// The most slices of a product, a power of two.
pub const SLICES_MAX: usize = 8;
/// Slices are multiples of this many elements: a step of the tensor cores, and whole steps of every
/// kernel on a processor.
const SLICE_ELEMENTS_MIN: usize = 16;
/// Units that slices of a down projection are made of, in elements, the preferred one first: groups
/// of quantised weights have at most 128 in the usual formats.
const DOWN_UNITS: [usize; 4] = [128, 64, 32, SLICE_ELEMENTS_MIN];

/// Slices of a product's inner dimension.
///
/// Each slice is summed by itself, from zero, and the sums are added as a balanced binary tree:
/// with eight slices `((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))`. Ranks that share a product have a
/// subtree each, see [`InnerSlices::share`], so that sums have the same bits however many there
/// are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InnerSlices {
    /// End of each slice of the whole product, in elements.
    ends: Vec<usize>,
    /// Slices that this matrix has.
    owned: Range<usize>,
}

impl InnerSlices {
    /// One slice of `width` elements: the product is one sum.
    pub fn whole(width: usize) -> Self {
        Self {
            ends: vec![width],
            owned: 0..1,
        }
    }

    /// Cuts `width` elements into `count` slices (1, 2, 4 or 8) of whole units by halving them
    /// again and again; where units do not divide, the second half has one more.
    ///
    /// # Panics
    /// If `width` is not whole units, or fewer units than slices.
    pub fn halved(width: usize, unit: usize, count: usize) -> Self {
        assert!(
            width.is_multiple_of(unit) && width / unit >= count,
            "{width} elements in {count} slices of whole units of {unit}"
        );
        assert!(slice_counts().any(|each| each == count), "{count} slices");
        let mut ends = vec![width / unit];
        while ends.len() < count {
            let starts = std::iter::once(0).chain(ends.iter().copied());
            let halves = starts.zip(&ends).map(|(start, end)| {
                let middle = start + (end - start) / 2;
                [middle, *end]
            });
            ends = halves.flatten().collect();
        }
        Self {
            ends: ends.iter().map(|end| end * unit).collect(),
            owned: 0..count,
        }
    }

    /// The part of rank `rank` of `ranks`: as many slices as every other rank has, which are a
    /// subtree of the sum.
    ///
    /// # Panics
    /// If `ranks` does not divide the number of slices, or `rank` is not below it.
    #[must_use]
    pub fn share(&self, rank: usize, ranks: usize) -> Self {
        assert!(
            self.count().is_multiple_of(ranks) && rank < ranks,
            "rank {rank} of {ranks} has no share of {} slices",
            self.count()
        );
        let each = self.count() / ranks;
        let start = self.owned.start + rank * each;
        Self {
            ends: self.ends.clone(),
            owned: start..start + each,
        }
    }

    /// Slices of this matrix: 1, 2, 4 or 8.
    pub fn count(&self) -> usize {
        self.owned.len()
    }

    /// Elements of the whole product's inner dimension that this matrix has.
    pub fn elements(&self) -> Range<usize> {
        let start = self.owned.start.checked_sub(1);
        start.map_or(0, |slice| self.ends[slice])..self.ends[self.owned.end - 1]
    }

    /// Ends of this matrix's slices, counted from its first element.
    pub fn ends(&self) -> impl Iterator<Item = usize> {
        let start = self.elements().start;
        self.ends[self.owned.clone()]
            .iter()
            .map(move |end| end - start)
    }

    /// Ends of all slices of the whole product, which are the same for every rank.
    pub fn ends_of_all(&self) -> &[usize] {
        &self.ends
    }

    /// Whether every slice is whole groups of `group` elements.
    pub fn are_multiples_of(&self, group: usize) -> bool {
        self.ends.iter().all(|end| end.is_multiple_of(group))
    }
}

impl ModelSpec {
    /// Slices of a projection's inner dimension in a layer. `group_columns` is the number of
    /// columns of a stored weight that share a scale, which a slice does not divide; 1 if there are
    /// no groups.
    ///
    /// A slice of [`Projection::Output`] is whole KV heads with their query heads, as many in every
    /// slice. Slices of a down projection, an expert's too, differ by at most one unit, of 128
    /// elements where that leaves eight slices. Every other projection has one slice.
    ///
    /// # Panics
    /// If the layer has no such projection.
    pub fn inner_slices(
        &self,
        layer: usize,
        projection: Projection,
        group_columns: usize,
    ) -> InnerSlices {
        let layer = &self.layers[layer];
        let width = layer.inner_width(projection, self.hidden_size);
        let width = width.unwrap_or_else(|| panic!("the layer has no {projection:?} projection"));
        let Mixer::Attention(AttentionSpec { heads, .. }) = &layer.mixer;
        match projection {
            Projection::Output => {
                let of_kv_head = heads.query_width() / heads.kv_heads;
                let unit = common_multiple(
                    common_multiple(of_kv_head, SLICE_ELEMENTS_MIN),
                    group_columns,
                );
                match slice_counts().find(|count| width.is_multiple_of(count * unit)) {
                    Some(count) => InnerSlices::halved(width, unit, count),
                    None => InnerSlices::whole(width),
                }
            }
            Projection::Down | Projection::ExpertDown | Projection::SharedDown => {
                let mut best = (width, 1);
                for unit in DOWN_UNITS.map(|unit| common_multiple(unit, group_columns)) {
                    let count = slice_counts()
                        .find(|count| width.is_multiple_of(unit) && width / unit >= *count)
                        .unwrap_or(1);
                    if count > best.1 {
                        best = (unit, count);
                    }
                }
                InnerSlices::halved(width, best.0, best.1)
            }
            Projection::Query
            | Projection::Key
            | Projection::Value
            | Projection::Gate
            | Projection::Up
            | Projection::ExpertGate
            | Projection::ExpertUp
            | Projection::SharedGate
            | Projection::SharedUp => InnerSlices::whole(width),
        }
    }
}

/// Numbers of slices, the most first.
fn slice_counts() -> impl Iterator<Item = usize> {
    std::iter::successors(Some(SLICES_MAX), |count| Some(count / 2)).take_while(|count| *count > 0)
}

/// The least number that both divide.
fn common_multiple(a: usize, b: usize) -> usize {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor * b
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ChosenWeights, ExpertsSpec, Mlp, RouterScore, RouterSpec, SharedExpertSpec};
    use crate::{ConfigError, ConfigFields, read_model};
    use serde_json::json;
    use std::path::Path;

    /// A Llama of one layer with these heads and this width of the MLP.
    fn model(query_heads: usize, kv_heads: usize, head_dim: usize, mlp: usize) -> ModelSpec {
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "intermediate_size": mlp,
            "num_attention_heads": query_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": 32,
            "max_position_embeddings": 64,
        });
        let map = config.as_object().cloned().unwrap();
        let fields = ConfigFields::new(Path::new("config.json"), map);
        read_model(&fields, |_| Ok::<_, ConfigError>(()))
            .unwrap()
            .0
            .spec
    }

    fn output(spec: &ModelSpec, group: usize) -> InnerSlices {
        spec.inner_slices(0, Projection::Output, group)
    }

    fn down(spec: &ModelSpec, group: usize) -> InnerSlices {
        spec.inner_slices(0, Projection::Down, group)
    }

    /// Heads, width of the MLP, and slices of both products; shapes of published models.
    #[test]
    fn known_models_have_these_slices() {
        for (heads, mlp, slices) in [
            ([32, 8, 128], 14_336, (8, 8)), // Llama 3.1 8B
            ([32, 8, 64], 8192, (8, 8)),    // Llama 3.2 1B
            ([16, 8, 128], 3072, (8, 8)),   // Qwen3 0.6B
            ([14, 2, 64], 4864, (2, 8)),    // Qwen2.5 0.5B
            ([28, 4, 128], 18_944, (4, 8)), // Qwen2.5 7B
            ([64, 8, 128], 29_568, (8, 8)), // Qwen2.5 72B
            ([12, 3, 64], 1536, (1, 8)),
            ([4, 4, 16], 172, (4, 1)),
            ([4, 2, 16], 112, (2, 4)),
        ] {
            let [query_heads, kv_heads, head_dim] = heads;
            let spec = model(query_heads, kv_heads, head_dim, mlp);
            let found = (output(&spec, 1).count(), down(&spec, 1).count());
            assert_eq!(found, slices, "{heads:?} {mlp}");
        }
    }

    #[test]
    fn slices_are_whole_groups_and_whole_kv_heads() {
        let spec = model(14, 2, 64, 4864);
        // A KV head's 448 elements are three and a half groups of 128, and seven of 64.
        assert_eq!(output(&spec, 128).count(), 1);
        assert_eq!(output(&spec, 64).count(), 2);
        let ends: Vec<usize> = down(&spec, 128).ends().collect();
        // 38 units: halves of 19, of which the second half is larger.
        assert_eq!(ends, [4, 9, 14, 19, 23, 28, 33, 38].map(|end| end * 128));
        assert_eq!(output(&spec, 896), InnerSlices::whole(896));
        assert_eq!(down(&spec, 4864), InnerSlices::whole(4864));
        let wide = model(14, 2, 64, 1536);
        assert_eq!(down(&wide, 192).count(), 8);
        assert!(down(&wide, 192).are_multiples_of(192));
    }

    #[test]
    fn an_experts_down_projection_has_the_slices_of_a_dense_one() {
        for width in [768, 1024, 1408, 112, 172] {
            let dense = model(4, 4, 16, width);
            let Mlp::Gated(mlp) = dense.layers[0].mlp else {
                panic!("Llama's MLP is dense");
            };
            let mut mixed = dense.clone();
            mixed.layers[0].mlp = Mlp::Experts(ExpertsSpec {
                count: 8,
                chosen: 2,
                expert: mlp,
                router: RouterSpec {
                    score: RouterScore::Softmax,
                    has_bias: false,
                    has_choice_bias: false,
                    groups: None,
                    weights: ChosenWeights::Scores,
                    scale: 1.0,
                },
                shared: Some(SharedExpertSpec {
                    mlp,
                    has_gate: false,
                }),
            });
            for projection in [Projection::ExpertDown, Projection::SharedDown] {
                let slices = mixed.inner_slices(0, projection, 1);
                assert_eq!(slices, down(&dense, 1), "{width} {projection:?}");
            }
            let gate = mixed.inner_slices(0, Projection::ExpertGate, 1);
            assert_eq!(gate, InnerSlices::whole(64));
        }
    }

    #[test]
    fn a_projection_of_columns_has_one_slice() {
        let spec = model(32, 8, 64, 8192);
        for projection in [Projection::Query, Projection::Gate] {
            assert_eq!(spec.inner_slices(0, projection, 1), InnerSlices::whole(64));
        }
    }

    #[test]
    fn shares_of_ranks_are_subtrees_that_cover_the_product() {
        for units in 8..70 {
            let whole = InnerSlices::halved(units * 32, 32, 8);
            let sizes: Vec<usize> = {
                let starts = std::iter::once(0).chain(whole.ends());
                starts.zip(whole.ends()).map(|(a, b)| b - a).collect()
            };
            let (least, most) = (sizes.iter().min(), sizes.iter().max());
            assert!(most.unwrap() - least.unwrap() <= 32, "{sizes:?}");
            for ranks in [1, 2, 4, 8] {
                let mut next = 0;
                for rank in 0..ranks {
                    let share = whole.share(rank, ranks);
                    let elements = share.elements();
                    assert_eq!(elements.start, next);
                    next = elements.end;
                    // A rank's slices are those of a product of its own width.
                    let alone = InnerSlices::halved(elements.len(), 32, 8 / ranks);
                    assert!(share.ends().eq(alone.ends()), "{units} {rank} of {ranks}");
                    assert_eq!(share.ends_of_all(), whole.ends_of_all());
                }
                assert_eq!(next, units * 32);
            }
        }
    }

    #[test]
    #[should_panic(expected = "has no share")]
    fn more_ranks_than_slices_have_no_share() {
        let _ = InnerSlices::whole(64).share(0, 2);
    }
}
