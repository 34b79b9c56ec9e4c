//! Stacks of projections: the matrices that a model multiplies with, from the tensors that have
//! them.
//!
//! Owns: the layouts in which one tensor has a stack of all experts of a layer.
//! Never: copies more than one expert's weights, and only where their axes or rows are in another
//! order.

use crate::checkpoint::Checkpoint;
use crate::quantized::{QuantizedTensor, StoredMatrix};
use crate::tensor::StoredTensor;
use cleave_models::{ExpertAxes, ModelTensor, Projection, StackedRows, TensorPlace, TensorRole};

/// A tensor with a stack of projections, or their biases, of all experts of a layer.
#[derive(Clone, Debug)]
pub(crate) struct ExpertsTensor {
    name: String,
    /// Projections of the stack.
    parts_count: usize,
    /// Axes of an expert's weights; `None` for biases.
    axes: Option<ExpertAxes>,
    rows: StackedRows,
    count: usize,
}

/// Bias of a stack.
#[derive(Clone, Debug, Default)]
pub struct StoredBias {
    /// An element for each row of the stack.
    pub values: Vec<f32>,
    /// Bytes that it takes in its file.
    pub stored_bytes: usize,
}

impl ExpertsTensor {
    /// The stack and the layer whose experts a tensor has, if it is one of all experts.
    pub(crate) fn of(tensor: &ModelTensor) -> Option<((&'static [Projection], usize), Self)> {
        let (parts, axes, rows) = match tensor.role {
            TensorRole::Experts { parts, axes, rows } => (parts, Some(axes), rows),
            TensorRole::ExpertBiases { parts, rows } => (parts, None, rows),
            _ => return None,
        };
        let of_experts = Self {
            name: tensor.name.clone(),
            parts_count: parts.len(),
            axes,
            rows,
            count: tensor.shape[0],
        };
        Some(((parts, tensor.place.layer()?), of_experts))
    }

    pub(crate) fn is_bias(&self) -> bool {
        self.axes.is_none()
    }

    /// Order of the tensor's rows in the stack: projection after projection.
    fn order(&self, rows: usize) -> Vec<usize> {
        let each = self.parts_count;
        match self.rows {
            StackedRows::Consecutive => (0..rows).collect(),
            StackedRows::Interleaved => {
                let of_part = |part: usize| (part..rows).step_by(each);
                (0..each).flat_map(of_part).collect()
            }
        }
    }

    /// The stack of one expert, `(out, in)`, from the tensor `(experts × rows, columns)`.
    fn weights(&self, all: &StoredTensor, expert: usize) -> StoredTensor {
        let rows = all.rows() / self.count;
        // Packed weights are known by their names, so that every expert needs its own.
        let name = format!("{}[{expert}]", self.name);
        let stored = all.rows_named(&name, expert * rows..(expert + 1) * rows);
        let ordered = match (self.axes, self.rows) {
            (Some(ExpertAxes::InOut), _) => {
                stored.with_columns_as_rows(&self.order(stored.columns()))
            }
            (_, StackedRows::Interleaved) => stored.with_rows(&self.order(rows)),
            (_, StackedRows::Consecutive) => return stored,
        };
        stored.release();
        ordered
    }

    /// The stack of one expert from quantised weights of all experts, `(experts × out, in)`: one
    /// matrix, or one for each projection where their rows take turns.
    fn quantized_weights(&self, all: &QuantizedTensor, expert: usize) -> Vec<StoredMatrix> {
        let rows = all.rows() / self.count;
        let parts = match self.rows {
            StackedRows::Consecutive => 1,
            StackedRows::Interleaved => self.parts_count,
        };
        let of_part = |part: usize| {
            let name = format!("{}[{expert}.{part}]", self.name);
            let rows = expert * rows..(expert + 1) * rows;
            let found = all.rows_in_turn(&name, rows, (part, parts));
            found.expect("weights of all experts lie row by row").into()
        };
        (0..parts).map(of_part).collect()
    }

    /// Bias of one expert's stack, from the tensor `(experts, out)`.
    fn bias(&self, all: &StoredTensor, expert: usize) -> StoredBias {
        let mut stored = vec![0.0; all.columns()];
        all.read_row(expert, &mut stored);
        let order = self.order(stored.len());
        StoredBias {
            values: order.iter().map(|row| stored[*row]).collect(),
            stored_bytes: all.row_bytes(expert).len(),
        }
    }
}

impl Checkpoint {
    /// The weights of a stack of projections of a layer or of an expert, `(out, in)` each: one for
    /// each projection, or a single one where the checkpoint has them in one tensor. Dense weights
    /// whose order is another one in the file are copied.
    ///
    /// # Panics
    /// If the model has no such tensors.
    pub fn stack(&self, parts: &'static [Projection], place: TensorPlace) -> Vec<StoredMatrix> {
        if let Some((of_experts, expert)) = self.experts_tensor(parts, place) {
            if let Some(all) = self.quantized_tensor(&of_experts.name) {
                return of_experts.quantized_weights(all, expert);
            }
            let all = self.tensor(&of_experts.name);
            return vec![of_experts.weights(all, expert).into()];
        }
        let names = self.stack_names(parts, place).into_iter();
        let found = names.map(|name| self.matrix(name));
        found
            .map(|matrix| matrix.expect("open() found every tensor of the layout"))
            .collect()
    }

