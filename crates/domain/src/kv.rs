//! The layout of a sequence's KV: planes, and where each layer lies in them.
//!
//! Layers whose KV lives equally long share a plane: in a block or slot of it, each has its own
//! bytes. A second plane exists only for KV that lives differently.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A kind of KV memory, by the lifetime of its content.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum KvPlane {
    /// Keys and values of every token: a block for each `block_tokens` tokens of a sequence.
    #[default]
    Blocks,
    /// A state that every token replaces: one slot for each sequence.
    State,
    /// Keys and values of the last tokens, of layers with a sliding window: a block for each
    /// `block_tokens` tokens, until no token to come reads it.
    Window,
}

impl fmt::Display for KvPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Blocks => "blocks",
            Self::State => "state",
            Self::Window => "window",
        })
    }
}

/// A part of a sequence's KV that is exported at once: a block, or a piece of its state or of a
/// block of its window. No piece exceeds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct KvUnit {
    /// The plane that it lies in.
    pub plane: KvPlane,
    /// The index of the block in the sequence, counted from its start (skipped blocks included), or
    /// of the piece in the state.
    pub ordinal: u32,
}

impl KvUnit {
    /// A block of a sequence.
    pub const fn block(ordinal: u32) -> Self {
        let plane = KvPlane::Blocks;
        Self { plane, ordinal }
    }
}

impl fmt::Display for KvUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.plane {
            KvPlane::Blocks => write!(f, "{}", self.ordinal),
            KvPlane::State => write!(f, "s{}", self.ordinal),
            KvPlane::Window => write!(f, "w{}", self.ordinal),
        }
    }
}

/// The KV memory that a model needs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KvSpec {
    /// Tokens whose keys and values one block holds.
    pub block_tokens: u32,
    /// The layers with keys and values, in a block.
    pub blocks: PlaneLayout,
    /// The layers with a state, in a slot; `None` if no layer has one.
    pub state: Option<PlaneLayout>,
    /// The layers with a sliding window, apart from those of `blocks`; `None` if there are none.
    pub window: Option<WindowLayout>,
}

/// The layers of the window plane.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WindowLayout {
    /// The largest window of these layers in tokens, the token itself included; at least 1.
    pub tokens: u32,
    /// The layers, in a block.
    pub layout: PlaneLayout,
}

/// The part of a sequence that its layers with a window read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvWindow {
    /// The largest window of the layers in tokens, the token itself included; at least 1.
    pub tokens: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
}

impl KvWindow {
    /// Tokens that a stream runs at once, with the step ahead. Drafts take blocks only if some are
    /// free.
    pub const DECODE_TOKENS: u32 = 2;

    /// The ordinal of the first block that is read when the token at `position` is run, or any
    /// token after it.
    pub fn first_block(&self, position: u32) -> u32 {
        (position + 1).saturating_sub(self.tokens) / self.block_tokens
    }

    /// The most blocks that running `tokens` consecutive tokens reads and writes, wherever they
    /// lie.
    pub fn blocks_max(&self, tokens: u32) -> u32 {
        let positions = self.tokens.saturating_add(tokens.max(1)) - 1;
        (positions - 1).div_ceil(self.block_tokens) + 1
    }
}

/// Where the layers lie in one block or slot.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlaneLayout {
    /// Bytes of the block or slot.
    pub bytes: u64,
    /// The layers' ranges, ascending and disjoint.
    pub layers: Vec<LayerSpan>,
}

/// The byte range of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerSpan {
    /// Index of the layer in the model.
    pub layer: u32,
    /// First byte, from the start of the block or slot.
    pub offset: u64,
    /// Number of bytes, at least 1.
    pub bytes: u64,
}

impl PlaneLayout {
    /// Layers of these bytes each, `(layer, bytes)`, one after the other without gaps.
    pub fn packed(layers: impl IntoIterator<Item = (u32, u64)>) -> Self {
        let mut layout = Self {
            bytes: 0,
            layers: Vec::new(),
        };
        for (layer, bytes) in layers {
            let offset = layout.bytes;
            layout.layers.push(LayerSpan {
                layer,
                offset,
                bytes,
            });
            layout.bytes += bytes;
        }
        layout
    }
}

