//! Scripts: one command a line, each followed by the outputs that it caused.
//!
//! `worker NAME ROLE [blocks= slots= step= queue= context= states= windows= swap= late= vocab=
//! stall= lease= flying= guess= host= disk= price=] [cache=off] [onesided]` · `reserve FLIGHT on
//! D from P [prompt= max= expect= ahead= output= priority= family= salt= stop= min= attempt=
//! waited= scores logprobs]` · `prefill FLIGHT on P to D` (to what D reserved) · `start FLIGHT on
//! W [as reserve]` (both legs) · `cancel|renew FLIGHT on W` · `drain W` · `migrate FLIGHT on W to
//! D [to= attempt= told=]` (attempt `attempt` leaves as attempt `to`, to what D reserved) ·
//! `serve W ROLE` · `severed W PEER` (nothing of PEER reaches W) · `step W [fail|constraint]
//! [slot= also=]` (fails for the sequences in these slots alone, by the engine or by their
//! constraints) · `copies W [fail]` (all exports and imports under way) · `swaps W [fail]` ·
//! `shelves|writes|fetches W [fail]` (to host memory, to disk, back) ·
//! `deliver|drop|damage|repeat|reverse P D [N]` (packets under way) · `forget P D` (each is
//! answered by a D that knows nothing of it) · `stop MS` (every process stands still for so long,
//! then wakes) · `keep P D`, `replay` (a copy of the first packet, later) · `cut P D` · `router
//! lost|joined W` · `run MS` (all in its order) · `wait MS` (only deadlines) · `restart W` ·
//! `pool W` (the audit's last sums) · `empty` (asserts that nothing is held anywhere)

use super::{
    ROUTER, StageEvent, StageEventOutcome, StageReport, StageWorld, draws, limits, states, windows,
};
use cleave_domain::{
    AbandonCause, BlockRef, FlightId, HandoffId, HandoffTarget, MigrateOrder, Order, Pooling,
    PrefillOrder, Report, Request, ReserveOrder, Role, RowPrice, RunOrder, SamplingParams,
    SlotIndex, StopRules, WindowTarget,
};
use cleave_kv::Packet;
use cleave_sched::{LookupLimits, PayloadCondition, PoolWriter, StepFault, WorkerInput};
use cleave_testkit::{EngineOp, build};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The leading blocks that are there, the reserved ones, the state slot and the window.
type ReservedPlaces = (u32, Vec<BlockRef>, Option<BlockRef>, Option<WindowTarget>);

#[derive(Default)]
struct ScriptPlayer {
    world: StageWorld,
    requests: BTreeMap<HandoffId, Arc<Request>>,
    held_back: Option<StageEvent>,
}

/// A command's words: the plain ones in order, the `key=value` ones by key.
struct CommandWords<'a> {
    plain: Vec<&'a str>,
    keyed: BTreeMap<&'a str, i64>,
}

impl<'a> CommandWords<'a> {
    fn of(line: &'a str) -> Self {
        let (mut plain, mut keyed) = (Vec::new(), BTreeMap::new());
        for word in line.split_whitespace() {
            match word.split_once('=') {
                Some((key, value)) => {
                    keyed.insert(key, value.parse().unwrap_or(0));
                }
                None => plain.push(word),
            }
        }
        Self { plain, keyed }
    }

    fn number(&self, key: &str, default: u32) -> u32 {
        let value = self.keyed.get(key).copied();
        value.map_or(default, |value| u32::try_from(value).expect("not negative"))
    }

    fn machine(&self, world: &StageWorld, i: usize) -> usize {
        world.named(self.plain[i].chars().next().expect("a name"))
    }
}

/// Plays a script; returns it with the outputs after each line.
pub fn play(script: &str) -> String {
    let mut play = ScriptPlayer::default();
    let mut text = String::new();
    for line in script
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
    {
        text.push_str(&format!("{line}\n"));
        play.command(&CommandWords::of(line));
        for line in play.world.log.drain(..) {
            text.push_str(&format!("    {line}\n"));
        }
    }
    text
}

