//! One line for each fact and each output, for goldens.
//!
//! Legend: `#1.0` flight 1, attempt 0; `b3g1` block 3 of generation 1; `[0+8]` position and length.

use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, HandoffId, KvUnit, Order, Report, SegmentState, StepPlan,
    StepProgress, StepResult, WindowTable, WorkerRef,
};
use cleave_kv::{BlockPart, Packet};
use cleave_sched::{
    BlockExport, PayloadCondition, SnapshotPiece, WorkerInput, WorkerNote, WorkerOutput,
};
use std::fmt::Write;

fn id(handoff: HandoffId) -> String {
    format!("#{}.{}", handoff.flight.0 & 0xffff, handoff.attempt)
}

fn ids(handoffs: &[HandoffId]) -> String {
    let ids: Vec<_> = handoffs.iter().map(|handoff| id(*handoff)).collect();
    ids.join(" ")
}

fn block(block: BlockRef) -> String {
    format!("{}{}", block.block, block.generation)
}

fn blocks(list: &[BlockRef]) -> String {
    let list: Vec<_> = list.iter().map(|of| block(*of)).collect();
    list.join(" ")
}

/// The slot of a state, if there is one.
fn state(slot: Option<BlockRef>) -> String {
    slot.map_or(String::new(), |slot| format!(" state {}", block(slot)))
}

fn indices(list: &[BlockIndex]) -> String {
    let list: Vec<_> = list.iter().map(BlockIndex::to_string).collect();
    list.join(" ")
}

fn part(part: BlockPart) -> String {
    format!("{}[{}+{}]", part.unit(), part.offset, part.len)
}

fn worker(worker: WorkerRef) -> String {
    worker.to_string()
}

pub fn packet(packet: &Packet) -> String {
    match packet {
        Packet::Frame {
            handoff,
            block: to,
            part: of,
            ..
        } => format!("frame {} {} to {}", id(*handoff), part(*of), block(*to)),
        Packet::Seal(seal) => format!(
            "seal {} blocks {} output {:?}",
            id(seal.handoff),
            seal.blocks_count,
            seal.output
        ),
        Packet::Landed { handoff } => format!("landed {}", id(*handoff)),
        Packet::Abandoned { handoff, cause } => format!("abandoned {} {cause:?}", id(*handoff)),
        Packet::Stop { handoff } => format!("stop {}", id(*handoff)),
        Packet::Stopped { handoff } => format!("stopped {}", id(*handoff)),
    }
}

fn order(order: &Order) -> String {
    match order {
        Order::Reserve(reserve) => format!(
            "reserve {} from {} prompt {} output {} of {}",
            id(reserve.handoff),
            worker(reserve.sender),
            reserve.request.prompt.len(),
            reserve.request.generated.len(),
            reserve.request.stop.max_tokens
        ),
        Order::Run(run) => format!(
            "run {} prompt {} output {} of {}",
            id(run.handoff),
            run.request.prompt.len(),
            run.request.generated.len(),
            run.request.stop.max_tokens
        ),
        Order::Prefill(prefill) => format!(
            "prefill {} to {} present {} [{}]{}",
            id(prefill.handoff),
            worker(prefill.target.worker),
            prefill.target.present,
            blocks(&prefill.target.blocks),
            state(prefill.target.state)
        ),
        Order::Migrate(migrate) => format!(
            "migrate {} as {} to {} present {} [{}]{} told {}",
            id(migrate.of),
            id(migrate.handoff),
            worker(migrate.target.worker),
            migrate.target.present,
            blocks(&migrate.target.blocks),
            state(migrate.target.state),
            migrate.tokens
        ),
        Order::Drain => "drain".into(),
        Order::Serve { role } => format!("serve {role}"),
        Order::Relay(_) => "pass on".into(),
        Order::FetchAdapter { adapter } => format!("fetch {adapter}"),
        Order::Renew { handoffs } => format!("renew {}", ids(handoffs)),
        Order::Cancel { handoff } => format!("cancel {}", id(*handoff)),
    }
}

