//! What is kept of the prefix cache below the pool, in host memory and on disk.
//!
//! Owns: which cached blocks are copied out before they are evicted, which contents a place keeps, and
//! which sequences have contents brought back in place of computing them.
//! Never: waits for a copy when it needs a block: a content that was not copied out in time is lost. Never
//! fails a sequence: what cannot be brought back is computed.
//! Invariant: a block that is copied out is held by the pool under [`Tiers::leaving`] until that is
//! answered; a sequence with a [`Fetch`] is active and in no step, and what it has brought back stays kept
//! until that is answered.

use crate::deadline::Deadlines;
use crate::sequence::{Sequence, Stage};
use crate::{Brain, FetchOutcome, KeepOutcome, Note, Output};
use cleave_domain::{BlockHash, HandoffId, Time};
use cleave_kv::{Gives, Lent, Place, Tier};
use cleave_planner::Predict;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// Of the blocks that can be taken, those that are being copied out are one in so many at most: for so
/// long they cannot be.
const LEAVING_PARTS: u32 = 4;
/// And so many: as many as a step of a few hundred tokens takes.
const LEAVING_MAX: u32 = 64;
/// While steps run, what is free and what was copied out are to be one part in so many of the pool, and what
/// was promised: a sequence with both legs here takes all its blocks at once. While none does, copies are
/// free, and all of it is to be.
const WATER_PARTS: u32 = 2;
/// Of what may be kept, what is in the pool as well takes one part in so many at most: what is nowhere else
/// must not make room for it.
const AHEAD_PARTS: u32 = 2;
/// Blocks that are written to disk at a time: enough to keep one busy.
const WRITES_MAX: u32 = 4;
/// A disk that has written nothing for so long while it should does not keep up.
const WRITE_MAX: Duration = Duration::from_secs(1);
/// What is brought back may take as long as to compute it would, but no less than this: a disk that was
/// asleep.
const FETCH_LEAST: Duration = Duration::from_millis(250);
/// A price that was too high to be paid is believed less by one part in this many, each time that a
/// sequence or a block would have paid it: what was slow once may have become faster, and is tried again.
const DOUBT_PARTS: [u32; 2] = [16, 1024];

/// What a brain knows of the places below its pool.
#[derive(Clone, Debug)]
pub(crate) struct Tiers {
    book: Tier,
    /// Blocks that are being copied to host memory, by what they contain.
    leaving: BTreeMap<BlockHash, Lent>,
    /// Contents that are being written to disk.
    writing: u32,
    /// When one of them began or was over.
    wrote: Time,
    /// To bring a block back from host memory, and from disk; `None` before the first time.
    from_host: Option<Duration>,
    from_disk: Option<Duration>,
    /// When what is brought back takes too long.
    patience: Deadlines,
    told: (u32, u32),
}

/// What is being brought back for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fetch {
    /// Blocks, from the first that is not published on.
    pub(crate) blocks: u32,
    /// Of those, on disk.
    on_disk: u32,
    /// It was told to stop.
    stopped: bool,
    /// The first step that was said since is in its deadline: no later one, or a disk that stands still never ended it.
    counts_step: bool,
}

/// What could be brought back, and what that is predicted to take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    /// Blocks that follow those in the pool.
    pub(crate) blocks: u32,
    on_disk: u32,
    /// Zero before anything was measured.
    pub(crate) takes: Duration,
    /// What to compute it takes; `None` before anything was measured.
    computing: Option<Duration>,
}

impl Kept {
    /// Before both were measured it does: or they never would be.
    fn pays(&self) -> bool {
        self.computing
            .is_none_or(|computing| self.takes <= computing)
    }

    /// What is worth bringing back of it.
    pub(crate) fn worth(self) -> Self {
        match self.pays() {
            true => self,
            false => Self::default(),
        }
    }
}

impl Tiers {
    pub(crate) fn new(host_blocks_max: u32, disk_blocks_max: u32) -> Self {
        Self {
            book: Tier::new(host_blocks_max, disk_blocks_max),
            leaving: BTreeMap::new(),
            writing: 0,
            wrote: Time::ZERO,
            from_host: None,
            from_disk: None,
            patience: Deadlines::default(),
            told: (0, 0),
        }
    }

