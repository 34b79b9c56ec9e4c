//! The workers as an operator sees them.
//!
//! Owns: one view per connected worker, kept current by the driver from the reports it gets, and
//! read by the HTTP server. Never decides anything: the brain judges workers from the same reports.
//! Invariant: a view exists exactly as long as its worker is connected, and shows links to
//! connected workers only. A worker that was lost is remembered by name, for a time.

use crate::adapters::AdapterDirectory;
use crate::dashboard::at_ms;
use cleave_api::{
    CommandError, LinkRow, LostWorker, WorkerCommand, WorkerRow, WorkerState, WorkerView,
};
use cleave_domain::{Capacity, Report, Role, StepProgress, WorkerId, WorkerRef};
use cleave_fleet::views::{self, CommandNovelty, PendingCommands};
use cleave_fleet::{LinkState, Registration, WorkerActivity};
use cleave_router::RouterNote;
use cleave_telemetry::{NoteContext, RouterObserver};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;

/// Links of one worker to others that are not connected: after a router's restart workers join one
/// by one, and report earlier measurements.
const LINKS_AHEAD_MAX: usize = 1024;

/// The longest name of an adapter, that of a model.
const ADAPTER_NAME_BYTES_MAX: usize = 256;
/// The longest folder of an adapter; workers end the connection of a router that sends more.
const ADAPTER_FOLDER_BYTES_MAX: usize = 4096;

/// Lost workers are shown for this time, or until one of their name joins.
const LOST_SHOWN: Duration = Duration::from_secs(15 * 60);

/// Lost workers that are shown at most, the latest of them.
const LOST_MAX: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct WorkerRoster {
    workers: Mutex<BTreeMap<WorkerId, RosterEntry>>,
    /// Lost workers with the times of their losses, in the order of these.
    lost: Mutex<Vec<(Instant, LostWorker)>>,
    /// See [`WorkerRoster::sequence_tokens_max`]; by model, none before its first worker.
    sequence_tokens_max: Mutex<BTreeMap<String, u32>>,
    adapters: AdapterDirectory,
}

#[derive(Debug)]
struct RosterEntry {
    view: WorkerView,
    capacity: Capacity,
    draining: bool,
    in_process: bool,
    commands: PendingCommands,
    links: BTreeMap<WorkerId, LinkState>,
    /// Sums of the links, from the first request until a link changes: a large fleet has a million
    /// links.
    link_sums: Option<Vec<LinkRow>>,
    counts: WorkerCounts,
    warned_of_prefixes: bool,
    activity: Arc<WorkerActivity>,
    /// The time and the token count of the last request.
    rate_sampled: Option<(Instant, u64)>,
}

/// Counts of the router's actions on a worker since it joined.
#[derive(Debug, Default)]
struct WorkerCounts {
    prefills: u64,
    decodes: u64,
    moves_in: u64,
    moves_out: u64,
    passed_over: u64,
}

impl WorkerRoster {
    pub(crate) fn join(&self, registration: &Registration, activity: Arc<WorkerActivity>) {
        let entry = RosterEntry {
            view: views::initial_view(registration),
            capacity: registration.description.capacity,
            draining: false,
            in_process: registration.data_address.is_empty(),
            commands: PendingCommands::default(),
            links: BTreeMap::new(),
            link_sums: None,
            counts: WorkerCounts::default(),
            warned_of_prefixes: false,
            activity,
            rate_sampled: None,
        };
        let is_back = |(_, lost): &(Instant, LostWorker)| lost.name == registration.name;
        self.lost.lock().retain(|lost| !is_back(lost));
        let mut workers = self.lock();
        workers.insert(registration.worker.worker, entry);
        self.update_sequence_tokens_max(&workers);
    }

    /// Removes a worker; gives its last view, if it was there.
    pub(crate) fn leave(&self, worker: WorkerRef) -> Option<WorkerView> {
        let mut workers = self.lock();
        let left = workers.remove(&worker.worker);
        let left = left.map(|entry| entry.view(&workers));
        for entry in workers.values_mut() {
            if entry.links.remove(&worker.worker).is_some() {
                entry.link_sums = None;
            }
        }
        self.update_sequence_tokens_max(&workers);
        self.adapters.leave(worker.worker);
        left
    }

