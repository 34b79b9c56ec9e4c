//! The projections of a model that adapters may change, by the names of their modules.
//!
//! Owns: the names, and the reasons why other modules are refused. Never: reads an adapter.
//! Invariant: a name stands for one projection, or for the parameters of one layer's experts.

use super::last_part;
use crate::checkpoint::Checkpoint;
use crate::shard::HEADER_BYTES_MAX;
use cleave_models::{
    ADAPTED_STACKS, ExpertAxes, ModelSpec, Projection, StackedRows, TensorPlace, TensorRole,
};
use std::collections::{BTreeMap, BTreeSet};

/// The module that has all experts of a layer.
const EXPERTS: &str = "experts";
/// The stacks of an expert, by the parameters of the module that have them, in its order.
const EXPERT_PARAMETERS: [(&str, &[Projection]); 2] = [
    ("gate_up_proj", Projection::EXPERT_GATE_UP),
    ("down_proj", Projection::EXPERT_DOWN),
];

/// The projections of a model that adapters can change, by the names of their modules.
#[derive(Clone, Debug)]
pub struct AdapterTarget {
    /// Projections by the name of their module: `model.layers.0.self_attn.q_proj`.
    pub(super) modules: BTreeMap<String, TargetModule>,
    /// Parameters of experts by the name of the module that has them: `model.layers.0.mlp.experts`.
    pub(super) experts: BTreeMap<String, TargetExperts>,
    /// Modules of the model that adapters cannot change here, with the reason.
    pub(super) refused: BTreeMap<String, &'static str>,
}

/// A module of a model whose output an adapter may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TargetModule {
    pub(super) place: AdapterPlaceInModel,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// The rows of a stack that a module computes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AdapterPlaceInModel {
    /// A layer, or one of its experts.
    pub(super) place: TensorPlace,
    pub(super) stack: &'static [Projection],
    /// First row of the module in the stack.
    pub(super) first_row: usize,
}

/// The experts of a layer, of which each parameter has one tensor for all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TargetExperts {
    pub(super) layer: usize,
    pub(super) count: usize,
    /// Order of the last two axes of the parameters in the model that PEFT wraps.
    pub(super) axes: ExpertAxes,
    pub(super) parameters: [ExpertParameter; 2],
}

/// A parameter with one stack of every expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExpertParameter {
    pub(super) name: &'static str,
    pub(super) stack: &'static [Projection],
    /// Rows and columns of one expert's stack.
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Order of the projections' rows.
    pub(super) order: StackedRows,
}

impl AdapterTarget {
    /// The modules of an open checkpoint, by the names in its files and by those of its family: an
    /// adapter is trained on the class that its maker loaded.
    pub fn of(checkpoint: &Checkpoint) -> Self {
        let mut target = Self {
            modules: BTreeMap::new(),
            experts: BTreeMap::new(),
            refused: BTreeMap::new(),
        };
        for (tensor, family_name) in checkpoint.named_tensors() {
            let names = [tensor.name.as_str(), family_name.as_str()];
            let modules = names.map(|name| name.strip_suffix(".weight").unwrap_or(name));
            for module in BTreeSet::from(modules) {
                let spec = checkpoint.spec();
                target.add(module, tensor.role, tensor.place, &tensor.shape, spec);
            }
        }
        target
    }

    fn add(
        &mut self,
        module: &str,
        role: TensorRole,
        place: TensorPlace,
        shape: &[usize],
        spec: &ModelSpec,
    ) {
        let refuse = |reason| (module.to_owned(), reason);
        let parts: &[Projection] = match &role {
            TensorRole::Weight(part) => std::slice::from_ref(part),
            TensorRole::Stack(parts) => parts,
            TensorRole::Embedding | TensorRole::Head => {
                const REASON: &str = "an adapter of the embedding or the head is not supported";
                return self.refused.extend([refuse(REASON)]);
            }
            TensorRole::Router | TensorRole::SharedExpertGate => {
                const REASON: &str =
                    "an adapter of a router of experts is not supported; merge it into the model";
                return self.refused.extend([refuse(REASON)]);
            }
            TensorRole::Experts { axes, rows, .. } => {
                return self.add_experts(module, place, (*axes, *rows), spec);
            }
            _ => return,
        };
        if let TensorPlace::Expert { .. } = place {
            // Newer classes have one parameter for all experts, whatever the files have.
            let order = (ExpertAxes::OutIn, StackedRows::Consecutive);
            self.add_experts(module, place, order, spec);
        }
        let (Some(layer), &[rows, columns]) = (place.layer(), shape) else {
            return;
        };
        let layer = &spec.layers[layer];
        let mut stacks = layer.stacks().into_iter();
        let stack = stacks.find(|stack| stack.contains(&parts[0]));
        let stack = stack.filter(is_adapted);
        let Some(stack) = stack else {
            const REASON: &str = "an adapter of the shared expert is not supported";
            return self.refused.extend([refuse(REASON)]);
        };
        let before = stack.iter().take_while(|part| **part != parts[0]);
        let first_row = before.map(|part| layer.rows_of(*part, spec.hidden_size));
        let place = AdapterPlaceInModel {
            place,
            stack,
            first_row: first_row.sum(),
        };
        let target = TargetModule {
            place,
            rows,
            columns,
        };
        self.modules.insert(module.to_owned(), target);
    }

