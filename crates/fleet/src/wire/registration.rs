//! A worker's registration on the wire.
//!
//! Owns: the bounds of a registration. Never passes on an unchecked number by which a router would
//! divide, multiply or count. Invariant: a registration that passes is one that this release could
//! have made, up to generous ceilings.

use super::{FleetWireError, PROTOCOL, nanos, proto, required, role_of, within};
use crate::connection::{Registration, invalid_name_reason};
use crate::grpc::SILENCE_MIN;
use cleave_domain::{Capacity, DeviceId, Fingerprint, Role, WorkerDescription};
use cleave_text::ModelFiles;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

impl From<Registration> for proto::Hello {
    fn from(registration: Registration) -> Self {
        let Registration {
            worker,
            name,
            description,
            data_address,
            files,
            silence,
        } = registration;
        Self {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            worker: Some(worker.into()),
            name,
            description: Some(description.into()),
            data_address,
            files: Some(files.as_ref().clone().into()),
            silence_nanos: nanos(silence),
        }
    }
}

impl TryFrom<proto::Hello> for Registration {
    type Error = FleetWireError;

    /// The caller checks protocol and version, since it answers a mismatch with a reason.
    fn try_from(hello: proto::Hello) -> Result<Self, FleetWireError> {
        let proto::Hello {
            protocol: _,
            version: _,
            worker,
            name,
            description,
            data_address,
            files,
            silence_nanos,
        } = hello;
        if let Some(reason) = invalid_name_reason(&name) {
            return Err(FleetWireError::Name(reason));
        }
        let silences = nanos(SILENCE_MIN)..=u64::MAX;
        within("hello.silence_nanos", silence_nanos, silences)?;
        Ok(Self {
            worker: required(worker, "hello.worker")?.into(),
            name,
            description: required(description, "hello.description")?.try_into()?,
            data_address,
            files: Arc::new(required(files, "hello.files")?.into()),
            silence: Duration::from_nanos(silence_nanos),
        })
    }
}

impl From<WorkerDescription> for proto::WorkerDescription {
    fn from(description: WorkerDescription) -> Self {
        let WorkerDescription {
            role,
            home,
            model,
            fingerprint: Fingerprint(fingerprint),
            capacity,
            queue_max,
            device,
        } = description;
        Self {
            role: proto::Role::from(role).into(),
            home: proto::Role::from(home).into(),
            model,
            fingerprint,
            capacity: Some(capacity.into()),
            queue_max,
            device: device.map(|DeviceId(device)| device),
        }
    }
}

impl TryFrom<proto::WorkerDescription> for WorkerDescription {
    type Error = FleetWireError;

    fn try_from(description: proto::WorkerDescription) -> Result<Self, FleetWireError> {
        let proto::WorkerDescription {
            role,
            home,
            model,
            fingerprint,
            capacity,
            queue_max,
            device,
        } = description;
        within("description.queue_max", queue_max.into(), QUEUE)?;
        Ok(Self {
            role: role_of(role, "description.role")?.try_into()?,
            home: role_of(home, "description.home")?.try_into()?,
            model,
            fingerprint: Fingerprint(fingerprint),
            capacity: required(capacity, "description.capacity")?.try_into()?,
            queue_max,
            device: device.filter(|name| !name.is_empty()).map(DeviceId),
        })
    }
}

impl From<Role> for proto::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
            Role::Both => Self::Both,
        }
    }
}

impl TryFrom<proto::Role> for Role {
    type Error = FleetWireError;

    fn try_from(role: proto::Role) -> Result<Self, FleetWireError> {
        match role {
            proto::Role::Prefill => Ok(Self::Prefill),
            proto::Role::Decode => Ok(Self::Decode),
            proto::Role::Both => Ok(Self::Both),
            proto::Role::Unspecified => Err(FleetWireError::Unknown("role")),
        }
    }
}

impl From<Capacity> for proto::Capacity {
    fn from(capacity: Capacity) -> Self {
        let Capacity {
            block_tokens,
            block_bytes,
            blocks_count,
            slots_count,
            step_tokens_max,
            context_tokens_max,
        } = capacity;
        Self {
            block_tokens,
            block_bytes,
            blocks_count,
            slots_count,
            step_tokens_max,
            context_tokens_max,
        }
    }
}

/// Least and most; the ceilings are far above any machine, and far below where sums overflow.
const QUEUE: RangeInclusive<u64> = 0..=1 << 24;
const BLOCK_TOKENS: RangeInclusive<u64> = 1..=1 << 16;
const BLOCK_BYTES: RangeInclusive<u64> = 1..=1 << 30;
const BLOCKS: RangeInclusive<u64> = 1..=1 << 28;
const SLOTS: RangeInclusive<u64> = 1..=1 << 16;
const STEP_TOKENS: RangeInclusive<u64> = 1..=1 << 24;
const CONTEXT_TOKENS: RangeInclusive<u64> = 1..=1 << 28;

impl TryFrom<proto::Capacity> for Capacity {
    type Error = FleetWireError;

    fn try_from(capacity: proto::Capacity) -> Result<Self, FleetWireError> {
        let proto::Capacity {
            block_tokens,
            block_bytes,
            blocks_count,
            slots_count,
            step_tokens_max,
            context_tokens_max,
        } = capacity;
        let bounded = [
            ("capacity.block_tokens", block_tokens, BLOCK_TOKENS),
            ("capacity.block_bytes", block_bytes, BLOCK_BYTES),
            ("capacity.blocks_count", blocks_count, BLOCKS),
            ("capacity.slots_count", slots_count, SLOTS),
            ("capacity.step_tokens_max", step_tokens_max, STEP_TOKENS),
            (
                "capacity.context_tokens_max",
                context_tokens_max,
                CONTEXT_TOKENS,
            ),
        ];
        for (field, value, bounds) in bounded {
            within(field, value.into(), bounds)?;
        }
        Ok(Self {
            block_tokens,
            block_bytes,
            blocks_count,
            slots_count,
            step_tokens_max,
            context_tokens_max,
        })
    }
}

impl From<ModelFiles> for proto::ModelFiles {
    fn from(files: ModelFiles) -> Self {
        let ModelFiles {
            name,
            config,
            tokenizer,
            tokenizer_config,
            special_tokens_map,
            generation_config,
            chat_template,
            chat_templates_named,
            context_tokens_max,
        } = files;
        let named = |(name, template)| proto::NamedTemplate { name, template };
        Self {
            name,
            config,
            tokenizer,
            tokenizer_config,
            special_tokens_map,
            generation_config,
            chat_template,
            chat_templates_named: chat_templates_named.into_iter().map(named).collect(),
            context_tokens_max,
        }
    }
}

impl From<proto::ModelFiles> for ModelFiles {
    fn from(files: proto::ModelFiles) -> Self {
        let proto::ModelFiles {
            name,
            config,
            tokenizer,
            tokenizer_config,
            special_tokens_map,
            generation_config,
            chat_template,
            chat_templates_named,
            context_tokens_max,
        } = files;
        let named = |proto::NamedTemplate { name, template }| (name, template);
        Self {
            name,
            config,
            tokenizer,
            tokenizer_config,
            special_tokens_map,
            generation_config,
            chat_template,
            chat_templates_named: chat_templates_named.into_iter().map(named).collect(),
            context_tokens_max,
        }
    }
}
