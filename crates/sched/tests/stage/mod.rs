//! A world for a few workers' brains: a clock, links, and an engine that detects wrong KV.
//!
//! Owns: everything that a body would do, each action as a pending event that the test may perform
//! in any order, late, twice or never. Never: decides for a worker.
//! Invariant: an engine panics at KV that is not the sequence's own, a body at a frame that is not
//! answered once, and every brain is checked after every fact.
#![allow(unreachable_pub, reason = "a test binary has no API")]

pub mod engine;
mod host;
pub mod line;
pub mod script;
mod tier;

use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Capacity, HandoffId, Incarnation, KvPlane, KvUnit, Order,
    Report, Role, RouterId, SlotIndex, StateCapacity, StepPlan, Time, WorkerId, WorkerRef,
};
use cleave_kv::handoff::HandoffDigest;
use cleave_kv::{BlockPart, Packet};
use cleave_sched::{
    BlockExport, ExportOutcome, FetchOutcome, ImportOutcome, OffloadOutcome, PayloadCondition,
    PoolWriter, SwapOutcome, TierLevel, WorkerBrain, WorkerInput, WorkerLimits, WorkerNote,
    WorkerOutput,
};
use engine::CheckedEngine;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

pub const ROUTER: RouterId = RouterId(1);
pub const BLOCK_TOKENS: u32 = 4;
pub const LEASE: Duration = Duration::from_millis(1000);
pub const STALL: Duration = Duration::from_millis(300);
const STEP_TAKES: Duration = Duration::from_millis(10);
pub const STEP: Duration = Duration::from_secs(5);

pub struct StageWorker {
    pub name: char,
    pub brain: WorkerBrain,
    pub pool: Option<WorkerNote>,
    pub engine: CheckedEngine,
    /// Steps emitted and not over, the oldest first. The second one is lost if the first breaks.
    steps: VecDeque<(StepPlan, StageEventOutcome)>,
    /// Swapped blocks in host memory, with their cells.
    host: BTreeMap<HandoffId, Vec<Vec<u64>>>,
    /// Contents of the tiers, with their cells.
    pub in_tiers: BTreeMap<(BlockHash, TierLevel), Vec<u64>>,
}

/// An event that will happen. A step event stands for the oldest step.
#[derive(Clone, Debug)]
pub enum StageEvent {
    Step(usize),
    Export {
        at: usize,
        export: BlockExport,
        /// Cells to be read; nothing may write to the block or state before.
        content: Vec<u64>,
    },
    Import {
        at: usize,
        handoff: HandoffId,
        part: BlockPart,
        block: BlockRef,
        payload: Vec<u64>,
    },
    SwapOut {
        at: usize,
        handoff: HandoffId,
        units: Vec<(BlockPart, BlockIndex)>,
        /// Cells to be read; nothing may write to them before.
        content: Vec<Vec<u64>>,
        dropped: bool,
    },
    SwapIn {
        at: usize,
        handoff: HandoffId,
        units: Vec<(BlockPart, BlockIndex)>,
        dropped: bool,
    },
    Offload {
        at: usize,
        content: BlockHash,
        block: BlockIndex,
        /// Cells to be read; nothing may write to the block before.
        cells: Vec<u64>,
    },
    Spill {
        at: usize,
        content: BlockHash,
    },
    Fetch {
        at: usize,
        handoff: HandoffId,
        blocks: Vec<(BlockHash, BlockIndex)>,
        since: Time,
        /// Its time where nothing goes ahead of it.
        work: Duration,
    },
    Packet {
        from: WorkerRef,
        to: WorkerRef,
        packet: Packet,
        payload: Vec<u64>,
    },
    Order {
        to: usize,
        order: Order,
    },
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
    Emitted(HandoffId, cleave_domain::Emission),
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
    /// Fetches that were ordered to stop and have not.
    stopped: BTreeSet<(usize, HandoffId)>,
    /// Contents that a fetch found unusable, by machine: they are dropped, also while others fetch
    /// them.
    unusable: BTreeSet<(usize, BlockHash)>,
    made: u64,
}

/// All bytes of a block.
fn whole(ordinal: u32) -> BlockPart {
    BlockPart {
        plane: KvPlane::Blocks,
        ordinal,
        offset: 0,
        len: BLOCK_TOKENS * 8,
    }
}

/// Slots for states of two and a half blocks; no plane for them at 0.
pub fn states(count: u32) -> Option<StateCapacity> {
    let bytes = BLOCK_TOKENS * 20;
    (count > 0).then_some(StateCapacity { bytes, count })
}

