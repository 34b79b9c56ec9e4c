//! A network that can be made bad: a TCP relay that delays, throttles, freezes, cuts and half-closes
//! what passes it.
//!
//! Owns: the connections through it. Never: changes a byte, unless it is asked to flip a bit. Invariant: in
//! clear weather it is a wire.

use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// What happens to bytes on their way, both ways.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Weather {
    Clear,
    /// So many bytes per second and direction.
    Slow(u32),
    /// Each piece this much later.
    Late(Duration),
    /// Nothing passes, and nobody is told.
    Frozen,
}

/// See the module.
pub(crate) struct Proxy {
    pub(crate) address: String,
    shared: Arc<Shared>,
}

struct Shared {
    target: watch::Sender<Option<String>>,
    weather: watch::Sender<Weather>,
    cuts: watch::Sender<u64>,
    halves: watch::Sender<u64>,
    /// How far from the end of the next long piece a bit is to flip.
    flip: watch::Sender<Option<usize>>,
}

/// Shorter pieces are a connection's own words.
const FLIPPED_BYTES_MIN: usize = 64;

impl Proxy {
    /// Listens on a free port; connections wait until it is aimed at something.
    pub(crate) async fn start() -> Self {
        let bound = TcpListener::bind("127.0.0.1:0").await;
        let listener = bound.expect("a free port");
        let address = listener.local_addr().expect("it is bound").to_string();
        let shared = Arc::new(Shared {
            target: watch::Sender::new(None),
            weather: watch::Sender::new(Weather::Clear),
            cuts: watch::Sender::new(0),
            halves: watch::Sender::new(0),
            flip: watch::Sender::new(None),
        });
        tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self { address, shared }
    }

    /// Where connections go from now on; nowhere, and they wait.
    pub(crate) fn aim(&self, target: Option<String>) {
        self.shared.target.send_replace(target);
    }

    pub(crate) fn turn(&self, weather: Weather) {
        self.shared.weather.send_replace(weather);
    }

    /// Ends every connection, whatever is under way on it.
    pub(crate) fn cut(&self) {
        self.shared.cuts.send_modify(|count| *count += 1);
    }

    /// Flips a bit of the next long piece that passes, so many bytes before its end.
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

    /// Of every connection ends the direction away from whoever dialled; the other one stays open.
    pub(crate) fn half_close(&self) {
        self.shared.halves.send_modify(|count| *count += 1);
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((near, _)) = listener.accept().await {
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

async fn carry(near: TcpStream, shared: &Shared) {
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
        let mut halves = shared.halves.subscribe();
        let (mut near_read, mut far_write) = (near_read, far_write);
        tokio::select! {
            () = relay(&mut near_read, &mut far_write, shared) => {}
            _ = halves.changed() => {
                // What still comes is swallowed, as a dead router's memory would.
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

async fn relay(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf, shared: &Shared) {
    let mut weather = shared.weather.subscribe();
    let mut buffer = vec![0; 1 << 14];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let arrived = Instant::now();
        let now = *weather.borrow_and_update();
        match now {
            Weather::Clear => {}
            Weather::Late(late) => sleep_until(arrived + late).await,
            Weather::Slow(rate) => {
                let takes = Duration::from_secs_f64(count as f64 / f64::from(rate));
                tokio::select! {
                    () = sleep_until(arrived + takes) => {}
                    _ = weather.changed() => {}
                }
            }
            Weather::Frozen => {
                let thawed = weather.wait_for(|now| *now != Weather::Frozen);
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
