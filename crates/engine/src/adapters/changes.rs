//! The changes that an adapter makes to a model, as its files have them.
//!
//! Owns: how the pairs of a stack's modules become one pair. Never: touches a device.
//! Invariant: zeros stand in a stack's second matrix where a row's module has no pair, so that a
//! product with it adds nothing.

use crate::folding;
use cleave_checkpoint::{Adapter, AdapterPart, StoredMatrix, StoredTensor};
use cleave_models::{LayerSpec, ModelSpec, Projection, TensorPlace};

/// An adapter of a model.
#[derive(Clone, Copy, Debug)]
pub struct StoredChanges<'a> {
    spec: &'a ModelSpec,
    adapter: &'a Adapter,
}

/// The change of one stack's product, `expand · (shrink · x)`, as its files have it.
#[derive(Clone, Debug)]
pub struct StoredLowRank {
    /// First matrices of the modules, one below the other, `(ranks, in)` together.
    pub shrink: Vec<StoredMatrix>,
    /// The second matrix, `(out, ranks)`, f32; the adapter's scale is in it.
    pub expand: StoredTensor,
}

impl<'a> StoredChanges<'a> {
    /// The changes of an adapter of the model that `spec` describes.
    pub(super) fn new(spec: &'a ModelSpec, adapter: &'a Adapter) -> Self {
        Self { spec, adapter }
    }

    /// Number of the model's layers.
    pub fn layers_count(&self) -> usize {
        self.spec.layers.len()
    }

    /// The stacks that change, of a layer and of its experts, each with the place that has it.
    pub fn places(
        &self,
        layer: usize,
    ) -> impl Iterator<Item = (TensorPlace, &'static [Projection])> {
        let spec = &self.spec.layers[layer];
        let places = spec.stacks().into_iter().flat_map(move |stack| {
            let places = spec.places(layer, stack);
            places.map(move |place| (place, stack))
        });
        places.filter(|(place, stack)| self.adapter.stack(*place, stack).next().is_some())
    }

    /// Whether an expert changes.
    pub fn changes_experts(&self) -> bool {
        self.adapter.changes_experts()
    }

    /// Bytes of all matrices in f32.
    pub(super) fn bytes(&self) -> u64 {
        let of_layer = |layer: usize| {
            let elements = self.places(layer).map(move |(place, stack)| {
                let parts: Vec<_> = self.adapter.stack(place, stack).collect();
                let rows = stack_rows(&self.spec.layers[layer], stack, self.spec.hidden_size);
                ranks(&parts) * (rows + parts[0].a.columns())
            });
            elements.sum::<usize>()
        };
        let elements: usize = (0..self.layers_count()).map(of_layer).sum();
        (elements * size_of::<f32>()) as u64
    }

    /// The pairs of a stack as one: first matrices one below the other, second ones as blocks.
    /// `None` if the adapter leaves the stack as it is.
    pub fn of(&self, place: TensorPlace, stack: &'static [Projection]) -> Option<StoredLowRank> {
        let parts: Vec<&AdapterPart> = self.adapter.stack(place, stack).collect();
        let layer = place.layer().filter(|_| !parts.is_empty())?;
        let rows = stack_rows(&self.spec.layers[layer], stack, self.spec.hidden_size);
        let ranks = ranks(&parts);
        let mut expand = vec![0.0; rows * ranks];
        let mut first_rank = 0;
        for part in &parts {
            let own = first_rank..first_rank + part.a.rows();
            let to = expand.chunks_exact_mut(ranks).skip(part.first_row);
            for (row, to) in (0..part.rows()).zip(to) {
                part.read_expand_row(row, &mut to[own.clone()]);
            }
            first_rank = own.end;
        }
        let expand = StoredTensor::from_f32("adapter", rows, ranks, &expand);
        let expand = match folding::row_order(self.spec, layer, stack) {
            Some(order) => expand.with_rows(&order),
            None => expand,
        };
        let shrink = parts.iter().map(|part| StoredMatrix::from(part.a.clone()));
        Some(StoredLowRank {
            shrink: shrink.collect(),
            expand,
        })
    }
}

/// Rows of a stack's product.
pub(super) fn stack_rows(layer: &LayerSpec, stack: &[Projection], hidden: usize) -> usize {
    stack.iter().map(|part| layer.rows_of(*part, hidden)).sum()
}

fn ranks(parts: &[&AdapterPart]) -> usize {
    parts.iter().map(|part| part.a.rows()).sum()
}