pub fn input(input: &WorkerInput) -> String {
    match input {
        WorkerInput::Ordered { order: of, .. } => order(of),
        WorkerInput::RouterJoined { .. } => "router joined".into(),
        WorkerInput::RouterLost { .. } => "router lost".into(),
        WorkerInput::Arrived {
            packet: of,
            condition,
            ..
        } => match condition {
            PayloadCondition::Intact => packet(of),
            PayloadCondition::Damaged => format!("DAMAGED {}", packet(of)),
        },
        WorkerInput::LinkLost { peer } => format!("link lost to {}", worker(*peer)),
        WorkerInput::Exported {
            handoff,
            plane,
            ordinal,
            outcome,
        } => {
            let (plane, ordinal) = (*plane, *ordinal);
            let unit = KvUnit { plane, ordinal };
            let outcome = format!("{outcome:?}");
            let outcome = outcome.split(' ').next().unwrap_or_default();
            format!("exported {} {unit} {outcome}", id(*handoff))
        }
        WorkerInput::Imported {
            handoff,
            part: of,
            outcome,
        } => format!("imported {} {} {outcome:?}", id(*handoff), part(*of)),
        WorkerInput::Stepped { result, .. } => stepped(result),
        WorkerInput::StepFailed { step, reason, .. } => format!("step {step} failed: {reason}"),
        WorkerInput::LinkMeasured { peer, .. } => format!("link to {} measured", worker(*peer)),
        WorkerInput::Woke => "woke".into(),
        WorkerInput::Fenced { peer } => format!("severed from {}", worker(*peer)),
        WorkerInput::SwappedOut {
            handoff, outcome, ..
        } => format!("swapped out {} {outcome:?}", id(*handoff)),
        WorkerInput::SwappedIn {
            handoff, outcome, ..
        } => format!("swapped in {} {outcome:?}", id(*handoff)),
        WorkerInput::FoundOnDisk { contents } => format!("found on disk {}", contents.len()),
        WorkerInput::Offloaded {
            content, outcome, ..
        } => format!("shelved {} {outcome:?}", short(*content)),
        WorkerInput::SpilledToDisk {
            content, outcome, ..
        } => format!("written on {} {outcome:?}", short(*content)),
        WorkerInput::Fetched {
            handoff,
            came: blocks_fetched,
            outcome,
            ..
        } => format!("fetched {} {blocks_fetched} {outcome:?}", id(*handoff)),
        WorkerInput::EngineLost { reason } => format!("engine lost: {reason}"),
        WorkerInput::Draining => "draining".into(),
    }
}

/// The first digits of a content's hash.
fn short(content: BlockHash) -> String {
    content.to_string().chars().take(6).collect()
}

fn stepped(result: &StepResult) -> String {
    let mut line = format!("stepped {}", result.step);
    for (slot, sampled) in &result.sampled {
        let _ = write!(line, " {slot}={}", sampled.token);
    }
    for (slot, scores) in &result.prompt_scores {
        let _ = write!(line, " {slot} scored {}", scores.len());
    }
    line
}

fn step(plan: &StepPlan) -> String {
    let mut line = format!("STEP {}", plan.step);
    for segment in &plan.segments {
        let open = plan.opens.iter().any(|open| open.slot == segment.slot);
        let _ = write!(
            line,
            " {}{}[{}+{}]{:?}",
            if open { "new " } else { "" },
            segment.slot,
            segment.position,
            segment.len,
            segment.logits
        );
        if let Some(SegmentState {
            slot,
            restore,
            snapshot,
        }) = segment.state
        {
            let _ = write!(line, " state {slot}");
            restore.map(|from| write!(line, " from {from}"));
            snapshot.map(|to| write!(line, " copy {to}"));
        }
        if !segment.drafts.is_empty() {
            let _ = write!(line, " guess {:?}", segment.drafts);
        }
    }
    line
}

