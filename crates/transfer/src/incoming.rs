//! The receiving end over sockets: check who knocks, then verify and hand on what arrives.
//!
//! Owns: the check of a hello, the streams of an incoming link, and the account of what its peer was
//! granted. Never: writes to a pool, or dials.
//! Invariant: when [`receive`] or [`receive_heads`] has returned, nothing more of the link arrives.

use crate::announced::{self, Announced};
use crate::buffer::Buffers;
use crate::config::{LinkEvent, LinksConfig};
use crate::credit::{Account, Hold};
use crate::handshake::Wish;
use crate::pass::{Admitted, Passes};
use crate::payload::{Payload, Place};
use crate::shared_memory::{Mirror, SlotView};
use crate::socket::{Reader, Received, SocketError, write};
use crate::tcp::{self, TcpEnd, TcpReader, TcpWriter};
use crate::wire::{FrameHead, Hello, Message, SLOTS_PER_GRANT_MAX};
use cleave_domain::WorkerRef;
use cleave_kv::{Condition, Packet};
use std::pin::pin;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Pongs that wait to be written; a peer that asks faster than it reads is cut off.
const PONGS_MAX: usize = 16;
/// Streams of one link, at most.
pub(crate) const STREAMS_MAX: usize = 16;

/// One connection, both ways.
pub(crate) struct Stream<R, W> {
    pub(crate) reader: Reader<R>,
    pub(crate) writer: W,
}

/// A peer that has shown who it is, and wants a link.
pub(crate) struct Visitor<R, W> {
    pub(crate) peer: WorkerRef,
    pub(crate) stream: Stream<R, W>,
}

/// What somebody who knocks wants.
pub(crate) enum Knock<R, W> {
    Link(Visitor<R, W>),
    /// A link, whose payloads its network card writes.
    Approach(Visitor<R, W>),
    /// To be a further stream of a link.
    Join {
        from: WorkerRef,
        key: u64,
        stream: Stream<R, W>,
    },
}

impl<R, W: AsyncWrite + Unpin> Visitor<R, W> {
    /// Tells it why it is not let in.
    pub(crate) async fn turn_away(mut self, reason: &str) -> Result<(), SocketError> {
        let reason = reason.to_owned();
        write(
            &mut self.stream.writer,
            &Message::Reject(reason.clone()),
            &[],
        )
        .await?;
        Err(SocketError::Refused(reason))
    }
}

/// What a link's host gives it.
pub(crate) struct Seat {
    pub(crate) key: u64,
    /// Further streams.
    pub(crate) joining: mpsc::Receiver<TcpEnd>,
    /// Told when a newer link of the same peer is to take its place.
    pub(crate) replaced: Arc<Notify>,
}

/// Where somebody knocks.
#[derive(Clone, Copy)]
pub(crate) struct Door<'a> {
    pub(crate) config: &'a LinksConfig,
    /// Whether somebody of this name is of the fleet: others are not told what this worker is.
    pub(crate) is_known: &'a (dyn Fn(WorkerRef) -> bool + Send + Sync),
}

/// Takes a TCP connection.
pub(crate) async fn greet(
    door: Door<'_>,
    stream: TcpStream,
) -> Result<Knock<TcpReader, TcpWriter>, SocketError> {
    let config = door.config;
    let taken = timeout(config.connect_timeout, tcp::take(config, stream)).await;
    let slow = SocketError::Slow(config.connect_timeout);
    hear_knock(door, taken.map_err(|_| slow)??).await
}

