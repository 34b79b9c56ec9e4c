//! Number formats, and the shape of a KV pool.
//!
//! Owns: the data that determine a block's layout for an engine and its device.
//! Never: allocates or computes.
//! Invariant: all of it is plain data; equal shapes mean equal layouts.

use cleave_models::HeadShape;

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
/// little-endian elements. A head's `block_tokens × head_dim` elements stay together,
/// `[token][dim]` unless the device prefers another order; devices with different orders have
/// different [`Ops::arithmetic`](super::Ops::arithmetic) names. If tokens have scales, a head's
/// scales follow its elements, `[token]`, and count as one element per byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPoolShape {
    /// Number of blocks in the pool.
    pub blocks_count: usize,
    /// Number of layers of the model.
    pub layers_count: usize,
    /// Heads; `query_heads` does not affect the layout.
    pub heads: HeadShape,
    /// Tokens per block; also the tile over which attention walks the keys.
    pub block_tokens: usize,
    /// Number format of the elements.
    pub kv: KvType,
}

impl KvPoolShape {
    /// Elements of one head of K or of V in one block: `block_tokens × head_dim`, and its scales.
    pub const fn head_elements(&self) -> usize {
        let scale = self.kv.scale_bytes() / self.kv.element_bytes();
        self.block_tokens * (self.heads.head_dim + scale)
    }

    /// Elements of one layer in one block, K then V.
    pub const fn layer_elements(&self) -> usize {
        2 * self.heads.kv_heads * self.head_elements()
    }

    /// Elements of a block.
    pub const fn block_elements(&self) -> usize {
        self.layers_count * self.layer_elements()
    }

    /// Bytes of a block.
    pub const fn block_bytes(&self) -> usize {
        self.block_elements() * self.kv.element_bytes()
    }

    /// First element, within a block, of K's head `kv_head` in `layer`. The head's tokens are
    /// together, [`KvPoolShape::head_elements`].
    pub const fn key_offset(&self, layer: usize, kv_head: usize) -> usize {
        layer * self.layer_elements() + kv_head * self.head_elements()
    }

    /// The same for V.
    pub const fn value_offset(&self, layer: usize, kv_head: usize) -> usize {
        self.key_offset(layer, kv_head) + self.heads.kv_heads * self.head_elements()
    }
}
