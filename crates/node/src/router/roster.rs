//! The workers as an operator sees them.
//!
//! Owns: one view per connected worker, kept up by the driver from what it hears, and read by the
//! HTTP face. Never: decides anything: what a worker is fit for the brain knows, from the same
//! words. Invariant: a view is there exactly as long as the worker is connected, and shows links to
//! workers that are.

use crate::line::{Activity, Introduction, LinkState};
use crate::views::{self, Commands, Novelty};
use cleave_api::{CommandError, LinkRow, WorkerCommand, WorkerRow, WorkerState, WorkerView};
use cleave_domain::{Progress, Report, WorkerId, WorkerRef};
use cleave_router::Note;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Links of one worker to others that are not connected: after a router's restart they join one by
/// one, and bring what they measured before.
const LINKS_AHEAD_MAX: usize = 1024;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    workers: Mutex<BTreeMap<WorkerId, Entry>>,
}

#[derive(Debug)]
struct Entry {
    view: WorkerView,
    draining: bool,
    in_process: bool,
    commands: Commands,
    links: BTreeMap<WorkerId, LinkState>,
    /// Their sums, once somebody looked and until one changes: a large fleet has a million.
    link_sums: Option<Vec<LinkRow>>,
    counts: Counts,
    activity: Arc<Activity>,
    /// Its tokens when somebody looked last, and when that was.
    looked: Option<(Instant, u64)>,
}

/// What the router did with a worker since it joined.
#[derive(Debug, Default)]
struct Counts {
    prefills: u64,
    decodes: u64,
    moves_in: u64,
    moves_out: u64,
    passed_over: u64,
}

impl Roster {
    pub(crate) fn join(&self, introduction: &Introduction, activity: Arc<Activity>) {
        let entry = Entry {
            view: views::joined(introduction),
            draining: false,
            in_process: introduction.data_address.is_empty(),
            commands: Commands::default(),
            links: BTreeMap::new(),
            link_sums: None,
            counts: Counts::default(),
            activity,
            looked: None,
        };
        self.lock().insert(introduction.worker.worker, entry);
    }

    /// Says what it was called and whether it was about to leave, if it was there.
    pub(crate) fn leave(&self, worker: WorkerRef) -> Option<(String, WorkerState)> {
        let mut workers = self.lock();
        let left = workers.remove(&worker.worker);
        let left = left.map(|entry| (entry.view.name.clone(), entry.state()));
        for entry in workers.values_mut() {
            if entry.links.remove(&worker.worker).is_some() {
                entry.link_sums = None;
            }
        }
        left
    }

    /// What a worker is called.
    pub(crate) fn name(&self, worker: &WorkerRef) -> String {
        let workers = self.lock();
        let entry = workers.get(&worker.worker);
        entry.map_or_else(|| worker.to_string(), |entry| entry.view.name.clone())
    }

    /// A worker said something that an operator may want to know.
    pub(crate) fn hear(&self, worker: WorkerRef, report: &Report) {
        let mut workers = self.lock();
        let Some(entry) = workers.get_mut(&worker.worker) else {
            return;
        };
        match report {
            Report::Load(load) => entry.view.load = *load,
            Report::Prices(prices) => {
                let known = !prices.rows.is_empty();
                entry.view.price_error_permille = known.then_some(prices.error_permille);
            }
            Report::Draining => {
                entry.draining = true;
                entry.commands.drains();
            }
            Report::Serves { role } => {
                entry.view.role = *role;
                entry.commands.serves(*role);
            }
            Report::Reserved { .. }
            | Report::Refused { .. }
            | Report::Prefilled { .. }
            | Report::Landed { .. }
            | Report::Stayed { .. }
            | Report::Crowded { .. }
            | Report::Finished { .. }
            | Report::LegFailed { .. }
            | Report::Released { .. }
            | Report::Prefix { .. }
            | Report::PassedOn(_) => {}
        }
    }

