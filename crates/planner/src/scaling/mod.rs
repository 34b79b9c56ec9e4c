//! How many workers serve a fleet's promises: the controller's brain.
//!
//! - *Facts*: [`Scaler::handle`] takes one, with the time.
//! - *Commands*: [`Scaler::poll`] gives one at a time; drain it before the next fact.
//! - *Wake-ups*: [`Scaler::deadline`] says when to hand in [`Input::Stands`] with the fleet as it is.
//! - *Checks*: [`Scaler::check`] asserts every invariant.
//!
//! Each router has one. They tell each other what is asked through them, over the workers that they share,
//! and add it up; the one with the smallest name decides, and the others repeat its answer, so that every
//! router answers the same. Without a worker in common each goes by what it knows.
//!
//! From demand to answer: `need` (how many workers of each leg by what work costs), `steady` (more soon, fewer
//! late), `fit` (bounds, devices, another leg before another worker, how often a pool may turn).
//!
//! Owns: these decisions. Never: starts or stops a worker; knows a flight.
//! Invariant: never more devices than there may be; never more turns in an hour than there may be; where
//! anybody waits and workers are allowed, some are wanted.

mod demand;
mod fit;
mod habits;
mod need;
mod scaler;
mod steady;
mod window;

pub use scaler::Scaler;

use cleave_domain::{
    Aim, Capacity, Prices, Role, Scaling, SloPolicy, Verdict, Voice, Wanted, WorkerId,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// Other bounds and promises hold from now on.
    Configured(Scaling, Arc<SloPolicy>),
    /// A request arrived, whatever becomes of it.
    Arrived {
        /// Its class's name.
        class: String,
        /// Tokens of its prompt.
        prompt_tokens: u32,
    },
    /// It was placed for the first time.
    Placed {
        /// Tokens of its prompt that were found cached.
        cached_tokens: u32,
    },
    /// A request ended.
    Ended {
        /// Its class's name.
        class: String,
        /// What came of its promise.
        came: Came,
        /// Tokens of its answer, if that came to its end; otherwise zero.
        output_tokens: u32,
    },
    /// Another router said this.
    Heard(Arc<Voice>),
    /// The fleet as it is; to be said at every deadline, and whenever somebody comes, goes or changes.
    Stands(Fleet),
}

/// What came of a request, as far as anything is learned from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// It kept its promise.
    Good,
    /// It was late or refused, for what workers of that leg could not do.
    Missed(Role),
    /// It failed, was tried again, or its client left: that says nothing of how many workers there are.
    Aside,
}

impl Came {
    /// From a verdict; `of` is the target that could not be met where it was refused for one. Whoever
    /// was served by a second attempt was not plainly served.
    pub fn of(verdict: Verdict, plain: bool, of: Option<Aim>) -> Self {
        let leg = |aim| match aim {
            Aim::Ttft | Aim::EndToEnd => Role::Prefill,
            Aim::Tpot => Role::Decode,
        };
        match verdict {
            _ if !plain => Self::Aside,
            Verdict::Good => Self::Good,
            Verdict::Late { aim, stage } => Self::Missed(match aim {
                Aim::EndToEnd if stage >= cleave_domain::Stage::Transfer => Role::Decode,
                aim => leg(aim),
            }),
            Verdict::Refused => of.map_or(Self::Aside, |aim| Self::Missed(leg(aim))),
            Verdict::Failed | Verdict::Cancelled => Self::Aside,
        }
    }
}

/// The fleet as a router knows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fleet {
    /// Every worker that is connected.
    pub members: Vec<Member>,
    /// What a prompt costs on one of those that run prompts.
    pub prefill: Option<(Prices, Capacity)>,
    /// What a stream costs on one of those that generate.
    pub decode: Option<(Prices, Capacity)>,
    /// Tokens, prompt and output, of all streams that run or are promised room.
    pub context_tokens: u64,
    /// Requests that wait for a place at this router, or for a worker's tokenizer.
    pub waiting: u32,
    /// Tokens of their prompts.
    pub waiting_tokens: u64,
    /// Requests of this router that have not ended.
    pub open: u32,
}

/// A worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Who.
    pub worker: WorkerId,
    /// What it serves.
    pub role: Role,
    /// What it was started to serve.
    pub home: Role,
    /// It drains, or makes no progress: nobody counts on it.
    pub leaves: bool,
    /// Tokens of what it is busy with.
    pub busy_tokens: u64,
}

/// What the body must do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Tell it to the other routers, by some worker or several.
    PassOn(Voice),
    /// Let this worker serve that leg from now on.
    Flip {
        /// Which.
        worker: WorkerId,
        /// What it is to serve.
        role: Role,
    },
    /// So many are wanted from now on.
    Want(Decision),
}

/// An answer, and what it was made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// How many.
    pub wanted: Wanted,
    /// Whether it is this router's own; otherwise another one's, repeated.
    pub own: bool,
    /// Requests in a second, of all routers.
    pub rate: f64,
    /// Prefill workers that would do, before anything was rounded or held.
    pub prefill_load: f64,
    /// Decode workers that would do.
    pub decode_load: f64,
    /// Requests that wait, of all routers.
    pub waiting: u32,
    /// Workers that are wanted and not there yet.
    pub starting: u32,
}
