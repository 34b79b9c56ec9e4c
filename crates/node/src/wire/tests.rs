//! What is converted there and back is equal, through the encoded bytes.

use super::{WireError, proto};
use crate::line::{Introduction, LinkState};
use cleave_api::ModelFiles;
use cleave_domain::{
    Aim, Backlog, BlockHash, BlockIndex, BlockRef, Capacity, DecodeTiming, DeviceId, Due, DueUnmet,
    Emission, Failure, Fingerprint, FinishReason, FlightId, Generation, HandoffId, Incarnation,
    LinkPrice, Load, Migrate, Order, Prefill, PrefillTiming, Prices, Progress, PromptFacts,
    Refusal, Report, Request, Reserve, Role, RowPrice, Sampled, Sampling, Scores, Slo, StopRules,
    Target, WorkerDescription, WorkerId, WorkerRef,
};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use prost::Message;
use std::sync::Arc;
use std::time::Duration;

fn handoff() -> impl Strategy<Value = HandoffId> {
    (any::<u64>(), any::<u32>()).prop_map(|(flight, attempt)| HandoffId {
        flight: FlightId(flight),
        attempt,
    })
}

fn worker() -> impl Strategy<Value = WorkerRef> {
    (any::<u64>(), any::<u64>()).prop_map(|(worker, incarnation)| WorkerRef {
        worker: WorkerId(worker),
        incarnation: Incarnation(incarnation),
    })
}

fn blocks() -> impl Strategy<Value = Vec<BlockRef>> {
    let block = (any::<u32>(), any::<u32>()).prop_map(|(block, generation)| BlockRef {
        block: BlockIndex(block),
        generation: Generation(generation),
    });
    vec(block, 0..5)
}

fn span() -> impl Strategy<Value = Duration> {
    any::<u64>().prop_map(Duration::from_nanos)
}

fn number() -> impl Strategy<Value = f32> {
    prop_oneof![
        Just(0.0f32),
        Just(-0.0),
        Just(f32::INFINITY),
        -1e30f32..1e30
    ]
}

fn sampling() -> impl Strategy<Value = Sampling> {
    let numbers = (number(), number(), number(), number(), number(), number());
    let rest = (
        any::<u32>(),
        vec((any::<u32>(), number()), 0..4),
        any::<u64>(),
        option::of(any::<u32>()),
        option::of(any::<u32>()),
    );
    (numbers, rest).prop_map(|(numbers, rest)| {
        let (temperature, top_p, min_p, repetition, presence, frequency) = numbers;
        let (top_k, logit_bias, seed, logprobs, prompt_logprobs) = rest;
        Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty: repetition,
            presence_penalty: presence,
            frequency_penalty: frequency,
            logit_bias,
            seed,
            logprobs,
            prompt_logprobs,
        }
    })
}

fn request() -> impl Strategy<Value = Arc<Request>> {
    let stop = (any::<u32>(), any::<u32>(), vec(any::<u32>(), 0..3)).prop_map(
        |(max_tokens, min_tokens, stop_tokens)| StopRules {
            max_tokens,
            min_tokens,
            stop_tokens: stop_tokens.into(),
        },
    );
    let aims = (option::of(span()), option::of(span()), option::of(span()));
    let slo = (".{0,8}", ".{0,8}", aims, any::<i32>()).prop_map(
        |(class, tenant, (ttft, tpot, e2e), priority)| Slo {
            class,
            tenant,
            ttft,
            tpot,
            e2e,
            priority,
        },
    );
    let tokens = (vec(any::<u32>(), 0..9), vec(any::<u32>(), 0..3));
    (tokens, sampling(), stop, any::<i32>(), any::<u64>(), slo).prop_map(
        |((prompt, generated), sampling, stop, priority, cache_salt, slo)| {
            Arc::new(Request {
                prompt: prompt.into(),
                generated: generated.into(),
                sampling,
                stop,
                priority,
                cache_salt,
                slo,
            })
        },
    )
}

fn due() -> impl Strategy<Value = Option<Due>> {
    let unmet = prop_oneof![Just(DueUnmet::Refuse), Just(DueUnmet::Serve)];
    option::of((span(), unmet).prop_map(|(left, unmet)| Due { left, unmet }))
}