pub fn handoff(flight: u32, attempt: u32) -> HandoffId {
    HandoffId {
        flight: FlightId::new(ROUTER, u64::from(flight)),
        attempt,
    }
}

/// `family` names a prompt: equal families, equal tokens. Outputs of families from 900 on repeat
/// themselves.
pub fn prompt(family: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| family * 1000 + i).collect()
}

/// Speculation with at most so many draft tokens, from two or three equal ones; none at 0.
pub fn guessing(drafts_max: u32) -> Option<LookupLimits> {
    let lookup = LookupLimits {
        drafts_max,
        match_max: 3,
        match_min: 2,
    };
    (drafts_max > 0).then_some(lookup)
}

fn request(words: &CommandWords, flight: u32) -> Request {
    let prompt = prompt(words.number("family", flight), words.number("prompt", 10));
    let stop = words.keyed.get("stop").map(|stop| *stop as usize);
    let output = draws::output(&prompt, 40);
    let mut sampling = SamplingParams::greedy();
    if words.plain.contains(&"scores") {
        sampling.prompt_logprobs = Some(0);
    }
    if words.plain.contains(&"logprobs") {
        sampling.logprobs = Some(0);
    }
    Request {
        generated: output[..words.number("output", 0) as usize].into(),
        sampling,
        stop: StopRules {
            max_tokens: if pooling(words).is_some() {
                1
            } else {
                words.number("max", 3)
            },
            min_tokens: words.number("min", 0),
            stop_tokens: stop.map(|stop| output[stop]).into_iter().collect(),
        },
        cache_salt: u64::from(words.number("salt", 0)),
        adapter: None,
        pooling: pooling(words),
        priority: i32::try_from(words.keyed.get("priority").copied().unwrap_or(0)).expect("small"),
        ..build::request(prompt, 20)
    }
}

/// The vector that a request asks for, by one of these words.
fn pooling(words: &CommandWords) -> Option<Pooling> {
    words.plain.iter().find_map(|word| match *word {
        "last" => Some(Pooling::LastToken),
        "mean" => Some(Pooling::Mean),
        "first" => Some(Pooling::FirstToken),
        "logits" => Some(Pooling::Logits([1, 2].into())),
        _ => None,
    })
}

impl ScriptPlayer {
    fn command(&mut self, words: &CommandWords) {
        let plain = &words.plain[..];
        match plain {
            ["worker", ..] => self.worker(words),
            ["start", ..] => self.start(words),
            ["reserve", ..] => self.reserve(words),
            ["prefill", ..] => self.prefill(words),
            ["migrate", ..] => self.migrate(words),
            ["serve", ..] => {
                let role = role(words.plain[2]);
                self.order(words.machine(&self.world, 1), Order::Serve { role });
            }
            ["severed", ..] => {
                let peer = self.world.me(words.machine(&self.world, 2));
                let at = words.machine(&self.world, 1);
                self.world.fence(at, peer);
            }
            ["copies" | "swaps", ..] => self.copies(words),
            ["cancel", ..] => {
                let handoff = self.handoff(words);
                self.order(words.machine(&self.world, 3), Order::Cancel { handoff });
            }
            ["renew", ..] => {
                let handoffs = vec![self.handoff(words)];
                self.order(words.machine(&self.world, 3), Order::Renew { handoffs });
            }
            ["drain", ..] => self
                .world
                .feed(words.machine(&self.world, 1), WorkerInput::Draining),
            ["broken", ..] => {
                let reason = "out of memory".into();
                let at = words.machine(&self.world, 1);
                self.world.feed(at, WorkerInput::EngineLost { reason });
            }
            ["step", ..] => {
                let at = words.machine(&self.world, 1);
                self.perform(
                    |event| matches!(event, StageEvent::Step(of) if *of == at),
                    words,
                );
            }
            ["shelves" | "writes" | "fetches", ..] => {
                let (word, of) = (words.plain[0], words.machine(&self.world, 1));
                self.perform(
                    move |event| match event {
                        StageEvent::Op { at, op, .. } => match op {
                            EngineOp::Offload { .. } => word == "shelves" && *at == of,
                            EngineOp::Fetch { .. } => word == "fetches" && *at == of,
                            _ => false,
                        },
                        StageEvent::Spill { at, .. } => word == "writes" && *at == of,
                        _ => false,
                    },
                    words,
                );
            }
            [
                "deliver" | "drop" | "damage" | "repeat" | "reverse" | "keep" | "forget",
                ..,
            ] => self.packets(words),
            ["replay"] => self.replay(),
            ["cut", ..] => {
                let (a, b) = (words.machine(&self.world, 1), words.machine(&self.world, 2));
                self.world.cut(a, b);
            }
            ["restart", ..] => self.world.restart(words.machine(&self.world, 1)),
            ["router", event, ..] => {
                let (at, router) = (words.machine(&self.world, 2), ROUTER);
                let input = match *event {
                    "lost" => WorkerInput::RouterLost { router },
                    "joined" => WorkerInput::RouterJoined { router },
                    other => panic!("no router is {other}"),
                };
                self.world.feed(at, input);
            }
            ["run", millis] => self.world.run(span(millis)),
            ["wait", millis] => self.wait(span(millis)),
            ["stop", millis] => self.stop(span(millis)),
            ["empty"] => self.world.check_empty(),
            ["pool", ..] => {
                let machine = &self.world.machines[words.machine(&self.world, 1)];
                let sums = format!("{:?}", machine.pool.as_ref().expect("an audit"));
                self.world
                    .log
                    .push(sums.replace("Pool { ", "").replace(" }", ""));
            }
            other => panic!("no such command: {other:?}"),
        }
    }

