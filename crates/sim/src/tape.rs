//! Tapes: a brain's life as lines, and the demand that it repeats itself.
//!
//! Owns: writing the lines and replaying them. Never: touches a file; lines come and go as text.
//! Invariant: a brain fed the inputs of a tape says its outputs, or the difference is an error.

use cleave_domain::{Tape, TapeLine, Time};
use serde::{Deserialize, Serialize};

/// A line of a worker's tape.
pub type WorkerLine = TapeLine<cleave_sched::Limits, cleave_sched::Input, cleave_sched::Output>;
/// A line of a router's tape.
pub type RouterLine = TapeLine<cleave_router::Limits, cleave_router::Input, cleave_router::Output>;
/// A line of either, as it is written.
pub type Line = Tape<WorkerLine, RouterLine>;

/// What a replay went through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replayed {
    /// Inputs fed.
    pub inputs: u64,
    /// Outputs compared.
    pub outputs: u64,
}

/// Why a tape did not replay. Lines are counted from 1.
#[derive(Debug, thiserror::Error)]
pub enum TapeError {
    /// The text is not a tape.
    #[error("line {line}: not a tape line ({reason})")]
    Malformed {
        /// Where.
        line: u64,
        /// What the parser says.
        reason: String,
    },
    /// The first line is not a birth, or a later one is, or the tape changes brains.
    #[error("line {line}: a tape is one birth, then what one brain heard and said")]
    Misplaced {
        /// Where.
        line: u64,
    },
    /// The brain said something else.
    #[error("line {line}: the tape says {taped}, the brain said {said}")]
    Differs {
        /// Where.
        line: u64,
        /// What the tape has.
        taped: String,
        /// What came.
        said: String,
    },
}

/// One line of text, without the newline.
pub fn write(line: &Line) -> String {
    serde_json::to_string(line).expect("plain data serialises")
}

/// Feeds a tape to a fresh brain and demands the same outputs.
///
/// # Errors
/// Says where tape and brain part, or why the text is no tape.
pub fn replay<'a>(lines: impl Iterator<Item = &'a str>) -> Result<Replayed, TapeError> {
    let mut player: Option<Player> = None;
    let mut place = Place::default();
    for text in lines.filter(|text| !text.trim().is_empty()) {
        place.line += 1;
        let line: Line = serde_json::from_str(text).map_err(|error| TapeError::Malformed {
            line: place.line,
            reason: error.to_string(),
        })?;
        let misplaced = TapeError::Misplaced { line: place.line };
        match (&mut player, line) {
            (None, line) => player = Some(Player::born(line).ok_or(misplaced)?),
            (Some(Player::Worker(brain)), Tape::Worker(line)) => place.play(&mut **brain, line)?,
            (Some(Player::Router(brain)), Tape::Router(line)) => place.play(&mut **brain, line)?,
            _ => return Err(misplaced),
        }
    }
    match &mut player {
        None => return Err(TapeError::Misplaced { line: 1 }),
        Some(Player::Worker(brain)) => place.silence(&mut **brain)?,
        Some(Player::Router(brain)) => place.silence(&mut **brain)?,
    }
    Ok(place.replayed)
}

/// A brain under replay.
#[derive(Debug)]
enum Player {
    Worker(Box<cleave_sched::Brain>),
    Router(Box<cleave_router::Brain>),
}

impl Player {
    fn born(line: Line) -> Option<Self> {
        match line {
            Tape::Worker(TapeLine::Born { limits }) => {
                Some(Self::Worker(Box::new(cleave_sched::Brain::new(limits))))
            }
            Tape::Router(TapeLine::Born { limits }) => {
                Some(Self::Router(Box::new(cleave_router::Brain::new(limits))))
            }
            _ => None,
        }
    }
}

/// What any brain does, as far as a tape is concerned.
trait Brain {
    type Input;
    type Output: PartialEq + std::fmt::Debug;

    fn hear(&mut self, at: Time, input: Self::Input);
    fn say(&mut self) -> Option<Self::Output>;
}

impl Brain for cleave_sched::Brain {
    type Input = cleave_sched::Input;
    type Output = cleave_sched::Output;

    fn hear(&mut self, at: Time, input: Self::Input) {
        self.handle(at, input);
    }

    fn say(&mut self) -> Option<Self::Output> {
        self.poll()
    }
}

impl Brain for cleave_router::Brain {
    type Input = cleave_router::Input;
    type Output = cleave_router::Output;

    fn hear(&mut self, at: Time, input: Self::Input) {
        self.handle(at, input);
    }

    fn say(&mut self) -> Option<Self::Output> {
        self.poll()
    }
}

#[derive(Default)]
struct Place {
    line: u64,
    replayed: Replayed,
}

impl Place {
    fn play<B: Brain, L>(
        &mut self,
        brain: &mut B,
        line: TapeLine<L, B::Input, B::Output>,
    ) -> Result<(), TapeError> {
        match line {
            TapeLine::Born { .. } => Err(TapeError::Misplaced { line: self.line }),
            TapeLine::Heard { at, input } => {
                self.silence(brain)?;
                brain.hear(at, input);
                self.replayed.inputs += 1;
                Ok(())
            }
            TapeLine::Said { output } => {
                self.replayed.outputs += 1;
                self.compare(Some(output), brain.say())
            }
        }
    }

    /// The brain has nothing left to say.
    fn silence<B: Brain>(&self, brain: &mut B) -> Result<(), TapeError> {
        self.compare(None, brain.say())
    }

    fn compare<O: PartialEq + std::fmt::Debug>(
        &self,
        taped: Option<O>,
        said: Option<O>,
    ) -> Result<(), TapeError> {
        if taped == said {
            return Ok(());
        }
        let words = |output: Option<O>| output.map_or("nothing".to_owned(), |o| format!("{o:?}"));
        Err(TapeError::Differs {
            line: self.line,
            taped: words(taped),
            said: words(said),
        })
    }
}
