//! Adapters of parameters that all experts of a layer share: PEFT's `target_parameters`.
//!
//! Owns: the names and the layout that PEFT gives their tensors. A pair has the ranks of all
//! experts: rows `expert · rank ..` of the first matrix are an expert's, and columns `expert`,
//! `expert + experts`, … of the second.
//! Never: copies a tensor.

use super::target::{AdapterPlaceInModel, ExpertParameter, TargetExperts};
use super::{AdapterPart, AdapterSource, ColumnSteps, WRAPPER, pair_names};
use crate::error::CheckpointError;
use cleave_models::{ExpertAxes, TensorPlace};

/// The attribute of PEFT's class that has the module it wraps. A module with several adapted
/// parameters is wrapped once for each, in the order of its parameters.
const WRAPPED: &str = ".base_layer";
/// The first release of PEFT whose first matrix reads an expert's input, in classes whose
/// parameters have outputs before inputs; earlier ones have inputs and outputs exchanged.
const INPUTS_FIRST_SINCE: [u64; 2] = [0, 19];

/// The parameter that a pair of tensors changes.
pub(super) struct WrappedParameter<'a> {
    /// Name of the module that has the parameter.
    module: &'a str,
    experts: &'a TargetExperts,
    parameter: &'a ExpertParameter,
}

impl WrappedParameter<'_> {
    /// Name of the parameter.
    pub(super) fn key(&self) -> String {
        parameter_key(self.module, self.parameter)
    }
}

pub(super) fn parameter_key(module: &str, parameter: &ExpertParameter) -> String {
    format!("{module}.{}", parameter.name)
}

/// The name of a module without PEFT's layers around it.
pub(super) fn without_layers(module: &str) -> &str {
    module.trim_end_matches(WRAPPED)
}

impl AdapterSource<'_> {
    /// The parameter of experts that the tensors of this module change; `None` if it is a module
    /// of another kind.
    pub(super) fn experts_of<'s>(
        &'s self,
        wrapped: &'s str,
    ) -> Result<Option<WrappedParameter<'s>>, CheckpointError> {
        let module = without_layers(wrapped);
        let Some(experts) = self.target.experts.get(module) else {
            return Ok(None);
        };
        let names = |parameter: &&ExpertParameter| {
            self.config
                .names_parameter(&parameter_key(module, parameter))
        };
        let named: Vec<&ExpertParameter> = experts.parameters.iter().filter(names).collect();
        // The first parameter is wrapped first, so that it is the innermost.
        let depth = (wrapped.len() - module.len()) / WRAPPED.len();
        let at = named.len().checked_sub(depth + 1);
        let Some(parameter) = at.map(|at| named[at]) else {
            let problem = format!("does not name `{module}` often enough: it has more tensors");
            return Err(self.fields.damaged("target_parameters", problem).into());
        };
        Ok(Some(WrappedParameter {
            module,
            experts,
            parameter,
        }))
    }

    /// The pairs of all experts, from one of their parameter.
    pub(super) fn parts_of_experts(
        &self,
        wrapped: &str,
        adapted: &WrappedParameter<'_>,
    ) -> Result<Vec<(AdapterPlaceInModel, AdapterPart)>, CheckpointError> {
        let WrappedParameter {
            experts, parameter, ..
        } = adapted;
        let ExpertParameter { rows, columns, .. } = **parameter;
        let (key, count) = (adapted.key(), experts.count);
        self.config.check_patterns(self.fields, &key)?;
        let rank = self.config.rank(&key);
        if experts.axes == ExpertAxes::OutIn {
            self.check_inputs_first(wrapped, [rows, columns])?;
        }
        let ranks = rank * count;
        let [a, b] = self.pair(wrapped, rank, [[ranks, columns], [rows, ranks]])?;
        let scale = self.config.scale(&key);
        let part = |expert: usize| {
            let layer = experts.layer;
            let place = AdapterPlaceInModel {
                place: TensorPlace::Expert { layer, expert },
                stack: parameter.stack,
                first_row: 0,
            };
            let name = format!("{}[{expert}]", a.name());
            let part = AdapterPart {
                first_row: 0,
                a: a.rows_named(&name, expert * rank..(expert + 1) * rank),
                b: b.clone(),
                columns: ColumnSteps {
                    first: expert,
                    step: count,
                },
                order: parameter.order,
                scale,
            };
            (place, part)
        };
        Ok((0..count).map(part).collect())
    }

    /// Refuses a pair whose first matrix reads an expert's output, as earlier releases of PEFT
    /// wrote it; by its shape, or by the release where inputs and outputs are as wide.
    fn check_inputs_first(
        &self,
        wrapped: &str,
        [rows, columns]: [usize; 2],
    ) -> Result<(), CheckpointError> {
        let names = pair_names(wrapped);
        let found = self.folder.find(&names[0]);
        let width = found.and_then(|found| found.shape.get(1).copied());
        let is_exchanged = if rows == columns {
            self.config.release() < Some(INPUTS_FIRST_SINCE)
        } else {
            width == Some(rows)
        };
        if !is_exchanged {
            return Ok(());
        }
        let problem = "has inputs and outputs of the experts exchanged, as PEFT before 0.19 wrote \
                       adapters of parameters; merge the adapter there";
        let tensor = names[0].strip_prefix(WRAPPER).unwrap_or(&names[0]);
        Err(CheckpointError::unsupported(
            self.folder.file_of(&names[0]),
            format!("tensor `{tensor}`"),
            problem,
        ))
    }
}
