//! A worker's registration, for tests of this crate and of those above it.

use crate::connection::Registration;
use cleave_domain::{Capacity, Fingerprint, Role, WorkerDescription, WorkerRef};
use cleave_text::{ModelFiles, ModelTask};
use std::sync::Arc;
use std::time::Duration;

/// A registration that every router accepts.
pub fn registration() -> Registration {
    Registration {
        worker: WorkerRef::default(),
        name: "w".to_owned(),
        description: WorkerDescription {
            role: Role::Both,
            home: Role::Both,
            model: "m".to_owned(),
            fingerprint: Fingerprint("f".to_owned()),
            capacity: Capacity {
                block_tokens: 16,
                block_bytes: 1024,
                blocks_count: 40,
                slots_count: 8,
                step_tokens_max: 512,
                context_tokens_max: 1024,
                states: None,
                windows: None,
            },
            queue_max: 4,
            device: None,
        },
        data_address: "h:1".to_owned(),
        files: Arc::new(ModelFiles {
            name: "m".to_owned(),
            config: String::new(),
            tokenizer: String::new(),
            tokenizer_config: None,
            special_tokens_map: None,
            generation_config: None,
            chat_template: None,
            chat_templates_named: Vec::new(),
            context_tokens_max: None,
            task: ModelTask::Generate,
        }),
        silence: Duration::from_secs(5),
    }
}