    /// Whether a connected worker drains.
    pub(crate) fn is_draining(&self, worker: WorkerRef) -> bool {
        let workers = self.lock();
        let entry = workers.get(&worker.worker);
        entry.is_some_and(|entry| entry.draining)
    }

    /// Remembers a worker that was connected and was not asked to leave, by its last view.
    pub(crate) fn remember_lost(&self, view: WorkerView) {
        let lost = LostWorker {
            name: view.name,
            model: view.model,
            role: view.role,
            device: view.device,
            at_ms: at_ms(),
        };
        let mut all = self.lost.lock();
        all.push((Instant::now(), lost));
        let excess = all.len().saturating_sub(LOST_MAX);
        all.drain(..excess);
    }

    /// The lost workers that are shown, by name.
    pub(crate) fn lost(&self) -> Vec<LostWorker> {
        let mut all = self.lost.lock();
        all.retain(|(since, _)| since.elapsed() < LOST_SHOWN);
        let mut lost: Vec<_> = all.iter().map(|(_, lost)| lost.clone()).collect();
        lost.sort_by(|a, b| a.name.cmp(&b.name));
        lost
    }

    /// Refuses a name that an adapter cannot have.
    ///
    /// # Errors
    /// The reason, in words.
    pub(crate) fn check_adapter_names(&self, name: &str, folder: &str) -> Result<(), String> {
        let is_model = |entry: &RosterEntry| entry.view.model == name;
        if name.trim().is_empty() || name.len() > ADAPTER_NAME_BYTES_MAX {
            return Err(format!(
                "the name of an adapter has 1 to {ADAPTER_NAME_BYTES_MAX} bytes"
            ));
        }
        if folder.len() > ADAPTER_FOLDER_BYTES_MAX {
            return Err(format!(
                "the folder of an adapter has at most {ADAPTER_FOLDER_BYTES_MAX} bytes"
            ));
        }
        if self.lock().values().any(is_model) {
            return Err(format!("a model is served under the name {name}"));
        }
        Ok(())
    }

    /// The only model of the connected workers.
    ///
    /// # Errors
    /// If there are none or several, in words.
    pub(crate) fn only_model(&self) -> Result<String, String> {
        let workers = self.lock();
        let models: BTreeSet<&str> = workers.values().map(|entry| &*entry.view.model).collect();
        match models.into_iter().collect::<Vec<_>>()[..] {
            [only] => Ok(only.to_owned()),
            [] => Err("no worker is connected".to_owned()),
            ref several => Err(format!(
                "several models are served; name one as base_model_name: {}",
                several.join(", ")
            )),
        }
    }

    /// The LoRA adapters that workers serve.
    pub(crate) fn adapters(&self) -> &AdapterDirectory {
        &self.adapters
    }

    /// Tokens of the longest sequence, prompt and output together, that a connected worker of the
    /// model can hold; while none is connected, that the last ones could. `None` before its first
    /// worker.
    pub(crate) fn sequence_tokens_max(&self, model: &str) -> Option<u32> {
        self.sequence_tokens_max.lock().get(model).copied()
    }

    /// A sequence grows where it decodes, so workers that only prefill count where no other is
    /// connected. Workers that drain take nothing new.
    fn update_sequence_tokens_max(&self, workers: &BTreeMap<WorkerId, RosterEntry>) {
        // Whether it decodes comes first, so that only where none does the others count.
        let mut longest: BTreeMap<&str, (bool, u32)> = BTreeMap::new();
        for entry in workers.values().filter(|entry| !entry.draining) {
            let own = (entry.view.role.decodes(), entry.tokens_max());
            let most = longest.entry(&entry.view.model).or_default();
            *most = own.max(*most);
        }
        let mut all = self.sequence_tokens_max.lock();
        for (model, (_, tokens)) in longest {
            all.insert(model.to_owned(), tokens);
        }
    }

