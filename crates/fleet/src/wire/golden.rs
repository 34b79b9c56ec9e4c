//! The bytes of every message, so that no change of a type changes the wire unnoticed.
//!
//! A test that fails here asks for a higher [`PROTOCOL`](super::PROTOCOL), and for new bytes in
//! this file; the bytes of the handshake stay as they are for ever.

use super::{encode, proto};
use crate::connection::{LinkState, Registration};
use crate::sample;
use cleave_api::TraceParent;
use cleave_domain::{
    AdapterChangeId, AdapterId, AdapterOffer, AdapterPlace, AdapterReport, BlockHash, BlockIndex,
    BlockRef, Constraint, ConstraintEnd, Deadline, DecodeTiming, DeviceId, Emission, Failure,
    FinishReason, FleetDemand, FleetTarget, FlightId, Generation, Grammar, HandoffId,
    HandoffTarget, Incarnation, LinkPrice, MigrateOrder, OnDeadlineMiss, Order, PoolCounts,
    Pooling, PrefillBacklog, PrefillOrder, PrefillTiming, Prices, PromptFacts, Refusal, Report,
    Request, RequestFlow, RequestSlo, ReserveOrder, Role, RouterId, RowPrice, RunOrder,
    SampledToken, SamplingParams, ScalingGossip, ScalingReason, ScalingReasons, SloMetric,
    SloOutcomes, StateCapacity, StepProgress, StopRules, TokenScores, UnloadedAdapter,
    WindowCapacity, WindowTarget, WorkerId, WorkerLoad, WorkerRef,
};
use cleave_telemetry::RequestContext;
use cleave_text::{ModelFiles, ModelTask, RerankTask};
use prost::Message;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn assert_bytes(value: &impl Serialize, expected: &str) {
    let bytes = hex(&encode(value));
    assert_eq!(bytes, expected, "other bytes need a higher PROTOCOL");
}

/// Variants are numbered in their order: a new one comes last.
#[test]
fn variants_keep_their_numbers() {
    let metrics = [SloMetric::Ttft, SloMetric::Tpot, SloMetric::EndToEnd];
    assert_bytes(&metrics, "000102");
    assert_bytes(&ScalingReason::ALL, "00010203040506070809");
}

fn handoff() -> HandoffId {
    HandoffId {
        flight: FlightId(1),
        attempt: 2,
    }
}

fn worker() -> WorkerRef {
    WorkerRef {
        worker: WorkerId(3),
        incarnation: Incarnation(4),
    }
}

fn blocks() -> Vec<BlockRef> {
    vec![BlockRef {
        block: BlockIndex(16),
        generation: Generation(17),
    }]
}

fn state() -> BlockRef {
    BlockRef {
        block: BlockIndex(61),
        generation: Generation(62),
    }
}

fn window() -> WindowTarget {
    let block = BlockRef {
        block: BlockIndex(67),
        generation: Generation(68),
    };
    WindowTarget {
        first: 66,
        blocks: vec![block],
    }
}

fn target() -> HandoffTarget {
    HandoffTarget {
        worker: worker(),
        present: 15,
        blocks: blocks(),
        state: Some(state()),
        window: Some(window()),
    }
}

fn request() -> Arc<Request> {
    Arc::new(Request {
        prompt: Arc::new([5, 300]),
        generated: Arc::new([6]),
        sampling: SamplingParams {
            temperature: 0.5,
            top_k: 7,
            top_p: 1.0,
            min_p: 0.25,
            top_n_sigma: 1.5,
            repetition_penalty: 2.0,
            presence_penalty: -1.0,
            frequency_penalty: -0.5,
            logit_bias: vec![(8, 1.5)],
            seed: 9,
            logprobs: Some(10),
            prompt_logprobs: None,
            constraint: Some(Arc::new(Constraint {
                grammar: Grammar::Choice(Arc::from(["c".to_owned()])),
                end: ConstraintEnd::Forced,
            })),
        },
        stop: StopRules {
            max_tokens: 11,
            min_tokens: 12,
            stop_tokens: Arc::new([13]),
        },
        priority: -1,
        cache_salt: 14,
        adapter: Some(AdapterId([0xad; 16])),
        pooling: Some(Pooling::Logits(Arc::new([15]))),
        slo: RequestSlo {
            class: "a".to_owned(),
            tenant: "b".to_owned(),
            ttft: Some(SECOND),
            tpot: None,
            e2e: Some(Duration::from_nanos(7)),
            priority: 2,
        },
    })
}

