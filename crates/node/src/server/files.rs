//! How many connections the system lets a process have.

use super::HttpLimits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

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
    let connections_max = u32::try_from(files / 2).unwrap_or(u32::MAX).max(1);
    if connections_max >= limits.connections_max {
        return limits;
    }
    warn!(
        files,
        connections_max,
        "fewer connections than were asked for: the system allows no more open files"
    );
    HttpLimits {
        connections_max,
        ..limits
    }
}
