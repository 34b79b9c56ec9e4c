//! From a router to a worker.

use super::{FleetWireError, blocks_in, blocks_out, nanos, proto, required, role_of};
use cleave_domain::{
    Deadline, HandoffTarget, MigrateOrder, OnDeadlineMiss, Order, PrefillOrder, ReserveOrder, Role,
};
use std::sync::Arc;
use std::time::Duration;

impl From<Order> for proto::Order {
    fn from(order: Order) -> Self {
        use proto::order::Kind;
        let kind = match order {
            Order::Reserve(reserve) => Kind::Reserve(reserve.into()),
            Order::Prefill(prefill) => Kind::Prefill(prefill.into()),
            Order::Migrate(migrate) => Kind::Migrate(migrate.into()),
            Order::Renew { handoffs } => Kind::Renew(proto::Renew {
                handoffs: handoffs.into_iter().map(Into::into).collect(),
            }),
            Order::Cancel { handoff } => Kind::Cancel(handoff.into()),
            Order::Drain => Kind::Drain(proto::Nothing {}),
            Order::Serve { role } => Kind::Serve(proto::Role::from(role).into()),
            Order::Relay(gossip) => Kind::PassOn(Arc::unwrap_or_clone(gossip).into()),
        };
        Self {
            kind: Some(kind),
            mark: None,
        }
    }
}

impl TryFrom<proto::Order> for Order {
    type Error = FleetWireError;

    fn try_from(order: proto::Order) -> Result<Self, FleetWireError> {
        use proto::order::Kind;
        Ok(match required(order.kind, "order.kind")? {
            Kind::Reserve(reserve) => Self::Reserve(reserve.try_into()?),
            Kind::Prefill(prefill) => Self::Prefill(prefill.try_into()?),
            Kind::Migrate(migrate) => Self::Migrate(migrate.try_into()?),
            Kind::Renew(proto::Renew { handoffs }) => Self::Renew {
                handoffs: handoffs.into_iter().map(Into::into).collect(),
            },
            Kind::Cancel(handoff) => Self::Cancel {
                handoff: handoff.into(),
            },
            Kind::Drain(proto::Nothing {}) => Self::Drain,
            Kind::Serve(role) => Self::Serve {
                role: Role::try_from(role_of(role, "order.serve")?)?,
            },
            Kind::PassOn(gossip) => Self::Relay(Arc::new(gossip.try_into()?)),
        })
    }
}

impl From<MigrateOrder> for proto::Migrate {
    fn from(migrate: MigrateOrder) -> Self {
        let MigrateOrder {
            handoff,
            of,
            target,
            tokens,
        } = migrate;
        Self {
            handoff: Some(handoff.into()),
            of: Some(of.into()),
            target: Some(target.into()),
            tokens,
        }
    }
}

impl TryFrom<proto::Migrate> for MigrateOrder {
    type Error = FleetWireError;

    fn try_from(migrate: proto::Migrate) -> Result<Self, FleetWireError> {
        let proto::Migrate {
            handoff,
            of,
            target,
            tokens,
        } = migrate;
        Ok(Self {
            handoff: required(handoff, "migrate.handoff")?.into(),
            of: required(of, "migrate.of")?.into(),
            target: required(target, "migrate.target")?.try_into()?,
            tokens,
        })
    }
}

impl From<ReserveOrder> for proto::Reserve {
    fn from(reserve: ReserveOrder) -> Self {
        let ReserveOrder {
            handoff,
            request,
            sender,
            expected_output_tokens,
            ahead_tokens,
            waited,
            due,
        } = reserve;
        Self {
            handoff: Some(handoff.into()),
            request: Some(request.as_ref().into()),
            sender: Some(sender.into()),
            expected_output_tokens,
            ahead_tokens,
            waited_nanos: nanos(waited),
            due: due.map(Into::into),
        }
    }
}

impl TryFrom<proto::Reserve> for ReserveOrder {
    type Error = FleetWireError;

    fn try_from(reserve: proto::Reserve) -> Result<Self, FleetWireError> {
        let proto::Reserve {
            handoff,
            request,
            sender,
            expected_output_tokens,
            ahead_tokens,
            waited_nanos,
            due,
        } = reserve;
        Ok(Self {
            handoff: required(handoff, "reserve.handoff")?.into(),
            request: Arc::new(required(request, "reserve.request")?.try_into()?),
            sender: required(sender, "reserve.sender")?.into(),
            expected_output_tokens,
            ahead_tokens,
            waited: Duration::from_nanos(waited_nanos),
            due: due.map(TryInto::try_into).transpose()?,
        })
    }
}

impl From<PrefillOrder> for proto::Prefill {
    fn from(prefill: PrefillOrder) -> Self {
        let PrefillOrder {
            handoff,
            request,
            target,
            waited,
            due,
        } = prefill;
        Self {
            handoff: Some(handoff.into()),
            request: Some(request.as_ref().into()),
            target: Some(target.into()),
            waited_nanos: nanos(waited),
            due: due.map(Into::into),
        }
    }
}

impl TryFrom<proto::Prefill> for PrefillOrder {
    type Error = FleetWireError;

    fn try_from(prefill: proto::Prefill) -> Result<Self, FleetWireError> {
        let proto::Prefill {
            handoff,
            request,
            target,
            waited_nanos,
            due,
        } = prefill;
        Ok(Self {
            handoff: required(handoff, "prefill.handoff")?.into(),
            request: Arc::new(required(request, "prefill.request")?.try_into()?),
            target: required(target, "prefill.target")?.try_into()?,
            waited: Duration::from_nanos(waited_nanos),
            due: due.map(TryInto::try_into).transpose()?,
        })
    }
}

impl From<Deadline> for proto::Due {
    fn from(due: Deadline) -> Self {
        let Deadline { left, unmet } = due;
        let unmet = match unmet {
            OnDeadlineMiss::Refuse => proto::DueUnmet::Refuse,
            OnDeadlineMiss::Serve => proto::DueUnmet::Serve,
        };
        Self {
            left_nanos: nanos(left),
            unmet: unmet.into(),
        }
    }
}

impl TryFrom<proto::Due> for Deadline {
    type Error = FleetWireError;

    fn try_from(due: proto::Due) -> Result<Self, FleetWireError> {
        let unmet = match due.unmet() {
            proto::DueUnmet::Refuse => OnDeadlineMiss::Refuse,
            proto::DueUnmet::Serve => OnDeadlineMiss::Serve,
            proto::DueUnmet::Unspecified => return Err(FleetWireError::Unknown("due.unmet")),
        };
        let proto::Due {
            left_nanos,
            unmet: _,
        } = due;
        Ok(Self {
            left: Duration::from_nanos(left_nanos),
            unmet,
        })
    }
}

impl From<HandoffTarget> for proto::Target {
    fn from(target: HandoffTarget) -> Self {
        let HandoffTarget {
            worker,
            present,
            blocks,
        } = target;
        Self {
            worker: Some(worker.into()),
            present,
            blocks: blocks_out(blocks),
        }
    }
}

impl TryFrom<proto::Target> for HandoffTarget {
    type Error = FleetWireError;

    fn try_from(target: proto::Target) -> Result<Self, FleetWireError> {
        let proto::Target {
            worker,
            present,
            blocks,
        } = target;
        Ok(Self {
            worker: required(worker, "target.worker")?.into(),
            present,
            blocks: blocks_in(blocks),
        })
    }
}
