//! A world for a few workers of cells: a clock, links, and pending events.
//!
//! Owns: when something ends: each operation of a worker, each packet and order is a pending event,
//! which the test may perform in any order, late, twice or never. Never: decides for a worker.
//! Invariant: a violation that the kit finds is a panic, and so is a block that is written before
//! an operation has read it; every brain is checked after every fact.
#![allow(unreachable_pub, reason = "a test binary has no API")]

pub mod draws;
pub mod line;
pub mod script;

use cleave_domain::{
    BlockHash, Capacity, Emission, HandoffId, Order, Report, Role, RouterId, SlotIndex,
    StateCapacity, Time, WindowCapacity, WorkerRef,
};
use cleave_kv::Packet;
use cleave_sched::{
    BlockExport, ExportOutcome, FetchOutcome, ImportOutcome, PayloadCondition, PoolWriter,
    StepFault, TierLevel, WorkerInput, WorkerLimits, WorkerNote,
};
use cleave_testkit::{
    AnswerTime, BlockFrames, CellHost, CellWorker, EngineOp, EngineOpResult, FrameCells, OpFault,
    build, carry_out,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub const ROUTER: RouterId = RouterId(1);
pub const BLOCK_TOKENS: u32 = 4;
pub const LEASE: Duration = Duration::from_millis(1000);
pub const STALL: Duration = Duration::from_millis(300);
const STEP_TAKES: Duration = Duration::from_millis(10);
pub const STEP: Duration = Duration::from_secs(5);

pub struct StageWorker {
    pub name: char,
    pub cells: CellWorker,
    pub pool: Option<WorkerNote>,
}

/// An event that will happen.
#[derive(Clone, Debug)]
pub enum StageEvent {
    /// The oldest step ends. The one behind it is lost if it breaks.
    Step(usize),
    /// Another operation of the engine ends.
    Op {
        at: usize,
        op: EngineOp,
        /// Cells to be read; nothing may write to them before.
        content: Vec<FrameCells>,
        since: Time,
        /// Its time where nothing goes ahead of it.
        work: Duration,
    },
    Spill {
        at: usize,
        content: BlockHash,
    },
    Packet {
        from: WorkerRef,
        to: WorkerRef,
        packet: Packet,
        payload: FrameCells,
    },
    Order {
        to: usize,
        order: Order,
    },
}

impl StageEvent {
    pub fn is_fetch(&self) -> bool {
        let Self::Op { op, .. } = self else {
            return false;
        };
        matches!(op, EngineOp::Fetch { .. })
    }
}

/// The outcome of a pending event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageEventOutcome {
    Well,
    Damaged,
}

/// The workers' outputs to their router.
#[derive(Clone, Debug)]
pub enum StageReport {
    Reported(Report),
    Emitted(HandoffId, Emission),
    Repeated(HandoffId),
    Drained,
}

#[derive(Default)]
pub struct StageWorld {
    pub now: Time,
    pub machines: Vec<StageWorker>,
    /// By due time, then in the order of creation.
    pub pending: BTreeMap<(Time, u64), StageEvent>,
    pub reports: Vec<(usize, StageReport)>,
    pub log: Vec<String>,
    /// Every fact, for tests that replay it.
    pub tape: Option<Vec<(usize, Time, WorkerInput)>>,
    /// Slots for whose sequences alone the next failing step fails.
    pub fails_for: Vec<SlotIndex>,
    /// The kind of that failure.
    pub step_fault: StepFault,
    /// Workers whose writes reach a machine no more: `(machine, writer)`.
    fenced: BTreeSet<(usize, WorkerRef)>,
    made: u64,
}

/// Disks are slower, and some of their contents take very long to read.
fn tier_takes(content: BlockHash, tier: TierLevel) -> Duration {
    match tier {
        TierLevel::Host => Duration::from_millis(1),
        TierLevel::Disk if content.0[1].is_multiple_of(8) => Duration::from_millis(400),
        TierLevel::Disk => Duration::from_millis(5),
    }
}

/// Slots for states of two and a half blocks; no plane for them at 0.
pub fn states(count: u32) -> Option<StateCapacity> {
    let bytes = BLOCK_TOKENS * 20;
    (count > 0).then_some(StateCapacity { bytes, count })
}

