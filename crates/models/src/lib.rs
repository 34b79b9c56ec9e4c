//! Models as data: a config.json becomes a [`ModelSpec`], and names of tensors become
//! [`TensorRole`]s.
//!
//! Owns: the registry of model families, one file each in `families`; the description of a model
//! that engines run and planners price.
//! Never: opens a file, reads a tensor, or computes with one.
//! Invariant: a [`ModelSpec`] is consistent: sizes are positive and bounded, heads divide, every
//! rope exists that a layer names. A key of config.json that no reader used, and that is not known
//! to be harmless, refuses the model.

#![warn(missing_docs)]

mod cost;
mod error;
mod families;
mod fields;
mod harmless;
mod parts;
mod registry;
mod rope;
mod slices;
mod spec;
mod spelling;
mod tensors;
mod wrapper;

pub use cost::{AdapterCost, ExpertsCost, ModelCost, StoredSizes};
pub use error::ConfigError;
pub use fields::ConfigFields;
pub use parts::{AttentionParts, ExpertParts, ModelParts, published_names};
pub use registry::{DescribedModel, Family, families, read_model};
pub use rope::{LongRopeScaling, QueryGrowth, Rope, RopePairs, RopeScaling, YarnScaling};
pub use slices::{InnerSlices, SLICES_MAX};
pub use spec::{
    Activation, AttentionBiases, AttentionSpec, ChosenWeights, ExpertGroups, ExpertsSpec,
    GatedMlpSpec, GroupScore, HeadShape, LayerNorms, LayerSpec, Mixer, Mlp, ModelSpec, NormFormula,
    NormSpec, NormWeight, PartOrder, QkNormScope, QkNormSpec, RopeIndex, RouterScore, RouterSpec,
    Scalars, SharedExpertSpec, Unsupported,
};
pub use spelling::NameSpelling;
pub use tensors::{
    ADAPTED_STACKS, ExpertAxes, ModelTensor, NamedRole, Projection, StackedRows, TensorPlace,
    TensorRole,
};
pub use wrapper::{Wrapper, wrappers};