    /// Performs copies between blocks of a machine and its peers, or its host memory.
    fn copies(&mut self, words: &CommandWords) {
        let (swaps, of) = (words.plain[0] == "swaps", words.machine(&self.world, 1));
        let is_meant = move |event: &StageEvent| {
            let StageEvent::Op { at, op, .. } = event else {
                return false;
            };
            let kind = match op {
                EngineOp::SwapOut { .. } | EngineOp::SwapIn { .. } => swaps,
                EngineOp::Export(_) | EngineOp::Import { .. } => !swaps,
                _ => false,
            };
            kind && *at == of
        };
        self.perform(is_meant, words);
    }

    /// Delivers the packet that was kept.
    fn replay(&mut self) {
        let held_back = self.held_back.clone().expect("kept before");
        self.world.later(Duration::ZERO, held_back);
        let newest = self.world.pending.keys().max_by_key(|(_, made)| *made);
        let newest = *newest.expect("just added");
        self.world.perform(newest, StageEventOutcome::Well);
    }

    fn worker(&mut self, words: &CommandWords) {
        let role = role(words.plain[2]);
        let mut limits = limits(1 + self.world.machines.len() as u64, role);
        let capacity = &mut limits.capacity;
        capacity.blocks_count = words.number("blocks", capacity.blocks_count);
        capacity.slots_count = words.number("slots", capacity.slots_count);
        capacity.step_tokens_max = words.number("step", capacity.step_tokens_max);
        capacity.context_tokens_max = words.number("context", capacity.context_tokens_max);
        capacity.states = states(words.number("states", 0));
        capacity.windows = windows(words.number("windows", 0));
        limits.vocab_size = words.number("vocab", limits.vocab_size);
        if let Some(millis) = words.keyed.get("lease") {
            limits.lease = Duration::from_millis(millis.unsigned_abs());
        }
        limits.queue_max = words.number("queue", limits.queue_max);
        limits.swap_blocks = words.number("swap", 0);
        limits.host_blocks = words.number("host", 0);
        limits.disk_blocks = words.number("disk", 0);
        limits.steps_in_flight = words.number("flying", 1);
        limits.speculation = guessing(words.number("guess", 0));
        if let Some(millis) = words.keyed.get("stall") {
            limits.stall_max = Duration::from_millis(millis.unsigned_abs());
        }
        if let Some(millis) = words.keyed.get("late") {
            limits.step_max = Duration::from_millis(millis.unsigned_abs());
        }
        // Predicted time of each step, in milliseconds.
        if let Some(millis) = words.keyed.get("price") {
            limits.prices.rows = vec![RowPrice {
                rows: 1,
                nanos: millis.unsigned_abs() * 1_000_000,
            }];
        }
        if words.plain.contains(&"onesided") {
            limits.writer = PoolWriter::Sender;
        }
        limits.prefix_cache = !words.keyed.contains_key("cache");
        let name = words.plain[1].chars().next().expect("a name");
        self.world.add(name, limits);
    }