    /// The name of a worker.
    pub(crate) fn name(&self, worker: &WorkerRef) -> String {
        let workers = self.lock();
        let entry = workers.get(&worker.worker);
        entry.map_or_else(|| worker.to_string(), |entry| entry.view.name.clone())
    }

    /// The name of a connected worker whose role is not this one.
    pub(crate) fn name_of_other_role(&self, worker: WorkerRef, role: Role) -> Option<String> {
        let workers = self.lock();
        let view = &workers.get(&worker.worker)?.view;
        (view.role != role).then(|| view.name.clone())
    }

    /// Updates a worker's view from its report.
    pub(crate) fn handle_report(&self, worker: WorkerRef, report: &Report) {
        let mut workers = self.lock();
        let Some(entry) = workers.get_mut(&worker.worker) else {
            return;
        };
        match report {
            Report::Load(load) => entry.view.load = *load,
            Report::Prices(prices) => {
                let has_prices = !prices.rows.is_empty();
                entry.view.price_error_permille = has_prices.then_some(prices.error_permille);
            }
            Report::Draining => {
                entry.draining = true;
                entry.commands.drain_began();
                self.update_sequence_tokens_max(&workers);
            }
            Report::Serves { role } => {
                entry.view.role = *role;
                entry.commands.role_changed(*role);
                self.update_sequence_tokens_max(&workers);
            }
            Report::Reserved { .. }
            | Report::Running { .. }
            | Report::Refused { .. }
            | Report::Prefilled { .. }
            | Report::Landed { .. }
            | Report::MigrationAborted { .. }
            | Report::MemoryPressure { .. }
            | Report::Finished { .. }
            | Report::LegFailed { .. }
            | Report::Released { .. }
            | Report::Prefix { .. }
            | Report::Adapters(_)
            | Report::Relayed(_) => {}
        }
    }

    /// A worker measured a link.
    pub(crate) fn link_measured(&self, worker: WorkerRef, link: LinkState) {
        let mut workers = self.lock();
        let peer = link.peer.worker;
        let here = workers.contains_key(&peer);
        let Some(entry) = workers.get_mut(&worker.worker) else {
            return;
        };
        if here || entry.links.len() < LINKS_AHEAD_MAX {
            entry.links.insert(peer, link);
            entry.link_sums = None;
        }
    }

    /// All of them, by name.
    pub(crate) fn views(&self) -> Vec<WorkerView> {
        let workers = self.lock();
        let mut views: Vec<WorkerView> = workers.values().map(|e| e.view(&workers)).collect();
        views.sort_by(|a, b| a.name.cmp(&b.name));
        views
    }

    /// All of them, by name, for the page; and the links between them.
    pub(crate) fn rows(&self) -> (Vec<WorkerRow>, Vec<LinkRow>) {
        let now = Instant::now();
        let mut workers = self.lock();
        let mut devices: BTreeMap<String, u32> = BTreeMap::new();
        let mut links: BTreeMap<String, LinkRow> = BTreeMap::new();
        for entry in workers.values_mut() {
            if let Some(device) = &entry.view.device {
                *devices.entry(device.clone()).or_default() += 1;
            }
            let sums = entry
                .link_sums
                .get_or_insert_with(|| views::link_sums(entry.links.values()));
            for sum in sums.iter() {
                views::add_links(&mut links, sum);
            }
        }
        let row = |entry: &mut RosterEntry| {
            let device = entry.view.device.as_ref();
            let there = device.and_then(|device| devices.get(device));
            entry.row(now, there.map_or(0, |there| there - 1))
        };
        let mut rows: Vec<WorkerRow> = workers.values_mut().map(row).collect();
        rows.sort_by(|a, b| a.name.cmp(&b.name));
        (rows, links.into_values().collect())
    }

