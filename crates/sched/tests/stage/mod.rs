//! A world for a few workers' brains: a clock, links, an engine that tells wrong KV from right.
//!
//! Owns: everything a body would do, each thing as a pending event that the test may let happen in
//! any order, late, twice or never. Never: decides what a worker does.
//! Invariant: an engine panics when it meets KV that is not the sequence's own, a body when a frame
//! is not answered once, and every brain is checked after every fact.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses another part of the stage"
)]

pub mod engine;
mod host;
pub mod line;
pub mod script;
mod tier;

use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Capacity, HandoffId, Incarnation, Order, Report, Role,
    RouterId, SlotIndex, StepPlan, Time, WorkerId, WorkerRef,
};
use cleave_kv::handoff::Digest;
use cleave_kv::{BlockPart, Packet};
use cleave_sched::{
    Brain, Condition, Export, ExportOutcome, FetchOutcome, ImportOutcome, Input, KeepOutcome,
    Limits, Note, Output, Place, SwapOutcome, Writer,
};
use engine::Engine;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

pub const ROUTER: RouterId = RouterId(1);
pub const BLOCK_TOKENS: u32 = 4;
pub const LEASE: Duration = Duration::from_millis(1000);
pub const STALL: Duration = Duration::from_millis(300);
const STEP_TAKES: Duration = Duration::from_millis(10);
pub const STEP: Duration = Duration::from_secs(5);

/// A worker with its engine.
pub struct Machine {
    pub name: char,
    pub brain: Brain,
    /// The audit's last sums.
    pub pool: Option<Note>,
    pub engine: Engine,
    /// Said and not over, the oldest first. What the second stands on is lost if the first breaks.
    steps: VecDeque<(StepPlan, Fate)>,
    /// What host memory keeps, each block's cells.
    host: BTreeMap<HandoffId, Vec<Vec<u64>>>,
    /// What is kept below the pool, each block's cells.
    pub kept: BTreeMap<(BlockHash, Place), Vec<u64>>,
}