    fn handoff(&self, words: &CommandWords) -> HandoffId {
        let flight = words.plain[1].parse().expect("a flight");
        handoff(flight, words.number("attempt", 0))
    }

    fn order(&mut self, to: usize, order: Order) {
        let router = ROUTER;
        self.world.feed(to, WorkerInput::Ordered { router, order });
    }

    /// Orders one worker to run both legs.
    fn start(&mut self, words: &CommandWords) {
        let handoff = self.handoff(words);
        let flight = words.plain[1].parse().expect("a flight");
        let request = Arc::new(request(words, flight));
        self.requests.insert(handoff, Arc::clone(&request));
        let order = Order::Run(RunOrder {
            handoff,
            request,
            expected_output_tokens: words.number("expect", 2),
            waited: Duration::from_millis(u64::from(words.number("waited", 0))),
            due: None,
        });
        self.order(words.machine(&self.world, 3), order);
    }

    fn reserve(&mut self, words: &CommandWords) {
        let handoff = self.handoff(words);
        let flight = words.plain[1].parse().expect("a flight");
        let request = Arc::new(request(words, flight));
        self.requests.insert(handoff, Arc::clone(&request));
        let (at, sender) = (words.machine(&self.world, 3), words.machine(&self.world, 5));
        let order = Order::Reserve(ReserveOrder {
            handoff,
            request,
            sender: self.world.me(sender),
            expected_output_tokens: words.number("expect", 2),
            ahead_tokens: words.number("ahead", 0),
            waited: Duration::from_millis(u64::from(words.number("waited", 0))),
            due: None,
        });
        self.order(at, order);
    }

    fn prefill(&mut self, words: &CommandWords) {
        let of = self.handoff(words);
        let (at, to) = (words.machine(&self.world, 3), words.machine(&self.world, 5));
        let (present, blocks, state, window) = self.reserved(of);
        let order = Order::Prefill(PrefillOrder {
            handoff: of,
            request: Arc::clone(&self.requests[&of]),
            target: HandoffTarget {
                worker: self.world.me(to),
                present,
                blocks,
                state,
                window,
            },
            waited: Duration::ZERO,
            due: None,
        });
        self.order(at, order);
    }

    fn reserved(&self, of: HandoffId) -> ReservedPlaces {
        let mut newest_first = self.world.reports.iter().rev();
        let reserved = newest_first.find_map(|(_, report)| match report {
            StageReport::Reported(Report::Reserved {
                handoff,
                present,
                blocks,
                state,
                window,
            }) if *handoff == of => Some((*present, blocks.clone(), *state, window.clone())),
            _ => None,
        });
        reserved.expect("reserved before")
    }

    fn migrate(&mut self, words: &CommandWords) {
        let of = self.handoff(words);
        let attempt = words.number("to", of.attempt + 1);
        let handoff = HandoffId { attempt, ..of };
        let (at, to) = (words.machine(&self.world, 3), words.machine(&self.world, 5));
        let (present, blocks, state, window) = self.reserved(handoff);
        let request = &self.requests[&handoff];
        let tokens_sent = request.prompt.len() + request.generated.len();
        let order = Order::Migrate(MigrateOrder {
            handoff,
            of,
            target: HandoffTarget {
                worker: self.world.me(to),
                present,
                blocks,
                state,
                window,
            },
            tokens: words.number("told", u32::try_from(tokens_sent).expect("small")),
        });
        self.order(at, order);
    }