    /// Blocks that are being copied out, each held once.
    pub(crate) fn leaving(&self) -> impl ExactSizeIterator<Item = Lent> + '_ {
        self.leaving.values().copied()
    }

    fn leaving_count(&self) -> u32 {
        u32::try_from(self.leaving.len()).expect("no more than there are blocks")
    }

    /// Fetches that end if nothing comes before.
    pub(crate) fn patience(&self) -> &Deadlines {
        &self.patience
    }

    /// To bring so many blocks back, if it was ever measured.
    fn price(&self, blocks: u32, on_disk: u32) -> Option<Duration> {
        let of = |each: Option<Duration>, count: u32| match count {
            0 => Some(Duration::ZERO),
            _ => Some(each?.saturating_mul(count)),
        };
        Some(of(self.from_host, blocks - on_disk)? + of(self.from_disk, on_disk)?)
    }

    /// So many blocks came back, of those that were asked for, and cost so much. What they waited for
    /// steps and for other fetches is no price of theirs: a busy engine would keep nothing any more.
    fn measure(&mut self, (came, fetch): (u32, Fetch), worked: Duration) {
        if came == 0 && worked.is_zero() {
            return;
        }
        // What came to nothing took as long as one block at least.
        let (from_host, count) = (fetch.blocks - fetch.on_disk, came.max(1));
        if fetch.on_disk == 0 {
            return mean(&mut self.from_host, worked / count);
        }
        let host = self.from_host.unwrap_or_default() * from_host.min(came);
        let count = came.saturating_sub(from_host).max(1);
        mean(&mut self.from_disk, worked.saturating_sub(host) / count);
    }

    /// To bring blocks back was dearer than to compute them.
    fn doubt(&mut self, parts: u32) {
        for price in [&mut self.from_host, &mut self.from_disk] {
            *price = price.map(|price| price - price / parts);
        }
    }

    /// What decides the future; `older` says how many cached blocks are older than one touched then.
    pub(crate) fn fingerprint(
        &self,
        now: Time,
        older: impl Fn(u64) -> usize,
        hasher: &mut impl Hasher,
    ) {
        self.book.fingerprint(hasher);
        for (content, lent) in &self.leaving {
            (content, lent.held, older(lent.touched)).hash(hasher);
        }
        let wrote = (self.writing > 0).then(|| now.since(self.wrote).min(WRITE_MAX));
        (self.writing, wrote, self.from_host, self.from_disk).hash(hasher);
    }
}

/// A running mean over about four measures: fetches are few.
fn mean(mean: &mut Option<Duration>, each: Duration) {
    *mean = Some(mean.map_or(each, |mean| (mean * 3 + each) / 4));
}

impl Brain {
    // === out ===

    /// Has the blocks that are evicted next copied to host memory, so many at a time.
    pub(crate) fn shelve(&mut self) {
        if self.limits.host_blocks == 0 || self.draining() {
            return;
        }
        let water = self.limits.capacity.blocks_count / WATER_PARTS + self.pool.blocks_promised();
        let depth = match self.under_way.is_empty() {
            true => u32::MAX,
            false => water.saturating_sub(self.pool.blocks_free()),
        };
        let kept_max = self
            .limits
            .host_blocks
            .saturating_add(self.limits.disk_blocks);
        let depth = depth.min(kept_max.div_ceil(AHEAD_PARTS));
        let leaving = self.tiers.leaving_count();
        let most = (self.pool.blocks_available() + leaving) / LEAVING_PARTS;
        let room = most.min(LEAVING_MAX).saturating_sub(leaving);
        if room == 0 {
            return;
        }
        let next = self.pool.next_evicted(depth);
        let mut unknown = 0;
        let next: Vec<_> = next
            .map(|(touched, content)| (touched, content, self.tiers.book.knows(content)))
            .take_while(|(.., known)| {
                unknown += u32::from(!known);
                unknown <= room
            })
            .collect();
        for (touched, content, known) in next {
            // Where nothing more can be kept it is looked at again.
            if !known && self.worth_keeping() && !self.shelve_one(content) {
                return;
            }
            self.pool.looked_at(touched);
        }
    }