/// Blocks for a window of six tokens, each in two pieces; no plane for them at 0.
pub fn windows(count: u32) -> Option<WindowCapacity> {
    let (tokens, bytes) = (6, BLOCK_TOKENS * 16);
    (count > 0).then_some(WindowCapacity {
        tokens,
        bytes,
        count,
    })
}

pub fn limits(worker: u64, role: Role) -> WorkerLimits {
    let capacity = Capacity {
        block_tokens: BLOCK_TOKENS,
        block_bytes: BLOCK_TOKENS * 8,
        blocks_count: 8,
        slots_count: 4,
        step_tokens_max: 8,
        context_tokens_max: 64,
        states: None,
        windows: None,
    };
    WorkerLimits {
        role,
        queue_max: 4,
        lease: LEASE,
        stall_max: STALL,
        step_max: STEP,
        prefix_cache: true,
        ..build::limits(build::worker(worker), capacity)
    }
}

impl StageWorld {
    pub fn add(&mut self, name: char, limits: WorkerLimits) -> usize {
        self.machines.push(StageWorker::new(name, limits));
        let machine = self.machines.len() - 1;
        self.feed(machine, WorkerInput::RouterJoined { router: ROUTER });
        machine
    }

    pub fn named(&self, name: char) -> usize {
        let found = self
            .machines
            .iter()
            .position(|machine| machine.name == name);
        found.expect("a machine of that name")
    }

    pub fn me(&self, machine: usize) -> WorkerRef {
        self.machines[machine].cells.worker
    }

    pub fn machine_of(&self, worker: WorkerRef) -> Option<usize> {
        (0..self.machines.len()).find(|machine| self.me(*machine) == worker)
    }

    pub fn order(&mut self, to: usize, order: Order) {
        self.later(Duration::from_millis(1), StageEvent::Order { to, order });
    }

    /// Feeds a brain, performs its outputs, and checks it.
    pub fn feed(&mut self, machine: usize, input: WorkerInput) {
        self.feed_frame(machine, input, None);
    }

    fn feed_frame(&mut self, machine: usize, input: WorkerInput, payload: Option<FrameCells>) {
        if let Some(tape) = &mut self.tape {
            tape.push((machine, self.now, input.clone()));
        }
        self.write(machine, '<', &line::input(&input));
        let cells = &mut self.machines[machine].cells;
        if let (Some(payload), WorkerInput::Arrived { packet, .. }) = (payload, &input)
            && let Packet::Frame { handoff, part, .. } = packet
        {
            cells.frame_arrives(*handoff, *part, payload);
        }
        cells.handle_input(self.now, input);
        while let Some(output) = self.machines[machine].cells.brain.poll() {
            self.write(machine, '>', &line::output(&output));
            let mut host = StageHost {
                world: self,
                at: machine,
            };
            holds(carry_out(&mut host, output));
        }
        let cells = &self.machines[machine].cells;
        holds(cells.check_frame_answered());
        cells.brain.check();
    }

    fn write(&mut self, machine: usize, direction: char, text: &str) {
        if !text.is_empty() {
            let millis = self.now.as_nanos() / 1_000_000;
            let name = self.machines[machine].name;
            self.log
                .push(format!("{millis:>5} {name} {direction} {text}"));
        }
    }

    pub fn later(&mut self, wait: Duration, event: StageEvent) {
        self.made += 1;
        self.pending.insert((self.now + wait, self.made), event);
    }

    /// Makes an event of the end of the operation that was queued last.
    fn queued(&mut self, at: usize) {
        let cells = &self.machines[at].cells;
        let op = cells.last_queued().expect("just queued").clone();
        let millis = match &op {
            EngineOp::Step(_) => {
                if cells.steps().count() == 1 {
                    self.later(STEP_TAKES, StageEvent::Step(at));
                }
                return;
            }
            EngineOp::Export(_) | EngineOp::Import { .. } => 1,
            EngineOp::SwapOut { .. } | EngineOp::SwapIn { .. } => 4,
            EngineOp::Offload { .. } => 2,
            EngineOp::Fetch { .. } => 0,
        };
        let mut work = Duration::from_millis(millis);
        if let EngineOp::Fetch { parts, .. } = &op {
            let takes = parts.iter().map(|part| {
                let tier = cells.tier_of(part.content).unwrap_or(TierLevel::Disk);
                tier_takes(part.content, tier)
            });
            work = takes.sum();
        }
        let event = StageEvent::Op {
            at,
            content: cells.cells_read(&op),
            op,
            since: self.now,
            work,
        };
        self.later(work, event);
    }

