//! How many connections the system lets a process have.

use super::HttpLimits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{info, warn};

/// Takes as many open files as the system gives, and keeps half of them for everything that is not a
/// client's connection: a server that cannot open a file any more cannot read its policy either.
pub(crate) fn fit(limits: HttpLimits) -> HttpLimits {
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
    let Some(connections_max) = fewer(limits, files) else {
        return limits;
    };
    // Without a number from the operator the system's limit decides, and nothing is wrong.
    match is_asked_for(limits) {
        true => warn!(
            files,
            connections_max,
            "fewer connections than --max-connections says: raise the system's limit of open files (ulimit -n)"
        ),
        false => info!(
            files,
            connections_max, "as many connections as the limit of open files leaves room for"
        ),
    }
    HttpLimits {
        connections_max,
        ..limits
    }
}

/// The connections that so many files leave room for, if those are fewer than the limit.
fn fewer(limits: HttpLimits, files: u64) -> Option<u32> {
    let connections_max = u32::try_from(files / 2).unwrap_or(u32::MAX).max(1);
    (connections_max < limits.connections_max).then_some(connections_max)
}

fn is_asked_for(limits: HttpLimits) -> bool {
    limits.connections_max != HttpLimits::default().connections_max
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_start_warns_of_no_limit_that_nobody_asked_for() {
        let defaults = HttpLimits::default();
        assert!(!is_asked_for(defaults));
        let more = HttpLimits {
            connections_max: defaults.connections_max + 1,
            ..defaults
        };
        assert!(is_asked_for(more));
        assert_eq!(fewer(more, 100), Some(50));
        assert_eq!(fewer(more, 1), Some(1));
        let files = u64::from(more.connections_max) * 2;
        assert_eq!(fewer(more, files), None);
    }
}