/// Something that will happen. Of steps the oldest.
#[derive(Clone, Debug)]
pub enum Pending {
    Step(usize),
    Export {
        at: usize,
        handoff: HandoffId,
        to: WorkerRef,
        from: BlockIndex,
        ordinal: u32,
        block: BlockRef,
        /// What is to be read; nobody may write to it before it was.
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
        blocks: Vec<BlockIndex>,
        /// What is to be read; nobody may write to it before it was.
        content: Vec<Vec<u64>>,
        dropped: bool,
    },
    SwapIn {
        at: usize,
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
        dropped: bool,
    },
    Shelve {
        at: usize,
        content: BlockHash,
        block: BlockIndex,
        /// What is to be read; nobody may write to it before it was.
        cells: Vec<u64>,
    },
    WriteOn {
        at: usize,
        content: BlockHash,
    },
    Fetch {
        at: usize,
        handoff: HandoffId,
        blocks: Vec<(BlockHash, BlockIndex)>,
        since: Time,
        /// How long it takes where nothing goes ahead of it.
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

/// How a pending thing turns out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Well,
    Damaged,
}

/// What the workers told their router.
#[derive(Clone, Debug)]
pub enum Heard {
    Told(Report),
    Emitted(HandoffId, cleave_domain::Emission),
    Repeated(HandoffId),
    Drained,
}

#[derive(Default)]
pub struct World {
    pub now: Time,
    pub machines: Vec<Machine>,
    /// By the time they are due, then in the order they were made.
    pub pending: BTreeMap<(Time, u64), Pending>,
    pub heard: Vec<(usize, Heard)>,
    pub log: Vec<String>,
    /// Every fact, for the machines that are asked to keep it.
    pub tape: Option<Vec<(usize, Time, Input)>>,
    /// The slot for whose sequence alone the next step fails that does.
    pub fails_for: Option<SlotIndex>,
    /// Fetches that were told to stop and have not.
    stopped: BTreeSet<(usize, HandoffId)>,
    made: u64,
}

/// All bytes of a block.
fn whole(ordinal: u32) -> BlockPart {
    BlockPart {
        ordinal,
        offset: 0,
        len: BLOCK_TOKENS * 8,
    }
}

pub fn limits(worker: u64, role: Role) -> Limits {
    Limits {
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
        writer: Writer::Receiver,
        prices: cleave_domain::Prices::default(),
        steps_in_flight: 1,
        speculation: None,
    }
}

impl World {
    pub fn add(&mut self, name: char, limits: Limits) -> usize {
        let engine = Engine::new(limits.capacity);
        self.machines.push(Machine {
            name,
            brain: Brain::new(limits),
            pool: None,
            engine,
            steps: VecDeque::new(),
            host: BTreeMap::new(),
            kept: BTreeMap::new(),
        });
        let machine = self.machines.len() - 1;
        self.feed(machine, Input::RouterJoined { router: ROUTER });
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

    fn find(&self, worker: WorkerRef) -> Option<usize> {
        (0..self.machines.len()).find(|machine| self.me(*machine) == worker)
    }

    pub fn order(&mut self, to: usize, order: Order) {
        self.later(Duration::from_millis(1), Pending::Order { to, order });
    }

    /// Tells a brain, does what it asks, and checks it.
    pub fn feed(&mut self, machine: usize, input: Input) {
        self.feed_frame(machine, input, None);
    }

    fn feed_frame(&mut self, machine: usize, input: Input, mut payload: Option<Vec<u64>>) {
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
                Output::Import { .. } | Output::Discard { .. }
            ));
            self.carry_out(machine, output, &mut payload);
        }
        assert_eq!(answers, u32::from(framed), "one answer to each frame");
        self.machines[machine].brain.check();
    }

    fn write(&mut self, machine: usize, way: char, said: &str) {
        if !said.is_empty() {
            let millis = self.now.as_nanos() / 1_000_000;
            let name = self.machines[machine].name;
            self.log.push(format!("{millis:>5} {name} {way} {said}"));
        }
    }

    pub fn later(&mut self, wait: Duration, what: Pending) {
        self.made += 1;
        self.pending.insert((self.now + wait, self.made), what);
    }

    fn carry_out(&mut self, at: usize, output: Output, payload: &mut Option<Vec<u64>>) {
        match output {
            Output::Step(plan) => {
                let machine = &mut self.machines[at];
                let most = machine.brain.limits().steps_in_flight as usize;
                assert!(machine.steps.len() < most, "too many steps at a time");
                machine.steps.push_back((plan, Fate::Well));
                if machine.steps.len() == 1 {
                    self.later(STEP_TAKES, Pending::Step(at));
                }
            }
            Output::Tell { report, .. } => self.heard.push((at, Heard::Told(report))),
            Output::Emit { handoff, emission } => {
                self.heard.push((at, Heard::Emitted(handoff, emission)));
            }
            Output::Export(export) => self.export(at, export),
            Output::Send { to, packet } => self.ship(at, to, packet, Vec::new()),
            Output::Import {
                handoff,
                part,
                block,
            } => {
                let payload = payload.take().expect("a frame has just arrived");
                self.later(
                    Duration::from_millis(1),
                    Pending::Import {
                        at,
                        handoff,
                        part,
                        block,
                        payload,
                    },
                );
            }
            Output::SwapOut { handoff, blocks } => {
                let read = |block: &BlockIndex| self.machines[at].engine.read(*block, whole(0));
                let content = blocks.iter().map(read).collect();
                let dropped = false;
                self.later(
                    Duration::from_millis(4),
                    Pending::SwapOut {
                        at,
                        handoff,
                        blocks,
                        content,
                        dropped,
                    },
                );
            }
            Output::SwapIn { handoff, blocks } => {
                let dropped = false;
                self.later(
                    Duration::from_millis(4),
                    Pending::SwapIn {
                        at,
                        handoff,
                        blocks,
                        dropped,
                    },
                );
            }
            Output::SwapDrop { handoff } => self.drop_swap(at, handoff),
            Output::Shelve { content, block } => self.shelve(at, content, block),
            Output::WriteOn { content } => {
                self.later(Duration::from_millis(6), Pending::WriteOn { at, content });
            }
            Output::Fetch { handoff, blocks } => self.fetch(at, handoff, blocks),
            Output::FetchStop { handoff } => self.stop_fetch(at, handoff),
            Output::TierDrop { content, place } => self.drop_kept(at, content, place),
            Output::Note(pool @ Note::Pool { blocks_leaked, .. }) => {
                assert_eq!(blocks_leaked, 0, "the audit counts leaked blocks");
                self.machines[at].pool = Some(pool);
            }
            Output::Note(Note::Repeated { handoff }) => {
                self.heard.push((at, Heard::Repeated(handoff)));
            }
            Output::Drained => self.heard.push((at, Heard::Drained)),
            Output::Discard { .. } | Output::Forget { .. } | Output::Note(_) => {}
        }
    }

    fn export(&mut self, at: usize, export: Export) {
        let Export {
            handoff,
            to,
            from,
            ordinal,
            block,
        } = export;
        let content = self.machines[at].engine.read(from, whole(ordinal));
        self.later(
            Duration::from_millis(1),
            Pending::Export {
                at,
                handoff,
                to,
                from,
                ordinal,
                block,
                content,
            },
        );
    }

    fn ship(&mut self, from: usize, to: WorkerRef, packet: Packet, payload: Vec<u64>) {
        let from = self.me(from);
        self.later(
            Duration::from_millis(2),
            Pending::Packet {
                from,
                to,
                packet,
                payload,
            },
        );
    }

    /// Lets one pending thing happen now.
    pub fn perform(&mut self, key: (Time, u64), fate: Fate) {
        let what = self.pending.remove(&key).expect("pending");
        self.now = self.now.max(key.0);
        match what {
            Pending::Step(at) => self.perform_step(at, fate),
            Pending::Export { at, .. } => self.perform_export(at, &what, fate),
            Pending::Import {
                at,
                handoff,
                part,
                block,
                payload,
            } => {
                let outcome = match fate {
                    Fate::Well => {
                        self.import(at, block, part, &payload);
                        ImportOutcome::Written
                    }
                    Fate::Damaged => ImportOutcome::Broken,
                };
                let input = Input::Imported {
                    handoff,
                    part,
                    outcome,
                };
                self.feed(at, input);
            }
            Pending::Packet {
                from,
                to,
                packet,
                payload,
            } => {
                let Some(at) = self.find(to) else {
                    return;
                };
                let frame = matches!(packet, Packet::Frame { .. });
                let condition = match fate {
                    Fate::Damaged if frame => Condition::Damaged,
                    _ => Condition::Intact,
                };
                let input = Input::Arrived {
                    from,
                    packet,
                    condition,
                };
                self.feed_frame(at, input, frame.then_some(payload));
            }
            Pending::SwapOut { at, .. } => self.perform_swap_out(at, what, fate),
            Pending::SwapIn { at, .. } => self.perform_swap_in(at, what, fate),
            Pending::Shelve { at, .. } => self.perform_shelve(at, what, fate),
            Pending::WriteOn { at, content } => self.perform_write_on(at, content, fate),
            Pending::Fetch { at, .. } => self.perform_fetch(at, what, fate),
            Pending::Order { to, order } => {
                let router = ROUTER;
                self.feed(to, Input::Ordered { router, order });
            }
        }
    }

    fn perform_step(&mut self, at: usize, fate: Fate) {
        let machine = &mut self.machines[at];
        let (plan, known) = machine.steps.pop_front().expect("a step is under way");
        let took = STEP_TAKES;
        let fate = if known == Fate::Damaged { known } else { fate };
        if let Some((_, next)) = machine.steps.front_mut() {
            *next = fate;
        }
        let input = match fate {
            Fate::Well => {
                let result = machine.engine.step(&plan);
                Input::Stepped { result, took }
            }
            Fate::Damaged => {
                machine.engine.spoil(&plan);
                Input::StepFailed {
                    step: plan.step,
                    slot: self.fails_for.take(),
                    reason: "on fire".into(),
                }
            }
        };
        if !self.machines[at].steps.is_empty() {
            self.later(STEP_TAKES, Pending::Step(at));
        }
        self.feed(at, input);
    }

    /// Writes a frame's payload, or looks whether its sender has.
    fn import(&mut self, at: usize, block: BlockRef, part: BlockPart, payload: &[u64]) {
        let machine = &mut self.machines[at];
        match machine.brain.limits().writer {
            Writer::Receiver => machine.engine.write(block.block, part, payload),
            Writer::Sender => {
                let found = machine.engine.read(block.block, part);
                assert_eq!(found, payload, "{} was overwritten", block.block);
            }
        }
    }

    /// Two frames for each block; the block is read only now.
    fn perform_export(&mut self, at: usize, what: &Pending, fate: Fate) {
        let Pending::Export {
            handoff,
            to,
            from,
            ordinal,
            block,
            ref content,
            ..
        } = *what
        else {
            panic!("an export")
        };
        let now = self.machines[at].engine.read(from, whole(ordinal));
        assert_eq!(
            now, *content,
            "{from} was given away while it was to be read"
        );
        // A sender that writes itself is held back by nothing, a lost link neither.
        if let Some(target) = self.find(to) {
            let target = &mut self.machines[target];
            if target.brain.limits().writer == Writer::Sender {
                target.engine.write(block.block, whole(ordinal), content);
            }
        }
        if fate == Fate::Damaged {
            let outcome = match ordinal % 2 {
                0 => ExportOutcome::Dropped,
                _ => ExportOutcome::Broken,
            };
            return self.feed(
                at,
                Input::Exported {
                    handoff,
                    ordinal,
                    outcome,
                },
            );
        }
        let mut digest = Digest::default();
        for (offset, len) in [(0, 24), (24, 8)] {
            let part = BlockPart {
                ordinal,
                offset,
                len,
            };
            let payload = self.machines[at].engine.read(from, part);
            let checksum = engine::fold(0, &payload);
            digest.add(part, checksum);
            let packet = Packet::Frame {
                handoff,
                block,
                part,
                checksum,
            };
            self.ship(at, to, packet, payload);
        }
        let outcome = ExportOutcome::Sent {
            digest: digest.value(),
            bytes: 32,
        };
        let input = Input::Exported {
            handoff,
            ordinal,
            outcome,
        };
        self.feed(at, input);
    }

    /// The link between two machines breaks: what is on it is gone, both ends hear of it.
    pub fn cut(&mut self, a: usize, b: usize) {
        let (one, other) = (self.me(a), self.me(b));
        self.pending.retain(|_, what| match what {
            Pending::Packet { from, to, .. } => {
                (*from, *to) != (one, other) && (*to, *from) != (one, other)
            }
            _ => true,
        });
        self.feed(a, Input::LinkLost { peer: other });
        self.feed(b, Input::LinkLost { peer: one });
    }

    /// A machine dies and comes back with nothing but what is on its disk; the others hear of it.
    pub fn restart(&mut self, at: usize) {
        let old = self.me(at);
        let mut limits = self.machines[at].brain.limits().clone();
        limits.me.incarnation.0 += 1;
        self.pending.retain(|_, what| match what {
            Pending::Step(machine) => *machine != at,
            Pending::Export { at: machine, .. }
            | Pending::Import { at: machine, .. }
            | Pending::SwapOut { at: machine, .. }
            | Pending::SwapIn { at: machine, .. }
            | Pending::Shelve { at: machine, .. }
            | Pending::WriteOn { at: machine, .. }
            | Pending::Fetch { at: machine, .. } => *machine != at,
            Pending::Packet { from, to, .. } => *from != old && *to != old,
            Pending::Order { to, .. } => *to != at,
        });
        let kept = self.on_disk(at);
        self.stopped.retain(|(machine, _)| *machine != at);
        let contents: Vec<BlockHash> = kept.keys().map(|(content, _)| *content).collect();
        self.machines[at] = Machine {
            name: self.machines[at].name,
            engine: Engine::new(limits.capacity),
            brain: Brain::new(limits),
            pool: None,
            steps: VecDeque::new(),
            host: BTreeMap::new(),
            kept,
        };
        if !contents.is_empty() {
            self.feed(at, Input::FoundOnDisk { contents });
        }
        self.feed(at, Input::RouterJoined { router: ROUTER });
        for other in (0..self.machines.len()).filter(|other| *other != at) {
            self.feed(other, Input::LinkLost { peer: old });
            self.feed(other, Input::Severed { peer: old });
        }
    }

    /// The next thing to happen of itself: a pending one or a deadline.
    pub fn next_event(&self) -> Option<Time> {
        let deadlines = self.machines.iter().filter_map(|m| m.brain.deadline());
        let pending = self.pending.keys().next().map(|(at, _)| *at);
        deadlines.chain(pending).min()
    }

    /// Lets the earliest pending thing or deadline happen, if it is due by `until`.
    pub fn advance(&mut self, until: Time) -> bool {
        let Some(next) = self.next_event().filter(|next| *next <= until) else {
            return false;
        };
        match self.pending.first_key_value() {
            Some((key, _)) if key.0 <= next => self.perform(*key, Fate::Well),
            _ => {
                self.now = self.now.max(next);
                for machine in 0..self.machines.len() {
                    let due = self.machines[machine].brain.deadline();
                    if due.is_some_and(|due| due <= self.now) {
                        self.feed(machine, Input::Woke);
                    }
                }
            }
        }
        true
    }

    /// Lets everything happen that is due within `span`, in its order.
    pub fn run(&mut self, span: Duration) {
        let until = self.now + span;
        while self.advance(until) {}
        self.now = until;
    }

    /// Every block of every pool is nobody's: nothing is leaked.
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
                brain.pool().blocks_promised(),
                0,
                "promises leaked on {name}"
            );
            assert_eq!(brain.deadline(), None, "a deadline for nothing on {name}");
            assert!(machine.host.is_empty(), "host memory leaked on {name}");
        }
    }
}