    fn send_packet(&mut self, from: usize, to: WorkerRef, packet: Packet, payload: FrameCells) {
        let from = self.me(from);
        self.later(
            Duration::from_millis(2),
            StageEvent::Packet {
                from,
                to,
                packet,
                payload,
            },
        );
    }

    /// Performs one pending event now.
    pub fn perform(&mut self, key: (Time, u64), event_outcome: StageEventOutcome) {
        let event = self.pending.remove(&key).expect("pending");
        self.now = self.now.max(key.0);
        match event {
            StageEvent::Step(at) => self.perform_step(at, event_outcome),
            StageEvent::Op { at, .. } => self.perform_op(at, &event, event_outcome),
            StageEvent::Spill { at, content } => {
                let fault =
                    (event_outcome == StageEventOutcome::Damaged).then_some(OpFault::Device);
                let outcome = self.machines[at].cells.disk_wrote(content, fault.as_ref());
                let input = WorkerInput::SpilledToDisk {
                    content,
                    outcome: holds(outcome),
                    took: tier_takes(content, TierLevel::Disk),
                };
                self.feed(at, input);
            }
            StageEvent::Packet {
                from,
                to,
                packet,
                payload,
            } => {
                let Some(at) = self.machine_of(to) else {
                    return;
                };
                let frame = matches!(packet, Packet::Frame { .. });
                let condition = match event_outcome {
                    StageEventOutcome::Damaged if frame => PayloadCondition::Damaged,
                    _ => PayloadCondition::Intact,
                };
                let input = WorkerInput::Arrived {
                    from,
                    packet,
                    condition,
                };
                self.feed_frame(at, input, frame.then_some(payload));
            }
            StageEvent::Order { to, order } => {
                let router = ROUTER;
                self.feed(to, WorkerInput::Ordered { router, order });
            }
        }
    }

    fn perform_step(&mut self, at: usize, event_outcome: StageEventOutcome) {
        let cells = &mut self.machines[at].cells;
        let plan = cells.steps().next().expect("a step is under way").clone();
        let fails = event_outcome == StageEventOutcome::Damaged || cells.fails_with_last(&plan);
        let fault = fails.then(|| {
            cells.spoil(&plan, |_| 0);
            OpFault::Step {
                slots: std::mem::take(&mut self.fails_for),
                fault: self.step_fault,
                reason: "on fire".into(),
            }
        });
        let op = EngineOp::Step(plan);
        let input = self.end_op(at, &op, STEP_TAKES, fault);
        if self.machines[at].cells.steps().next().is_some() {
            self.later(STEP_TAKES, StageEvent::Step(at));
        }
        self.feed(at, input);
    }

    /// Ends an operation that is answered at its end.
    fn end_op(
        &mut self,
        at: usize,
        op: &EngineOp,
        took: Duration,
        fault: Option<OpFault>,
    ) -> WorkerInput {
        let span = self.now - took..self.now;
        let cells = &mut self.machines[at].cells;
        match holds(cells.finish_queued(op, span, |_| 0, fault)) {
            EngineOpResult::Answer(input) => input,
            EngineOpResult::Send(export, _) => panic!("{export:?} is answered by the link"),
        }
    }

