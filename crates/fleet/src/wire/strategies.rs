//! Strategies that draw messages for property tests: any value that can be sent.
//!
//! Owns: how each type is drawn. Never encodes a value, or says what a receiver does with it.
//! Invariant: each variant and each field is drawn, within what its type promises, so that a field
//! forgotten on the wire does not come back equal.

mod adapters;
mod failures;
mod gossip;

use super::proto;
use crate::connection::{FromWorker, LinkState, Registration, ToWorker};
use crate::grpc::OutboundMessage;
use adapters::{adapter_change, adapter_command, adapters};
use cleave_api::TraceParent;
use cleave_domain::{
    AdapterId, BlockHash, BlockIndex, BlockRef, Capacity, Constraint, ConstraintEnd, Deadline,
    DecodeTiming, DeviceId, Emission, Fingerprint, FinishReason, FlightId, Generation, Grammar,
    HandoffId, HandoffTarget, Incarnation, LinkPrice, MigrateOrder, OnDeadlineMiss, Order, Pooling,
    PrefillBacklog, PrefillOrder, PrefillTiming, Prices, PromptFacts, Report, Request, RequestSlo,
    ReserveOrder, Role, RowPrice, RunOrder, SampledToken, SamplingParams, StateCapacity,
    StepProgress, StopRules, TokenScores, WorkerDescription, WorkerId, WorkerLoad, WorkerRef,
};
use cleave_telemetry::RequestContext;
use cleave_text::{EmbedTask, ModelFiles, ModelTask, RerankTask};
use cleave_transfer::WriteGrant;
use failures::{failure, refusal};
use gossip::gossip;
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::strategy::Union;
use std::sync::Arc;
use std::time::Duration;

pub(super) fn handoff() -> impl Strategy<Value = HandoffId> {
    (any::<u64>(), any::<u32>()).prop_map(|(flight, attempt)| HandoffId {
        flight: FlightId(flight),
        attempt,
    })
}

pub(super) fn worker() -> impl Strategy<Value = WorkerRef> {
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

fn state() -> impl Strategy<Value = Option<BlockRef>> {
    option::of(
        any::<(u32, u32)>().prop_map(|(block, generation)| BlockRef {
            block: BlockIndex(block),
            generation: Generation(generation),
        }),
    )
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

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let numbers = (number(), number(), number(), number(), number(), number());
    let rest = (
        number(),
        any::<u32>(),
        vec((any::<u32>(), number()), 0..4),
        any::<u64>(),
        option::of(any::<u32>()),
        option::of(any::<u32>()),
        option::of(constraint()),
    );
    (numbers, rest).prop_map(|(numbers, rest)| {
        let (temperature, top_p, min_p, repetition, presence, frequency) = numbers;
        let (top_n_sigma, top_k, logit_bias, seed, logprobs, prompt_logprobs, constraint) = rest;
        SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            top_n_sigma,
            repetition_penalty: repetition,
            presence_penalty: presence,
            frequency_penalty: frequency,
            logit_bias,
            seed,
            logprobs,
            prompt_logprobs,
            constraint,
        }
    })
}

fn constraint() -> BoxedStrategy<Arc<Constraint>> {
    let text = || ".{0,8}".prop_map(Arc::<str>::from);
    let grammar = prop_oneof![
        text().prop_map(Grammar::JsonSchema),
        text().prop_map(Grammar::Regex),
        vec(".{0,8}", 1..3).prop_map(|texts| Grammar::Choice(texts.into())),
        text().prop_map(Grammar::Lark),
    ];
    let end = prop_oneof![Just(ConstraintEnd::Allowed), Just(ConstraintEnd::Forced)];
    let constraint = (grammar, end).prop_map(|(grammar, end)| Constraint { grammar, end });
    constraint.prop_map(Arc::new).boxed()
}

