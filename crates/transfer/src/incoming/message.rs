//! The messages of one stream of an incoming link: verifies each one, and performs its action.

use super::{LinkReceiver, PayloadSource, SlotReadiness};
use crate::config::LinkEvent;
use crate::credit::CreditHold;
use crate::grant::AdmittedHandoffs;
use crate::payload::{PayloadLocation, ReceivedPayload};
use crate::socket::{LinkError, MessageReader, ReceivedMessage};
use crate::transports::nixl::receive_ahead;
use crate::transports::shm::SlotView;
use crate::wire::{FrameHead, LinkMessage};
use cleave_kv::{Packet, PayloadCondition};
use tokio::io::AsyncRead;
use tokio::sync::mpsc;

pub(crate) struct ArrivedPacket {
    packet: Packet,
    condition: PayloadCondition,
    payload: Option<ReceivedPayload>,
}

/// An action read from the stream; actions are performed in this order.
pub(crate) struct DeferredAction {
    pub(crate) action: LinkAction,
    /// The slot that must have been written before the action.
    pub(crate) after_slot: Option<u32>,
}

pub(crate) enum LinkAction {
    Deliver(ArrivedPacket),
    /// A slot with probe bytes.
    Probe(SlotView, CreditHold),
    Ping(u64),
    Nothing,
}

impl From<LinkAction> for DeferredAction {
    fn from(action: LinkAction) -> Self {
        Self {
            action,
            after_slot: None,
        }
    }
}

pub(super) async fn receive_messages<R: AsyncRead + Unpin>(
    reader: &mut MessageReader<R>,
    link_receiver: &LinkReceiver,
    pongs: mpsc::Sender<u64>,
) -> LinkError {
    if let PayloadSource::Ring(_, SlotReadiness::AfterWrite(pending_writes)) =
        &link_receiver.payload_source
    {
        return receive_ahead(reader, link_receiver, pending_writes, pongs).await;
    }
    let mut admitted = AdmittedHandoffs::new(link_receiver.grants.clone());
    loop {
        let deferred = match receive_action(reader, link_receiver, &mut admitted).await {
            Ok(deferred) => deferred,
            Err(error) => return error,
        };
        if let Err(error) = link_receiver.perform(deferred.action, &pongs).await {
            return error;
        }
    }
}

pub(crate) async fn receive_action<R: AsyncRead + Unpin>(
    reader: &mut MessageReader<R>,
    link_receiver: &LinkReceiver,
    admitted: &mut AdmittedHandoffs,
) -> Result<DeferredAction, LinkError> {
    let deferred = receive_message(reader, link_receiver, admitted).await;
    if let Err(LinkError::InvalidGrant(..)) = deferred {
        let forged = LinkEvent::InvalidGrant {
            peer: link_receiver.peer,
        };
        // The receiver of events is gone only when the worker itself is closing.
        let _ = link_receiver.events.send(forged).await;
    }
    deferred
}

async fn receive_message<R: AsyncRead + Unpin>(
    reader: &mut MessageReader<R>,
    link_receiver: &LinkReceiver,
    admitted: &mut AdmittedHandoffs,
) -> Result<DeferredAction, LinkError> {
    let message = match reader.next().await? {
        ReceivedMessage::Message(message) => message,
        ReceivedMessage::Probe => return Ok(LinkAction::Nothing.into()),
        ReceivedMessage::Frame(head) => {
            admitted.check_admitted(head.handoff)?;
            let arrival = link_receiver.receive_frame(reader, head).await?;
            return Ok(LinkAction::Deliver(arrival).into());
        }
    };
    let packet = match message {
        LinkMessage::WriteGrant(handoff, grant) => {
            admitted.admit(link_receiver.peer, handoff, grant)?;
            return Ok(LinkAction::Nothing.into());
        }
        LinkMessage::Seal(seal) => {
            admitted.check_admitted(seal.handoff)?;
            Packet::Seal(seal)
        }
        LinkMessage::Landed(handoff) => Packet::Landed { handoff },
        LinkMessage::Abandoned(handoff, cause) => Packet::Abandoned { handoff, cause },
        LinkMessage::Stop(handoff) => Packet::Stop { handoff },
        LinkMessage::Stopped(handoff) => Packet::Stopped { handoff },
        LinkMessage::SlotFrame(head, slot) => {
            admitted.check_admitted(head.handoff)?;
            return link_receiver.slot_frame(head, slot);
        }
        LinkMessage::PoolFrame(head) => {
            admitted.check_admitted(head.handoff)?;
            return Ok(LinkAction::Deliver(link_receiver.pool_frame(head)?).into());
        }
        LinkMessage::SlotProbe(slot) => return link_receiver.probe(slot),
        LinkMessage::Ping(nonce) => return Ok(LinkAction::Ping(nonce).into()),
        LinkMessage::KeepAlive => return Ok(LinkAction::Nothing.into()),
        _ => return Err(LinkError::Unexpected("from the sender of a link")),
    };
    let arrival = ArrivedPacket {
        packet,
        condition: PayloadCondition::Intact,
        payload: None,
    };
    Ok(LinkAction::Deliver(arrival).into())
}

