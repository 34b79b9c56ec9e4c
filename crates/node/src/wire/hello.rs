//! How a worker introduces itself.

use super::{PROTOCOL, WireError, nanos, proto, required, role_of};
use crate::line::Introduction;
use cleave_api::ModelFiles;
use cleave_domain::{Capacity, Fingerprint, Role, WorkerDescription};
use std::sync::Arc;
use std::time::Duration;

impl From<Introduction> for proto::Hello {
    fn from(introduction: Introduction) -> Self {
        let Introduction {
            worker,
            name,
            description,
            data_address,
            files,
            silence,
        } = introduction;
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

impl TryFrom<proto::Hello> for Introduction {
    type Error = WireError;

    /// Protocol and version are the caller's: it answers a mismatch with words, not an error.
    fn try_from(hello: proto::Hello) -> Result<Self, WireError> {
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
            model,
            fingerprint: Fingerprint(fingerprint),
            capacity,
            queue_max,
        } = description;
        Self {
            role: proto::Role::from(role).into(),
            model,
            fingerprint,
            capacity: Some(capacity.into()),
            queue_max,
        }
    }
}

impl TryFrom<proto::WorkerDescription> for WorkerDescription {
    type Error = WireError;

    fn try_from(description: proto::WorkerDescription) -> Result<Self, WireError> {
        let proto::WorkerDescription {
            role,
            model,
            fingerprint,
            capacity,
            queue_max,
        } = description;
        Ok(Self {
            role: role_of(role, "description.role")?.try_into()?,
            model,
            fingerprint: Fingerprint(fingerprint),
            capacity: required(capacity, "description.capacity")?.into(),
            queue_max,
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
    type Error = WireError;

    fn try_from(role: proto::Role) -> Result<Self, WireError> {
        match role {
            proto::Role::Prefill => Ok(Self::Prefill),
            proto::Role::Decode => Ok(Self::Decode),
            proto::Role::Both => Ok(Self::Both),
            proto::Role::Unspecified => Err(WireError::Unknown("role")),
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

impl From<proto::Capacity> for Capacity {
    fn from(capacity: proto::Capacity) -> Self {
        let proto::Capacity {
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
