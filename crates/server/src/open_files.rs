//! How many connections the system lets a process have.

use super::HttpLimits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{debug, warn};

/// Takes as many open files as the system gives, and keeps half of them for everything that is not
/// a client's connection: a server that cannot open a file any more cannot read its policy either.
pub fn fit_to_open_files(limits: HttpLimits) -> HttpLimits {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: maximum,
        maximum,
    };
    let files = match setrlimit(Resource::Nofile, most) {
        Ok(()) => maximum,
        Err(_) => current,
    };
    let Some(files) = files else {
        return limits;
    };
    let Some(connections_max) = connections_within(limits, files) else {
        return limits;
    };
    // Without a number from the operator the system's limit decides, and nothing is wrong.
    if limits.connections_max.is_some() {
        warn!(
            files,
            connections_max,
            "fewer connections than --max-connections says: raise the system's limit of open files (ulimit -n)"
        );
    } else {
        debug!(
            files,
            connections_max, "as many connections as the limit of open files leaves room for"
        );
    }
    HttpLimits {
        connections_max: Some(connections_max),
        ..limits
    }
}

/// The connections that so many files leave room for, if those are fewer than the limit.
fn connections_within(limits: HttpLimits, files: u64) -> Option<u32> {
    let connections_max = u32::try_from(files / 2).unwrap_or(u32::MAX).max(1);
    (connections_max < limits.connections()).then_some(connections_max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_files_are_for_connections() {
        let configured = HttpLimits {
            connections_max: Some(HttpLimits::CONNECTIONS_MAX),
            ..HttpLimits::default()
        };
        for limits in [configured, HttpLimits::default()] {
            assert_eq!(connections_within(limits, 100), Some(50));
            assert_eq!(connections_within(limits, 1), Some(1));
            let files = u64::from(HttpLimits::CONNECTIONS_MAX) * 2;
            assert_eq!(connections_within(limits, files), None);
        }
    }
}