fn order() -> impl Strategy<Value = Order> {
    let waits = || (span(), due());
    let reserve = (handoff(), request(), worker(), any::<[u32; 2]>(), waits()).prop_map(
        |(handoff, request, sender, tokens, (waited, due))| {
            Order::Reserve(Reserve {
                handoff,
                request,
                sender,
                expected_output_tokens: tokens[0],
                ahead_tokens: tokens[1],
                waited,
                due,
            })
        },
    );
    let target = || {
        (worker(), any::<u32>(), blocks()).prop_map(|(worker, present, blocks)| Target {
            worker,
            present,
            blocks,
        })
    };
    let prefill = (handoff(), request(), target(), waits()).prop_map(
        |(handoff, request, target, (waited, due))| {
            Order::Prefill(Prefill {
                handoff,
                request,
                target,
                waited,
                due,
            })
        },
    );
    let migrate =
        (handoff(), handoff(), target(), any::<u32>()).prop_map(|(handoff, of, target, tokens)| {
            Order::Migrate(Migrate {
                handoff,
                of,
                target,
                tokens,
            })
        });
    prop_oneof![
        reserve,
        prefill,
        migrate,
        Just(Order::Drain),
        role().prop_map(|role| Order::Serve { role }),
        vec(handoff(), 0..4).prop_map(|handoffs| Order::Renew { handoffs }),
        handoff().prop_map(|handoff| Order::Cancel { handoff }),
    ]
}

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Prefill), Just(Role::Decode), Just(Role::Both)]
}

fn failure() -> impl Strategy<Value = Failure> {
    let plain = prop_oneof![
        Just(Failure::WorkerLost),
        Just(Failure::WorkerStuck),
        Just(Failure::SlowReader),
        Just(Failure::LinkLost),
        Just(Failure::LeaseExpired),
        Just(Failure::Corrupt),
        Just(Failure::Rejected),
        Just(Failure::OutOfBlocks),
        Just(Failure::Draining),
        ".{0,20}".prop_map(Failure::Engine),
    ];
    plain.prop_recursive(3, 4, 1, |last| {
        last.prop_map(|last| Failure::RetriesSpent(Box::new(last)))
    })
}

fn refusal() -> impl Strategy<Value = Refusal> {
    prop_oneof![
        span().prop_map(|retry_after| Refusal::QueueFull { retry_after }),
        span().prop_map(|retry_after| Refusal::NoBlocks { retry_after }),
        any::<u32>().prop_map(|tokens_max| Refusal::TooLong { tokens_max }),
        Just(Refusal::NoWorker),
        Just(Refusal::Draining),
        Just(Refusal::WrongWorker),
        (aim(), span(), span()).prop_map(|(aim, predicted, retry_after)| Refusal::Late {
            aim,
            predicted,
            retry_after
        }),
    ]
}

fn aim() -> impl Strategy<Value = Aim> {
    prop_oneof![Just(Aim::Ttft), Just(Aim::Tpot), Just(Aim::EndToEnd)]
}

fn prefill_timing() -> impl Strategy<Value = PrefillTiming> {
    (span(), span()).prop_map(|(wait, run)| PrefillTiming { wait, run })
}

fn prices() -> impl Strategy<Value = Prices> {
    let link = || {
        any::<(u64, u64)>().prop_map(|(latency_nanos, byte_picos)| LinkPrice {
            latency_nanos,
            byte_picos,
        })
    };
    let rows = btree_map(any::<u32>(), any::<u64>(), 0..6);
    let links = btree_map(any::<u64>(), link(), 0..4);
    let numbers = any::<(u64, u64, u64, u32)>();
    (rows, numbers, link(), links).prop_map(|(rows, numbers, link, links)| {
        let (pair_picos, context_picos, draw_nanos, error_permille) = numbers;
        let row = |(rows, nanos)| RowPrice { rows, nanos };
        let to = |(worker, price)| (WorkerId(worker), price);
        Prices {
            rows: rows.into_iter().map(row).collect(),
            pair_picos,
            context_picos,
            draw_nanos,
            link,
            links: links.into_iter().map(to).collect(),
            error_permille,
        }
    })
}