impl KvSpec {
    /// The layout of a plane, if the model has it.
    pub fn plane(&self, plane: KvPlane) -> Option<&PlaneLayout> {
        match plane {
            KvPlane::Blocks => Some(&self.blocks),
            KvPlane::State => self.state.as_ref(),
            KvPlane::Window => self.window.as_ref().map(|window| &window.layout),
        }
    }

    /// Checks the layouts: each plane has at least one layer and fits in 32 bits, a layer's range
    /// lies in its plane behind the one before it, a layer is in one plane only, and its part of a
    /// block divides into tokens.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self) -> Result<(), KvSpecError> {
        let mut seen = Vec::new();
        if self
            .window
            .as_ref()
            .is_some_and(|window| window.tokens == 0)
        {
            return Err(KvSpecError::NoTokens);
        }
        for plane in [KvPlane::Blocks, KvPlane::State, KvPlane::Window] {
            let Some(layout) = self.plane(plane) else {
                continue;
            };
            if layout.layers.is_empty() {
                return Err(KvSpecError::NoLayers(plane));
            }
            if layout.bytes > u64::from(u32::MAX) {
                let bytes = layout.bytes;
                return Err(KvSpecError::TooLarge { plane, bytes });
            }
            let mut end = 0;
            for span in &layout.layers {
                let layer = span.layer;
                let past = span.offset.checked_add(span.bytes);
                if span.bytes == 0 || span.offset < end || past.is_none_or(|p| p > layout.bytes) {
                    return Err(KvSpecError::Range { plane, layer });
                }
                if plane != KvPlane::State
                    && !span.bytes.is_multiple_of(u64::from(self.block_tokens))
                {
                    return Err(KvSpecError::UnevenTokens { layer });
                }
                end = span.offset + span.bytes;
                seen.push(layer);
            }
        }
        seen.sort_unstable();
        match seen.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(KvSpecError::Repeated { layer: pair[0] }),
            None => Ok(()),
        }
    }
}

/// A layout that no pool can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSpecError {
    /// No layer of the model has KV in this plane.
    NoLayers(KvPlane),
    /// The window has no tokens.
    NoTokens,
    /// A block or slot exceeds 4 GiB.
    TooLarge {
        /// Plane of the block or slot.
        plane: KvPlane,
        /// The bytes of its block or slot.
        bytes: u64,
    },
    /// A layer's range is empty, overlaps the one before it, or exceeds the block or slot.
    Range {
        /// Plane in which the range lies.
        plane: KvPlane,
        /// Index of the layer in the model.
        layer: u32,
    },
    /// A layer's bytes in a block do not divide into tokens.
    UnevenTokens {
        /// Index of the layer in the model.
        layer: u32,
    },
    /// A layer is named twice.
    Repeated {
        /// Index of the layer in the model.
        layer: u32,
    },
}

impl fmt::Display for KvSpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLayers(KvPlane::Blocks) => f.write_str(
                "no layer has keys and values; at least one layer of attention is needed",
            ),
            Self::NoLayers(KvPlane::State) => f.write_str("no layer has a state"),
            Self::NoLayers(KvPlane::Window) => f.write_str("no layer has a window"),
            Self::NoTokens => f.write_str("a window of no tokens"),
            Self::TooLarge { plane, bytes } => {
                write!(
                    f,
                    "{bytes} bytes in one unit of the plane {plane}: at most 4 GiB are supported"
                )
            }
            Self::Range { plane, layer } => {
                write!(
                    f,
                    "layer {layer} has an impossible range in the plane {plane}"
                )
            }
            Self::UnevenTokens { layer } => {
                write!(
                    f,
                    "the bytes of layer {layer} in a block do not divide into tokens"
                )
            }
            Self::Repeated { layer } => write!(f, "layer {layer} has two ranges"),
        }
    }
}

impl std::error::Error for KvSpecError {}

#[cfg(test)]
mod tests {
    use super::{KvPlane, KvSpec, KvSpecError, KvWindow, PlaneLayout, WindowLayout};

