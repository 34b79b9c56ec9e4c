//! The labels of a worker's series.
//!
//! Owns: their names. Never: gives one a value.

use prometheus_client::encoding::EncodeLabelSet;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct WorkerLabels {
    pub(super) worker: String,
    pub(super) role: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct WorkerKindLabels {
    pub(super) worker: String,
    pub(super) role: String,
    pub(super) kind: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct WorkerPeerLabels {
    pub(super) worker: String,
    pub(super) role: String,
    pub(super) peer: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PeerTransportLabels {
    pub(super) worker: String,
    pub(super) role: String,
    pub(super) peer: String,
    pub(super) transport: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct WorkerModelLabels {
    pub(super) worker: String,
    pub(super) role: String,
    pub(super) model_name: String,
}

/// Labels by the names that pickers know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct CacheConfigLabels {
    pub(super) worker: String,
    pub(super) model_name: String,
    pub(super) block_size: String,
    pub(super) num_gpu_blocks: String,
}