    /// Whether any weight of a stack is quantised. Copies nothing.
    ///
    /// # Panics
    /// As [`Checkpoint::stack`].
    pub fn is_quantized(&self, parts: &'static [Projection], place: TensorPlace) -> bool {
        if let Some((of_experts, _)) = self.experts_tensor(parts, place) {
            return self.quantized_tensor(&of_experts.name).is_some();
        }
        self.stack(parts, place).iter().any(|matrix| match matrix {
            StoredMatrix::Dense(_) => false,
            StoredMatrix::Quantized(_) => true,
        })
    }

    /// Bias of a stack, an element for each row.
    ///
    /// # Panics
    /// If the model has no such tensors.
    pub fn bias(&self, parts: &'static [Projection], place: TensorPlace) -> StoredBias {
        if let TensorPlace::Expert { layer, expert } = place
            && let Some(of_experts) = self.expert_biases(parts, layer)
        {
            return of_experts.bias(self.tensor(&of_experts.name), expert);
        }
        let tensors = parts
            .iter()
            .map(|part| self.vector(TensorRole::Bias(*part), place));
        tensors.fold(StoredBias::default(), |mut bias, tensor| {
            bias.values.extend(tensor.to_f32());
            bias.stored_bytes += tensor.bytes().len();
            bias
        })
    }

    /// The tensor of all experts that has a stack of one of them.
    fn experts_tensor(
        &self,
        parts: &'static [Projection],
        place: TensorPlace,
    ) -> Option<(&ExpertsTensor, usize)> {
        let TensorPlace::Expert { layer, expert } = place else {
            return None;
        };
        Some((self.experts(parts, layer)?, expert))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two experts of three inputs; an expert's element at `(row, column)` of its stack of gate
    /// and up is `100 · expert + 10 · row + column`.
    fn tensor(axes: ExpertAxes, rows: StackedRows) -> (ExpertsTensor, StoredTensor) {
        let of_experts = ExpertsTensor {
            name: "gate_up".to_owned(),
            parts_count: 2,
            axes: Some(axes),
            rows,
            count: 2,
        };
        let place = |row: usize| match rows {
            StackedRows::Consecutive => row,
            StackedRows::Interleaved => [0, 2, 1, 3][row],
        };
        let element = |expert: usize, row: usize, column: usize| {
            (100 * expert + 10 * place(row) + column) as f32
        };
        let values: Vec<f32> = match axes {
            ExpertAxes::OutIn => (0..24)
                .map(|at| element(at / 12, at / 3 % 4, at % 3))
                .collect(),
            ExpertAxes::InOut => (0..24)
                .map(|at| element(at / 12, at % 4, at / 4 % 3))
                .collect(),
        };
        let (rows, columns) = match axes {
            ExpertAxes::OutIn => (8, 3),
            ExpertAxes::InOut => (6, 4),
        };
        let stored = StoredTensor::from_f32("gate_up", rows, columns, &values);
        (of_experts, stored)
    }

    #[test]
    fn every_layout_gives_the_same_stack_of_an_expert() {
        for axes in [ExpertAxes::OutIn, ExpertAxes::InOut] {
            for rows in [StackedRows::Consecutive, StackedRows::Interleaved] {
                let (of_experts, stored) = tensor(axes, rows);
                let found = of_experts.weights(&stored, 1);
                assert_eq!(found.name(), "gate_up[1]");
                assert_eq!((found.rows(), found.columns()), (4, 3));
                let expected: Vec<f32> = (0..12)
                    .map(|at| (100 + 10 * (at / 3) + at % 3) as f32)
                    .collect();
                assert_eq!(found.to_f32(), expected, "{axes:?} {rows:?}");
            }
        }
    }

    #[test]
    fn interleaved_biases_become_gate_then_up() {
        let (of_experts, _) = tensor(ExpertAxes::OutIn, StackedRows::Interleaved);
        let stored = StoredTensor::from_f32("b", 2, 4, &[0., 2., 1., 3., 10., 12., 11., 13.]);
        let bias = of_experts.bias(&stored, 1);
        assert_eq!(bias.values, [10., 11., 12., 13.]);
        assert_eq!(bias.stored_bytes, 16);
    }
}
