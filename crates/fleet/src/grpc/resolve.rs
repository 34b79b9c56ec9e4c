//! The addresses of routers: names are resolved again and again, because a headless service's
//! addresses come and go.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::net::{UdpSocket, lookup_host};
use tokio::sync::watch;
use tracing::warn;

/// How often a name is looked up, and how soon again when that failed.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(10);
const RESOLVE_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Keeps `found` at the addresses of `names` (`host:port` each).
pub async fn watch_names(names: Vec<String>, found: watch::Sender<BTreeSet<SocketAddr>>) {
    loop {
        let mut addresses = BTreeSet::new();
        let mut failed = false;
        for name in &names {
            match lookup_host(name.as_str()).await {
                Ok(resolved) => addresses.extend(resolved),
                Err(error) => {
                    failed = true;
                    warn!(name, %error, "cannot resolve a router's name");
                }
            }
        }
        found.send_if_modified(|found_before| {
            // A resolver that fails for a moment removes no router.
            if failed {
                addresses.extend(found_before.iter().copied());
            }
            let changed = *found_before != addresses;
            *found_before = addresses;
            changed
        });
        let pause = if failed {
            RESOLVE_RETRY_PAUSE
        } else {
            RESOLVE_INTERVAL
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = found.closed() => return,
        }
    }
}

/// The address of this machine from which `router` is reached: the one at which other workers,
/// which reach the same router, are most likely to reach this one. Nothing is sent.
pub async fn local_address(router: SocketAddr) -> std::io::Result<IpAddr> {
    let any: SocketAddr = match router {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(router).await?;
    Ok(socket.local_addr()?.ip())
}
