//! An engine whose given-up window blocks spoil whatever reads them.

use crate::{BlockSpan, Engine, EngineDescription, EngineError};
use cleave_domain::{BlockIndex, KvPlane, StepPlan, StepResult};

/// Returns the engine, for one sequence at a time: before each step, every block of the window
/// plane that is not in the plan's tables is overwritten with bytes that are no number.
///
/// # Panics
/// If the engine has no window plane, at the first step.
pub fn poisoned(engine: Box<dyn Engine>) -> Box<dyn Engine> {
    Box::new(PoisonedEngine { engine })
}

struct PoisonedEngine {
    engine: Box<dyn Engine>,
}

impl Engine for PoisonedEngine {
    fn describe(&self) -> &EngineDescription {
        self.engine.describe()
    }

    fn step(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError> {
        let windows = self.describe().capacity.windows;
        let windows = windows.expect("the model has windows");
        let tables = plan
            .segments
            .iter()
            .filter_map(|segment| segment.window.as_ref());
        let live: Vec<BlockIndex> = tables.flat_map(|table| table.blocks.clone()).collect();
        let poison = vec![0xff; windows.bytes as usize];
        for block in (0..windows.count).map(BlockIndex) {
            if !live.contains(&block) {
                let span = BlockSpan {
                    plane: KvPlane::Window,
                    block,
                    offset: 0,
                    len: poison.len(),
                };
                self.engine.write_block(span, &poison)?;
            }
        }
        self.engine.step(plan)
    }

    fn read_block(&self, span: BlockSpan, out: &mut [u8]) -> Result<(), EngineError> {
        self.engine.read_block(span, out)
    }

    fn write_block(&mut self, span: BlockSpan, bytes: &[u8]) -> Result<(), EngineError> {
        self.engine.write_block(span, bytes)
    }

    fn copy_blocks(
        &mut self,
        plane: KvPlane,
        pairs: &[(BlockIndex, BlockIndex)],
    ) -> Result<(), EngineError> {
        self.engine.copy_blocks(plane, pairs)
    }
}