fn gossip() -> Arc<ScalingGossip> {
    let counts = |prefill, decode, both| PoolCounts {
        prefill,
        decode,
        both,
    };
    Arc::new(ScalingGossip {
        router: RouterId(23),
        number: 24,
        demand: FleetDemand {
            slow: RequestFlow {
                arrivals: 25,
                prompt_tokens: 26,
                pairs: 27,
                placed: 28,
                cached_tokens: 29,
                answers: 30,
                output_tokens: 31,
            },
            quick: RequestFlow::default(),
            classes: vec![SloOutcomes {
                arrivals: 1,
                judged: 2,
                missed_prefill: 3,
                missed_decode: 4,
            }],
            waiting: 32,
            waiting_tokens: 33,
            open: 34,
        },
        wanted: FleetTarget {
            workers: counts(35, 36, 37),
            legs: counts(0, 0, 0),
            reasons: ScalingReasons {
                prefill: ScalingReason::Idle,
                decode: ScalingReason::Streams,
                both: ScalingReason::Turns,
            },
        },
    })
}

const GOSSIP: &str = "1718191a1b1c1d1e1f000000000000000101020304202122232425000000000309";
const REQUEST: &str = "0205ac0201060000003f070000803f0000803e0000c03f00000040000080bf000000bf01080000c0\
                       3f09010a000102010163010b0c010d010e01adadadadadadadadadadadadadadadad\
                       0161016201010000010007040103010f";

#[test]
fn orders_keep_their_bytes() {
    let assert_order = |order: Order, expected: &str| {
        let bare: (Order, Option<Arc<RequestContext>>) = (order, None);
        assert_bytes(&bare, &format!("{expected}00"));
    };
    let waited = Duration::from_millis(1500);
    let reserve = Order::Reserve(ReserveOrder {
        handoff: handoff(),
        request: request(),
        sender: worker(),
        expected_output_tokens: 20,
        ahead_tokens: 21,
        waited,
        due: None,
    });
    assert_order(reserve, &format!("000102{REQUEST}030414150180cab5ee0100"));
    let migrate = Order::Migrate(MigrateOrder {
        handoff: handoff(),
        of: handoff(),
        target: target(),
        tokens: 22,
    });
    assert_order(migrate, "020102010203040f011011013d3e014201434416");
    let handoffs = vec![handoff()];
    assert_order(Order::Renew { handoffs }, "03010102");
    let handoff = handoff();
    assert_order(Order::Cancel { handoff }, "040102");
    assert_order(Order::Drain, "05");
    assert_order(Order::Serve { role: Role::Both }, "0602");
    assert_order(Order::Relay(gossip()), &format!("07{GOSSIP}"));
    let adapter = AdapterId([7; 16]);
    let fetch = format!("09{}", "07".repeat(16));
    assert_order(Order::FetchAdapter { adapter }, &fetch);
    let run = Order::Run(RunOrder {
        handoff,
        request: request(),
        expected_output_tokens: 20,
        waited,
        due: None,
    });
    assert_order(run, &format!("080102{REQUEST}140180cab5ee0100"));
    let prefill = Order::Prefill(PrefillOrder {
        handoff,
        request: request(),
        target: target(),
        waited,
        due: Some(Deadline {
            left: 2 * SECOND,
            unmet: OnDeadlineMiss::Serve,
        }),
    });
    let context = RequestContext {
        request_id: "r".into(),
        trace: Some(TraceParent {
            trace: 18,
            span: 19,
            flags: 1,
        }),
    };
    let expected =
        format!("010102{REQUEST}03040f011011013d3e01420143440180cab5ee010102000101017201121301");
    assert_bytes(&(prefill, Some(context)), &expected);
}