    /// The worker's view once it has carried out the command, and whether the command must be sent.
    pub(crate) fn command(
        &self,
        name: &str,
        command: WorkerCommand,
    ) -> Result<(WorkerView, CommandNovelty), CommandError> {
        let mut workers = self.lock();
        let mut named = workers.values_mut().filter(|entry| entry.view.name == name);
        let entry = named.next().ok_or(CommandError::UnknownWorker)?;
        if entry.in_process && command == WorkerCommand::Drain {
            return Err(CommandError::SameProcess);
        }
        let novelty = entry.commands.accept(command)?;
        let id = entry.view.worker.worker;
        let view = workers[&id].view(&workers);
        Ok((views::view_after(view, command), novelty))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerId, RosterEntry>> {
        self.workers.lock()
    }
}

impl RouterObserver for WorkerRoster {
    /// Counts placements and migrations from the brain's notes.
    fn handle_note(&self, note: &RouterNote, _context: NoteContext<'_>) {
        let mut workers = self.lock();
        let mut at = |worker: &WorkerRef, count: fn(&mut WorkerCounts) -> &mut u64| {
            if let Some(entry) = workers.get_mut(&worker.worker) {
                *count(&mut entry.counts) += 1;
            }
        };
        match note {
            RouterNote::Placed {
                prefill, decode, ..
            } => {
                at(prefill, |counts| &mut counts.prefills);
                at(decode, |counts| &mut counts.decodes);
            }
            RouterNote::Moving { from, to, .. } => {
                at(from, |counts| &mut counts.moves_out);
                at(to, |counts| &mut counts.moves_in);
            }
            RouterNote::PassedOver { worker, .. } => at(worker, |counts| &mut counts.passed_over),
            RouterNote::PrefixDropped { worker, .. } => {
                if let Some(entry) = workers.get_mut(&worker.worker) {
                    entry.warn_of_dropped_prefixes();
                }
            }
            _ => {}
        }
    }
}

impl RosterEntry {
    /// Tokens of the longest sequence that the worker can hold: its pool, or the context.
    fn tokens_max(&self) -> u32 {
        let Capacity {
            blocks_count,
            block_tokens,
            context_tokens_max,
            ..
        } = self.capacity;
        let pool_tokens = blocks_count.saturating_mul(block_tokens);
        pool_tokens.min(context_tokens_max)
    }

    /// Warns the operator once for each incarnation of a worker; the metric counts all.
    fn warn_of_dropped_prefixes(&mut self) {
        if !std::mem::replace(&mut self.warned_of_prefixes, true) {
            warn!(
                name = self.view.name,
                "a worker reports more cached prefixes than its blocks and offload tiers can hold; some are \
                 dropped, and requests may miss its cache"
            );
        }
    }

    fn state(&self) -> WorkerState {
        match (self.draining, self.view.load.progress) {
            (true, _) => WorkerState::Draining,
            (false, StepProgress::Stuck) => WorkerState::Stuck,
            (false, StepProgress::Moving) => WorkerState::Ready,
        }
    }

    /// The worker's row on the dashboard; `sharing` is how many others use the same device.
    fn row(&mut self, now: Instant, sharing: u32) -> WorkerRow {
        let tokens = self.activity.tokens_count();
        let looked = self.rate_sampled.replace((now, tokens));
        let rate = looked.and_then(|(at, before)| {
            let spent = now.saturating_duration_since(at).as_secs_f64();
            (spent > 0.0).then(|| (tokens - before) as f64 / spent)
        });
        let WorkerView {
            name,
            model,
            role,
            device,
            load,
            blocks_count,
            ..
        } = &self.view;
        WorkerRow {
            name: name.clone(),
            model: model.clone(),
            role: *role,
            state: self.state(),
            device: device.clone(),
            sharing,
            running: load.sequences_running,
            waiting: load.sequences_waiting,
            queue_tokens: load.queue_tokens,
            backlog: load.backlog.work_ahead(i32::MAX, None),
            blocks_held: blocks_count.saturating_sub(load.blocks_free),
            blocks_count: *blocks_count,
            last_step: self.activity.step_time(),
            since_report: self.activity.silence(),
            tokens_per_second: rate,
            placed: self.counts.prefills + self.counts.decodes,
        }
    }

