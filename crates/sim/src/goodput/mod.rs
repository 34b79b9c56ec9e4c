//! Goodput of fleets: production brains over priced devices, lean enough for a thousand workers and
//! prompts of a hundred thousand tokens.
//!
//! Owns: a second driver for the brains, which moves no cell and checks none (the worlds of
//! [`crate::run_chaos`] do), and the clients' results. Never: decides what a brain decides; injects
//! data faults. Invariant: the same scenario gives the same score, byte for byte, and every arrival
//! ends once.

mod adapters;
mod check;
mod compare;
mod fleet;
mod links;
mod orchestrator;
mod profile;
mod run;
mod scenario;
mod score;
mod worker;
mod workload;

pub use adapters::{AdapterFleet, with_adapters};
pub use check::{MissedGoal, PolicyCheck, PolicyLimit, check};
pub use compare::{
    ArrivalsAtRate, RateSearchResult, RateTrial, RoutingComparison, RoutingScheme, at_rate,
};
pub use fleet::{FleetSpec, FleetText};
pub use orchestrator::{FleetHistory, Orchestrator, ScalingAuthority};
pub use profile::{WorkerProfile, profiles};
pub use scenario::{PromptRecipe, RecipePart, RequestArrival, Scenario, VOCAB_SIZE, WorkerDevice};
pub use score::{
    ArrivalEnd, ClassScore, ClientResult, GoodputOutcome, GoodputScore, LatencyQuantiles,
};
pub use workload::{SyntheticWorkload, slo_of_class, thinned_by_curve};

use cleave_router::RouterNote;

/// Measures a router's brain from outside, with a clock; the simulator has none.
pub trait RouterBrainTimer {
    /// A router's brain is about to handle this input.
    fn input_begins(&mut self, input: &cleave_router::RouterInput);

    /// The brain has handled the input.
    fn input_ends(&mut self);

    /// Half of all requests have arrived.
    fn half_arrived(&mut self, router: &cleave_router::RouterBrain);
}

/// Runs a scenario to its end.
pub fn run(scenario: &Scenario) -> GoodputOutcome {
    run::GoodputWorld::new(scenario).run()
}

/// Runs a scenario to its end, with an observer.
pub fn run_observed(scenario: &Scenario, observer: &mut dyn RouterBrainTimer) -> GoodputOutcome {
    let mut world = run::GoodputWorld::new(scenario);
    world.observe(observer);
    world.run()
}

/// The decisions of the first router, in order: every [`RouterNote::Decided`] and
/// [`RouterNote::Placed`]. The `n`-th arrival, from 0, is `FlightId::new(RouterId(1), n)`; workers
/// have the names of their [`WorkerDevice::limits`].
///
/// Used to compare this driver with another: with [`Scenario::message_time`] zero, links of no
/// latency and [`Scenario::grain`] set, everything happens at whole multiples of that grain, as
/// under a clock that only jumps. Simultaneous events happen in the order in which they were
/// caused.
pub fn decisions(scenario: &Scenario) -> Vec<RouterNote> {
    let mut world = run::GoodputWorld::new(scenario);
    world.keep_decisions();
    world.run().decisions
}