#[test]
fn reports_about_a_hand_off_keep_their_bytes() {
    let handoff = handoff();
    let timing = PrefillTiming {
        wait: SECOND,
        run: 2 * SECOND,
    };
    let reserved = Report::Reserved {
        handoff,
        present: 15,
        blocks: blocks(),
        state: Some(state()),
        window: Some(window()),
    };
    assert_bytes(&reserved, "0001020f011011013d3e0142014344");
    let running = Report::Running {
        handoff,
        present: 15,
    };
    assert_bytes(&running, "0f01020f");
    let (retry_after, reason) = (SECOND, "r".to_owned());
    let late = Refusal::Late {
        aim: SloMetric::EndToEnd,
        predicted: SECOND,
        retry_after: 2 * SECOND,
    };
    let refusals = [
        (Refusal::QueueFull { retry_after }, "000100"),
        (Refusal::NoBlocks { retry_after }, "010100"),
        (Refusal::TooLong { tokens_max: 9 }, "0209"),
        (Refusal::OutOfVocabulary { vocab_size: 9 }, "0309"),
        (Refusal::NoWorker, "04"),
        (late, "050201000200"),
        (Refusal::Draining, "06"),
        (Refusal::WrongWorker, "07"),
        (Refusal::NoAdapter { reason }, "080172"),
    ];
    for (refusal, expected) in refusals {
        let refused = Report::Refused { handoff, refusal };
        assert_bytes(&refused, &format!("010102{expected}"));
    }
    let prefilled = Report::Prefilled { handoff, timing };
    assert_bytes(&prefilled, "02010201000200");
    assert_bytes(&Report::Landed { handoff }, "030102");
    let failures = [
        (Failure::WorkerLost, "00"),
        (Failure::WorkerStuck, "01"),
        (Failure::LinkLost, "02"),
        (Failure::LeaseExpired, "03"),
        (Failure::Corrupt, "04"),
        (Failure::Rejected, "05"),
        (Failure::Engine("e".to_owned()), "060165"),
        (Failure::OutOfBlocks, "07"),
        (Failure::Draining, "08"),
        (Failure::SlowReader, "09"),
        (Failure::RetriesSpent(Box::new(Failure::WorkerLost)), "0a00"),
        (Failure::Constraint("e".to_owned()), "0b0165"),
    ];
    for (failure, expected) in failures {
        let aborted = Report::MigrationAborted {
            handoff,
            failure: failure.clone(),
        };
        assert_bytes(&aborted, &format!("040102{expected}"));
        let failed = Report::LegFailed { handoff, failure };
        assert_bytes(&failed, &format!("070102{expected}"));
    }
    assert_bytes(&Report::MemoryPressure { handoff }, "050102");
    let finished = Report::Finished {
        handoff,
        reason: FinishReason::Length,
        output_tokens: 9,
        timing: DecodeTiming {
            wait: 3 * SECOND,
            first: 4 * SECOND,
        },
        prefill: Some(timing),
    };
    assert_bytes(&finished, "0601020109030004000101000200");
    assert_bytes(&Report::Released { handoff }, "080102");
}

#[test]
fn reports_about_a_worker_keep_their_bytes() {
    let mut micros = [[0; 9]; 3];
    for (entry, number) in micros.iter_mut().flatten().zip(1..) {
        *entry = number;
    }
    let load = WorkerLoad {
        queue_tokens: 40,
        sequences_waiting: 41,
        sequences_running: 42,
        blocks_free: 43,
        states_free: 63,
        progress: StepProgress::Stuck,
        context_tokens: 44,
        streams: 45,
        backlog: PrefillBacklog { micros },
        tpot_least: Some(SECOND),
        step_left: 2 * SECOND,
        orders_received: 46,
        windows_free: 65,
    };
    assert_bytes(
        &Report::Load(load),
        "0928292a2b3f41012c2d0102030405060708090a0b0c0d0e0f101112131415161718191a1b01010002002e",
    );
    let price = |latency_nanos, byte_picos| LinkPrice {
        latency_nanos,
        byte_picos,
    };
    let prices = Prices {
        rows: vec![RowPrice {
            rows: 50,
            nanos: 51,
        }],
        pair_picos: 52,
        context_picos: 53,
        draw_nanos: 54,
        link: price(55, 56),
        links: vec![(WorkerId(3), price(57, 58))],
        error_permille: 59,
    };
    assert_bytes(&Report::Prices(prices), "0a01323334353637380103393a3b");
    assert_bytes(&Report::Draining, "0b");
    assert_bytes(&Report::Serves { role: Role::Decode }, "0c01");
    let prefix = Report::Prefix {
        stored: vec![BlockHash([7; 16])],
        evicted: Vec::new(),
    };
    assert_bytes(&prefix, "0d010707070707070707070707070707070700");
    assert_bytes(&Report::Relayed(gossip()), &format!("0e{GOSSIP}"));
    let offer = AdapterOffer {
        name: "a".to_owned(),
        adapter: AdapterId([7; 16]),
        root: "b".to_owned(),
        loaded_from: Some("c".to_owned()),
        change: Some(AdapterChangeId {
            number: 2,
            router: RouterId(3),
        }),
        place: AdapterPlace::OnDisk,
        problem: Some("d".to_owned()),
    };
    let unloaded = UnloadedAdapter {
        name: "e".to_owned(),
        change: AdapterChangeId::default(),
    };
    let adapters = Report::Adapters(AdapterReport {
        offers: vec![offer],
        unloaded: vec![unloaded],
    });
    let offer = format!("0161{}016201016301020301010164", "07".repeat(16));
    let expected = format!("1001{offer}0101650000");
    assert_bytes(&adapters, &expected);
}