    /// A worker measured a link.
    pub(crate) fn measured(&self, worker: WorkerRef, link: LinkState) {
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

    /// The brain noted something of workers.
    pub(crate) fn count(&self, note: &Note) {
        let mut workers = self.lock();
        let mut at = |worker: &WorkerRef, count: fn(&mut Counts) -> &mut u64| {
            if let Some(entry) = workers.get_mut(&worker.worker) {
                *count(&mut entry.counts) += 1;
            }
        };
        match note {
            Note::Placed {
                prefill, decode, ..
            } => {
                at(prefill, |counts| &mut counts.prefills);
                at(decode, |counts| &mut counts.decodes);
            }
            Note::Moving { from, to, .. } => {
                at(from, |counts| &mut counts.moves_out);
                at(to, |counts| &mut counts.moves_in);
            }
            Note::PassedOver { worker, .. } => at(worker, |counts| &mut counts.passed_over),
            Note::Stale { .. }
            | Note::Decided(_)
            | Note::Judged { .. }
            | Note::Retried { .. }
            | Note::Moved { .. }
            | Note::Stayed { .. }
            | Note::CancelFreed { .. }
            | Note::WorkerStuck { .. }
            | Note::Fleet { .. } => {}
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
        let row = |entry: &mut Entry| {
            let device = entry.view.device.as_ref();
            let there = device.and_then(|device| devices.get(device));
            entry.row(now, there.map_or(0, |there| there - 1))
        };
        let mut rows: Vec<WorkerRow> = workers.values_mut().map(row).collect();
        rows.sort_by(|a, b| a.name.cmp(&b.name));
        (rows, links.into_values().collect())
    }

    /// How a worker will stand once it has done this, and whether it is to be told.
    pub(crate) fn command(
        &self,
        name: &str,
        command: WorkerCommand,
    ) -> Result<(WorkerView, Novelty), CommandError> {
        let mut workers = self.lock();
        let mut named = workers.values_mut().filter(|entry| entry.view.name == name);
        let entry = named.next().ok_or(CommandError::Unknown)?;
        if entry.in_process && command == WorkerCommand::Drain {
            return Err(CommandError::SameProcess);
        }
        let novelty = entry.commands.take(command)?;
        let id = entry.view.worker.worker;
        let view = workers[&id].view(&workers);
        Ok((views::after(view, command), novelty))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Entry>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn state(&self) -> WorkerState {
        match (self.draining, self.view.load.progress) {
            (true, _) => WorkerState::Draining,
            (false, Progress::Stuck) => WorkerState::Stuck,
            (false, Progress::Moving) => WorkerState::Ready,
        }
    }

    /// As the page shows it; `sharing` others take the same device.
    fn row(&mut self, now: Instant, sharing: u32) -> WorkerRow {
        let tokens = self.activity.tokens();
        let looked = self.looked.replace((now, tokens));
        let rate = looked.and_then(|(at, before)| {
            let spent = now.saturating_duration_since(at).as_secs_f64();
            (spent > 0.0).then(|| (tokens - before) as f64 / spent)
        });
        let WorkerView {
            name,
            role,
            device,
            load,
            blocks_count,
            ..
        } = &self.view;
        WorkerRow {
            name: name.clone(),
            role: *role,
            state: self.state(),
            device: device.clone(),
            sharing,
            running: load.sequences_running,
            waiting: load.sequences_waiting,
            queue_tokens: load.queue_tokens,
            backlog: load.backlog.ahead(i32::MAX, None),
            blocks_held: blocks_count.saturating_sub(load.blocks_free),
            blocks_count: *blocks_count,
            step: self.activity.step(),
            heard: self.activity.silence(),
            tokens_per_second: rate,
            placed: self.counts.prefills + self.counts.decodes,
        }
    }

    fn view(&self, workers: &BTreeMap<WorkerId, Entry>) -> WorkerView {
        let link = |(peer, link): (&WorkerId, &LinkState)| {
            let name = workers.get(peer)?.view.name.clone();
            Some(views::link(name, link))
        };
        let Counts {
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
    use crate::wire::sample;
    use cleave_domain::Role;
    use std::time::Duration;

    fn named(number: u64, data_address: &str) -> Introduction {
        Introduction {
            worker: life(number),
            name: format!("w{number}"),
            data_address: data_address.to_owned(),
            ..sample::introduction()
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

    fn peers(roster: &Roster, name: &str) -> Vec<String> {
        let views = roster.views();
        let view = views.into_iter().find(|view| view.name == name);
        let links = view.expect("it is connected").links;
        links.into_iter().map(|link| link.peer).collect()
    }

    #[test]
    fn links_to_workers_that_had_left_were_kept_for_ever() {
        let roster = Roster::default();
        roster.join(&named(1, "h:1"), Arc::default());
        roster.join(&named(2, "h:2"), Arc::default());
        roster.measured(life(1), link(2));
        // Measured before it joined here.
        roster.measured(life(1), link(3));
        assert_eq!(peers(&roster, "w1"), ["w2"]);
        roster.join(&named(3, "h:3"), Arc::default());
        assert_eq!(peers(&roster, "w1"), ["w2", "w3"]);
        roster.leave(life(2));
        roster.leave(life(3));
        assert!(peers(&roster, "w1").is_empty());
        assert!(roster.lock()[&WorkerId(1)].links.is_empty());
        for peer in 100..100 + 2 * LINKS_AHEAD_MAX as u64 {
            roster.measured(life(1), link(peer));
        }
        let kept = roster.lock()[&WorkerId(1)].links.len();
        assert_eq!(kept, LINKS_AHEAD_MAX);
        roster.join(&named(9, "h:9"), Arc::default());
        roster.measured(life(1), link(9));
        assert_eq!(peers(&roster, "w1"), ["w9"]);
    }

    #[test]
    fn a_command_was_passed_on_as_often_as_it_was_repeated() {
        let roster = Roster::default();
        roster.join(&named(1, "h:1"), Arc::default());
        let take = |command| roster.command("w1", command);
        let serve = WorkerCommand::Serve(Role::Prefill);
        let (view, novelty) = take(serve).unwrap();
        assert_eq!((view.role, novelty), (Role::Prefill, Novelty::New));
        let (view, novelty) = take(serve).unwrap();
        assert_eq!((view.role, novelty), (Role::Prefill, Novelty::Said));
        let role = Role::Prefill;
        roster.hear(life(1), &Report::Serves { role });
        assert_eq!(take(serve).unwrap().1, Novelty::New);
        assert_eq!(take(WorkerCommand::Drain).unwrap().1, Novelty::New);
        let (view, novelty) = take(WorkerCommand::Drain).unwrap();
        assert_eq!(
            (view.state, novelty),
            (WorkerState::Draining, Novelty::Said)
        );
        // Another life of it has heard nothing.
        roster.leave(life(1));
        assert_eq!(take(WorkerCommand::Drain), Err(CommandError::Unknown));
        roster.join(&named(1, "h:1"), Arc::default());
        assert_eq!(take(WorkerCommand::Drain).unwrap().1, Novelty::New);
    }

    #[test]
    fn a_worker_that_could_not_be_taken_back_was_drained() {
        let roster = Roster::default();
        roster.join(&named(1, ""), Arc::default());
        let drained = roster.command("w1", WorkerCommand::Drain);
        assert_eq!(drained, Err(CommandError::SameProcess));
        assert_eq!(roster.views()[0].state, WorkerState::Ready);
        let served = roster.command("w1", WorkerCommand::Serve(Role::Both));
        assert_eq!(served.unwrap().0.role, Role::Both);
    }
}