pub fn output(output: &WorkerOutput) -> String {
    match output {
        WorkerOutput::Step(plan) => step(plan),
        WorkerOutput::Report { report: of, .. } => format!("tell {}", report(of)),
        WorkerOutput::Emit { handoff, emission } => {
            let mut line = format!(
                "EMIT {} {} {}",
                id(*handoff),
                emission.index,
                emission.sampled.token
            );
            if let Some(prompt) = &emission.prompt {
                let (cached, scores) = (prompt.cached_tokens, prompt.scores.len());
                let _ = write!(line, " cached {cached} scores {scores}");
                if let Some(pooled) = &prompt.pooled {
                    let _ = write!(line, " pooled {pooled:?}");
                }
            }
            line
        }
        WorkerOutput::Export(export) => {
            let BlockExport {
                handoff,
                from,
                block: to,
                ..
            } = export;
            let unit = export.unit();
            format!("export {} {unit} {from} to {}", id(*handoff), block(*to))
        }
        WorkerOutput::Send { packet: of, .. } => format!("send {}", packet(of)),
        WorkerOutput::Import {
            handoff,
            part: of,
            block: to,
        } => format!("import {} {} to {}", id(*handoff), part(*of), block(*to)),
        WorkerOutput::Discard { handoff, part: of } => {
            format!("discard {} {}", id(*handoff), part(*of))
        }
        WorkerOutput::SwapOut {
            handoff,
            blocks,
            state: slot,
            window: of,
        } => {
            let slot = slot.map_or(String::new(), |slot| format!(" state {slot}"));
            let (of, blocks) = (window(of.as_ref()), indices(blocks));
            format!("swap out {} [{blocks}]{slot}{of}", id(*handoff))
        }
        WorkerOutput::SwapIn {
            handoff,
            blocks,
            state: slot,
            window: of,
        } => {
            let slot = slot.map_or(String::new(), |slot| format!(" state {slot}"));
            let (of, blocks) = (window(of.as_ref()), indices(blocks));
            format!("swap in {} [{blocks}]{slot}{of}", id(*handoff))
        }
        WorkerOutput::SwapDrop { handoff } => format!("swap drop {}", id(*handoff)),
        WorkerOutput::Offload {
            content,
            plane: _,
            block,
            pieces,
        } => {
            let word = |piece: &SnapshotPiece| format!(" s{}", piece.ordinal);
            let pieces: String = pieces.iter().map(word).collect();
            format!("shelve {} {block}{pieces}", short(*content))
        }
        WorkerOutput::SpillToDisk { content } => format!("write on {}", short(*content)),
        WorkerOutput::Fetch {
            handoff,
            blocks,
            window: of,
            state,
        } => {
            let of = window(of.as_ref().map(|of| &of.table));
            let word = |(content, block): &(_, BlockIndex)| format!("{} {block}", short(*content));
            let words: Vec<_> = blocks.iter().map(word).collect();
            let state = state.as_ref().map_or(String::new(), |state| {
                format!(" state {} of {} pieces", state.slot, state.pieces.len())
            });
            format!("fetch {} [{}]{state}{of}", id(*handoff), words.join(", "))
        }
        WorkerOutput::FetchStop { handoff } => format!("fetch stop {}", id(*handoff)),
        WorkerOutput::TierDrop { content, place } => format!("drop {} {place:?}", short(*content)),
        WorkerOutput::Forget { handoff } => format!("forget {}", id(*handoff)),
        WorkerOutput::Drained => "drained".into(),
        WorkerOutput::Note(of) => note(of),
    }
}

fn window(of: Option<&WindowTable>) -> String {
    of.map_or(String::new(), |WindowTable { first, blocks }| {
        format!(" window {first}+[{}]", indices(blocks))
    })
}