#[test]
fn other_messages_keep_their_bytes() {
    let sampled = |token, scores| SampledToken { token, scores };
    let scores = TokenScores {
        normalizer: 0.5,
        chosen: -0.5,
        top: vec![(8, 1.5)],
    };
    let facts = PromptFacts {
        cached_tokens: 62,
        scores: vec![sampled(63, None)],
        timing: PrefillTiming {
            wait: SECOND,
            run: 2 * SECOND,
        },
        pooled: Some(Arc::new([0.5])),
    };
    let emission = Emission {
        index: 60,
        sampled: sampled(61, Some(scores)),
        prompt: Some(facts),
    };
    assert_bytes(
        &vec![(handoff(), emission)],
        "0101023c3d010000003f000000bf01080000c03f013e013f000100020001010000003f",
    );
    let link = LinkState {
        peer: worker(),
        transport: "tcp".to_owned(),
        bytes_per_second: 70,
        latency: Duration::from_nanos(71),
    };
    assert_bytes(&link, "030403746370460047");
    let pass = (handoff(), [9_u8; 32]);
    assert_bytes(&pass, &format!("0102{}", "09".repeat(32)));
    assert_bytes(&(worker(), "h:1".to_owned()), "030403683a31");
}

#[test]
fn a_registration_keeps_its_bytes() {
    let mut registration = Registration {
        worker: worker(),
        ..sample::registration()
    };
    registration.description.home = Role::Decode;
    registration.description.capacity.context_tokens_max = 2048;
    registration.description.capacity.states = Some(StateCapacity {
        bytes: 3000,
        count: 64,
    });
    registration.description.capacity.windows = Some(WindowCapacity {
        tokens: 69,
        bytes: 70,
        count: 71,
    });
    registration.description.device = Some(DeviceId("d".to_owned()));
    registration.files = Arc::new(ModelFiles {
        name: "m".to_owned(),
        config: "c".to_owned(),
        tokenizer: "t".to_owned(),
        tokenizer_config: None,
        special_tokens_map: Some("s".to_owned()),
        generation_config: None,
        chat_template: None,
        chat_templates_named: vec![("n".to_owned(), "p".to_owned())],
        context_tokens_max: Some(80),
        task: ModelTask::Rerank(RerankTask {
            negative: "x".to_owned(),
            positive: "y".to_owned(),
        }),
    });
    assert_bytes(
        &registration,
        "030401770201016d016610800828088004801001b81740014546470401016403683a31016d016301740001017300000101\
         6e0170015002017801790500",
    );
}

/// Every release reads these, to turn away one of another protocol with the reason.
#[test]
fn the_handshake_keeps_its_bytes_in_every_protocol() {
    use proto::downward::Kind;
    let down = |kind| hex(&proto::Downward { kind: Some(kind) }.encode_to_vec());
    let greeting = proto::Greeting {
        protocol: 6,
        router: 1,
        silence_nanos: 2,
    };
    assert_eq!(down(Kind::Greeting(greeting)), "0a06080610011802");
    let reason = "r".to_owned();
    let rejection = Kind::Rejection(proto::Rejection { reason });
    assert_eq!(down(rejection), "1a030a0172");
    let hello = proto::Hello {
        protocol: 6,
        version: "v".to_owned(),
        name: "w".to_owned(),
        registration: vec![1],
    };
    let hello = proto::Upward {
        kind: Some(proto::upward::Kind::Hello(hello)),
    };
    assert_eq!(hex(&hello.encode_to_vec()), "0a0b08061201762201774a0101");
}
