//! Number formats, and the shape of a KV pool.
//!
//! Owns: the data that determine a block's layout for an engine and its device.
//! Never: allocates or computes.
//! Invariant: all of it is plain data; equal shapes mean equal layouts.

use crate::blocks::BlockSpan;
use cleave_domain::{BlockIndex, KvPlane, KvSpec, PlaneLayout, StateCapacity, WindowCapacity};
use cleave_models::HeadShape;
use std::ops::Range;
use std::sync::Arc;

/// Number format of stored weights and of products. Sums are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// 32-bit floats: weights and activations.
    F32,
    /// bfloat16: weights, and the activations that meet weights.
    Bf16,
}

impl Precision {
    /// Bytes of one stored element.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Name as the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// Number format of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// 32-bit floats, four bytes per element.
    F32,
    /// bfloat16, two bytes per element.
    Bf16,
    /// Eight-bit floats without a scale, see `cleave_checkpoint::e4m3`; they saturate at ±448.
    Fp8E4m3,
    /// Whole numbers from −127 to 127 with a scale per token and head, separate for key and value:
    /// the largest magnitude divided by 127.
    Int8PerTokenHead,
}

impl KvType {
    /// Bytes of one stored element.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Fp8E4m3 | Self::Int8PerTokenHead => 1,
        }
    }

    /// Bytes of the scale of a token's key or value in a head: an f32, or none.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::Bf16 | Self::Fp8E4m3 => 0,
            Self::Int8PerTokenHead => 4,
        }
    }

    /// Name as the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Int8PerTokenHead => "int8_per_token_head",
        }
    }
}

impl From<Precision> for KvType {
    /// The default: the weights' format.
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::Bf16,
        }
    }
}

/// The shape of a KV pool: `[block][layer][K|V][kv_head]`, each block one contiguous span of
/// little-endian elements. A layer begins where its [`KvSpec`] says. A head's
/// `block_tokens × head_dim` elements stay together, `[token][dim]` unless the device prefers
/// another order; devices with different orders have different
/// [`Ops::arithmetic`](super::Ops::arithmetic) names. If tokens have scales, a head's scales follow
/// its elements, `[token]`, and count as one element per byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPoolShape {
    /// Number of blocks in the pool.
    pub blocks_count: usize,
    /// Tokens per block; also the tile over which attention walks the keys.
    pub block_tokens: usize,
    /// Number format of the elements.
    pub kv: KvType,
    /// The slots of the state plane; `None` if no layer has a state. A slot is one contiguous span,
    /// whose layout its layers choose.
    pub states: Option<StateCapacity>,
    /// The blocks of the window plane; `None` if no layer is in it.
    pub windows: Option<WindowCapacity>,
    /// Elements of a block.
    block_elements: usize,
    /// The layers of both planes with keys and values, in order; at least one.
    layers: Arc<[PoolLayerShape]>,
}

/// The blocks and slots of each plane of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlaneCounts {
    /// Blocks of the plane of blocks.
    pub blocks: usize,
    /// Blocks of the window plane.
    pub windows: u32,
    /// Slots of the state plane; 0 without it.
    pub states: u32,
}

/// One layer of a KV pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLayerShape {
    /// Heads; `query_heads` does not affect the layout.
    pub heads: HeadShape,
    /// Tokens whose keys and values one block holds.
    pub block_tokens: usize,
    /// Number format of keys and values.
    pub kv: KvType,
    /// The plane that the layer lies in.
    pub plane: KvPlane,
    /// First element of the layer, within a block of its plane.
    pub offset: usize,
    /// Elements of a block of its plane, from one block to the next.
    pub block_elements: usize,
}