fn load() -> impl Strategy<Value = Load> {
    let progress = prop_oneof![Just(Progress::Moving), Just(Progress::Stuck)];
    let counts = any::<(u64, u32, u32, u32, (u64, u32))>();
    let work = (any::<[[u32; 9]; 3]>(), option::of(span()));
    let step = (span(), any::<u64>());
    (counts, progress, work, step).prop_map(|(counts, progress, (micros, tpot_least), step)| {
        let (step_left, orders_heard) = step;
        let (queue_tokens, sequences_waiting, sequences_running, blocks_free, decode) = counts;
        let (context_tokens, streams) = decode;
        Load {
            queue_tokens,
            sequences_waiting,
            sequences_running,
            blocks_free,
            progress,
            context_tokens,
            streams,
            backlog: Backlog { micros },
            tpot_least,
            step_left,
            orders_heard,
        }
    })
}

fn hashes() -> impl Strategy<Value = Vec<BlockHash>> {
    vec(any::<[u8; 16]>().prop_map(BlockHash), 0..4)
}

fn report() -> impl Strategy<Value = Report> {
    let reason = prop_oneof![Just(FinishReason::Stop), Just(FinishReason::Length)];
    let decode = (span(), span()).prop_map(|(wait, first)| DecodeTiming { wait, first });
    prop_oneof![
        (handoff(), any::<u32>(), blocks()).prop_map(|(handoff, present, blocks)| {
            Report::Reserved {
                handoff,
                present,
                blocks,
            }
        }),
        (handoff(), refusal()).prop_map(|(handoff, refusal)| Report::Refused { handoff, refusal }),
        (handoff(), prefill_timing())
            .prop_map(|(handoff, timing)| Report::Prefilled { handoff, timing }),
        handoff().prop_map(|handoff| Report::Landed { handoff }),
        (
            handoff(),
            reason,
            any::<u32>(),
            decode,
            option::of(prefill_timing())
        )
            .prop_map(|(handoff, reason, output_tokens, timing, prefill)| {
                Report::Finished {
                    handoff,
                    reason,
                    output_tokens,
                    timing,
                    prefill,
                }
            }),
        (handoff(), failure())
            .prop_map(|(handoff, failure)| Report::LegFailed { handoff, failure }),
        handoff().prop_map(|handoff| Report::Released { handoff }),
        load().prop_map(Report::Load),
        prices().prop_map(Report::Prices),
        (handoff(), failure()).prop_map(|(handoff, failure)| Report::Stayed { handoff, failure }),
        handoff().prop_map(|handoff| Report::Crowded { handoff }),
        role().prop_map(|role| Report::Serves { role }),
        Just(Report::Draining),
        (hashes(), hashes()).prop_map(|(stored, evicted)| Report::Prefix { stored, evicted }),
    ]
}

fn sampled() -> impl Strategy<Value = Sampled> {
    let scores = (number(), number(), vec((any::<u32>(), number()), 0..4)).prop_map(
        |(normalizer, chosen, top)| Scores {
            normalizer,
            chosen,
            top,
        },
    );
    (any::<u32>(), option::of(scores)).prop_map(|(token, scores)| Sampled { token, scores })
}

fn emission() -> impl Strategy<Value = Emission> {
    let facts = (any::<u32>(), vec(sampled(), 0..3), prefill_timing()).prop_map(
        |(cached_tokens, scores, timing)| PromptFacts {
            cached_tokens,
            scores,
            timing,
        },
    );
    (any::<u32>(), sampled(), option::of(facts)).prop_map(|(index, sampled, prompt)| Emission {
        index,
        sampled,
        prompt,
    })
}