fn report(report: &Report) -> String {
    match report {
        Report::Reserved {
            handoff,
            present,
            blocks: list,
            state: slot,
            window,
        } => {
            let window = window.as_ref().map_or(String::new(), |window| {
                format!(" window {}+[{}]", window.first, blocks(&window.blocks))
            });
            format!(
                "reserved {} present {present} [{}]{}{window}",
                id(*handoff),
                blocks(list),
                state(*slot)
            )
        }
        Report::Running { handoff, present } => {
            format!("running {} present {present}", id(*handoff))
        }
        Report::Refused { handoff, refusal } => format!("refused {} {refusal:?}", id(*handoff)),
        Report::Prices(_) => "prices".to_owned(),
        Report::Prefilled { handoff, .. } => format!("prefilled {}", id(*handoff)),
        Report::Landed { handoff } => format!("landed {}", id(*handoff)),
        Report::Finished {
            handoff,
            reason,
            output_tokens,
            ..
        } => format!("finished {} {reason:?} {output_tokens}", id(*handoff)),
        Report::LegFailed { handoff, failure } => {
            format!("leg failed {} {failure:?}", id(*handoff))
        }
        Report::Released { handoff } => format!("released {}", id(*handoff)),
        Report::Load(load) => format!(
            "load queue {} waiting {} running {} free {}{}",
            load.queue_tokens,
            load.sequences_waiting,
            load.sequences_running,
            load.blocks_free,
            match load.progress {
                StepProgress::Moving => "",
                StepProgress::Stuck => " STUCK",
            }
        ),
        Report::MigrationAborted { handoff, failure } => {
            format!("stayed {} {failure:?}", id(*handoff))
        }
        Report::MemoryPressure { handoff } => format!("crowded {}", id(*handoff)),
        Report::Serves { role } => format!("serves {role}"),
        Report::Relayed(gossip) => format!("passed on {}", gossip.number),
        Report::Adapters(report) => format!("serves {} adapters", report.offers.len()),
        Report::Draining => "draining".into(),
        Report::Prefix { stored, evicted } => {
            format!("prefix +{} -{}", stored.len(), evicted.len())
        }
    }
}

/// Notes that add nothing to the reports are left out.
fn note(note: &WorkerNote) -> String {
    match note {
        WorkerNote::Preempted {
            handoff,
            recomputed_tokens,
        } => format!("note preempted {} {recomputed_tokens}", id(*handoff)),
        WorkerNote::Joined { handoff } => format!("note joined {}", id(*handoff)),
        WorkerNote::Repeated { handoff } => format!("note repeated {}", id(*handoff)),
        WorkerNote::FrameDiscarded { handoff } => format!("note frame discarded {}", id(*handoff)),
        WorkerNote::HandoffFailed { handoff, failure } => {
            format!("note hand-off failed {} {failure:?}", id(*handoff))
        }
        WorkerNote::CancelFreed { took } => format!("note cancel freed after {took:?}"),
        WorkerNote::MigratedOut {
            handoff,
            bytes,
            blocks,
            took,
            still: paused_for,
        } => format!(
            "note moved out {} bytes {bytes} blocks {blocks} took {took:?} still {paused_for:?}",
            id(*handoff)
        ),
        WorkerNote::Drafted {
            drafted_tokens,
            accepted_tokens,
            drafting,
        } => format!("note guessed {drafted_tokens} true {accepted_tokens} {drafting:?}"),
        WorkerNote::Stuck { running } => format!("note stuck for {running:?}"),
        WorkerNote::Fetched { .. }
        | WorkerNote::Offloaded { .. }
        | WorkerNote::Tiers { .. }
        | WorkerNote::SwappedOut { .. }
        | WorkerNote::SwappedIn { .. }
        | WorkerNote::MigrationAborted { .. }
        | WorkerNote::PrefixLookedUp { .. }
        | WorkerNote::PrefillStarted { .. }
        | WorkerNote::Sealed { .. }
        | WorkerNote::Landed { .. }
        | WorkerNote::Stepped { .. }
        | WorkerNote::Pool { .. } => String::new(),
    }
}