impl KvPoolShape {
    /// The shape of a pool with this layout. `heads` has those of each layer with keys and values,
    /// in order. A count of a plane that the layout has not is ignored.
    ///
    /// # Panics
    /// If the layout has no layer, its layers have other sizes than these heads, or a state slot
    /// exceeds 4 GiB.
    pub fn new(
        spec: &KvSpec,
        heads: impl IntoIterator<Item = HeadShape>,
        counts: PlaneCounts,
        kv: KvType,
    ) -> Self {
        let PlaneCounts {
            blocks: blocks_count,
            windows: windows_count,
            states: states_count,
        } = counts;
        let elements = |bytes: u64| bytes as usize / kv.element_bytes();
        let block_elements = elements(spec.blocks.bytes);
        let block_tokens = spec.block_tokens as usize;
        let planes = [KvPlane::Blocks, KvPlane::Window].into_iter();
        let spans = planes.filter_map(|plane| Some((plane, spec.plane(plane)?)));
        let spans = spans.flat_map(|(plane, PlaneLayout { bytes, layers })| {
            let each = elements(*bytes);
            layers.iter().map(move |span| (plane, span, each))
        });
        let mut spans: Vec<_> = spans.collect();
        spans.sort_unstable_by_key(|(_, span, _)| span.layer);
        let spans_count = spans.len();
        let layers = spans.into_iter().zip(heads).map(|(span, heads)| {
            let (plane, span, block_elements) = span;
            let shape = PoolLayerShape {
                heads,
                block_tokens,
                kv,
                plane,
                offset: elements(span.offset),
                block_elements,
            };
            assert_eq!(shape.layer_elements(), elements(span.bytes), "{span:?}");
            shape
        });
        let layers: Arc<[_]> = layers.collect();
        assert_eq!(layers.len(), spans_count, "heads of layers");
        assert!(!layers.is_empty(), "a pool without layers");
        Self {
            blocks_count,
            block_tokens,
            kv,
            states: spec.state.as_ref().map(|layout| StateCapacity {
                bytes: u32::try_from(layout.bytes).expect("a slot exceeds 4 GiB"),
                count: states_count,
            }),
            windows: spec.window.as_ref().map(|window| WindowCapacity {
                tokens: window.tokens,
                bytes: u32::try_from(window.layout.bytes).expect("a block exceeds 4 GiB"),
                count: windows_count,
            }),
            block_elements,
            layers,
        }
    }

    /// The shape of a pool for `layers_count` layers of the same heads, without states.
    pub fn uniform(
        heads: HeadShape,
        layers_count: usize,
        block_tokens: usize,
        blocks_count: usize,
        kv: KvType,
    ) -> Self {
        let one = PoolLayerShape {
            heads,
            block_tokens,
            kv,
            plane: KvPlane::Blocks,
            offset: 0,
            block_elements: 0,
        };
        let bytes = (one.layer_elements() * kv.element_bytes()) as u64;
        let spec = KvSpec {
            block_tokens: block_tokens as u32,
            blocks: PlaneLayout::packed((0..layers_count as u32).map(|layer| (layer, bytes))),
            state: None,
            window: None,
        };
        let heads = (0..layers_count).map(|_| heads);
        let counts = PlaneCounts {
            blocks: blocks_count,
            ..PlaneCounts::default()
        };
        Self::new(&spec, heads, counts, kv)
    }

    /// Layers with keys and values.
    pub fn layers_count(&self) -> usize {
        self.layers.len()
    }

    /// The layer with this index among the pool's layers.
    pub fn layer(&self, layer: usize) -> PoolLayerShape {
        self.layers[layer]
    }

    /// The heads of every layer.
    ///
    /// # Panics
    /// If layers have different heads; such models are refused, see
    /// [`supports_decoder`](super::supports_decoder).
    pub fn uniform_heads(&self) -> HeadShape {
        let heads = self.layers[0].heads;
        let same = self.layers.iter().all(|layer| layer.heads == heads);
        assert!(same, "a pool with heads of different shapes");
        heads
    }

    /// Elements of a block.
    pub const fn block_elements(&self) -> usize {
        self.block_elements
    }

    /// Bytes of a block.
    pub const fn block_bytes(&self) -> usize {
        self.block_elements * self.kv.element_bytes()
    }

    /// Number of blocks or slots of a plane, and the bytes of each; zeros if the pool has no such
    /// plane.
    pub fn plane(&self, plane: KvPlane) -> PoolPlane {
        match plane {
            KvPlane::Blocks => PoolPlane {
                count: self.blocks_count,
                bytes: self.block_bytes(),
            },
            KvPlane::State => self
                .states
                .map_or(PoolPlane::default(), |states| PoolPlane {
                    count: states.count as usize,
                    bytes: states.bytes as usize,
                }),
            KvPlane::Window => self
                .windows
                .map_or(PoolPlane::default(), |windows| PoolPlane {
                    count: windows.count as usize,
                    bytes: windows.bytes as usize,
                }),
        }
    }

    /// The span of a whole block or slot.
    pub fn whole(&self, plane: KvPlane, block: BlockIndex) -> BlockSpan {
        BlockSpan {
            plane,
            block,
            offset: 0,
            len: self.plane(plane).bytes,
        }
    }
}

/// The blocks of a pool, or its state slots, one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolPlane {
    /// Number of blocks or slots.
    pub count: usize,
    /// Bytes of one state slot.
    pub bytes: usize,
}