fn introduction() -> impl Strategy<Value = Introduction> {
    let capacity = vec(1..=1_u32 << 16, 6).prop_map(|drawn| Capacity {
        block_tokens: drawn[0],
        block_bytes: drawn[1],
        blocks_count: drawn[2],
        slots_count: drawn[3],
        step_tokens_max: drawn[4],
        context_tokens_max: drawn[5],
    });
    let names = (".{0,9}", ".{0,9}", option::of(".{1,9}"));
    let description = (role(), names, capacity, 0..=1_u32 << 24).prop_map(
        |(role, (model, fingerprint, device), capacity, queue_max)| WorkerDescription {
            role,
            home: Role::Both,
            model,
            fingerprint: Fingerprint(fingerprint),
            capacity,
            queue_max,
            device: device.map(DeviceId),
        },
    );
    let text = || option::of(".{0,9}");
    let files = (
        (".{0,9}", ".{0,9}", ".{0,9}"),
        (text(), text(), text(), text()),
        vec((".{0,9}", ".{0,9}"), 0..3),
        option::of(any::<u32>()),
    )
        .prop_map(
            |(required, optional, chat_templates_named, context_tokens_max)| {
                let (name, config, tokenizer) = required;
                let (tokenizer_config, special_tokens_map, generation_config, chat_template) =
                    optional;
                Arc::new(ModelFiles {
                    name,
                    config,
                    tokenizer,
                    tokenizer_config,
                    special_tokens_map,
                    generation_config,
                    chat_template,
                    chat_templates_named,
                    context_tokens_max,
                })
            },
        );
    let silence = (100_000_000..=u64::MAX).prop_map(Duration::from_nanos);
    let name = "[-_.:@a-zA-Z0-9äß]{1,128}";
    (worker(), name, description, ".{0,9}", files, silence).prop_map(
        |(worker, name, description, data_address, files, silence)| Introduction {
            worker,
            name,
            description,
            data_address,
            files,
            silence,
        },
    )
}

/// Encodes and decodes, as the network does.
fn travel<M: Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).unwrap()
}

proptest! {
    #[test]
    fn every_order_comes_back(order in order()) {
        let wire = travel(&proto::Order::from(order.clone()));
        prop_assert_eq!(Order::try_from(wire).unwrap(), order);
    }

    #[test]
    fn every_report_comes_back(report in report()) {
        let wire = travel(&proto::Report::from(report.clone()));
        prop_assert_eq!(Report::try_from(wire).unwrap(), report);
    }

    #[test]
    fn every_emission_comes_back(handoff in handoff(), emission in emission()) {
        let wire = travel(&proto::Tokens::from((handoff, emission.clone())));
        let back: (HandoffId, Emission) = wire.try_into().unwrap();
        prop_assert_eq!(back, (handoff, emission));
    }

    #[test]
    fn every_link_state_comes_back(
        peer in worker(), transport in ".{0,9}", bytes_per_second in any::<u64>(), latency in span(),
    ) {
        let link = LinkState { peer, transport, bytes_per_second, latency };
        let wire = travel(&proto::LinkState::from(link.clone()));
        prop_assert_eq!(LinkState::try_from(wire).unwrap(), link);
    }

    #[test]
    fn every_introduction_comes_back(introduction in introduction()) {
        let wire = travel(&proto::Hello::from(introduction.clone()));
        prop_assert_eq!(Introduction::try_from(wire).unwrap(), introduction);
    }

    #[test]
    fn damage_is_an_error_and_never_a_panic(bytes in vec(any::<u8>(), 0..200)) {
        if let Ok(upward) = proto::Upward::decode(bytes.as_slice())
            && let Some(proto::upward::Kind::Report(report)) = upward.kind
        {
            let _ = Report::try_from(report);
        }
        if let Ok(order) = proto::Order::decode(bytes.as_slice()) {
            let _ = Order::try_from(order);
        }
    }
}

#[test]
fn a_damaged_message_is_refused_or_what_it_says() {
    let mut runner = TestRunner::deterministic();
    let mut samples = Vec::new();
    let mut keep = |kind: u8, message: Vec<u8>| samples.push([vec![kind], message].concat());
    for _ in 0..40 {
        keep(0, drawn::<_, proto::Hello>(introduction(), &mut runner));
        keep(1, drawn::<_, proto::Report>(report(), &mut runner));
        keep(2, drawn::<_, proto::Order>(order(), &mut runner));
        let tokens = (handoff(), emission());
        keep(3, drawn::<_, proto::Tokens>(tokens, &mut runner));
    }
    cleave_fuzz::hold("grpc", &samples, 20_000, crate::fuzzing::grpc);
}