/// Reads the first message and checks it against what this worker is.
pub(crate) async fn hear_knock<R, W>(
    Door { config, is_known }: Door<'_>,
    mut stream: Stream<R, W>,
) -> Result<Knock<R, W>, SocketError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let first = timeout(config.connect_timeout, stream.reader.message())
        .await
        .map_err(|_| SocketError::Slow(config.connect_timeout))??;
    let (hello, wish) = match first {
        Message::Hello(hello) => (hello, Wish::Link),
        Message::Approach(hello) => (hello, Wish::Landing),
        Message::Join { from, key } => return Ok(Knock::Join { from, key, stream }),
        _ => return Err(SocketError::Unexpected("in place of a hello")),
    };
    let peer = hello.from;
    if let Some(reason) = objection(config, &hello) {
        let told = match is_known(peer) {
            true => reason.clone(),
            false => {
                "what it said of itself is not what this worker expects; its log has more".into()
            }
        };
        write(&mut stream.writer, &Message::Reject(told), &[]).await?;
        return Err(SocketError::Refused(reason));
    }
    let visitor = Visitor { peer, stream };
    Ok(match wish {
        Wish::Link => Knock::Link(visitor),
        Wish::Landing => Knock::Approach(visitor),
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

/// Receives over TCP until the link ends. Returns why it ended.
pub(crate) async fn receive(
    visitor: Visitor<TcpReader, TcpWriter>,
    mut seat: Seat,
    config: &LinksConfig,
    events: &mpsc::Sender<LinkEvent>,
) -> SocketError {
    let Visitor { peer, mut stream } = visitor;
    let window = config.window();
    let welcome = Message::Welcome {
        me: config.me,
        credit: u64::from(window),
        key: seat.key,
        frame_bytes: config.stream_frame_bytes(),
    };
    if let Err(error) = write(&mut stream.writer, &welcome, &[]).await {
        return error;
    }
    let hearing = Hearing {
        peer,
        block_bytes: config.block_bytes,
        account: Account::of_bytes(window),
        places: Places::Buffers(Buffers::new(config.stream_frame_bytes(), window)),
        events: events.clone(),
        passes: config.passes.clone(),
    };
    let hearing = Arc::new(hearing);
    let mut streams = JoinSet::new();
    streams.spawn(attend(stream, Arc::clone(&hearing), Grants::Here));
    let error = loop {
        tokio::select! {
            further = seat.joining.recv() => match further {
                Some(stream) if streams.len() < STREAMS_MAX => {
                    streams.spawn(attend(stream, Arc::clone(&hearing), Grants::Elsewhere));
                }
                Some(_) => break SocketError::Unexpected("stream beyond the limit of a link"),
                None => break SocketError::Closing,
            },
            ended = streams.join_next() => {
                let ended = ended.expect("there is the first stream");
                break ended.unwrap_or(SocketError::Closing);
            }
            () = seat.replaced.notified() => break SocketError::Replaced,
        }
    };
    // One lost stream is the link lost: the others end too, before anybody is told.
    streams.shutdown().await;
    error
}

/// Receives over one stream whose payloads go another way. Returns why it ended.
pub(crate) async fn receive_heads<R, W>(
    stream: Stream<R, W>,
    hearing: Hearing,
    seat: Seat,
) -> SocketError
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    tokio::select! {
        error = attend(stream, Arc::new(hearing), Grants::Here) => error,
        () = seat.replaced.notified() => SocketError::Replaced,
    }
}

/// What the streams of a link share.
pub(crate) struct Hearing {
    pub(crate) peer: WorkerRef,
    pub(crate) block_bytes: u32,
    pub(crate) account: Arc<Account>,
    pub(crate) places: Places,
    pub(crate) events: mpsc::Sender<LinkEvent>,
    pub(crate) passes: Option<Passes>,
}

/// Where payloads are.
pub(crate) enum Places {
    /// They come out of the stream.
    Buffers(Buffers),
    /// They are in the ring, already or soon.
    Ring(Mirror, Arrivals),
    /// They are in the pool already.
    Pool,
}

/// When what a head speaks of is in its slot.
pub(crate) enum Arrivals {
    /// Before the head: both ends have mapped the ring.
    Mapped,
    /// When the sender's card has written it.
    Announced(Announced),
}

/// Which stream of a link says what credit came back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Grants {
    Here,
    Elsewhere,
}

async fn attend<R, W>(stream: Stream<R, W>, hearing: Arc<Hearing>, grants: Grants) -> SocketError
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let Stream {
        mut reader,
        mut writer,
    } = stream;
    let (pongs, asked) = mpsc::channel(PONGS_MAX);
    let is_announced = matches!(hearing.places, Places::Ring(_, Arrivals::Announced(_)));
    let mut heard = pin!(hear(&mut reader, &hearing, pongs));
    tokio::select! {
        error = answer(&mut writer, (&hearing.account, grants), asked) => match is_announced {
            // A sender that has gone takes no answer, and what it wrote before is here to be heard: its heads may wait for
            // writes that have come, and a seal among them must not be lost. It ends with what was written, for nothing more
            // comes on a stream that takes no answer; were it not so, the sender, which hears no answer to its pings, would
            // end it when it has heard nothing for as long as a peer may be silent.
            true => heard.await,
            false => error,
        },
        error = &mut heard => error,
    }
}