impl LinkReceiver {
    /// Reports an arrived packet, answers a ping, or reads a probe.
    pub(crate) async fn perform(
        &self,
        action: LinkAction,
        pongs: &mpsc::Sender<u64>,
    ) -> Result<(), LinkError> {
        let ArrivedPacket {
            packet,
            condition,
            payload,
        } = match action {
            LinkAction::Deliver(arrival) => arrival,
            LinkAction::Nothing => return Ok(()),
            LinkAction::Ping(nonce) => {
                let answered = pongs.try_send(nonce);
                return answered.map_err(|_| LinkError::Unexpected("flood of pings"));
            }
            LinkAction::Probe(view, hold) => {
                // Reads the probe as the verification of a frame would. Its credit is returned at
                // once.
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
        let sent = self.events.send(event).await;
        sent.map_err(|_| LinkError::Closing)
    }

    async fn receive_frame<R: AsyncRead + Unpin>(
        &self,
        reader: &mut MessageReader<R>,
        head: FrameHead,
    ) -> Result<ArrivedPacket, LinkError> {
        let PayloadSource::Buffers(buffers) = &self.payload_source else {
            return Err(LinkError::Unexpected(
                "frame with its payload on a link with a ring",
            ));
        };
        if head.part.len > buffers.buffer_bytes() {
            return Err(LinkError::Unexpected("frame longer than was agreed"));
        }
        // Credit is checked first: memory is allocated only for granted bytes.
        let hold = self.account.hold_bytes(u64::from(head.part.len));
        let hold = hold.ok_or(LinkError::CreditExceeded)?;
        let mut buffer = buffers.take(head.part.len);
        reader.payload(&mut buffer).await?;
        let condition = if crate::checksum(&buffer) == head.checksum {
            PayloadCondition::Intact
        } else {
            PayloadCondition::Damaged
        };
        let payload = ReceivedPayload::new(PayloadLocation::Buffer(buffer), hold);
        Ok(arrived_frame(head, payload, condition))
    }

    /// Takes a slot; returns its number if its write must be awaited.
    fn take_slot(
        &self,
        slot: u32,
        len: Option<u32>,
    ) -> Result<(SlotView, CreditHold, Option<u32>), LinkError> {
        let PayloadSource::Ring(mirror, arrivals) = &self.payload_source else {
            return Err(LinkError::Unexpected("slot without a ring"));
        };
        let hold = self
            .account
            .hold_slot(slot)
            .ok_or(LinkError::CreditExceeded)?;
        let view = mirror.view(slot, len.unwrap_or(mirror.slot_bytes()));
        let view = view.ok_or(LinkError::Unexpected("frame longer than a slot"))?;
        let after = match arrivals {
            SlotReadiness::Mapped => None,
            SlotReadiness::AfterWrite(_) => Some(slot),
        };
        Ok((view, hold, after))
    }

    fn slot_frame(&self, head: FrameHead, slot: u32) -> Result<DeferredAction, LinkError> {
        head.check_within_block(self.block_bytes)?;
        let (view, hold, after) = self.take_slot(slot, Some(head.part.len))?;
        let payload = ReceivedPayload::new(PayloadLocation::Slot(view, head.checksum), hold);
        // The checksum is not verified here: `ReceivedPayload::write_verified` verifies the bytes
        // at their destination.
        let action = LinkAction::Deliver(arrived_frame(head, payload, PayloadCondition::Intact));
        Ok(DeferredAction {
            action,
            after_slot: after,
        })
    }

    fn pool_frame(&self, head: FrameHead) -> Result<ArrivedPacket, LinkError> {
        let PayloadSource::Pool = &self.payload_source else {
            return Err(LinkError::Unexpected("frame of a pool that was not opened"));
        };
        head.check_within_block(self.block_bytes)?;
        let hold = self.account.hold_bytes(u64::from(head.part.len));
        let hold = hold.ok_or(LinkError::CreditExceeded)?;
        let payload = ReceivedPayload::new(PayloadLocation::Pool(head.checksum), hold);
        Ok(arrived_frame(head, payload, PayloadCondition::Intact))
    }

    fn probe(&self, slot: u32) -> Result<DeferredAction, LinkError> {
        let (view, hold, after) = self.take_slot(slot, None)?;
        let action = LinkAction::Probe(view, hold);
        Ok(DeferredAction {
            action,
            after_slot: after,
        })
    }
}

fn arrived_frame(
    head: FrameHead,
    payload: ReceivedPayload,
    condition: PayloadCondition,
) -> ArrivedPacket {
    let FrameHead {
        handoff,
        block,
        part,
        checksum,
    } = head;
    ArrivedPacket {
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