fn drawn<S: Strategy, M: Message + From<S::Value>>(from: S, runner: &mut TestRunner) -> Vec<u8> {
    let value = from.new_tree(runner).unwrap().current();
    M::from(value).encode_to_vec()
}

#[test]
fn what_is_missing_is_named() {
    let empty = proto::Order {
        kind: None,
        mark: None,
    };
    assert_eq!(
        Order::try_from(empty),
        Err(WireError::Missing("order.kind"))
    );
    let hash = proto::Prefix {
        stored: vec![vec![1, 2, 3]],
        evicted: Vec::new(),
    };
    let report = proto::Report {
        kind: Some(proto::report::Kind::Prefix(hash)),
    };
    let error = Report::try_from(report).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`prefix.stored` has 3 bytes in place of 16"
    );
}

#[test]
fn prices_out_of_order_stopped_the_router() {
    let report = |prices: Prices| Report::try_from(proto::Report::from(Report::Prices(prices)));
    let row = |rows| RowPrice { rows, nanos: 1 };
    let flaw = |rows: Vec<RowPrice>, links: Vec<u64>| {
        let to = |worker| (WorkerId(worker), LinkPrice::default());
        report(Prices {
            rows,
            links: links.into_iter().map(to).collect(),
            ..Prices::default()
        })
        .unwrap_err()
        .to_string()
    };
    let ascending = "is not in ascending order";
    for rows in [vec![row(8), row(1)], vec![row(8), row(8)]] {
        assert_eq!(flaw(rows, Vec::new()), format!("`prices.rows` {ascending}"));
    }
    let links = flaw(Vec::new(), vec![2, 1]);
    assert_eq!(links, format!("`prices.links` {ascending}"));
    let many = flaw((0..1025).map(row).collect(), Vec::new());
    assert_eq!(many, "`prices.rows` has more than 1024 entries");

    let load = proto::Load {
        backlog_micros: vec![1; 26],
        progress: proto::Progress::Moving.into(),
        ..proto::Load::default()
    };
    let error = Load::try_from(load).unwrap_err().to_string();
    assert_eq!(
        error,
        "`load.backlog_micros` does not have three times nine entries"
    );
}

#[test]
fn a_worker_that_could_not_be_stopped_the_router() {
    let sound = || proto::Hello::from(super::sample::introduction());
    assert!(Introduction::try_from(sound()).is_ok());
    let refused = |field: &str, value: u64, spoil: &dyn Fn(&mut proto::Hello)| {
        let mut hello = sound();
        spoil(&mut hello);
        let error = Introduction::try_from(hello).unwrap_err().to_string();
        let says = error.contains(&format!("`{field}`")) && error.contains(&value.to_string());
        assert!(says, "{field} {value}: {error}");
    };
    type Field = fn(&mut proto::Capacity) -> &mut u32;
    let fields: [(&str, Field); 6] = [
        ("capacity.block_tokens", |c| &mut c.block_tokens),
        ("capacity.block_bytes", |c| &mut c.block_bytes),
        ("capacity.blocks_count", |c| &mut c.blocks_count),
        ("capacity.slots_count", |c| &mut c.slots_count),
        ("capacity.step_tokens_max", |c| &mut c.step_tokens_max),
        ("capacity.context_tokens_max", |c| &mut c.context_tokens_max),
    ];
    for (name, field) in fields {
        for value in [0, u32::MAX] {
            refused(name, value.into(), &|hello| {
                let description = hello.description.as_mut().unwrap();
                *field(description.capacity.as_mut().unwrap()) = value;
            });
        }
    }
    let most = u32::MAX;
    refused("description.queue_max", most.into(), &|hello| {
        hello.description.as_mut().unwrap().queue_max = most;
    });
    refused("hello.silence_nanos", 20_000_000, &|hello| {
        hello.silence_nanos = 20_000_000;
    });
    let long = "x".repeat(129);
    for name in ["", "a\nb", "a\"b", "a/b", "a b", long.as_str()] {
        let mut hello = sound();
        hello.name = name.to_owned();
        let error = Introduction::try_from(hello).unwrap_err().to_string();
        assert!(error.starts_with("`hello.name`"), "{name:?}: {error}");
    }
}