    fn hybrid() -> KvSpec {
        KvSpec {
            block_tokens: 4,
            blocks: PlaneLayout::packed([(0, 32), (3, 64)]),
            state: Some(PlaneLayout::packed([(1, 7), (2, 9)])),
            window: Some(WindowLayout {
                tokens: 6,
                layout: PlaneLayout::packed([(4, 40)]),
            }),
        }
    }

    /// Compares with a count of the blocks that hold a position which is read or written.
    #[test]
    fn a_window_reads_the_blocks_of_its_last_positions() {
        for (tokens, block_tokens) in [(1, 1), (1, 4), (2, 4), (6, 4), (8, 4), (9, 1), (16, 16)] {
            let window = KvWindow {
                tokens,
                block_tokens,
            };
            for position in 0..60_u32 {
                let oldest = (position + 1).max(tokens) - tokens;
                assert_eq!(window.first_block(position), oldest / block_tokens);
            }
            for run in 1..=6_u32 {
                let count = |position: u32| {
                    let last = (position + run - 1) / block_tokens;
                    last + 1 - window.first_block(position)
                };
                let most = (0..60).map(count).max();
                assert_eq!(most, Some(window.blocks_max(run)), "{window:?} {run}");
            }
        }
    }

    #[test]
    fn packed_layers_follow_each_other() {
        let spec = hybrid();
        assert_eq!(spec.check(), Ok(()));
        let offsets = |plane| {
            let layers = &spec.plane(plane).unwrap().layers;
            layers.iter().map(|span| span.offset).collect::<Vec<_>>()
        };
        assert_eq!(offsets(KvPlane::Blocks), [0, 32]);
        assert_eq!(offsets(KvPlane::State), [0, 7]);
        assert_eq!((spec.blocks.bytes, spec.state.unwrap().bytes), (96, 16));
    }

    #[test]
    fn impossible_layouts_are_refused() {
        let broken = |change: fn(&mut KvSpec)| {
            let mut spec = hybrid();
            change(&mut spec);
            spec.check().unwrap_err()
        };
        let state = |spec: &mut KvSpec, span: usize, bytes: u64| {
            spec.state.as_mut().unwrap().layers[span].bytes = bytes;
        };
        let range = |plane, layer| KvSpecError::Range { plane, layer };
        let none = broken(|spec| spec.blocks.layers.clear());
        assert_eq!(none, KvSpecError::NoLayers(KvPlane::Blocks));
        let none = broken(|spec| spec.state.as_mut().unwrap().layers.clear());
        assert_eq!(none, KvSpecError::NoLayers(KvPlane::State));
        let overlap = broken(|spec| spec.blocks.layers[1].offset = 31);
        assert_eq!(overlap, range(KvPlane::Blocks, 3));
        let outside = broken(|spec| spec.blocks.bytes = 95);
        assert_eq!(outside, range(KvPlane::Blocks, 3));
        for (span, bytes) in [(0, 8), (0, 0), (1, 10), (1, u64::MAX)] {
            let mut spec = hybrid();
            state(&mut spec, span, bytes);
            let layer = if bytes == 8 { 2 } else { span as u32 + 1 };
            assert_eq!(spec.check(), Err(range(KvPlane::State, layer)));
        }
        let uneven = broken(|spec| spec.blocks = PlaneLayout::packed([(0, 33)]));
        assert_eq!(uneven, KvSpecError::UnevenTokens { layer: 0 });
        let repeated = broken(|spec| spec.state = Some(PlaneLayout::packed([(3, 8)])));
        assert_eq!(repeated, KvSpecError::Repeated { layer: 3 });
        let uneven =
            broken(|spec| spec.window.as_mut().unwrap().layout = PlaneLayout::packed([(4, 41)]));
        assert_eq!(uneven, KvSpecError::UnevenTokens { layer: 4 });
        let repeated = broken(|spec| spec.window.as_mut().unwrap().layout.layers[0].layer = 0);
        assert_eq!(repeated, KvSpecError::Repeated { layer: 0 });
        let empty = broken(|spec| spec.window.as_mut().unwrap().tokens = 0);
        assert_eq!(empty, KvSpecError::NoTokens);
        let large = broken(|spec| spec.blocks.bytes = 1 << 32);
        assert!(matches!(large, KvSpecError::TooLarge { bytes, .. } if bytes == 1 << 32));
    }
}
