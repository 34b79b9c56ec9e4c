//! Ranges of bytes in the pool.
//!
//! Owns: where a unit of KV, or a part of one, lies in its block or slot.

use cleave_domain::{BlockIndex, Capacity, KvUnit};
use cleave_engine::BlockSpan;
use cleave_kv::BlockPart;

/// The range of a whole block, or of a piece of a state, in a block or slot of the pool.
pub(super) fn unit_span(capacity: &Capacity, block: BlockIndex, unit: KvUnit) -> BlockSpan {
    BlockSpan {
        plane: unit.plane,
        block,
        offset: capacity.unit_start(unit) as usize,
        len: capacity.unit_bytes(unit) as usize,
    }
}

/// The range of a part in a block or slot of the pool.
pub(super) fn part_span(capacity: &Capacity, block: BlockIndex, part: BlockPart) -> BlockSpan {
    let unit = unit_span(capacity, block, part.unit());
    BlockSpan {
        offset: unit.offset + part.offset as usize,
        len: part.len as usize,
        ..unit
    }
}