/// Gives credit back and answers pings.
async fn answer<W: AsyncWrite + Unpin>(
    writer: &mut W,
    (account, grants): (&Account, Grants),
    mut asked: mpsc::Receiver<u64>,
) -> SocketError {
    loop {
        let messages = tokio::select! {
            returned = account.returned(), if grants == Grants::Here => {
                let slots = returned.slots.chunks(SLOTS_PER_GRANT_MAX);
                let mut messages: Vec<_> = slots.map(|slots| Message::GrantSlots(slots.to_vec())).collect();
                if returned.bytes > 0 {
                    messages.push(Message::Grant(returned.bytes));
                }
                messages
            },
            nonce = asked.recv() => match nonce {
                Some(nonce) => vec![Message::Pong(nonce)],
                None => return SocketError::Closing,
            },
        };
        for message in &messages {
            if let Err(error) = write(writer, message, &[]).await {
                return error;
            }
        }
    }
}

pub(crate) struct Arrival {
    packet: Packet,
    condition: Condition,
    payload: Option<Payload>,
}

/// What was read, and is to be acted on in this order.
pub(crate) struct Heard {
    pub(crate) what: What,
    /// The slot that must have been written first.
    pub(crate) after: Option<u32>,
}

pub(crate) enum What {
    Arrival(Arrival),
    /// A slot that means nothing.
    Probe(SlotView, Hold),
    Ping(u64),
    Nothing,
}

impl From<What> for Heard {
    fn from(what: What) -> Self {
        Self { what, after: None }
    }
}

async fn hear<R: AsyncRead + Unpin>(
    reader: &mut Reader<R>,
    hearing: &Hearing,
    pongs: mpsc::Sender<u64>,
) -> SocketError {
    if let Places::Ring(_, Arrivals::Announced(announced)) = &hearing.places {
        return announced::hear(reader, (hearing, announced), pongs).await;
    }
    let mut admitted = Admitted::new(hearing.passes.clone());
    loop {
        let heard = match hear_one(reader, (hearing, &mut admitted)).await {
            Ok(heard) => heard,
            Err(error) => return error,
        };
        if let Err(error) = hearing.act(heard.what, &pongs).await {
            return error;
        }
    }
}

pub(crate) async fn hear_one<R: AsyncRead + Unpin>(
    reader: &mut Reader<R>,
    (hearing, admitted): (&Hearing, &mut Admitted),
) -> Result<Heard, SocketError> {
    let heard = hear_message(reader, (hearing, admitted)).await;
    if let Err(SocketError::Pass(..)) = heard {
        let forged = LinkEvent::Forged { peer: hearing.peer };
        // Nobody listens any more when the worker itself is closing.
        let _ = hearing.events.send(forged).await;
    }
    heard
}

async fn hear_message<R: AsyncRead + Unpin>(
    reader: &mut Reader<R>,
    (hearing, admitted): (&Hearing, &mut Admitted),
) -> Result<Heard, SocketError> {
    let message = match reader.next().await? {
        Received::Message(message) => message,
        Received::Probe => return Ok(What::Nothing.into()),
        Received::Frame(head) => {
            admitted.may_write(head.handoff)?;
            let arrival = hearing.frame(reader, head).await?;
            return Ok(What::Arrival(arrival).into());
        }
    };
    let packet = match message {
        Message::Pass(handoff, pass) => {
            admitted.show(hearing.peer, (handoff, pass))?;
            return Ok(What::Nothing.into());
        }
        Message::Seal(seal) => {
            admitted.may_write(seal.handoff)?;
            Packet::Seal(seal)
        }
        Message::Landed(handoff) => Packet::Landed { handoff },
        Message::Abandoned(handoff, cause) => Packet::Abandoned { handoff, cause },
        Message::Stop(handoff) => Packet::Stop { handoff },
        Message::Stopped(handoff) => Packet::Stopped { handoff },
        Message::SlotFrame(head, slot) => {
            admitted.may_write(head.handoff)?;
            return hearing.slot_frame(head, slot);
        }
        Message::PoolFrame(head) => {
            admitted.may_write(head.handoff)?;
            return Ok(What::Arrival(hearing.pool_frame(head)?).into());
        }
        Message::SlotProbe(slot) => return hearing.probe(slot),
        Message::Ping(nonce) => return Ok(What::Ping(nonce).into()),
        Message::Wait => return Ok(What::Nothing.into()),
        _ => return Err(SocketError::Unexpected("from the sender of a link")),
    };
    let arrival = Arrival {
        packet,
        condition: Condition::Intact,
        payload: None,
    };
    Ok(What::Arrival(arrival).into())
}

