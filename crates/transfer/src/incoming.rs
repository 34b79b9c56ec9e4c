//! The receiving end over TCP: check who knocks, then verify and hand on what arrives.

use crate::config::{LinkEvent, LinksConfig};
use crate::credit::Account;
use crate::payload::Payload;
use crate::socket::{Reader, Received, SocketError, write};
use crate::wire::{FrameHead, Hello, Message};
use bytes::Bytes;
use cleave_domain::WorkerRef;
use cleave_kv::Packet;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Pongs that wait to be written; a peer that asks faster than it reads is cut off.
const PONGS_MAX: usize = 16;

/// A peer that has shown who it is.
pub(crate) struct Visitor {
    pub(crate) peer: WorkerRef,
    reader: Reader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

/// Reads the first message and checks it against what this worker is.
pub(crate) async fn greet(config: &LinksConfig, stream: TcpStream) -> Result<Visitor, SocketError> {
    stream.set_nodelay(true)?;
    let (reader, mut writer) = stream.into_split();
    let mut reader = Reader::new(reader, config.silence_max, config.block_bytes);
    let hello = timeout(config.connect_timeout, reader.message())
        .await
        .map_err(|_| SocketError::Slow(config.connect_timeout))??;
    let Message::Hello(hello) = hello else {
        return Err(SocketError::Unexpected("in place of a hello"));
    };
    let peer = hello.from;
    if let Some(reason) = objection(config, &hello) {
        return turn_away(&mut writer, reason).await;
    }
    Ok(Visitor {
        peer,
        reader,
        writer,
    })
}

/// Both values are named, so that whoever reads the log knows which end to change.
fn objection(config: &LinksConfig, hello: &Hello) -> Option<String> {
    let Hello {
        from,
        to,
        block_bytes,
        fingerprint,
    } = hello;
    if *to != config.me {
        let me = config.me;
        return Some(format!(
            "this is worker {me}, and {from} asked for worker {to}"
        ));
    }
    if *fingerprint != config.fingerprint.0 {
        let mine = &config.fingerprint.0;
        return Some(format!(
            "KV does not fit: worker {from} has fingerprint \"{fingerprint}\", worker {to} has \"{mine}\""
        ));
    }
    if *block_bytes != config.block_bytes {
        let mine = config.block_bytes;
        return Some(format!(
            "KV does not fit: blocks of worker {from} have {block_bytes} bytes, those of worker {to} {mine}"
        ));
    }
    None
}

async fn turn_away<T>(writer: &mut OwnedWriteHalf, reason: String) -> Result<T, SocketError> {
    write(writer, &Message::Reject(reason.clone()), Bytes::new()).await?;
    Err(SocketError::Refused(reason))
}

impl Visitor {
    /// Welcomes the peer and hands on what it sends until the link ends. Returns why it ended.
    pub(crate) async fn receive(
        self,
        config: &LinksConfig,
        events: &mpsc::Sender<LinkEvent>,
    ) -> SocketError {
        let Self {
            peer,
            mut reader,
            mut writer,
        } = self;
        let window = config.window();
        let welcome = Message::Welcome {
            me: config.me,
            credit: u64::from(window),
        };
        if let Err(error) = write(&mut writer, &welcome, Bytes::new()).await {
            return error;
        }
        let account = Account::new(window);
        let (pongs, asked) = mpsc::channel(PONGS_MAX);
        tokio::select! {
            error = answer(&mut writer, &account, asked) => error,
            error = hear(&mut reader, Hearing { peer, account: &account, pongs, events }) => error,
        }
    }
}

/// Gives credit back and answers pings.
async fn answer<W: AsyncWrite + Unpin>(
    writer: &mut W,
    account: &Account,
    mut asked: mpsc::Receiver<u64>,
) -> SocketError {
    loop {
        let message = tokio::select! {
            bytes = account.returned() => Message::Grant(bytes),
            nonce = asked.recv() => match nonce {
                Some(nonce) => Message::Pong(nonce),
                None => return SocketError::Closing,
            },
        };
        if let Err(error) = write(writer, &message, Bytes::new()).await {
            return error;
        }
    }
}

/// What the reading half needs.
struct Hearing<'a> {
    peer: WorkerRef,
    account: &'a Arc<Account>,
    pongs: mpsc::Sender<u64>,
    events: &'a mpsc::Sender<LinkEvent>,
}

struct Arrival {
    packet: Packet,
    intact: bool,
    payload: Option<Payload>,
}

async fn hear<R: AsyncRead + Unpin>(reader: &mut Reader<R>, hearing: Hearing<'_>) -> SocketError {
    let from = hearing.peer;
    loop {
        let Arrival {
            packet,
            intact,
            payload,
        } = match hear_one(reader, &hearing).await {
            Ok(Some(arrival)) => arrival,
            Ok(None) => continue,
            Err(error) => return error,
        };
        let event = LinkEvent::Arrived {
            from,
            packet,
            intact,
            payload,
        };
        if hearing.events.send(event).await.is_err() {
            return SocketError::Closing;
        }
    }
}

async fn hear_one<R: AsyncRead + Unpin>(
    reader: &mut Reader<R>,
    hearing: &Hearing<'_>,
) -> Result<Option<Arrival>, SocketError> {
    let message = match reader.next().await? {
        Received::Message(message) => message,
        Received::Probe => return Ok(None),
        Received::Frame(head) => return receive_frame(reader, hearing, head).await.map(Some),
    };
    let packet = match message {
        Message::Seal(seal) => Packet::Seal(seal),
        Message::Landed(handoff) => Packet::Landed { handoff },
        Message::Abandoned(handoff, cause) => Packet::Abandoned { handoff, cause },
        Message::Ping(nonce) => {
            let answered = hearing.pongs.try_send(nonce);
            return match answered {
                Ok(()) => Ok(None),
                Err(_) => Err(SocketError::Unexpected("flood of pings")),
            };
        }
        _ => return Err(SocketError::Unexpected("from the sender of a link")),
    };
    Ok(Some(Arrival {
        packet,
        intact: true,
        payload: None,
    }))
}

async fn receive_frame<R: AsyncRead + Unpin>(
    reader: &mut Reader<R>,
    hearing: &Hearing<'_>,
    head: FrameHead,
) -> Result<Arrival, SocketError> {
    // Credit first: memory is set aside only for what was granted.
    let hold = hearing.account.take(u64::from(head.part.len));
    let hold = hold.ok_or(SocketError::Overdrawn)?;
    let bytes = reader.payload(head.part.len).await?;
    let packet = Packet::Frame {
        handoff: head.handoff,
        block: head.block,
        part: head.part,
        checksum: head.checksum,
    };
    let intact = crate::checksum(&bytes) == head.checksum;
    Ok(Arrival {
        packet,
        intact,
        payload: Some(Payload::new(bytes, hold)),
    })
}