pub fn limits(worker: u64, role: Role) -> WorkerLimits {
    WorkerLimits {
        me: WorkerRef {
            worker: WorkerId(worker),
            incarnation: Incarnation(1),
        },
        role,
        capacity: Capacity {
            block_tokens: BLOCK_TOKENS,
            block_bytes: BLOCK_TOKENS * 8,
            blocks_count: 8,
            slots_count: 4,
            step_tokens_max: 8,
            context_tokens_max: 64,
            states: None,
        },
        vocab_size: u32::MAX,
        queue_max: 4,
        lease: LEASE,
        stall_max: STALL,
        step_max: STEP,
        prefix_cache: true,
        swap_blocks: 0,
        host_blocks: 0,
        disk_blocks: 0,
        writer: PoolWriter::Receiver,
        prices: cleave_domain::Prices::default(),
        steps_in_flight: 1,
        speculation: None,
    }
}

impl StageWorld {
    pub fn add(&mut self, name: char, limits: WorkerLimits) -> usize {
        let engine = CheckedEngine::new(limits.capacity);
        self.machines.push(StageWorker {
            name,
            brain: WorkerBrain::new(limits),
            pool: None,
            engine,
            steps: VecDeque::new(),
            host: BTreeMap::new(),
            in_tiers: BTreeMap::new(),
        });
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
        self.machines[machine].brain.limits().me
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

    fn feed_frame(&mut self, machine: usize, input: WorkerInput, mut payload: Option<Vec<u64>>) {
        let framed = payload.is_some();
        if let Some(tape) = &mut self.tape {
            tape.push((machine, self.now, input.clone()));
        }
        self.write(machine, '<', &line::input(&input));
        self.machines[machine].brain.handle(self.now, input);
        let mut answers = 0;
        while let Some(output) = self.machines[machine].brain.poll() {
            self.write(machine, '>', &line::output(&output));
            answers += u32::from(matches!(
                output,
                WorkerOutput::Import { .. } | WorkerOutput::Discard { .. }
            ));
            self.perform_output(machine, output, &mut payload);
        }
        assert_eq!(answers, u32::from(framed), "one answer to each frame");
        self.machines[machine].brain.check();
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

    fn perform_output(&mut self, at: usize, output: WorkerOutput, payload: &mut Option<Vec<u64>>) {
        match output {
            WorkerOutput::Step(plan) => {
                let machine = &mut self.machines[at];
                let most = machine.brain.limits().steps_in_flight as usize;
                assert!(machine.steps.len() < most, "too many steps at a time");
                machine.steps.push_back((plan, StageEventOutcome::Well));
                if machine.steps.len() == 1 {
                    self.later(STEP_TAKES, StageEvent::Step(at));
                }
            }
            WorkerOutput::Report { report, .. } => {
                self.reports.push((at, StageReport::Reported(report)))
            }
            WorkerOutput::Emit { handoff, emission } => {
                self.reports
                    .push((at, StageReport::Emitted(handoff, emission)));
            }
            WorkerOutput::Export(export) => self.export(at, export),
            WorkerOutput::Send { to, packet } => self.send_packet(at, to, packet, Vec::new()),
            WorkerOutput::Import {
                handoff,
                part,
                block,
            } => {
                let payload = payload.take().expect("a frame has just arrived");
                self.later(
                    Duration::from_millis(1),
                    StageEvent::Import {
                        at,
                        handoff,
                        part,
                        block,
                        payload,
                    },
                );
            }
            WorkerOutput::SwapOut {
                handoff,
                blocks,
                state,
            } => {
                let units = self.units(at, &blocks, state);
                let content = self.read_units(at, &units);
                let dropped = false;
                self.later(
                    Duration::from_millis(4),
                    StageEvent::SwapOut {
                        at,
                        handoff,
                        units,
                        content,
                        dropped,
                    },
                );
            }
            WorkerOutput::SwapIn {
                handoff,
                blocks,
                state,
            } => {
                let units = self.units(at, &blocks, state);
                let dropped = false;
                self.later(
                    Duration::from_millis(4),
                    StageEvent::SwapIn {
                        at,
                        handoff,
                        units,
                        dropped,
                    },
                );
            }
            WorkerOutput::SwapDrop { handoff } => self.drop_swap(at, handoff),
            WorkerOutput::Offload { content, block } => self.offload(at, content, block),
            WorkerOutput::SpillToDisk { content } => {
                self.later(Duration::from_millis(6), StageEvent::Spill { at, content });
            }
            WorkerOutput::Fetch { handoff, blocks } => self.fetch(at, handoff, blocks),
            WorkerOutput::FetchStop { handoff } => self.stop_fetch(at, handoff),
            WorkerOutput::TierDrop { content, place } => self.drop_from_tier(at, content, place),
            WorkerOutput::Note(
                pool @ WorkerNote::Pool {
                    blocks_leaked,
                    states_leaked,
                    ..
                },
            ) => {
                assert_eq!(blocks_leaked, 0, "the audit counts leaked blocks");
                assert_eq!(states_leaked, 0, "the audit counts leaked state slots");
                self.machines[at].pool = Some(pool);
            }
            WorkerOutput::Note(WorkerNote::Repeated { handoff }) => {
                self.reports.push((at, StageReport::Repeated(handoff)));
            }
            WorkerOutput::Drained => self.reports.push((at, StageReport::Drained)),
            WorkerOutput::Discard { .. } | WorkerOutput::Forget { .. } | WorkerOutput::Note(_) => {}
        }
    }

    fn export(&mut self, at: usize, export: BlockExport) {
        let whole = self.whole_unit(at, export.unit());
        let content = self.machines[at].engine.read(export.from, whole);
        self.later(
            Duration::from_millis(1),
            StageEvent::Export {
                at,
                export,
                content,
            },
        );
    }

    /// All bytes of a block, or of a piece of a state.
    fn whole_unit(&self, at: usize, unit: KvUnit) -> BlockPart {
        let KvUnit { plane, ordinal } = unit;
        BlockPart {
            plane,
            ordinal,
            offset: 0,
            len: self.machines[at].brain.limits().capacity.unit_bytes(unit),
        }
    }

    fn send_packet(&mut self, from: usize, to: WorkerRef, packet: Packet, payload: Vec<u64>) {
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
            StageEvent::Export { at, .. } => self.perform_export(at, &event, event_outcome),
            StageEvent::Import {
                at,
                handoff,
                part,
                block,
                payload,
            } => {
                let outcome = match event_outcome {
                    StageEventOutcome::Well => {
                        self.import(at, block, part, &payload);
                        ImportOutcome::Written
                    }
                    StageEventOutcome::Damaged => ImportOutcome::Broken,
                };
                let input = WorkerInput::Imported {
                    handoff,
                    part,
                    outcome,
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
            StageEvent::SwapOut { at, .. } => self.perform_swap_out(at, event, event_outcome),
            StageEvent::SwapIn { at, .. } => self.perform_swap_in(at, event, event_outcome),
            StageEvent::Offload { at, .. } => self.perform_offload(at, event, event_outcome),
            StageEvent::Spill { at, content } => self.perform_spill(at, content, event_outcome),
            StageEvent::Fetch { at, .. } => self.perform_fetch(at, event, event_outcome),
            StageEvent::Order { to, order } => {
                let router = ROUTER;
                self.feed(to, WorkerInput::Ordered { router, order });
            }
        }
    }

    fn perform_step(&mut self, at: usize, event_outcome: StageEventOutcome) {
        let machine = &mut self.machines[at];
        let (plan, earlier_outcome) = machine.steps.pop_front().expect("a step is under way");
        let took = STEP_TAKES;
        let event_outcome = if earlier_outcome == StageEventOutcome::Damaged {
            earlier_outcome
        } else {
            event_outcome
        };
        if let Some((_, next)) = machine.steps.front_mut() {
            *next = event_outcome;
        }
        let input = match event_outcome {
            StageEventOutcome::Well => {
                let result = machine.engine.step(&plan);
                WorkerInput::Stepped { result, took }
            }
            StageEventOutcome::Damaged => {
                machine.engine.spoil(&plan);
                WorkerInput::StepFailed {
                    step: plan.step,
                    slots: std::mem::take(&mut self.fails_for),
                    reason: "on fire".into(),
                }
            }
        };
        if !self.machines[at].steps.is_empty() {
            self.later(STEP_TAKES, StageEvent::Step(at));
        }
        self.feed(at, input);
    }

    /// Writes a frame's payload, or checks that its sender has.
    fn import(&mut self, at: usize, block: BlockRef, part: BlockPart, payload: &[u64]) {
        let machine = &mut self.machines[at];
        match machine.brain.limits().writer {
            PoolWriter::Receiver => machine.engine.write(block.block, part, payload),
            PoolWriter::Sender => {
                let found = machine.engine.read(block.block, part);
                assert_eq!(found, payload, "{} was overwritten", block.block);
            }
        }
    }

    /// Sends two frames for each block or piece; it is read only now.
    fn perform_export(&mut self, at: usize, event: &StageEvent, event_outcome: StageEventOutcome) {
        let StageEvent::Export {
            export,
            ref content,
            ..
        } = *event
        else {
            panic!("an export")
        };
        let BlockExport {
            handoff,
            to,
            from,
            block,
            ..
        } = export;
        let whole = self.whole_unit(at, export.unit());
        let now = self.machines[at].engine.read(from, whole);
        assert_eq!(
            now, *content,
            "{from} was given away while it was to be read"
        );
        // A sender with one-sided access is held back by nothing, not even a lost link.
        if let Some(target) = self.machine_of(to) {
            let target = &mut self.machines[target];
            if target.brain.limits().writer == PoolWriter::Sender {
                target.engine.write(block.block, whole, content);
            }
        }
        if event_outcome == StageEventOutcome::Damaged {
            let outcome = match export.ordinal % 2 {
                0 => ExportOutcome::Dropped,
                _ => ExportOutcome::Broken,
            };
            return self.feed(at, export.answer(outcome));
        }
        let mut digest = HandoffDigest::default();
        let cut = whole.len - 8;
        for (offset, len) in [(0, cut), (cut, 8)] {
            let part = BlockPart {
                offset,
                len,
                ..whole
            };
            let payload = self.machines[at].engine.read(from, part);
            let checksum = engine::fold(0, &payload);
            digest.add_frame(part, checksum);
            let packet = Packet::Frame {
                handoff,
                block,
                part,
                checksum,
            };
            self.send_packet(at, to, packet, payload);
        }
        let outcome = ExportOutcome::Sent {
            digest: digest.value(),
            bytes: u64::from(whole.len),
        };
        self.feed(at, export.answer(outcome));
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

    /// Restarts a machine with nothing but the contents of its disk; the others are informed.
    pub fn restart(&mut self, at: usize) {
        let old = self.me(at);
        let mut limits = self.machines[at].brain.limits().clone();
        limits.me.incarnation.0 += 1;
        self.pending.retain(|_, event| match event {
            StageEvent::Step(machine) => *machine != at,
            StageEvent::Export { at: machine, .. }
            | StageEvent::Import { at: machine, .. }
            | StageEvent::SwapOut { at: machine, .. }
            | StageEvent::SwapIn { at: machine, .. }
            | StageEvent::Offload { at: machine, .. }
            | StageEvent::Spill { at: machine, .. }
            | StageEvent::Fetch { at: machine, .. } => *machine != at,
            StageEvent::Packet { from, to, .. } => *from != old && *to != old,
            StageEvent::Order { to, .. } => *to != at,
        });
        let on_disk = self.on_disk(at);
        self.stopped.retain(|(machine, _)| *machine != at);
        self.unusable.retain(|(machine, _)| *machine != at);
        let contents: Vec<BlockHash> = on_disk.keys().map(|(content, _)| *content).collect();
        self.machines[at] = StageWorker {
            name: self.machines[at].name,
            engine: CheckedEngine::new(limits.capacity),
            brain: WorkerBrain::new(limits),
            pool: None,
            steps: VecDeque::new(),
            host: BTreeMap::new(),
            in_tiers: on_disk,
        };
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
        let step = self.machines[at].steps.front();
        let segments = step.into_iter().flat_map(|(plan, _)| &plan.segments);
        segments.map(|segment| segment.slot).collect()
    }

    /// The time of the next event: a pending one or a deadline.
    pub fn next_event(&self) -> Option<Time> {
        let deadlines = self.machines.iter().filter_map(|m| m.brain.deadline());
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
                    let due = self.machines[machine].brain.deadline();
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
        for machine in &self.machines {
            let (brain, name) = (&machine.brain, machine.name);
            assert!(
                brain.idle(),
                "{name} still has {:?}",
                brain.handoffs().collect::<Vec<_>>()
            );
            assert_eq!(brain.pool().blocks_held(), 0, "blocks leaked on {name}");
            assert_eq!(
                brain.pool().blocks_reserved(),
                0,
                "promises leaked on {name}"
            );
            assert_eq!(brain.deadline(), None, "a deadline for nothing on {name}");
            let slots_held = brain.states().map_or(0, |states| states.blocks_held());
            assert_eq!(slots_held, 0, "state slots leaked on {name}");
            assert!(machine.host.is_empty(), "host memory leaked on {name}");
        }
    }
}