impl Hearing {
    /// Says what arrived, answers pings, looks at probes.
    pub(crate) async fn act(
        &self,
        what: What,
        pongs: &mpsc::Sender<u64>,
    ) -> Result<(), SocketError> {
        let Arrival {
            packet,
            condition,
            payload,
        } = match what {
            What::Arrival(arrival) => arrival,
            What::Nothing => return Ok(()),
            What::Ping(nonce) => {
                let answered = pongs.try_send(nonce);
                return answered.map_err(|_| SocketError::Unexpected("flood of pings"));
            }
            What::Probe(view, hold) => {
                // As a frame's verification would read it. It is credit again at once.
                std::hint::black_box(crate::checksum(&view));
                drop(hold);
                return Ok(());
            }
        };
        let event = LinkEvent::Arrived {
            from: self.peer,
            packet,
            condition,
            payload,
        };
        let told = self.events.send(event).await;
        told.map_err(|_| SocketError::Closing)
    }

    async fn frame<R: AsyncRead + Unpin>(
        &self,
        reader: &mut Reader<R>,
        head: FrameHead,
    ) -> Result<Arrival, SocketError> {
        let Places::Buffers(buffers) = &self.places else {
            return Err(SocketError::Unexpected("frame beside a ring"));
        };
        if head.part.len > buffers.buffer_bytes() {
            return Err(SocketError::Unexpected("frame longer than was agreed"));
        }
        // Credit first: memory is set aside only for what was granted.
        let hold = self.account.take(u64::from(head.part.len));
        let hold = hold.ok_or(SocketError::Overdrawn)?;
        let mut buffer = buffers.take(head.part.len);
        reader.payload(&mut buffer).await?;
        let condition = match crate::checksum(&buffer) == head.checksum {
            true => Condition::Intact,
            false => Condition::Damaged,
        };
        let payload = Payload::new(Place::Buffer(buffer), hold);
        Ok(arrival(head, payload, condition))
    }

    /// Takes a slot, and says whether it must be waited for.
    fn slot(
        &self,
        slot: u32,
        len: Option<u32>,
    ) -> Result<(SlotView, Hold, Option<u32>), SocketError> {
        let Places::Ring(mirror, arrivals) = &self.places else {
            return Err(SocketError::Unexpected("slot without a ring"));
        };
        let hold = self.account.take_slot(slot).ok_or(SocketError::Overdrawn)?;
        let view = mirror.view(slot, len.unwrap_or(mirror.slot_bytes()));
        let view = view.ok_or(SocketError::Unexpected("frame longer than a slot"))?;
        let after = match arrivals {
            Arrivals::Mapped => None,
            Arrivals::Announced(_) => Some(slot),
        };
        Ok((view, hold, after))
    }

    fn slot_frame(&self, head: FrameHead, slot: u32) -> Result<Heard, SocketError> {
        head.fits(self.block_bytes)?;
        let (view, hold, after) = self.slot(slot, Some(head.part.len))?;
        let payload = Payload::new(Place::Slot(view, head.checksum), hold);
        // Not looked at here: `Payload::land` verifies it where it is written to.
        let what = What::Arrival(arrival(head, payload, Condition::Intact));
        Ok(Heard { what, after })
    }

    fn pool_frame(&self, head: FrameHead) -> Result<Arrival, SocketError> {
        let Places::Pool = &self.places else {
            return Err(SocketError::Unexpected(
                "frame of a pool that was not opened",
            ));
        };
        head.fits(self.block_bytes)?;
        let hold = self.account.take(u64::from(head.part.len));
        let hold = hold.ok_or(SocketError::Overdrawn)?;
        let payload = Payload::new(Place::Pool(head.checksum), hold);
        Ok(arrival(head, payload, Condition::Intact))
    }

    fn probe(&self, slot: u32) -> Result<Heard, SocketError> {
        let (view, hold, after) = self.slot(slot, None)?;
        let what = What::Probe(view, hold);
        Ok(Heard { what, after })
    }
}

fn arrival(head: FrameHead, payload: Payload, condition: Condition) -> Arrival {
    let FrameHead {
        handoff,
        block,
        part,
        checksum,
    } = head;
    Arrival {
        packet: Packet::Frame {
            handoff,
            block,
            part,
            checksum,
        },
        condition,
        payload: Some(payload),
    }
}
