//! What an operator is shown of a worker, and what it was told that it has not shown yet.
//!
//! Owns: the making of a view, and which commands are unanswered. Never: passes a command on, or
//! decides what it means. Invariant: of a worker that does not answer, no more commands wait than
//! [`UNANSWERED_MAX`], however often an operator repeats itself.

use crate::line::{Introduction, LinkState};
use cleave_api::{CommandError, LinkRow, LinkView, WorkerCommand, WorkerState, WorkerView};
use cleave_domain::{DeviceId, Load, Role};
use std::collections::{BTreeMap, VecDeque};

/// Changes of role that one worker is told before it has answered the first.
const UNANSWERED_MAX: usize = 8;

/// A worker as it joins.
pub(crate) fn joined(introduction: &Introduction) -> WorkerView {
    let description = &introduction.description;
    let blocks_count = description.capacity.blocks_count;
    WorkerView {
        name: introduction.name.clone(),
        worker: introduction.worker,
        role: description.role,
        state: WorkerState::Ready,
        fingerprint: description.fingerprint.0.clone(),
        device: description
            .device
            .as_ref()
            .map(|DeviceId(device)| device.clone()),
        load: Load {
            blocks_free: blocks_count,
            ..Load::default()
        },
        price_error_permille: None,
        blocks_count,
        links: Vec::new(),
        counters: Vec::new(),
    }
}

/// A link to a worker that is called so.
pub(crate) fn link(peer: String, link: &LinkState) -> LinkView {
    LinkView {
        peer,
        transport: link.transport.clone(),
        bytes_per_second: link.bytes_per_second,
        latency: link.latency,
    }
}

/// Links by what carries them.
pub(crate) fn link_sums<'a>(links: impl Iterator<Item = &'a LinkState>) -> Vec<LinkRow> {
    let mut sums = BTreeMap::new();
    for link in links {
        let one = LinkRow {
            transport: link.transport.clone(),
            count: 1,
            slowest_bytes_per_second: link.bytes_per_second,
            mean_bytes_per_second: link.bytes_per_second,
        };
        add_links(&mut sums, &one);
    }
    sums.into_values().collect()
}

/// Counts links with others of their kind.
pub(crate) fn add_links(sums: &mut BTreeMap<String, LinkRow>, more: &LinkRow) {
    let Some(sum) = sums.get_mut(&more.transport) else {
        sums.insert(more.transport.clone(), more.clone());
        return;
    };
    let all = |row: &LinkRow| u128::from(row.mean_bytes_per_second) * u128::from(row.count);
    let bytes = all(sum) + all(more);
    sum.count += more.count;
    let mean = bytes / u128::from(sum.count.max(1));
    sum.mean_bytes_per_second = u64::try_from(mean).unwrap_or(u64::MAX);
    let slowest = sum.slowest_bytes_per_second;
    sum.slowest_bytes_per_second = slowest.min(more.slowest_bytes_per_second);
}

/// How a worker will stand once it has done this.
pub(crate) fn after(mut view: WorkerView, command: WorkerCommand) -> WorkerView {
    match command {
        WorkerCommand::Drain => view.state = WorkerState::Draining,
        WorkerCommand::Serve(role) => view.role = role,
    }
    view
}

/// What a worker was told and has not shown.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    /// Never taken back, and so never told twice.
    drains: bool,
    /// In the order in which they were told; each is answered by its role.
    roles: VecDeque<Role>,
}

/// Whether a command is to be passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Novelty {
    /// It is.
    New,
    /// It was, and is unanswered.
    Said,
}

impl Commands {
    /// An operator commands.
    pub(crate) fn take(&mut self, command: WorkerCommand) -> Result<Novelty, CommandError> {
        match command {
            WorkerCommand::Drain if self.drains => Ok(Novelty::Said),
            WorkerCommand::Drain => {
                self.drains = true;
                Ok(Novelty::New)
            }
            WorkerCommand::Serve(role) if self.roles.back() == Some(&role) => Ok(Novelty::Said),
            WorkerCommand::Serve(_) if self.roles.len() >= UNANSWERED_MAX => {
                Err(CommandError::Busy)
            }
            WorkerCommand::Serve(role) => {
                self.roles.push_back(role);
                Ok(Novelty::New)
            }
        }
    }

    /// The worker drains, whoever told it to.
    pub(crate) fn drains(&mut self) {
        self.drains = true;
    }

    /// The worker serves these legs now: what was told before that is over.
    pub(crate) fn serves(&mut self, role: Role) {
        if let Some(at) = self.roles.iter().position(|told| *told == role) {
            self.roles.drain(..=at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_one_kind_are_one_line() {
        let link = |transport: &str, bytes_per_second| LinkState {
            peer: cleave_domain::WorkerRef::default(),
            transport: transport.to_owned(),
            bytes_per_second,
            latency: std::time::Duration::ZERO,
        };
        let links = [link("tcp", 10), link("shm", 70), link("tcp", 40)];
        let sums = link_sums(links.iter());
        let told: Vec<_> = sums
            .iter()
            .map(|row| {
                (
                    &*row.transport,
                    row.count,
                    row.slowest_bytes_per_second,
                    row.mean_bytes_per_second,
                )
            })
            .collect();
        assert_eq!(told, [("shm", 1, 70, 70), ("tcp", 2, 10, 25)]);
    }

    #[test]
    fn a_command_repeated_filled_a_workers_line() {
        let mut commands = Commands::default();
        let serve = WorkerCommand::Serve;
        assert_eq!(commands.take(serve(Role::Both)), Ok(Novelty::New));
        assert_eq!(commands.take(serve(Role::Both)), Ok(Novelty::Said));
        assert_eq!(commands.take(serve(Role::Decode)), Ok(Novelty::New));
        assert_eq!(commands.take(serve(Role::Both)), Ok(Novelty::New));
        // The first is answered; the last is not.
        commands.serves(Role::Both);
        assert_eq!(commands.take(serve(Role::Both)), Ok(Novelty::Said));
        commands.serves(Role::Decode);
        commands.serves(Role::Both);
        assert_eq!(commands.take(serve(Role::Both)), Ok(Novelty::New));
        for _ in 0..2 * UNANSWERED_MAX {
            let _ = commands.take(serve(Role::Decode));
            let _ = commands.take(serve(Role::Prefill));
        }
        assert_eq!(commands.roles.len(), UNANSWERED_MAX);
        assert_eq!(commands.take(serve(Role::Both)), Err(CommandError::Busy));
        assert_eq!(commands.take(WorkerCommand::Drain), Ok(Novelty::New));
        assert_eq!(commands.take(WorkerCommand::Drain), Ok(Novelty::Said));
    }
}