    /// False if no more can be kept.
    fn shelve_one(&mut self, content: BlockHash) -> bool {
        let writes = self.tiers.writing > 0 && self.now < self.tiers.wrote + WRITE_MAX;
        let gives = if writes { Gives::Written } else { Gives::Any };
        let Ok(dropped) = self.tiers.book.begin(content, Place::Host, gives) else {
            return false;
        };
        if let Some(content) = dropped {
            let place = Place::Host;
            self.say(Output::TierDrop { content, place });
        }
        let Some(lent) = self.pool.lend(content) else {
            self.tiers.book.failed(content, Place::Host);
            return false;
        };
        self.tiers.leaving.insert(content, lent);
        let block = lent.held.block;
        self.say(Output::Shelve { content, block });
        true
    }

    /// Whether a block comes back from host memory for less than it costs to compute.
    fn worth_keeping(&mut self) -> bool {
        let (Some(back), Some(token)) = (self.tiers.from_host, self.swap_prices.token()) else {
            return true;
        };
        let worth = back <= token * self.limits.capacity.block_tokens;
        if !worth {
            self.tiers.doubt(DOUBT_PARTS[1]);
        }
        worth
    }

    pub(crate) fn shelved(&mut self, content: BlockHash, outcome: KeepOutcome, took: Duration) {
        let Some(lent) = self.tiers.leaving.remove(&content) else {
            return;
        };
        self.pool.take_back(lent);
        match outcome {
            KeepOutcome::Copied => self.tiers.book.kept(content, Place::Host),
            KeepOutcome::Broken => self.tiers.book.failed(content, Place::Host),
        }
        let place = Place::Host;
        self.note(Note::Kept {
            place,
            outcome,
            took,
        });
        self.write_on();
    }

    /// Has what host memory keeps written to disk, the oldest first.
    fn write_on(&mut self) {
        while self.tiers.writing < WRITES_MAX
            && let Some(content) = self.tiers.book.next_unwritten()
        {
            let place = Place::Disk;
            let Ok(dropped) = self.tiers.book.begin(content, place, Gives::Any) else {
                continue;
            };
            if let Some(content) = dropped {
                self.say(Output::TierDrop { content, place });
            }
            if self.tiers.writing == 0 {
                self.tiers.wrote = self.now;
            }
            self.tiers.writing += 1;
            self.say(Output::WriteOn { content });
        }
    }

    pub(crate) fn written_on(&mut self, content: BlockHash, outcome: KeepOutcome, took: Duration) {
        self.tiers.writing -= 1;
        self.tiers.wrote = self.now;
        match outcome {
            KeepOutcome::Copied => self.tiers.book.kept(content, Place::Disk),
            KeepOutcome::Broken => self.tiers.book.failed(content, Place::Disk),
        }
        let place = Place::Disk;
        self.note(Note::Kept {
            place,
            outcome,
            took,
        });
        self.write_on();
    }

    /// An earlier life left these on disk; those for which there is no room are dropped.
    pub(crate) fn found_on_disk(&mut self, contents: Vec<BlockHash>) {
        for content in contents {
            if !self.tiers.book.found_on_disk(content) {
                let place = Place::Disk;
                self.say(Output::TierDrop { content, place });
            }
        }
    }

    // === in ===

    /// What could be brought back of a sequence's beginning after its first `known` blocks.
    pub(crate) fn kept_below(&self, sequence: &mut Sequence, known: u32) -> Kept {
        let size = self.limits.capacity.block_tokens;
        let mut kept = Kept::default();
        if self.limits.host_blocks == 0 || !self.limits.prefix_cache {
            return kept;
        }
        for hash in sequence.reusable(size).iter().skip(known as usize) {
            let place = self.tiers.book.place(*hash);
            let Some(place) = place.filter(|_| !self.pool.contains(*hash)) else {
                break;
            };
            kept.blocks += 1;
            kept.on_disk += u32::from(place == Place::Disk);
        }
        kept.takes = self
            .tiers
            .price(kept.blocks, kept.on_disk)
            .unwrap_or_default();
        kept.computing = self.compute_price(known * size, kept.blocks * size);
        kept
    }

