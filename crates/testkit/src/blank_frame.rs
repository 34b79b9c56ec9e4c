//! Frames of blocks whose content is not simulated.

use cleave_domain::SplitMix64;
use cleave_kv::handoff::HandoffDigest;
use cleave_kv::{BlockPart, Packet};
use cleave_sched::{BlockExport, ExportOutcome, WorkerInput};

/// The one frame of an exported block, without a payload.
#[derive(Clone, Copy, Debug)]
pub struct BlankFrame {
    export: BlockExport,
    part: BlockPart,
    /// Stands for the checksum of the payload; both ends compute the same one.
    checksum: u64,
}

impl BlankFrame {
    /// The frame of a block of this size.
    pub fn of(export: &BlockExport, block_bytes: u32) -> Self {
        let part = BlockPart {
            plane: export.plane,
            ordinal: export.ordinal,
            offset: 0,
            len: block_bytes,
        };
        let content = export.handoff.flight.0 ^ u64::from(export.ordinal) << 40;
        Self {
            export: *export,
            part,
            checksum: SplitMix64::finalize(content),
        }
    }

    /// The packet that the receiver gets.
    pub fn packet(&self) -> Packet {
        Packet::Frame {
            handoff: self.export.handoff,
            block: self.export.block,
            part: self.part,
            checksum: self.checksum,
        }
    }

    /// The answer to the export, once the block has left.
    pub fn answer(&self) -> WorkerInput {
        let mut digest = HandoffDigest::default();
        digest.add_frame(self.part, self.checksum);
        self.export.answer(ExportOutcome::Sent {
            digest: digest.value(),
            bytes: u64::from(self.part.len),
        })
    }
}
