//! Tapes: the inputs and outputs of a brain's life as lines, and their replay.
//!
//! Owns: writing the lines and replaying them. Never: touches a file; lines come and go as text.
//! Invariant: a brain given the inputs of a tape produces its outputs, or the difference is an
//! error.

use cleave_domain::{Tape, TapeRecord, Time};
use serde::{Deserialize, Serialize};

/// A line of a worker's tape.
pub type WorkerTapeLine =
    TapeRecord<cleave_sched::WorkerLimits, cleave_sched::WorkerInput, cleave_sched::WorkerOutput>;
/// A line of a router's tape.
pub type RouterTapeLine =
    TapeRecord<cleave_router::RouterLimits, cleave_router::PoolInput, cleave_router::PoolOutput>;
/// A line of either tape, as it is written.
pub type AnyTapeLine = Tape<WorkerTapeLine, RouterTapeLine>;

/// The counts of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplayCounts {
    pub inputs: u64,
    pub outputs: u64,
}

/// Why a tape did not replay. Lines are counted from 1.
#[derive(Debug, thiserror::Error)]
pub enum TapeError {
    /// The text is not a tape line.
    #[error("line {line}: not a tape line ({reason})")]
    Malformed {
        line: u64,
        /// The parser's error message.
        reason: String,
    },
    /// The first line is not `Started`, a later one is, or the tape changes brains.
    #[error("line {line}: a tape has one start of one brain, then its inputs and outputs")]
    Misplaced { line: u64 },
    /// The brain produced another output.
    #[error("line {line}: the tape has {taped}, the brain emitted {emitted}")]
    Differs {
        line: u64,
        /// The output on the tape.
        taped: String,
        /// The output of the brain.
        emitted: String,
    },
}

/// The tape of one life of a brain, if it is kept.
#[derive(Debug, Default)]
pub(crate) struct LifeTape(Option<Vec<String>>);

impl LifeTape {
    pub(crate) fn begin(mode: TapeMode, started: impl FnOnce() -> AnyTapeLine) -> Self {
        Self((mode == TapeMode::On).then(|| vec![write(&started())]))
    }

    pub(crate) fn record(&mut self, line: impl FnOnce() -> AnyTapeLine) {
        if let Some(tape) = &mut self.0 {
            tape.push(write(&line()));
        }
    }

    pub(crate) fn take(&mut self) -> Option<Vec<String>> {
        self.0.take()
    }
}

/// Whether tapes are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TapeMode {
    Off,
    On,
}

/// One line of text, without the newline.
pub fn write(line: &AnyTapeLine) -> String {
    serde_json::to_string(line).expect("plain data serialises")
}

/// Replays a tape on a new brain and checks that its outputs are the same.
///
/// # Errors
/// The first difference between tape and brain, or why the text is no tape.
pub fn replay<'a>(lines: impl Iterator<Item = &'a str>) -> Result<ReplayCounts, TapeError> {
    let mut player: Option<ReplayedBrain> = None;
    let mut place = ReplayCursor::default();
    for text in lines.filter(|text| !text.trim().is_empty()) {
        place.line += 1;
        let line: AnyTapeLine =
            serde_json::from_str(text).map_err(|error| TapeError::Malformed {
                line: place.line,
                reason: error.to_string(),
            })?;
        let misplaced = TapeError::Misplaced { line: place.line };
        match (&mut player, line) {
            (None, line) => player = Some(ReplayedBrain::from_first_line(line).ok_or(misplaced)?),
            (Some(ReplayedBrain::Worker(brain)), Tape::Worker(line)) => {
                place.replay_line(&mut **brain, line)?
            }
            (Some(ReplayedBrain::Router(brain)), Tape::Router(line)) => {
                place.replay_line(&mut **brain, line)?
            }
            _ => return Err(misplaced),
        }
    }
    match &mut player {
        None => return Err(TapeError::Misplaced { line: 1 }),
        Some(ReplayedBrain::Worker(brain)) => place.expect_no_output(&mut **brain)?,
        Some(ReplayedBrain::Router(brain)) => place.expect_no_output(&mut **brain)?,
    }
    Ok(place.replayed)
}

/// A brain under replay.
#[derive(Debug)]
enum ReplayedBrain {
    Worker(Box<cleave_sched::WorkerBrain>),
    Router(Box<cleave_router::RouterPools>),
}

impl ReplayedBrain {
    fn from_first_line(line: AnyTapeLine) -> Option<Self> {
        match line {
            Tape::Worker(TapeRecord::Started { limits }) => Some(Self::Worker(Box::new(
                cleave_sched::WorkerBrain::new(limits),
            ))),
            Tape::Router(TapeRecord::Started { limits }) => Some(Self::Router(Box::new(
                cleave_router::RouterPools::new(limits),
            ))),
            _ => None,
        }
    }
}

/// The interface of any brain that a replay needs.
trait TapedBrain {
    type Input;
    type Output: PartialEq + std::fmt::Debug;

    fn handle_input(&mut self, at: Time, input: Self::Input);
    fn poll_output(&mut self) -> Option<Self::Output>;
}

impl TapedBrain for cleave_sched::WorkerBrain {
    type Input = cleave_sched::WorkerInput;
    type Output = cleave_sched::WorkerOutput;

    fn handle_input(&mut self, at: Time, input: Self::Input) {
        self.handle(at, input);
    }

    fn poll_output(&mut self) -> Option<Self::Output> {
        self.poll()
    }
}

impl TapedBrain for cleave_router::RouterPools {
    type Input = cleave_router::PoolInput;
    type Output = cleave_router::PoolOutput;

    fn handle_input(&mut self, at: Time, input: Self::Input) {
        self.handle(at, input);
    }

    fn poll_output(&mut self) -> Option<Self::Output> {
        self.poll()
    }
}

#[derive(Default)]
struct ReplayCursor {
    line: u64,
    replayed: ReplayCounts,
}

impl ReplayCursor {
    fn replay_line<B: TapedBrain, L>(
        &mut self,
        brain: &mut B,
        line: TapeRecord<L, B::Input, B::Output>,
    ) -> Result<(), TapeError> {
        match line {
            TapeRecord::Started { .. } => Err(TapeError::Misplaced { line: self.line }),
            TapeRecord::Received { at, input } => {
                self.expect_no_output(brain)?;
                brain.handle_input(at, input);
                self.replayed.inputs += 1;
                Ok(())
            }
            TapeRecord::Emitted { output } => {
                self.replayed.outputs += 1;
                self.compare(Some(output), brain.poll_output())
            }
        }
    }

    /// Checks that the brain has no output left.
    fn expect_no_output<B: TapedBrain>(&self, brain: &mut B) -> Result<(), TapeError> {
        self.compare(None, brain.poll_output())
    }

    fn compare<O: PartialEq + std::fmt::Debug>(
        &self,
        taped: Option<O>,
        emitted: Option<O>,
    ) -> Result<(), TapeError> {
        if taped == emitted {
            return Ok(());
        }
        let words = |output: Option<O>| output.map_or("nothing".to_owned(), |o| format!("{o:?}"));
        Err(TapeError::Differs {
            line: self.line,
            taped: words(taped),
            emitted: words(emitted),
        })
    }
}