    /// To compute so many tokens after the first `known`; `None` before anything was measured.
    fn compute_price(&self, known: u32, tokens: u32) -> Option<Duration> {
        match self.learner.knows() {
            true => Some(self.learner.prices().prefill(known, tokens, self.quantum)),
            false => Some(self.swap_prices.token()?.saturating_mul(tokens)),
        }
    }

    /// Has what is kept of a sequence's beginning brought back, if that is cheaper than to compute it.
    /// Everybody else goes on meanwhile. Asked for when it becomes active, and again whenever it has new blocks
    /// for those that it lost.
    pub(crate) fn fetch(&mut self, handoff: HandoffId) {
        let Some(mut sequence) = self.sequences.remove(&handoff) else {
            return;
        };
        let size = self.limits.capacity.block_tokens;
        let known = sequence.published;
        let kept = match sequence.computed == known * size {
            true => self.kept_below(&mut sequence, known),
            false => Kept::default(),
        };
        if !kept.pays() {
            self.tiers.doubt(DOUBT_PARTS[0]);
        } else if kept.blocks > 0 {
            let patience = kept.computing.unwrap_or(self.limits.step_max);
            let patience = patience.max(FETCH_LEAST);
            let until = self.now + self.step_left() + patience;
            self.tiers.patience.set(handoff, until);
            self.begin_fetch(&mut sequence, kept);
        }
        self.sequences.insert(handoff, sequence);
    }

    /// Nothing of a fetch may come before the step that was said first after it began is over.
    pub(crate) fn fetches_wait_for_step(&mut self) {
        let step = self
            .under_way
            .back()
            .map_or(Duration::ZERO, |step| step.predicted);
        let fetching: Vec<_> = self.tiers.patience.iter().map(|(of, _)| of).collect();
        for handoff in fetching {
            let sequence = self.sequences.get_mut(&handoff);
            let fetch = sequence.and_then(|sequence| sequence.fetch.as_mut());
            if fetch.is_some_and(|fetch| !std::mem::replace(&mut fetch.counts_step, true)) {
                self.tiers.patience.postpone(handoff, step);
            }
        }
    }

    fn begin_fetch(&mut self, sequence: &mut Sequence, kept: Kept) {
        let (from, to) = (sequence.published, sequence.published + kept.blocks);
        while sequence.table.len() < to as usize {
            let block = self.pool.take_promised(&mut sequence.promise);
            sequence
                .table
                .push(block.expect("what is taken on has its blocks"));
        }
        let range = from as usize..to as usize;
        let hashes = sequence.hashes[range.clone()].iter().copied();
        let table = sequence.table[range].iter().map(|held| held.block);
        let blocks: Vec<_> = hashes.zip(table).collect();
        for (content, _) in &blocks {
            self.tiers.book.read(*content);
        }
        sequence.fetch = Some(Fetch {
            blocks: kept.blocks,
            on_disk: kept.on_disk,
            stopped: false,
            counts_step: false,
        });
        let handoff = sequence.rank.handoff;
        self.say(Output::Fetch { handoff, blocks });
    }

    /// What is not here yet is not waited for any more.
    pub(crate) fn stop_fetch(&mut self, handoff: HandoffId) {
        self.tiers.patience.end(handoff);
        let sequence = self.sequences.get_mut(&handoff);
        let Some(fetch) = sequence.and_then(|s| s.fetch.as_mut()) else {
            return;
        };
        if !std::mem::replace(&mut fetch.stopped, true) {
            self.say(Output::FetchStop { handoff });
        }
    }

    /// Fetches that take too long.
    pub(crate) fn lose_patience(&mut self) {
        while let Some(handoff) = self.tiers.patience.passed(self.now) {
            self.stop_fetch(handoff);
        }
    }

