//! Steps that verify drafts, played step by step; the goldens hold every fact and every output.
//! `INSTA_UPDATE=always cargo test -p cleave-sched` writes them anew.

use crate::stage::draws::draw_of_slot;
use crate::stage::script::{guessing, handoff, play, prompt};
use crate::stage::{ROUTER, limits};
use cleave_domain::{
    Order, Report, Role, RunOrder, SampledToken, StepPlan, StepResult, Time, TokenId,
};
use cleave_sched::{WorkerBrain, WorkerInput, WorkerOutput};
use cleave_testkit::{CellEngine, build};
use std::sync::Arc;
use std::time::Duration;

/// The clients' tokens, as `(flight, index, token)`, of any attempt.
fn emitted(log: &str) -> Vec<(u32, u32, TokenId)> {
    let number = |text: &str| text.parse().expect("a number");
    let token = |line: &str| {
        let (_, token) = line.split_once("EMIT #")?;
        let mut words = token.split([' ', '.']);
        let mut next = || number(words.next().expect("a word"));
        let flight = next();
        next();
        Some((flight, next(), next()))
    };
    let mut tokens: Vec<_> = log.lines().filter_map(token).collect();
    tokens.sort_unstable();
    tokens
}

fn steps(log: &str) -> usize {
    log.matches("> STEP").count()
}

// Invariant: I48.
/// Streams that repeat themselves and one that does not; some end at a stop token, one at its
/// length, one moves in the middle, and one is resumed.
#[test]
fn speculation_changes_no_token() {
    let script = |guess: u32| {
        format!(
            "worker p prefill guess={guess}
            worker d decode blocks=60 guess={guess}
            worker e decode blocks=60 guess={guess}
            reserve 1 on d from p prompt=9 max=30 family=900
            prefill 1 on p to d
            reserve 2 on d from p prompt=7 max=25 family=901 stop=21
            prefill 2 on p to d
            reserve 3 on d from p prompt=3 max=9
            prefill 3 on p to d
            run 60
            reserve 1 on e from d attempt=1 prompt=9 max=30 family=900 ahead=30
            migrate 1 on d to e to=1
            run 40
            reserve 4 on d from p prompt=6 max=30 family=902 output=5
            prefill 4 on p to d
            run 1000
            empty"
        )
    };
    let [none, one, six] = [0, 1, 6].map(|guess| play(&script(guess)));
    assert_eq!(emitted(&none), emitted(&one));
    assert_eq!(emitted(&none), emitted(&six));
    assert!(none.contains("note moved out") && six.contains("note moved out"));
    let all = [&none, &one, &six].map(|log| steps(log));
    assert!(
        all[0] > all[1] && all[1] > all[2],
        "{all:?}: nothing was guessed"
    );
}

scenarios! {
    accepted_drafts_give_several_tokens_a_step: "
        worker b both guess=4
        start 1 on b prompt=7 max=12 family=900
        step b
        step b
        step b
        step b
        step b
        run 100
        empty"
    tokens_drafted_past_the_end_are_dropped: "
        worker b both guess=4
        start 1 on b prompt=8 max=20 family=900 stop=1 min=5
        run 200
        empty"
    // Lesson: 40.
    an_end_within_a_draft_emits_nothing_more: "
        worker b both guess=4
        worker e decode guess=4
        start 1 on b prompt=8 max=20 family=900 stop=1 min=5
        step b
        step b
        step b
        reserve 1 on e from b attempt=1 prompt=8 max=20 family=900 ahead=10
        migrate 1 on b to e to=1
        cut b e
        step b
        step b
        copies b
        cancel 1 on e
        run 300
        empty"
    drafts_take_no_block_of_another_sequence: "
        worker b both blocks=5 guess=6
        start 1 on b prompt=7 max=16 expect=1 family=900
        start 2 on b prompt=7 max=4 expect=1 family=901
        run 300
        empty"
    a_moving_sequence_gets_no_drafts: "
        worker b both guess=4
        worker e decode guess=4
        start 1 on b prompt=8 max=20 family=900
        step b
        step b
        step b
        step b
        reserve 1 on e from b attempt=1 prompt=8 max=20 family=900 ahead=10
        migrate 1 on b to e to=1
        step b
        run 300
        empty"
    // Lesson: 40.
    a_failed_step_discards_its_drafts: "
        worker b both guess=4
        start 1 on b prompt=7 max=12 family=900
        step b
        step b
        step b fail
        run 50
        empty"
}

