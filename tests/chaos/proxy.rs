//! A TCP relay that can delay, throttle, freeze, cut and half-close its connections.
//!
//! Owns: the connections through it. Never: changes a byte, unless it is asked to flip a bit.
//! Invariant: in its normal condition it relays bytes as they come.

use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// The condition of a link, in both directions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LinkCondition {
    Normal,
    /// Throttled to this many bytes per second and direction.
    Throttled(u32),
    /// Each piece is delayed by this time.
    Delayed(Duration),
    /// Nothing passes, and no side is notified.
    Frozen,
}

pub(crate) struct FaultProxy {
    pub(crate) address: String,
    shared: Arc<FaultProxyState>,
}

struct FaultProxyState {
    target: watch::Sender<Option<String>>,
    condition: watch::Sender<LinkCondition>,
    cuts: watch::Sender<u64>,
    half_closes: watch::Sender<u64>,
    dialled: watch::Sender<u64>,
    /// Distance of the bit to flip from the end of the next long piece, in bytes.
    flip: watch::Sender<Option<usize>>,
}

/// The least length of a piece whose bits are flipped. Shorter pieces are TLS or protocol overhead,
/// not payload.
pub(crate) const FLIPPED_BYTES_MIN: usize = 64;

impl FaultProxy {
    /// Listens on a free port; connections wait until the proxy has a target.
    pub(crate) async fn start() -> Self {
        let bound = TcpListener::bind("127.0.0.1:0").await;
        let listener = bound.expect("a free port");
        let address = listener.local_addr().expect("it is bound").to_string();
        let shared = Arc::new(FaultProxyState {
            target: watch::Sender::new(None),
            condition: watch::Sender::new(LinkCondition::Normal),
            cuts: watch::Sender::new(0),
            half_closes: watch::Sender::new(0),
            dialled: watch::Sender::new(0),
            flip: watch::Sender::new(None),
        });
        tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self { address, shared }
    }

    /// Sets the target of new connections; without one they wait.
    pub(crate) fn set_target(&self, target: Option<String>) {
        self.shared.target.send_replace(target);
    }

    #[allow(dead_code, reason = "not every test that relays counts")]
    pub(crate) fn dialled(&self) -> u64 {
        *self.shared.dialled.borrow()
    }

    pub(crate) fn set_condition(&self, condition: LinkCondition) {
        self.shared.condition.send_replace(condition);
    }

    /// Ends every connection with everything in flight on it.
    pub(crate) fn cut(&self) {
        self.shared.cuts.send_modify(|count| *count += 1);
    }

    /// Flips a bit of the next long piece, this many bytes before its end.
    #[allow(dead_code, reason = "not every test that relays flips bits")]
    pub(crate) fn flip(&self, from_end: usize) {
        assert!(from_end < FLIPPED_BYTES_MIN, "within every long piece");
        self.shared.flip.send_replace(Some(from_end));
    }

    /// Whether the bit has flipped.
    #[allow(dead_code, reason = "not every test that relays flips bits")]
    pub(crate) fn flipped(&self) -> bool {
        self.shared.flip.borrow().is_none()
    }

    /// Ends, on every connection, the direction away from the dialling side; the other direction
    /// stays open.
    pub(crate) fn half_close(&self) {
        self.shared.half_closes.send_modify(|count| *count += 1);
    }
}

async fn accept(listener: TcpListener, shared: Arc<FaultProxyState>) {
    while let Ok((near, _)) = listener.accept().await {
        shared.dialled.send_modify(|count| *count += 1);
        let shared = Arc::clone(&shared);
        let mut cuts = shared.cuts.subscribe();
        tokio::spawn(async move {
            tokio::select! {
                () = carry(near, &shared) => {}
                _ = cuts.changed() => {}
            }
        });
    }
}

async fn carry(near: TcpStream, shared: &FaultProxyState) {
    let mut target = shared.target.subscribe();
    let Ok(aimed) = target.wait_for(Option::is_some).await.map(|to| to.clone()) else {
        return;
    };
    let Ok(far) = TcpStream::connect(aimed.expect("it was waited for")).await else {
        return;
    };
    for stream in [&near, &far] {
        stream.set_nodelay(true).expect("a socket takes options");
    }
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    let there = async {
        let mut halves = shared.half_closes.subscribe();
        let (mut near_read, mut far_write) = (near_read, far_write);
        tokio::select! {
            () = relay(&mut near_read, &mut far_write, shared) => {}
            _ = halves.changed() => {
                // Later bytes are swallowed, as by the buffers of a dead router.
                let _ = far_write.shutdown().await;
                let mut sink = tokio::io::sink();
                let _ = tokio::io::copy(&mut near_read, &mut sink).await;
            }
        }
    };
    let back = async {
        let (mut far_read, mut near_write) = (far_read, near_write);
        relay(&mut far_read, &mut near_write, shared).await;
    };
    tokio::join!(there, back);
}

async fn relay(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf, shared: &FaultProxyState) {
    let mut condition = shared.condition.subscribe();
    let mut buffer = vec![0; 1 << 14];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let arrived = Instant::now();
        // The condition is read for each piece, so a change applies to connections that exist.
        let now = *condition.borrow_and_update();
        match now {
            LinkCondition::Normal => {}
            LinkCondition::Delayed(late) => sleep_until(arrived + late).await,
            LinkCondition::Throttled(rate) => {
                let takes = Duration::from_secs_f64(count as f64 / f64::from(rate));
                tokio::select! {
                    () = sleep_until(arrived + takes) => {}
                    _ = condition.changed() => {}
                }
            }
            LinkCondition::Frozen => {
                let thawed = condition.wait_for(|now| *now != LinkCondition::Frozen);
                if thawed.await.is_err() {
                    return;
                }
            }
        }
        if count >= FLIPPED_BYTES_MIN && shared.flip.borrow().is_some() {
            let from_end = shared.flip.send_replace(None).unwrap_or(0);
            buffer[count - 1 - from_end] ^= 4;
        }
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}