impl PoolPlane {
    /// Bytes of all blocks or slots; `None` if the product overflows.
    pub fn bytes_total(&self) -> Option<usize> {
        self.count.checked_mul(self.bytes)
    }

    /// The bytes of a span of this plane, from its first block or slot; `None` if the span exceeds
    /// its block or slot, or there is no such one.
    pub fn range(&self, span: &BlockSpan) -> Option<Range<usize>> {
        let end = span.offset.checked_add(span.len)?;
        let first = span.block.0 as usize * self.bytes;
        let is_inside = (span.block.0 as usize) < self.count && end <= self.bytes;
        is_inside.then(|| first + span.offset..first + end)
    }
}

impl PoolLayerShape {
    /// Elements of one head of K or of V in one block: `block_tokens × head_dim`, and its scales.
    pub const fn head_elements(&self) -> usize {
        let scale = self.kv.scale_bytes() / self.kv.element_bytes();
        self.block_tokens * (self.heads.head_dim + scale)
    }

    /// Elements of the layer in one block, K then V.
    pub const fn layer_elements(&self) -> usize {
        2 * self.heads.kv_heads * self.head_elements()
    }

    /// First element, within a block, of K's head `kv_head`. The head's tokens are together,
    /// [`PoolLayerShape::head_elements`].
    pub const fn key_offset(&self, kv_head: usize) -> usize {
        self.offset + kv_head * self.head_elements()
    }

    /// The same for V.
    pub const fn value_offset(&self, kv_head: usize) -> usize {
        self.key_offset(kv_head) + self.heads.kv_heads * self.head_elements()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: HeadShape = HeadShape {
        query_heads: 4,
        kv_heads: 2,
        head_dim: 8,
    };

    #[test]
    fn equal_layers_lie_at_multiples_of_their_size() {
        let kinds = [
            (KvType::F32, 8, 4),
            (KvType::Bf16, 8, 2),
            (KvType::Fp8E4m3, 8, 1),
            (KvType::Int8PerTokenHead, 12, 1),
        ];
        for (kv, width, bytes) in kinds {
            let shape = KvPoolShape::uniform(HEADS, 3, 16, 5, kv);
            let layer_elements = 2 * 2 * 16 * width;
            assert_eq!(shape.block_bytes(), 3 * layer_elements * bytes);
            for layer in 0..3 {
                let at = shape.layer(layer);
                for head in 0..2 {
                    let key = layer * layer_elements + head * 16 * width;
                    assert_eq!(at.key_offset(head), key, "{kv:?}");
                    assert_eq!(at.value_offset(head), key + 2 * 16 * width, "{kv:?}");
                }
            }
        }
    }

    #[test]
    fn unequal_layers_lie_at_their_offsets() {
        let wide = HeadShape {
            head_dim: 16,
            ..HEADS
        };
        let blocks = PlaneLayout::packed([(0, 2 * 2 * 4 * 8 * 2), (2, 2 * 2 * 4 * 16 * 2)]);
        let spec = KvSpec {
            block_tokens: 4,
            blocks,
            state: None,
            window: None,
        };
        let counts = PlaneCounts {
            blocks: 1,
            windows: 5,
            states: 9,
        };
        let shape = KvPoolShape::new(&spec, [HEADS, wide], counts, KvType::Bf16);
        assert_eq!((shape.states, shape.windows), (None, None));
        assert_eq!(shape.plane(KvPlane::State), PoolPlane::default());
        assert_eq!(shape.block_elements(), 128 + 256);
        assert_eq!((shape.layer(0).offset, shape.layer(1).offset), (0, 128));
        assert_eq!(shape.layer(1).value_offset(1), 128 + 3 * 4 * 16);
    }

    #[test]
    fn a_span_outside_its_slot_has_no_bytes() {
        let plane = PoolPlane { count: 3, bytes: 8 };
        let range = |block, offset, len| {
            plane.range(&BlockSpan {
                plane: KvPlane::State,
                block: BlockIndex(block),
                offset,
                len,
            })
        };
        assert_eq!(range(2, 3, 5), Some(19..24));
        assert_eq!(range(0, 8, 0), Some(8..8));
        assert_eq!(plane.bytes_total(), Some(24));
        for (block, offset, len) in [(3, 0, 0), (2, 4, 5), (0, 9, 0), (0, usize::MAX, 2)] {
            assert_eq!(range(block, offset, len), None);
        }
    }
}