    /// Adds the experts of the layer that has a tensor of this name, by the names that their module
    /// has or had in the classes of its family.
    fn add_experts(
        &mut self,
        tensor: &str,
        place: TensorPlace,
        layout: (ExpertAxes, StackedRows),
        spec: &ModelSpec,
    ) {
        let (axes, order) = layout;
        let Some(layer) = place.layer() else {
            return;
        };
        let Some((parent, _)) = tensor.split_once(&format!(".{EXPERTS}.")) else {
            return;
        };
        let described = &spec.layers[layer];
        let parameter = |(name, stack): (&'static str, &'static [Projection])| {
            let shape = described.stack_shape(stack, spec.hidden_size);
            let (rows, columns) = shape.unwrap_or_default();
            let is_stacked = stack.len() > 1;
            ExpertParameter {
                name,
                stack,
                rows,
                columns,
                order: if is_stacked {
                    order
                } else {
                    StackedRows::Consecutive
                },
            }
        };
        let experts = TargetExperts {
            layer,
            count: described.experts().map_or(0, |experts| experts.count),
            axes,
            parameters: EXPERT_PARAMETERS.map(parameter),
        };
        let block = parent.rsplit_once('.').map_or("", |(block, _)| block);
        for parent in [parent, &format!("{block}.mlp")] {
            let module = format!("{parent}.{EXPERTS}");
            // The tensor of gate and up decides: rows of a down projection take no turns.
            let known = self
                .experts
                .entry(module)
                .or_insert_with(|| experts.clone());
            if known.parameters[0].order == StackedRows::Consecutive {
                known.parameters[0].order = experts.parameters[0].order;
            }
        }
    }

    /// Bytes that the file of an adapter of this model has at most, with ranks up to `rank_max`.
    pub(super) fn bytes_max(&self, rank_max: usize) -> u64 {
        let pair = |rows: usize, columns: usize| (rows + columns) as u64;
        let modules = self.modules.values().map(|of| pair(of.rows, of.columns));
        let experts = self.experts.values().flat_map(|experts| {
            let of_all = |of: &ExpertParameter| pair(of.rows, of.columns) * experts.count as u64;
            experts.parameters.iter().map(of_all)
        });
        let elements = modules.chain(experts).sum::<u64>();
        let bytes = elements.saturating_mul(rank_max as u64 * size_of::<f32>() as u64);
        bytes.saturating_add(HEADER_BYTES_MAX)
    }

    /// Names of the modules and parameters that adapters may change, each by its last part, for
    /// messages.
    pub(super) fn kinds(&self) -> String {
        let modules = self.modules.keys().map(|module| last_part(module));
        let parameters = self.experts.values().flat_map(|of| &of.parameters);
        let parameters = parameters.map(|parameter| parameter.name);
        let kinds: BTreeSet<&str> = modules.chain(parameters).collect();
        kinds.into_iter().collect::<Vec<_>>().join(", ")
    }

    /// Why a module cannot be changed; `None` if it can.
    pub(super) fn refusal(&self, module: &str) -> Option<String> {
        if self.modules.contains_key(module) {
            return None;
        }
        Some(match self.refused.get(module) {
            Some(reason) => (*reason).to_owned(),
            None => format!(
                "the model has no such module; adapters may change {}",
                self.kinds()
            ),
        })
    }
}

fn is_adapted(stack: &&'static [Projection]) -> bool {
    let of_experts = EXPERT_PARAMETERS.map(|(_, stack)| stack);
    ADAPTED_STACKS.contains(stack) || of_experts.contains(stack)
}