    fn perform_op(&mut self, at: usize, event: &StageEvent, event_outcome: StageEventOutcome) {
        let StageEvent::Op {
            op,
            content,
            since,
            work,
            ..
        } = event
        else {
            panic!("an operation")
        };
        let now = self.machines[at].cells.cells_read(op);
        assert_eq!(now, *content, "written before it was read: {op:?}");
        let damaged = event_outcome == StageEventOutcome::Damaged;
        let mut took = *work;
        let mut fault = damaged.then_some(OpFault::Device);
        match op {
            EngineOp::Export(export) => {
                return self.perform_export(at, *export, &content[0], event_outcome);
            }
            EngineOp::Offload { content, .. } => took = tier_takes(*content, TierLevel::Host),
            EngineOp::Fetch { parts, .. } => {
                took = self.now.since(*since);
                let of = parts[parts.len() / 2].content;
                fault = damaged.then_some(OpFault::Fetch(match of.0[0] % 4 {
                    0 => FetchOutcome::Missing,
                    1 => FetchOutcome::Corrupt,
                    2 => FetchOutcome::Unreadable,
                    _ => FetchOutcome::Broken,
                }));
            }
            EngineOp::Step(_)
            | EngineOp::Import { .. }
            | EngineOp::SwapOut { .. }
            | EngineOp::SwapIn { .. } => {}
        }
        let mut input = self.end_op(at, op, took, fault);
        match &mut input {
            WorkerInput::Imported { part, outcome, .. } => {
                let written = *outcome == ImportOutcome::Written;
                assert!(written || damaged, "{part:?} was overwritten");
            }
            // A fetch that was ordered to stop did nothing else until then; others may have waited
            // for steps.
            WorkerInput::Fetched {
                outcome, worked, ..
            } if *outcome != FetchOutcome::Stopped => *worked = (*worked).min(*work),
            _ => {}
        }
        self.feed(at, input);
    }

    /// Sends two frames for each block or piece; it is read only now.
    fn perform_export(
        &mut self,
        at: usize,
        export: BlockExport,
        payload: &FrameCells,
        event_outcome: StageEventOutcome,
    ) {
        // A sender with one-sided access is held back by a fence alone, not even by a lost link.
        let from = self.me(at);
        let target = self.machine_of(export.to);
        if let Some(target) = target.filter(|target| !self.fenced.contains(&(*target, from))) {
            let target = &mut self.machines[target].cells;
            if target.limits.writer == PoolWriter::Sender {
                holds(target.written_into(&export, payload));
            }
        }
        let op = EngineOp::Export(export);
        if event_outcome == StageEventOutcome::Damaged {
            self.end_op(at, &op, Duration::ZERO, Some(OpFault::Device));
            let outcome = match export.ordinal % 2 {
                0 => ExportOutcome::Dropped,
                _ => ExportOutcome::Broken,
            };
            return self.feed(at, export.answer(outcome));
        }
        let cells = &mut self.machines[at].cells;
        holds(cells.finish_queued(&op, self.now..self.now, |_| 0, None));
        cells.export_ends(export.handoff, export.unit());
        let mut block = BlockFrames::of_cells(&export, payload, payload.len() - 1);
        for (packet, cells) in std::mem::take(&mut block.frames) {
            self.send_packet(at, export.to, packet, cells);
        }
        self.feed(at, block.answer());
    }

    /// Breaks the link between two machines: everything on it is gone, and both ends are informed.
    pub fn cut(&mut self, a: usize, b: usize) {
        let (one, other) = (self.me(a), self.me(b));
        self.pending.retain(|_, event| match event {
            StageEvent::Packet { from, to, .. } => {
                (*from, *to) != (one, other) && (*to, *from) != (one, other)
            }
            _ => true,
        });
        self.feed(a, WorkerInput::LinkLost { peer: other });
        self.feed(b, WorkerInput::LinkLost { peer: one });
    }

    /// Revokes a worker's access to a machine, which is informed.
    pub fn fence(&mut self, at: usize, peer: WorkerRef) {
        self.fenced.insert((at, peer));
        self.feed(at, WorkerInput::Fenced { peer });
    }

    /// Restarts a machine with nothing but the contents of its disk; the others are informed.
    pub fn restart(&mut self, at: usize) {
        let old = self.me(at);
        let mut limits = self.machines[at].cells.brain.limits().clone();
        limits.me.incarnation.0 += 1;
        self.pending.retain(|_, event| match event {
            StageEvent::Step(machine) => *machine != at,
            StageEvent::Op { at: machine, .. } | StageEvent::Spill { at: machine, .. } => {
                *machine != at
            }
            StageEvent::Packet { from, to, .. } => *from != old && *to != old,
            StageEvent::Order { to, .. } => *to != at,
        });
        let machine = &mut self.machines[at];
        let disk = machine.cells.take_disk();
        *machine = StageWorker::new(machine.name, limits);
        let contents = machine.cells.find_disk(disk);
        if !contents.is_empty() {
            self.feed(at, WorkerInput::FoundOnDisk { contents });
        }
        self.feed(at, WorkerInput::RouterJoined { router: ROUTER });
        for other in (0..self.machines.len()).filter(|other| *other != at) {
            self.feed(other, WorkerInput::LinkLost { peer: old });
            self.feed(other, WorkerInput::Fenced { peer: old });
        }
    }