    /// Performs the events pending now, not those that they cause.
    fn perform(&mut self, pick: impl Fn(&StageEvent) -> bool, words: &CommandWords) {
        let (event_outcome, fault) = match words.plain.last() {
            Some(&"fail") => (StageEventOutcome::Damaged, StepFault::Engine),
            Some(&"constraint") => (StageEventOutcome::Damaged, StepFault::Constraint),
            _ => (StageEventOutcome::Well, StepFault::Engine),
        };
        self.world.step_fault = fault;
        let named = ["slot", "also"].iter();
        let named = named.filter_map(|key| words.keyed.get(*key));
        let slots = named.map(|slot| SlotIndex(u32::try_from(*slot).expect("not negative")));
        self.world.fails_for = slots.collect();
        let picked = self.world.pending.iter().filter(|(_, event)| pick(event));
        let keys: Vec<_> = picked.map(|(key, _)| *key).collect();
        assert!(!keys.is_empty(), "nothing to do: {:?}", words.plain);
        for key in keys {
            self.world.perform(key, event_outcome);
        }
    }

    fn packets(&mut self, words: &CommandWords) {
        let (from, to) = (words.machine(&self.world, 1), words.machine(&self.world, 2));
        let (from, to) = (self.world.me(from), self.world.me(to));
        let is_on_link = |event: &StageEvent| matches!(event, StageEvent::Packet { from: a, to: b, .. } if (*a, *b) == (from, to));
        let picked = self
            .world
            .pending
            .iter()
            .filter(|(_, event)| is_on_link(event));
        let count = words
            .plain
            .get(3)
            .map_or(99, |count| count.parse().expect("a count"));
        let mut keys: Vec<_> = picked.map(|(key, _)| *key).take(count).collect();
        assert!(!keys.is_empty(), "no packets");
        match words.plain[0] {
            "drop" => keys
                .iter()
                .for_each(|key| drop(self.world.pending.remove(key))),
            // A receiver that forgot the hand-off answers this.
            "forget" => {
                for key in keys {
                    let packet = self.world.pending.remove(&key);
                    let Some(StageEvent::Packet {
                        from, to, packet, ..
                    }) = packet
                    else {
                        panic!("no packet");
                    };
                    let packet = Packet::Abandoned {
                        handoff: packet.handoff(),
                        cause: AbandonCause::Finished,
                    };
                    let sender = self.world.machine_of(from).expect("it is there");
                    let input = WorkerInput::Arrived {
                        from: to,
                        packet,
                        condition: PayloadCondition::Intact,
                    };
                    self.world.feed(sender, input);
                }
            }
            "keep" => self.held_back = Some(self.world.pending[&keys[0]].clone()),
            "damage" => self.world.perform(keys[0], StageEventOutcome::Damaged),
            "repeat" => {
                let copy = self.world.pending[&keys[0]].clone();
                self.world.perform(keys[0], StageEventOutcome::Well);
                self.world.later(Duration::ZERO, copy);
            }
            how => {
                if how == "reverse" {
                    keys.reverse();
                }
                for key in keys {
                    self.world.perform(key, StageEventOutcome::Well);
                }
            }
        }
    }

    /// Suspends every process: packets that arrive meanwhile lie unread, and deadlines are noticed
    /// late.
    fn stop(&mut self, span: Duration) {
        self.world.now = self.world.now + span;
        for machine in 0..self.world.machines.len() {
            self.world.feed(machine, WorkerInput::Woke);
        }
    }

    fn wait(&mut self, span: Duration) {
        let pending = std::mem::take(&mut self.world.pending);
        self.world.run(span);
        self.world.pending.extend(pending);
    }
}

fn role(name: &str) -> Role {
    match name {
        "prefill" => Role::Prefill,
        "decode" => Role::Decode,
        _ => Role::Both,
    }
}

fn span(millis: &str) -> Duration {
    Duration::from_millis(millis.parse().expect("milliseconds"))
}
