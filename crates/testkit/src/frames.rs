//! Frames of exported blocks.
//!
//! Owns: how a block becomes packets, and the answer to its export. Never: sends them.

use crate::FrameCells;
use crate::engine::{CELL_BYTES, KvCell};
use cleave_domain::SplitMix64;
use cleave_kv::handoff::HandoffDigest;
use cleave_kv::{BlockPart, Packet};
use cleave_sched::{BlockExport, ExportOutcome, WorkerInput};

/// A block, or a piece of a state, as frames. Its bytes are those of all frames.
#[derive(Clone, Debug)]
pub struct BlockFrames {
    /// The packets with their cells, in order.
    pub frames: Vec<(Packet, FrameCells)>,
    export: BlockExport,
    digest: HandoffDigest,
    bytes: u32,
}

impl BlockFrames {
    /// The cells of a block in one frame, or in two, the second of which begins at cell `cut`.
    pub fn of_cells(export: &BlockExport, cells: &[Option<KvCell>], cut: usize) -> Self {
        let mut frames = Self::none(export);
        let (first, second) = cells.split_at(cut);
        for cells in [first, second]
            .into_iter()
            .filter(|cells| !cells.is_empty())
        {
            frames.add(
                cells.to_vec(),
                cells.len() as u32 * CELL_BYTES,
                checksum(cells),
            );
        }
        frames
    }

    /// A block whose content is not simulated, as one frame without cells.
    pub fn blank(export: &BlockExport, block_bytes: u32) -> Self {
        let mut frames = Self::none(export);
        // Stands for the checksum of the payload; both ends compute the same one.
        let content = export.handoff.flight.0 ^ u64::from(export.ordinal) << 40;
        frames.add(Vec::new(), block_bytes, SplitMix64::finalize(content));
        frames
    }

    fn none(export: &BlockExport) -> Self {
        Self {
            frames: Vec::new(),
            export: *export,
            digest: HandoffDigest::default(),
            bytes: 0,
        }
    }

    fn add(&mut self, cells: FrameCells, len: u32, checksum: u64) {
        let part = BlockPart {
            plane: self.export.plane,
            ordinal: self.export.ordinal,
            offset: self.bytes,
            len,
        };
        self.digest.add_frame(part, checksum);
        self.bytes += len;
        let packet = Packet::Frame {
            handoff: self.export.handoff,
            block: self.export.block,
            part,
            checksum,
        };
        self.frames.push((packet, cells));
    }

    /// The answer to the export, once all frames have left.
    pub fn answer(&self) -> WorkerInput {
        self.export.answer(ExportOutcome::Sent {
            digest: self.digest.value(),
            bytes: u64::from(self.bytes),
        })
    }
}

/// The checksum of cells: FNV-1a over their content.
fn checksum(cells: &[Option<KvCell>]) -> u64 {
    cells.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, cell| {
        let word = cell.map_or(0, |cell| cell.kv.0 ^ cell.salt);
        (hash ^ word).wrapping_mul(0x0100_0000_01b3)
    })
}
