//! Random weights, streamed to safetensors files.
//!
//! Owns: the distribution of the weights, and their division into shards.
//! Never: holds more than one piece of a tensor in memory.
//! Invariant: an element depends only on the seed, its tensor's index in the list and its own
//! index.

use super::SynthError;
use crate::CheckpointProgress;
use cleave_domain::SplitMix64;
use cleave_models::{ExpertAxes, ModelTensor, TensorRole};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::thread;

/// Elements drawn and written at once; a multiple of `DRAW_ELEMENTS`.
const PIECE_ELEMENTS: usize = 1 << 23;
/// Elements per random number: 64 bits, 16 for each.
const DRAW_ELEMENTS: usize = 4;
/// Random numbers drawn together, so that the compiler vectorises the loop.
const DRAWS_TOGETHER: usize = 16;
const ELEMENT_BYTES: u64 = 2;

/// A set of tensors to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightsWriter<'a> {
    pub(super) tensors: &'a [ModelTensor],
    pub(super) seed: u64,
    /// Limit of a shard in bytes; a larger tensor gets a shard of its own.
    pub(super) shard_bytes_max: u64,
}

impl WeightsWriter<'_> {
    /// Writes every tensor, in one file or in shards with an index.
    pub(super) fn run(
        self,
        out: &Path,
        progress: &mut dyn FnMut(CheckpointProgress),
    ) -> Result<(), SynthError> {
        let Self { tensors, seed, .. } = self;
        let shards = shard_ranges(tensors, self.shard_bytes_max);
        let mut done = CheckpointProgress {
            bytes_done: 0,
            bytes_total: tensors.iter().map(bytes_of).sum(),
        };
        let mut weight_map = Map::new();
        for (index, shard) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => "model.safetensors".to_owned(),
                count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            let path = out.join(&name);
            let mut file = File::create(&path).map_err(SynthError::at(&path))?;
            let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(SynthError::at(&path));
            put(&header(&tensors[shard.clone()]))?;
            for ordinal in shard.clone() {
                let tensor = &tensors[ordinal];
                weight_map.insert(tensor.name.clone(), json!(name));
                draw_tensor(tensor, seed, ordinal as u32, &mut |piece| {
                    put(piece)?;
                    done.bytes_done += piece.len() as u64;
                    progress(done);
                    Ok(())
                })?;
            }
        }
        if shards.len() > 1 {
            let index = json!({
                "metadata": {"total_size": done.bytes_total},
                "weight_map": weight_map,
            });
            super::write_json(&out.join("model.safetensors.index.json"), &index)?;
        }
        Ok(())
    }
}

fn bytes_of(tensor: &ModelTensor) -> u64 {
    tensor.shape.iter().map(|dim| *dim as u64).product::<u64>() * ELEMENT_BYTES
}

/// Divides the tensors into ranges, one per file.
fn shard_ranges(tensors: &[ModelTensor], shard_bytes_max: u64) -> Vec<Range<usize>> {
    let mut shards = Vec::new();
    let (mut first, mut bytes) = (0, 0);
    for (ordinal, tensor) in tensors.iter().enumerate() {
        if bytes + bytes_of(tensor) > shard_bytes_max && ordinal > first {
            shards.push(first..ordinal);
            (first, bytes) = (ordinal, 0);
        }
        bytes += bytes_of(tensor);
    }
    shards.push(first..tensors.len());
    shards
}

/// Bytes of each shard's tensors.
#[cfg(test)]
pub(super) fn shard_bytes(tensors: &[ModelTensor], shard_bytes_max: u64) -> Vec<u64> {
    let shards = shard_ranges(tensors, shard_bytes_max).into_iter();
    shards
        .map(|shard| tensors[shard].iter().map(bytes_of).sum())
        .collect()
}

/// The file's header: length and JSON, padded so that the data begin at a multiple of eight.
fn header(tensors: &[ModelTensor]) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut start = 0;
    for tensor in tensors {
        let end = start + bytes_of(tensor);
        let entry = json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]});
        map.insert(tensor.name.clone(), entry);
        start = end;
    }
    let mut text = Value::Object(map).to_string();
    text.extend(std::iter::repeat_n(
        ' ',
        text.len().next_multiple_of(8) - text.len(),
    ));
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// A uniform distribution: `center ± reach`.
#[derive(Clone, Copy, Debug)]
struct UniformSpread {
    center: f32,
    reach: f32,
}