    /// Its first `came` blocks are in the pool; the rest is computed.
    pub(crate) fn fetched(
        &mut self,
        handoff: HandoffId,
        (came, outcome): (u32, FetchOutcome),
        (took, worked): (Duration, Duration),
    ) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let Some(fetch) = sequence.fetch.take() else {
            return;
        };
        let came = came.min(fetch.blocks);
        let from = sequence.published as usize;
        let asked = sequence.hashes[from..from + fetch.blocks as usize].to_vec();
        let closing = sequence.closing();
        if !closing {
            sequence.computed += came * self.limits.capacity.block_tokens;
        }
        self.tiers.patience.end(handoff);
        self.forget_spoiled(asked.get(came as usize), outcome);
        for content in asked {
            self.tiers.book.read_over(content);
        }
        self.note(Note::Fetched {
            handoff,
            asked: fetch.blocks,
            came,
            outcome,
            took,
        });
        if closing {
            return self.release_if_settled(handoff);
        }
        self.tiers.measure((came, fetch), worked);
        self.publish(handoff);
    }

    /// The content that stopped a fetch is not tried again, if it was the content's fault.
    fn forget_spoiled(&mut self, stopped_at: Option<&BlockHash>, outcome: FetchOutcome) {
        let Some(content) = stopped_at.copied().filter(|_| outcome.is_contents_fault()) else {
            return;
        };
        for place in self.tiers.book.forget(content) {
            self.say(Output::TierDrop { content, place });
        }
    }

    // === what routers and people are told ===

    /// What can be reused at all, in the pool or below it, since that was said last: what was gained,
    /// and what was lost.
    pub(crate) fn cache_changes(&mut self) -> (Vec<BlockHash>, Vec<BlockHash>) {
        let cleave_kv::Changes {
            mut stored,
            mut evicted,
        } = self.pool.changes();
        let (gained, lost) = self.tiers.book.changes();
        evicted.retain(|hash| self.tiers.book.place(*hash).is_none());
        let elsewhere = |hash: &BlockHash| !self.pool.contains(*hash);
        evicted.extend(lost.into_iter().filter(elsewhere));
        stored.extend(gained.into_iter().filter(elsewhere));
        (stored, evicted)
    }

    /// Everything that can be reused.
    pub(crate) fn cache_contents(&self) -> Vec<BlockHash> {
        let below = self.tiers.book.contents();
        let below = below.filter(|hash| !self.pool.contains(*hash));
        self.pool.contents().chain(below).collect()
    }

    pub(crate) fn note_tiers(&mut self) {
        let blocks = |place| self.tiers.book.blocks_in(place);
        let told = (blocks(Place::Host), blocks(Place::Disk));
        if std::mem::replace(&mut self.tiers.told, told) != told {
            let (host_blocks, disk_blocks) = told;
            self.note(Note::Tiers {
                host_blocks,
                disk_blocks,
            });
        }
    }

    /// Blocks that nobody else holds, and that will be cached once they have been copied out.
    pub(crate) fn blocks_lent(&self) -> u64 {
        let alone = |lent: &Lent| self.pool.has_one_holder(lent.held);
        self.tiers.leaving().filter(alone).count() as u64
    }

    /// Asserts this module's invariant.
    pub(crate) fn check_tiers(&self) {
        let fetches = self.sequences.values().filter_map(|s| s.fetch);
        let readers = fetches.map(|fetch| u64::from(fetch.blocks)).sum();
        self.tiers.book.check(readers);
        let waits = |s: &Sequence| s.fetch.is_some_and(|fetch| !fetch.stopped);
        let waiting = self.sequences.iter().filter(|(_, s)| waits(s));
        self.tiers
            .patience
            .check(waiting.map(|(handoff, _)| *handoff));
        for sequence in self.sequences.values() {
            let Some(fetch) = sequence.fetch else {
                continue;
            };
            let stands = matches!(sequence.stage, Stage::Active | Stage::Closing { .. })
                && sequence.slot.is_none()
                && !sequence.stepping()
                && sequence.swap.is_none();
            assert!(stands, "fetched for, and not at rest: {sequence:?}");
            let covered = sequence.table.len() >= (sequence.published + fetch.blocks) as usize;
            assert!(covered, "fetched to nowhere: {sequence:?}");
        }
    }
}
