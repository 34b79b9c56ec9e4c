//! One stream of an outgoing link: sends queued messages and heartbeats, and receives credit.

use crate::config::LinkEvent;
use crate::grant::HANDOFFS_MAX;
use crate::link::{OutboundPayload, QueuedMessage, SendCredit};
use crate::measure::NONCE_LAST;
use crate::socket::{LinkError, MessageReader, write_message};
use crate::transports::nixl::RdmaWriter;
use crate::transports::shm::SenderSlot;
use crate::wire::{FrameHead, LinkMessage};
use cleave_domain::{HandoffId, WorkerRef};
use cleave_kv::{Packet, Seal};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Mutex, mpsc};
use tokio::time::{MissedTickBehavior, interval};

/// The receiver returned more credit than it was sent.
pub(crate) const CREDIT_BEYOND_WINDOW: LinkError = LinkError::Unexpected("grant beyond the window");

/// Sends queued messages; an idle stream takes the next one. Returns `Ok` when no sender is left.
pub(super) async fn send_messages<W: AsyncWrite + Unpin>(
    queue: Arc<Mutex<mpsc::UnboundedReceiver<QueuedMessage>>>,
    mut writer: W,
    state: StreamSendState,
    beat: Duration,
) -> Result<(), LinkError> {
    let mut beats = interval(beat);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut nonce = NONCE_LAST;
    let StreamSendState {
        rdma_writer: far,
        grants_shown: mut shown,
    } = state;
    loop {
        let next = async { queue.lock().await.recv().await };
        tokio::select! {
            queued = next => match queued {
                Some(queued) => {
                    if let Some(grant) = shown.grant_message(&queued) {
                        write_message(&mut writer, &grant, &[]).await?;
                    }
                    send_message(&mut writer, far.as_deref(), queued).await?;
                }
                None => {
                    if let Some(far) = &far {
                        far.wait_until_idle().await;
                    }
                    return Ok(());
                }
            },
            _ = beats.tick() => {
                nonce += 1;
                write_message(&mut writer, &LinkMessage::Ping(nonce), &[]).await?;
            }
        }
    }
}

/// The state of one stream beside its socket.
pub(super) struct StreamSendState {
    /// The RDMA writer of payloads, if the link has one.
    rdma_writer: Option<Arc<RdmaWriter>>,
    grants_shown: ShownGrants,
}

impl StreamSendState {
    pub(super) fn new(rdma_writer: Option<Arc<RdmaWriter>>) -> Self {
        Self {
            rdma_writer,
            grants_shown: ShownGrants::default(),
        }
    }
}

/// The hand-offs whose write grant was sent on this stream.
#[derive(Default)]
struct ShownGrants {
    handoffs: BTreeSet<HandoffId>,
}

impl ShownGrants {
    /// The write grant that must be sent before this message, if any.
    fn grant_message(&mut self, queued: &QueuedMessage) -> Option<LinkMessage> {
        let (Packet::Frame { handoff, .. } | Packet::Seal(Seal { handoff, .. })) = &queued.packet
        else {
            return None;
        };
        let grant = queued.grant?;
        if self.handoffs.len() >= HANDOFFS_MAX {
            self.handoffs.clear();
        }
        let is_new = self.handoffs.insert(*handoff);
        is_new.then_some(LinkMessage::WriteGrant(*handoff, grant))
    }
}

/// Lends the slot to the receiver. Its write begins before the head that names it is sent.
pub(crate) fn lend_slot(slot: SenderSlot, far: Option<&RdmaWriter>) -> u32 {
    let len = slot.len();
    let number = slot.lend_to_receiver();
    if let Some(far) = far {
        far.write(number, len);
    }
    number
}

async fn send_message<W: AsyncWrite + Unpin>(
    writer: &mut W,
    far: Option<&RdmaWriter>,
    queued: QueuedMessage,
) -> Result<(), LinkError> {
    let QueuedMessage {
        packet,
        payload,
        grant: _,
    } = queued;
    let message = match packet {
        Packet::Frame {
            handoff,
            block,
            part,
            checksum,
        } => {
            let head = FrameHead {
                handoff,
                block,
                part,
                checksum,
            };
            match payload {
                Some(OutboundPayload::Slot(slot)) => {
                    LinkMessage::SlotFrame(head, lend_slot(slot, far))
                }
                Some(OutboundPayload::Buffer(bytes)) => {
                    return write_message(writer, &LinkMessage::Frame(head), &bytes).await;
                }
                None => LinkMessage::PoolFrame(head),
            }
        }
        Packet::Seal(seal) => LinkMessage::Seal(seal),
        Packet::Landed { handoff } => LinkMessage::Landed(handoff),
        Packet::Abandoned { handoff, cause } => LinkMessage::Abandoned(handoff, cause),
        Packet::Stop { handoff } => LinkMessage::Stop(handoff),
        Packet::Stopped { handoff } => LinkMessage::Stopped(handoff),
    };
    write_message(writer, &message, &[]).await
}

/// The state that receives credit of one link.
pub(super) struct CreditReceiver {
    pub(super) peer: WorkerRef,
    pub(super) window: u32,
    pub(super) credit: Arc<SendCredit>,
    pub(super) events: mpsc::Sender<LinkEvent>,
}

pub(super) async fn receive_credit<R: AsyncRead + Unpin>(
    mut reader: MessageReader<R>,
    granted: CreditReceiver,
) -> LinkError {
    let CreditReceiver {
        peer,
        window,
        credit,
        events,
    } = granted;
    loop {
        let sound = match reader.message().await {
            Ok(LinkMessage::Credit(bytes)) => credit.grant(bytes, window),
            Ok(LinkMessage::CreditSlots(slots)) => {
                credit.wait_until_unread(&slots).await;
                credit.grant_slots(&slots)
            }
            Ok(LinkMessage::Pong(_)) => continue,
            Ok(_) => return LinkError::Unexpected("from the receiver of a link"),
            Err(error) => return error,
        };
        if !sound {
            return CREDIT_BEYOND_WINDOW;
        }
        if events
            .send(LinkEvent::CreditGranted { peer })
            .await
            .is_err()
        {
            return LinkError::Closing;
        }
    }
}