/// The tree of a drawn request is on the heap: those of messages, which hold several, would
/// overflow the stack of a test.
fn request() -> BoxedStrategy<Arc<Request>> {
    let stop = (any::<u32>(), any::<u32>(), vec(any::<u32>(), 0..3)).prop_map(
        |(max_tokens, min_tokens, stop_tokens)| StopRules {
            max_tokens,
            min_tokens,
            stop_tokens: stop_tokens.into(),
        },
    );
    let aims = (option::of(span()), option::of(span()), option::of(span()));
    let slo = (".{0,8}", ".{0,8}", aims, any::<i32>()).prop_map(
        |(class, tenant, (ttft, tpot, e2e), priority)| RequestSlo {
            class,
            tenant,
            ttft,
            tpot,
            e2e,
            priority,
        },
    );
    let tokens = (vec(any::<u32>(), 0..9), vec(any::<u32>(), 0..3));
    let pooling = prop_oneof![
        Just(Pooling::LastToken),
        Just(Pooling::Mean),
        Just(Pooling::FirstToken),
        vec(any::<u32>(), 0..3).prop_map(|tokens| Pooling::Logits(tokens.into())),
    ];
    let adapter = option::of(any::<[u8; 16]>().prop_map(AdapterId));
    let wanted = (slo, adapter, option::of(pooling));
    let request = (tokens, sampling(), stop, any::<i32>(), any::<u64>(), wanted).prop_map(
        |((prompt, generated), sampling, stop, priority, cache_salt, (slo, adapter, pooling))| {
            Arc::new(Request {
                prompt: prompt.into(),
                generated: generated.into(),
                sampling,
                stop,
                priority,
                cache_salt,
                adapter,
                slo,
                pooling,
            })
        },
    );
    request.boxed()
}

fn due() -> impl Strategy<Value = Option<Deadline>> {
    let unmet = prop_oneof![Just(OnDeadlineMiss::Refuse), Just(OnDeadlineMiss::Serve)];
    option::of((span(), unmet).prop_map(|(left, unmet)| Deadline { left, unmet }))
}

