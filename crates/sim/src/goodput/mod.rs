//! Fleets that serve within their promises, or not: production brains over priced devices, lean enough for
//! a thousand workers and prompts of a hundred thousand tokens.
//!
//! Owns: a second body for the brains, which moves no cell and checks none (the worlds of
//! [`crate::chaos`] do), and the count of what clients got. Never: decides what a brain decides; breaks
//! anything on purpose.
//! Invariant: the same scenario gives the same score, byte for byte, and every arrival ends once.

mod agenda;
mod check;
mod compare;
mod fleet;
mod profile;
mod run;
mod scenario;
mod score;
mod starter;
mod wire;
mod worker;
mod workload;

pub use check::{Break, Checked, check};
pub use compare::{Arrivals, Contest, Found, Tried, Way, at_rate};
pub use fleet::Fleet;
pub use profile::{Profile, profiles};
pub use scenario::{Arrival, Device, Part, Prompt, Scenario, VOCAB_SIZE};
pub use score::{ClassScore, Client, End, Outcome, Quantiles, Score};
pub use starter::{Growth, Starter, Who};
pub use workload::{Workload, promise, shaped};

use cleave_router::Note;

/// Somebody with a clock who looks on; a simulator has none.
pub trait Observer {
    /// A router's brain is about to be told this.
    fn begins(&mut self, input: &cleave_router::Input);

    /// It has taken it in.
    fn ends(&mut self);

    /// Half of all have arrived.
    fn half_way(&mut self, router: &cleave_router::Brain);
}

/// Runs a scenario to its end.
pub fn run(scenario: &Scenario) -> Outcome {
    run::World::new(scenario).run()
}

/// Runs a scenario to its end while somebody looks on.
pub fn run_observed(scenario: &Scenario, observer: &mut dyn Observer) -> Outcome {
    let mut world = run::World::new(scenario);
    world.observe(observer);
    world.run()
}

/// What the (first) router decided, in the order in which it did: every [`Note::Decided`] and
/// [`Note::Placed`]. The `n`-th arrival, from 0, is `FlightId::new(RouterId(1), n)`; workers have the
/// names of their [`Device::limits`].
///
/// For a comparison with another body: with [`Scenario::message`] zero, links of no latency and
/// [`Scenario::grain`] set, everything happens at whole multiples of that grain, as it does under a
/// clock that only jumps. What happens at one moment happens in the order in which it was caused.
pub fn decisions(scenario: &Scenario) -> Vec<Note> {
    let mut world = run::World::new(scenario);
    world.keep_decisions();
    world.run().decisions
}