impl UniformSpread {
    /// Norms are near one. Projections add more to the residual stream than the embedding did, or
    /// else a tied head would only repeat the last token. The head's logits are spread widely, so
    /// that greedy tokens do not depend on the last bit.
    fn of(tensor: &ModelTensor) -> Self {
        // A uniform distribution of this reach has a standard deviation of one.
        const UNIT: f32 = 1.732_050_8;
        let (center, deviation) = match (tensor.role, tensor.shape.as_slice()) {
            (TensorRole::Embedding | TensorRole::Head, [_, columns]) => {
                (0.0, 3.0 / (*columns as f32).sqrt())
            }
            (TensorRole::Bias(_) | TensorRole::ExpertBiases { .. }, _)
            | (TensorRole::RouterBias | TensorRole::ChoiceBias | TensorRole::Sinks, _) => {
                (0.0, 0.1)
            }
            (
                TensorRole::Experts {
                    axes: ExpertAxes::InOut,
                    ..
                },
                [_, columns, _],
            )
            | (_, [.., columns])
                if tensor.shape.len() > 1 =>
            {
                (0.0, 2.0 / (*columns as f32).sqrt())
            }
            _ => (1.0, 0.1),
        };
        Self {
            center,
            reach: deviation * UNIT,
        }
    }

    /// Maps 16 random bits to an element; returns the bits of a bfloat16.
    fn value(self, bits: u16) -> u16 {
        let share = (f32::from(bits) + 0.5) / 32_768.0 - 1.0;
        let wide = (self.center + self.reach * share).to_bits();
        // Rounds to nearest, ties to even; the numbers are finite.
        ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16) as u16
    }
}

/// Draws a tensor piece by piece; all cores share each piece.
fn draw_tensor(
    tensor: &ModelTensor,
    seed: u64,
    ordinal: u32,
    put: &mut dyn FnMut(&[u8]) -> Result<(), SynthError>,
) -> Result<(), SynthError> {
    let spread = UniformSpread::of(tensor);
    let elements = (bytes_of(tensor) / ELEMENT_BYTES) as usize;
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let mut piece = vec![0u8; elements.min(PIECE_ELEMENTS) * ELEMENT_BYTES as usize];
    for first in (0..elements).step_by(PIECE_ELEMENTS) {
        let count = (elements - first).min(PIECE_ELEMENTS);
        let bytes = &mut piece[..count * ELEMENT_BYTES as usize];
        let part_elements = count
            .div_ceil(cores)
            .next_multiple_of(DRAW_ELEMENTS * DRAWS_TOGETHER);
        thread::scope(|scope| {
            let parts = bytes.chunks_mut(part_elements * ELEMENT_BYTES as usize);
            for (part, bytes) in parts.enumerate() {
                let draw = ((first + part * part_elements) / DRAW_ELEMENTS) as u64;
                scope.spawn(move || draw_part(bytes, draw, spread, seed, ordinal));
            }
        });
        put(bytes)?;
    }
    Ok(())
}

fn draw_part(bytes: &mut [u8], first_draw: u64, spread: UniformSpread, seed: u64, ordinal: u32) {
    let key = SplitMix64::finalize(seed ^ SplitMix64::finalize(u64::from(ordinal)));
    let groups = bytes.chunks_mut(DRAWS_TOGETHER * DRAW_ELEMENTS * ELEMENT_BYTES as usize);
    for (group, bytes) in groups.enumerate() {
        let first = first_draw + (group * DRAWS_TOGETHER) as u64;
        let mut drawn = [[0u8; DRAW_ELEMENTS * ELEMENT_BYTES as usize]; DRAWS_TOGETHER];
        for (index, drawn) in drawn.iter_mut().enumerate() {
            let draw = first + index as u64;
            let bits = SplitMix64::nth(key, draw);
            let value = |part: u32| u64::from(spread.value((bits >> (16 * part)) as u16));
            let values = value(0) | value(1) << 16 | value(2) << 32 | value(3) << 48;
            *drawn = values.to_le_bytes();
        }
        bytes.copy_from_slice(&drawn.as_flattened()[..bytes.len()]);
    }
}