// Invariant: I48.
/// An engine may report a draft as drawn that was not, or more tokens than requested: the step then
/// fails.
#[test]
fn a_result_that_contradicts_its_drafts_fails_the_step() {
    let spoils: [(&str, SpoilTokens); 4] = [
        ("nothing", |_| {}),
        ("a guess that was not drawn", |tokens| {
            assert!(tokens.len() > 1, "one that is right comes before another");
            tokens[0] += 1;
        }),
        ("more than was guessed", |tokens| tokens.extend([7; 8])),
        ("no token", Vec::clear),
    ];
    for (number, (case, spoil)) in spoils.into_iter().enumerate() {
        let (mut harness, plan) = SpeculationHarness::at_first_draft();
        let mut result = harness.step(&plan);
        let (slot, _) = result.sampled[0];
        let mut tokens = result
            .sampled
            .iter()
            .map(|(_, sampled)| sampled.token)
            .collect();
        spoil(&mut tokens);
        let sampled = |token| {
            let scores = None;
            (slot, SampledToken { token, scores })
        };
        result.sampled = tokens.into_iter().map(sampled).collect();
        let took = Duration::from_millis(1);
        let outputs = harness.handle(WorkerInput::Stepped { result, took });
        let failed = outputs.iter().any(|one| {
            matches!(
                one,
                WorkerOutput::Report {
                    report: Report::LegFailed { .. },
                    ..
                }
            )
        });
        assert_eq!(failed, number > 0, "{case}: {outputs:?}");
    }
}

// Invariant: I48.
/// Tokens that a constraint forces are drafted before those of earlier places, and only once.
#[test]
fn forced_tokens_become_the_next_drafts() {
    let (mut harness, plan) = SpeculationHarness::at_first_draft();
    let mut result = harness.step(&plan);
    let slot = plan.segments[0].slot;
    let forced = vec![11, 12, 13];
    result.forced = vec![(slot, forced.clone())];
    let plan = harness.stepped(result);
    assert_eq!(plan.segments[0].drafts, forced);
    let result = harness.step(&plan);
    let plan = harness.stepped(result);
    assert_ne!(plan.segments[0].drafts, forced, "none were forced again");
}

type SpoilTokens = fn(&mut Vec<TokenId>);

/// A brain and its engine.
struct SpeculationHarness {
    brain: WorkerBrain,
    engine: CellEngine,
}

impl SpeculationHarness {
    /// A harness that was just given a step with a draft.
    fn at_first_draft() -> (Self, StepPlan) {
        let mut limits = limits(1, Role::Both);
        limits.speculation = guessing(4);
        let mut harness = Self {
            engine: CellEngine::new(&limits.capacity, draw_of_slot, 0),
            brain: WorkerBrain::new(limits),
        };
        let (request, handoff) = (Arc::new(build::request(prompt(900, 7), 20)), handoff(1, 0));
        harness.handle(WorkerInput::RouterJoined { router: ROUTER });
        let mut outputs = harness.order(Order::Run(RunOrder {
            handoff,
            request,
            expected_output_tokens: 4,
            waited: Duration::ZERO,
            due: None,
        }));
        loop {
            let plan = outputs.into_iter().find_map(|output| match output {
                WorkerOutput::Step(plan) => Some(plan),
                _ => None,
            });
            let plan = plan.expect("it runs until it guesses");
            if plan.segments[0].drafts.len() > 1 {
                return (harness, plan);
            }
            let (result, took) = (harness.step(&plan), Duration::from_millis(1));
            outputs = harness.handle(WorkerInput::Stepped { result, took });
        }
    }

    fn step(&mut self, plan: &StepPlan) -> StepResult {
        self.engine.step(plan, |_| 0).expect("its own KV")
    }

    /// Gives the brain a result; returns the next plan.
    fn stepped(&mut self, result: StepResult) -> StepPlan {
        let took = Duration::from_millis(1);
        let outputs = self.handle(WorkerInput::Stepped { result, took });
        let plans = outputs.into_iter().find_map(|output| match output {
            WorkerOutput::Step(plan) => Some(plan),
            _ => None,
        });
        plans.expect("the sequence goes on")
    }

    fn order(&mut self, order: Order) -> Vec<WorkerOutput> {
        let router = ROUTER;
        self.handle(WorkerInput::Ordered { router, order })
    }

    fn handle(&mut self, input: WorkerInput) -> Vec<WorkerOutput> {
        self.brain.handle(Time::ZERO, input);
        self.brain.check();
        std::iter::from_fn(|| self.brain.poll()).collect()
    }
}