    fn view(&self, workers: &BTreeMap<WorkerId, RosterEntry>) -> WorkerView {
        let link = |(peer, link): (&WorkerId, &LinkState)| {
            let name = workers.get(peer)?.view.name.clone();
            Some(views::link_view(name, link))
        };
        let WorkerCounts {
            prefills,
            decodes,
            moves_in,
            moves_out,
            passed_over,
        } = self.counts;
        WorkerView {
            state: self.state(),
            links: self.links.iter().filter_map(link).collect(),
            counters: vec![
                ("prefills", prefills),
                ("decodes", decodes),
                ("moves_in", moves_in),
                ("moves_out", moves_out),
                ("passed_over", passed_over),
            ],
            ..self.view.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_fleet::sample;

    fn named(number: u64, data_address: &str) -> Registration {
        Registration {
            worker: life(number),
            name: format!("w{number}"),
            data_address: data_address.to_owned(),
            ..sample::registration()
        }
    }

    fn life(number: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(number),
            ..WorkerRef::default()
        }
    }

    fn link(peer: u64) -> LinkState {
        LinkState {
            peer: life(peer),
            transport: "tcp".to_owned(),
            bytes_per_second: 1,
            latency: Duration::ZERO,
        }
    }

    fn peers(roster: &WorkerRoster, name: &str) -> Vec<String> {
        let views = roster.views();
        let view = views.into_iter().find(|view| view.name == name);
        let links = view.expect("it is connected").links;
        links.into_iter().map(|link| link.peer).collect()
    }

    #[test]
    fn links_to_workers_that_left_are_dropped() {
        let roster = WorkerRoster::default();
        roster.join(&named(1, "h:1"), Arc::default());
        roster.join(&named(2, "h:2"), Arc::default());
        roster.link_measured(life(1), link(2));
        // Measured before it joined here.
        roster.link_measured(life(1), link(3));
        assert_eq!(peers(&roster, "w1"), ["w2"]);
        roster.join(&named(3, "h:3"), Arc::default());
        assert_eq!(peers(&roster, "w1"), ["w2", "w3"]);
        roster.leave(life(2));
        roster.leave(life(3));
        assert!(peers(&roster, "w1").is_empty());
        assert!(roster.lock()[&WorkerId(1)].links.is_empty());
        for peer in 100..100 + 2 * LINKS_AHEAD_MAX as u64 {
            roster.link_measured(life(1), link(peer));
        }
        let links_count = roster.lock()[&WorkerId(1)].links.len();
        assert_eq!(links_count, LINKS_AHEAD_MAX);
        roster.join(&named(9, "h:9"), Arc::default());
        roster.link_measured(life(1), link(9));
        assert_eq!(peers(&roster, "w1"), ["w9"]);
    }

    #[test]
    fn the_longest_sequence_is_that_of_the_largest_open_decoder() {
        let roster = WorkerRoster::default();
        let join = |number, role, blocks_count| {
            let mut registration = named(number, "h:1");
            registration.description.role = role;
            registration.description.capacity = Capacity {
                block_tokens: 16,
                block_bytes: 1,
                blocks_count,
                slots_count: 1,
                step_tokens_max: 16,
                context_tokens_max: 1000,
                states: None,
                windows: None,
            };
            roster.join(&registration, Arc::default());
        };
        assert_eq!(
            roster.sequence_tokens_max(&sample::registration().description.model),
            None
        );
        join(1, Role::Prefill, 50);
        assert_eq!(
            roster.sequence_tokens_max(&sample::registration().description.model),
            Some(800),
            "no other is there"
        );
        join(2, Role::Decode, 10);
        assert_eq!(
            roster.sequence_tokens_max(&sample::registration().description.model),
            Some(160)
        );
        join(3, Role::Both, 100);
        assert_eq!(
            roster.sequence_tokens_max(&sample::registration().description.model),
            Some(1000),
            "the context"
        );
        roster.handle_report(life(3), &Report::Draining);
        assert_eq!(
            roster.sequence_tokens_max(&sample::registration().description.model),
            Some(160)
        );
        let role = Role::Decode;
        roster.handle_report(life(1), &Report::Serves { role });
        assert_eq!(
            roster.sequence_tokens_max(&sample::registration().description.model),
            Some(800)
        );
        for number in 1..=3 {
            roster.leave(life(number));
        }
        assert!(
            roster
                .sequence_tokens_max(&sample::registration().description.model)
                .is_some(),
            "the last known"
        );
    }

    #[test]
    fn a_lost_worker_is_remembered_until_its_name_is_back() {
        let roster = WorkerRoster::default();
        let names = || -> Vec<String> {
            let lost = roster.lost().into_iter();
            lost.map(|worker| worker.name).collect()
        };
        for number in (0..LOST_MAX as u64 + 2).rev() {
            roster.join(&named(number, "h:1"), Arc::default());
            roster.remember_lost(roster.leave(life(number)).unwrap());
        }
        let lost = names();
        assert_eq!(lost.len(), LOST_MAX);
        assert!(
            lost.is_sorted() && lost.contains(&"w0".to_owned()),
            "the latest stay"
        );
        roster.join(&named(0, "h:1"), Arc::default());
        assert!(!names().contains(&"w0".to_owned()));
        assert_eq!(names().len(), LOST_MAX - 1);
    }

    #[test]
    fn a_changed_role_has_the_workers_name() {
        let roster = WorkerRoster::default();
        roster.join(&named(1, "h:1"), Arc::default());
        let role = roster.views()[0].role;
        assert_eq!(roster.name_of_other_role(life(1), role), None);
        let roles = [Role::Prefill, Role::Decode];
        let other = roles.into_iter().find(|other| *other != role).unwrap();
        let name = roster.name_of_other_role(life(1), other);
        assert_eq!(name.as_deref(), Some("w1"));
        assert_eq!(roster.name_of_other_role(life(2), role), None);
    }

    #[test]
    fn a_repeated_command_is_sent_once() {
        let roster = WorkerRoster::default();
        roster.join(&named(1, "h:1"), Arc::default());
        let take = |command| roster.command("w1", command);
        let serve = WorkerCommand::SetRole(Role::Prefill);
        let (view, novelty) = take(serve).unwrap();
        assert_eq!((view.role, novelty), (Role::Prefill, CommandNovelty::New));
        let (view, novelty) = take(serve).unwrap();
        assert_eq!(
            (view.role, novelty),
            (Role::Prefill, CommandNovelty::Pending)
        );
        let role = Role::Prefill;
        roster.handle_report(life(1), &Report::Serves { role });
        assert_eq!(take(serve).unwrap().1, CommandNovelty::New);
        assert_eq!(take(WorkerCommand::Drain).unwrap().1, CommandNovelty::New);
        let (view, novelty) = take(WorkerCommand::Drain).unwrap();
        assert_eq!(
            (view.state, novelty),
            (WorkerState::Draining, CommandNovelty::Pending)
        );
        // A new incarnation has received no command.
        roster.leave(life(1));
        assert_eq!(take(WorkerCommand::Drain), Err(CommandError::UnknownWorker));
        roster.join(&named(1, "h:1"), Arc::default());
        assert_eq!(take(WorkerCommand::Drain).unwrap().1, CommandNovelty::New);
    }

    #[test]
    fn a_worker_in_the_router_process_cannot_be_drained() {
        let roster = WorkerRoster::default();
        roster.join(&named(1, ""), Arc::default());
        let drained = roster.command("w1", WorkerCommand::Drain);
        assert_eq!(drained, Err(CommandError::SameProcess));
        assert_eq!(roster.views()[0].state, WorkerState::Ready);
        let served = roster.command("w1", WorkerCommand::SetRole(Role::Both));
        assert_eq!(served.unwrap().0.role, Role::Both);
    }
}