    /// The slots of the step that ends next.
    pub fn slots_of_step(&self, at: usize) -> Vec<SlotIndex> {
        let step = self.machines[at].cells.steps().next();
        let segments = step.into_iter().flat_map(|plan| &plan.segments);
        segments.map(|segment| segment.slot).collect()
    }

    /// The time of the next event: a pending one or a deadline.
    pub fn next_event(&self) -> Option<Time> {
        let deadlines = self
            .machines
            .iter()
            .filter_map(|m| m.cells.brain.deadline());
        let pending = self.pending.keys().next().map(|(at, _)| *at);
        deadlines.chain(pending).min()
    }

    /// Performs the earliest pending event or deadline, if it is due by `until`.
    pub fn advance(&mut self, until: Time) -> bool {
        let Some(next) = self.next_event().filter(|next| *next <= until) else {
            return false;
        };
        match self.pending.first_key_value() {
            Some((key, _)) if key.0 <= next => self.perform(*key, StageEventOutcome::Well),
            _ => {
                self.now = self.now.max(next);
                for machine in 0..self.machines.len() {
                    let due = self.machines[machine].cells.brain.deadline();
                    if due.is_some_and(|due| due <= self.now) {
                        self.feed(machine, WorkerInput::Woke);
                    }
                }
            }
        }
        true
    }

    /// Performs everything that is due within `span`, in its order.
    pub fn run(&mut self, span: Duration) {
        let until = self.now + span;
        while self.advance(until) {}
        self.now = until;
    }

    /// Asserts that nothing holds a block: nothing is leaked.
    pub fn check_empty(&self) {
        for StageWorker { cells, name, .. } in &self.machines {
            holds(cells.check_empty());
            let deadline = cells.brain.deadline();
            assert_eq!(deadline, None, "a deadline for nothing on {name}");
        }
    }
}

/// The result, or a panic at a violation.
fn holds<T>(result: Result<T, String>) -> T {
    result.unwrap_or_else(|problem| panic!("{problem}"))
}

impl StageWorker {
    fn new(name: char, limits: WorkerLimits) -> Self {
        let cells = CellWorker::new(limits, draws::draw_of_slot, 0);
        Self {
            name,
            cells: cells.answering(AnswerTime::AtItsEnd),
            pool: None,
        }
    }
}

/// A worker of the stage, as its brain's outputs see it.
struct StageHost<'a> {
    world: &'a mut StageWorld,
    at: usize,
}

impl StageHost<'_> {
    fn record(&mut self, report: StageReport) -> Result<(), String> {
        self.world.reports.push((self.at, report));
        Ok(())
    }
}

impl CellHost for StageHost<'_> {
    fn cells(&mut self) -> &mut CellWorker {
        &mut self.world.machines[self.at].cells
    }

    fn now(&self) -> Time {
        self.world.now
    }

    fn report(&mut self, _: RouterId, report: Report) -> Result<(), String> {
        self.record(StageReport::Reported(report))
    }

    fn emit(&mut self, handoff: HandoffId, emission: Emission) -> Result<(), String> {
        self.record(StageReport::Emitted(handoff, emission))
    }

    fn send(&mut self, to: WorkerRef, packet: Packet) -> Result<(), String> {
        self.world.send_packet(self.at, to, packet, Vec::new());
        Ok(())
    }

    fn answer(&mut self, answer: WorkerInput) -> Result<(), String> {
        Err(format!("{answer:?} comes before its operation ends"))
    }

    fn drained(&mut self) -> Result<(), String> {
        self.record(StageReport::Drained)
    }

    fn note(&mut self, note: WorkerNote) -> Result<(), String> {
        match note {
            WorkerNote::Pool { .. } => self.world.machines[self.at].pool = Some(note),
            WorkerNote::Repeated { handoff } => self.record(StageReport::Repeated(handoff))?,
            _ => {}
        }
        Ok(())
    }

    fn queued(&mut self) {
        self.world.queued(self.at);
    }

    fn spill(&mut self, content: BlockHash) -> Result<(), String> {
        let at = self.at;
        let event = StageEvent::Spill { at, content };
        self.world.later(Duration::from_millis(6), event);
        Ok(())
    }
}