pub(super) fn order() -> impl Strategy<Value = Order> {
    let waits = || (span(), due());
    let reserve = (handoff(), request(), worker(), any::<[u32; 2]>(), waits()).prop_map(
        |(handoff, request, sender, tokens, (waited, due))| {
            Order::Reserve(ReserveOrder {
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
    let run = (handoff(), request(), any::<u32>(), waits()).prop_map(
        |(handoff, request, expected_output_tokens, (waited, due))| {
            Order::Run(RunOrder {
                handoff,
                request,
                expected_output_tokens,
                waited,
                due,
            })
        },
    );
    let target = || {
        (worker(), any::<u32>(), blocks(), state()).prop_map(|(worker, present, blocks, state)| {
            HandoffTarget {
                worker,
                present,
                blocks,
                state,
                window: None,
            }
        })
    };
    let prefill = (handoff(), request(), target(), waits()).prop_map(
        |(handoff, request, target, (waited, due))| {
            Order::Prefill(PrefillOrder {
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
            Order::Migrate(MigrateOrder {
                handoff,
                of,
                target,
                tokens,
            })
        });
    prop_oneof![
        reserve,
        run,
        prefill,
        migrate,
        Just(Order::Drain),
        role().prop_map(|role| Order::Serve { role }),
        vec(handoff(), 0..4).prop_map(|handoffs| Order::Renew { handoffs }),
        handoff().prop_map(|handoff| Order::Cancel { handoff }),
        gossip().prop_map(Order::Relay),
        any::<[u8; 16]>().prop_map(|digest| Order::FetchAdapter {
            adapter: AdapterId(digest)
        }),
    ]
}

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Prefill), Just(Role::Decode), Just(Role::Both)]
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

fn load() -> impl Strategy<Value = WorkerLoad> {
    let progress = prop_oneof![Just(StepProgress::Moving), Just(StepProgress::Stuck)];
    let counts = any::<(u64, u32, u32, [u32; 2], (u64, u32))>();
    let work = (any::<[[u32; 9]; 3]>(), option::of(span()));
    let step = (span(), any::<u64>());
    (counts, progress, work, step).prop_map(|(counts, progress, (micros, tpot_least), step)| {
        let (step_left, orders_received) = step;
        let (queue_tokens, sequences_waiting, sequences_running, free, decode) = counts;
        let [blocks_free, states_free] = free;
        let (context_tokens, streams) = decode;
        WorkerLoad {
            queue_tokens,
            sequences_waiting,
            sequences_running,
            blocks_free,
            states_free,
            progress,
            context_tokens,
            streams,
            backlog: PrefillBacklog { micros },
            tpot_least,
            step_left,
            orders_received,
            windows_free: 0,
        }
    })
}

fn hashes() -> impl Strategy<Value = Vec<BlockHash>> {
    vec(any::<[u8; 16]>().prop_map(BlockHash), 0..4)
}

pub(super) fn report() -> impl Strategy<Value = Report> {
    let reason = prop_oneof![Just(FinishReason::Stop), Just(FinishReason::Length)];
    let decode = (span(), span()).prop_map(|(wait, first)| DecodeTiming { wait, first });
    prop_oneof![
        (handoff(), any::<u32>(), blocks(), state()).prop_map(
            |(handoff, present, blocks, state)| {
                Report::Reserved {
                    handoff,
                    present,
                    blocks,
                    state,
                    window: None,
                }
            }
        ),
        (handoff(), any::<u32>())
            .prop_map(|(handoff, present)| Report::Running { handoff, present }),
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
        (handoff(), failure())
            .prop_map(|(handoff, failure)| Report::MigrationAborted { handoff, failure }),
        handoff().prop_map(|handoff| Report::MemoryPressure { handoff }),
        role().prop_map(|role| Report::Serves { role }),
        Just(Report::Draining),
        gossip().prop_map(Report::Relayed),
        adapters().prop_map(Report::Adapters),
        (hashes(), hashes()).prop_map(|(stored, evicted)| Report::Prefix { stored, evicted }),
    ]
}

fn sampled() -> impl Strategy<Value = SampledToken> {
    let scores = (number(), number(), vec((any::<u32>(), number()), 0..4)).prop_map(
        |(normalizer, chosen, top)| TokenScores {
            normalizer,
            chosen,
            top,
        },
    );
    (any::<u32>(), option::of(scores)).prop_map(|(token, scores)| SampledToken { token, scores })
}

pub(super) fn emission() -> impl Strategy<Value = Emission> {
    let pooled = option::of(vec(-1e3f32..1e3, 0..3).prop_map(Arc::from));
    let facts = (any::<u32>(), vec(sampled(), 0..3), prefill_timing(), pooled).prop_map(
        |(cached_tokens, scores, timing, pooled)| PromptFacts {
            cached_tokens,
            scores,
            timing,
            pooled,
        },
    );
    (any::<u32>(), sampled(), option::of(facts)).prop_map(|(index, sampled, prompt)| Emission {
        index,
        sampled,
        prompt,
    })
}

fn task() -> impl Strategy<Value = ModelTask> {
    let prompts = vec((".{0,9}", ".{0,9}"), 0..3);
    let embed = (any::<bool>(), prompts, option::of(".{0,9}")).prop_map(
        |(normalize, prompts, default_prompt)| {
            ModelTask::Embed(EmbedTask {
                pooling: Pooling::Mean,
                normalize,
                prompts,
                default_prompt,
            })
        },
    );
    let rerank = (".{0,9}", ".{0,9}")
        .prop_map(|(negative, positive)| ModelTask::Rerank(RerankTask { negative, positive }));
    prop_oneof![Just(ModelTask::Generate), embed, rerank]
}

pub(super) fn registration() -> impl Strategy<Value = Registration> {
    let states = option::of((1..=1_u32 << 16, 1..=1_u32 << 16));
    let states =
        states.prop_map(|drawn| drawn.map(|(bytes, count)| StateCapacity { bytes, count }));
    let capacity = (vec(1..=1_u32 << 16, 6), states).prop_map(|(drawn, states)| Capacity {
        block_tokens: drawn[0],
        block_bytes: drawn[1],
        blocks_count: drawn[2],
        slots_count: drawn[3],
        step_tokens_max: drawn[4],
        context_tokens_max: drawn[5],
        states,
        windows: None,
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
        (option::of(any::<u32>()), task()),
    )
        .prop_map(
            |(required, optional, chat_templates_named, (context_tokens_max, task))| {
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
                    task,
                })
            },
        );
    let silence = (100_000_000..=u64::MAX).prop_map(Duration::from_nanos);
    let name = "[-_.:@a-zA-Z0-9äß]{1,128}";
    (worker(), name, description, ".{0,9}", files, silence).prop_map(
        |(worker, name, description, data_address, files, silence)| Registration {
            worker,
            name,
            description,
            data_address,
            files,
            silence,
        },
    )
}

pub(super) fn link_state() -> impl Strategy<Value = LinkState> {
    (worker(), ".{0,9}", any::<u64>(), span()).prop_map(
        |(peer, transport, bytes_per_second, latency)| LinkState {
            peer,
            transport,
            bytes_per_second,
            latency,
        },
    )
}

/// The id and the trace of an order's request.
pub(super) fn context() -> impl Strategy<Value = Option<Arc<RequestContext>>> {
    let trace = (1..=u128::MAX, 1..=u64::MAX, 0..=1_u8);
    let trace = trace.prop_map(|(trace, span, flags)| TraceParent { trace, span, flags });
    let context = (".{0,9}", option::of(trace)).prop_map(|(request_id, trace)| {
        Arc::new(RequestContext {
            request_id: request_id.into(),
            trace,
        })
    });
    option::of(context)
}

pub(super) fn from_worker() -> impl Strategy<Value = FromWorker> {
    prop_oneof![
        report().prop_map(FromWorker::Report),
        vec((handoff(), emission()), 0..3).prop_map(FromWorker::Emissions),
        grant().prop_map(|(handoff, grant)| FromWorker::Grant { handoff, grant }),
        link_state().prop_map(FromWorker::Link),
        (any::<u64>(), option::of(".{0,20}")).prop_map(|(request, reason)| {
            let outcome = reason.map_or(Ok(()), Err);
            FromWorker::AdapterAnswer { request, outcome }
        }),
    ]
}

pub(super) fn to_worker() -> impl Strategy<Value = ToWorker> {
    let address = || "[a-z0-9:.]{0,20}";
    prop_oneof![
        (order(), context()).prop_map(|(order, context)| ToWorker::Order { order, context }),
        (worker(), address()).prop_map(|(worker, data_address)| ToWorker::Peer {
            worker,
            data_address,
        }),
        worker().prop_map(|worker| ToWorker::PeerGone { worker }),
        address().prop_map(|data_address| ToWorker::NameTaken { data_address }),
        grant().prop_map(|(handoff, grant)| ToWorker::Grant { handoff, grant }),
        (any::<u64>(), adapter_change(), adapter_command()).prop_map(
            |(request, change, command)| ToWorker::Adapter {
                request,
                change,
                command,
            }
        ),
    ]
}

fn grant() -> impl Strategy<Value = (HandoffId, WriteGrant)> {
    (handoff(), any::<[u8; 32]>().prop_map(WriteGrant))
}

// Boxed: the strategies together would not fit a test's stack.
pub(super) fn upward() -> impl Strategy<Value = proto::Upward> {
    use proto::upward::Kind;
    let of_kind = |kind| proto::Upward { kind: Some(kind) };
    let kinds: [BoxedStrategy<proto::Upward>; 4] = [
        registration()
            .prop_map(move |sent| of_kind(Kind::Hello(proto::Hello::from(&sent))))
            .boxed(),
        any::<u64>()
            .prop_map(|received| proto::Upward::beat(proto::Beat { received }))
            .boxed(),
        from_worker().prop_map(proto::Upward::of).boxed(),
        vec(from_worker().prop_map(proto::Upward::of), 0..3)
            .prop_map(proto::Upward::batch)
            .boxed(),
    ];
    Union::new(kinds)
}

pub(super) fn downward() -> impl Strategy<Value = proto::Downward> {
    use proto::downward::Kind;
    let of_kind = |kind| proto::Downward { kind: Some(kind) };
    let greet = |(protocol, router, silence_nanos)| proto::Greeting {
        protocol,
        router,
        silence_nanos,
    };
    let kinds: [BoxedStrategy<proto::Downward>; 6] = [
        any::<(u32, u64, u64)>()
            .prop_map(move |drawn| of_kind(Kind::Greeting(greet(drawn))))
            .boxed(),
        Just(of_kind(Kind::Welcome(proto::Welcome {}))).boxed(),
        ".{0,40}"
            .prop_map(move |reason| of_kind(Kind::Rejection(proto::Rejection { reason })))
            .boxed(),
        any::<u64>()
            .prop_map(|received| proto::Downward::beat(proto::Beat { received }))
            .boxed(),
        to_worker().prop_map(proto::Downward::of).boxed(),
        vec(to_worker().prop_map(proto::Downward::of), 0..3)
            .prop_map(proto::Downward::batch)
            .boxed(),
    ];
    Union::new(kinds)
}
