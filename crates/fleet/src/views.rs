//! The operator's view of a worker, and the commands that the worker has not answered.
//!
//! Owns: making a view, and which commands are unanswered. Never forwards or interprets a command.
//! Invariant: a worker that does not answer has at most [`UNANSWERED_MAX`] commands waiting,
//! however often an operator repeats them.

use crate::connection::{LinkState, Registration};
use cleave_api::{CommandError, LinkRow, LinkView, WorkerCommand, WorkerState, WorkerView};
use cleave_domain::{DeviceId, Role, WorkerLoad};
use std::collections::{BTreeMap, VecDeque};

/// Role changes that may be sent to one worker before it has answered the first.
const UNANSWERED_MAX: usize = 8;

/// The view of a worker that joins.
pub fn initial_view(registration: &Registration) -> WorkerView {
    let description = &registration.description;
    let blocks_count = description.capacity.blocks_count;
    WorkerView {
        name: registration.name.clone(),
        model: description.model.clone(),
        worker: registration.worker,
        role: description.role,
        state: WorkerState::Ready,
        fingerprint: description.fingerprint.0.clone(),
        device: description
            .device
            .as_ref()
            .map(|DeviceId(device)| device.clone()),
        load: WorkerLoad {
            blocks_free: blocks_count,
            ..WorkerLoad::default()
        },
        price_error_permille: None,
        blocks_count,
        links: Vec::new(),
        counters: Vec::new(),
    }
}

/// The view of a link to the named worker.
pub fn link_view(peer: String, link: &LinkState) -> LinkView {
    LinkView {
        peer,
        transport: link.transport.clone(),
        bytes_per_second: link.bytes_per_second,
        latency: link.latency,
    }
}

/// Sums of links by transport.
pub fn link_sums<'a>(links: impl Iterator<Item = &'a LinkState>) -> Vec<LinkRow> {
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

/// Adds links to the sum of their transport.
pub fn add_links(sums: &mut BTreeMap<String, LinkRow>, more: &LinkRow) {
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

/// The view of a worker once it has carried out this command.
pub fn view_after(mut view: WorkerView, command: WorkerCommand) -> WorkerView {
    match command {
        WorkerCommand::Drain => view.state = WorkerState::Draining,
        WorkerCommand::SetRole(role) => view.role = role,
    }
    view
}

/// Commands sent to a worker that it has not answered yet.
#[derive(Debug, Default)]
pub struct PendingCommands {
    /// A drain is never taken back, so it is sent once.
    drains: bool,
    /// In the order sent; the worker answers each by reporting its role.
    roles: VecDeque<Role>,
}

/// Whether a command must be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandNovelty {
    New,
    /// Sent before, and unanswered.
    Pending,
}

impl PendingCommands {
    /// Takes an operator's command, unless too many are unanswered.
    pub fn accept(&mut self, command: WorkerCommand) -> Result<CommandNovelty, CommandError> {
        match command {
            WorkerCommand::Drain if self.drains => Ok(CommandNovelty::Pending),
            WorkerCommand::Drain => {
                self.drains = true;
                Ok(CommandNovelty::New)
            }
            WorkerCommand::SetRole(role) if self.roles.back() == Some(&role) => {
                Ok(CommandNovelty::Pending)
            }
            WorkerCommand::SetRole(_) if self.roles.len() >= UNANSWERED_MAX => {
                Err(CommandError::Busy)
            }
            WorkerCommand::SetRole(role) => {
                self.roles.push_back(role);
                Ok(CommandNovelty::New)
            }
        }
    }

    /// The worker drains, whatever the cause.
    pub fn drain_began(&mut self) {
        self.drains = true;
    }

    /// The worker serves these legs now, which answers the role changes up to this one.
    pub fn role_changed(&mut self, role: Role) {
        if let Some(at) = self.roles.iter().position(|sent| *sent == role) {
            self.roles.drain(..=at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_one_transport_are_summed_in_one_row() {
        let link = |transport: &str, bytes_per_second| LinkState {
            peer: cleave_domain::WorkerRef::default(),
            transport: transport.to_owned(),
            bytes_per_second,
            latency: std::time::Duration::ZERO,
        };
        let links = [link("tcp", 10), link("shm", 70), link("tcp", 40)];
        let sums = link_sums(links.iter());
        let rows: Vec<_> = sums
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
        assert_eq!(rows, [("shm", 1, 70, 70), ("tcp", 2, 10, 25)]);
    }

    #[test]
    fn repeated_commands_are_not_queued_again() {
        let mut commands = PendingCommands::default();
        let serve = WorkerCommand::SetRole;
        assert_eq!(commands.accept(serve(Role::Both)), Ok(CommandNovelty::New));
        assert_eq!(
            commands.accept(serve(Role::Both)),
            Ok(CommandNovelty::Pending)
        );
        assert_eq!(
            commands.accept(serve(Role::Decode)),
            Ok(CommandNovelty::New)
        );
        assert_eq!(commands.accept(serve(Role::Both)), Ok(CommandNovelty::New));
        // The first is answered; the last is not.
        commands.role_changed(Role::Both);
        assert_eq!(
            commands.accept(serve(Role::Both)),
            Ok(CommandNovelty::Pending)
        );
        commands.role_changed(Role::Decode);
        commands.role_changed(Role::Both);
        assert_eq!(commands.accept(serve(Role::Both)), Ok(CommandNovelty::New));
        for _ in 0..2 * UNANSWERED_MAX {
            let _ = commands.accept(serve(Role::Decode));
            let _ = commands.accept(serve(Role::Prefill));
        }
        assert_eq!(commands.roles.len(), UNANSWERED_MAX);
        assert_eq!(commands.accept(serve(Role::Both)), Err(CommandError::Busy));
        assert_eq!(
            commands.accept(WorkerCommand::Drain),
            Ok(CommandNovelty::New)
        );
        assert_eq!(
            commands.accept(WorkerCommand::Drain),
            Ok(CommandNovelty::Pending)
        );
    }
}
