//! An adapter's matrices on a device.
//!
//! Owns: how the pairs of a stack's modules become one pair. Never: reads a file by itself.
//! Invariant: zeros stand in a stack's second matrix where a row's module has no pair, so that a
//! product with it adds nothing.

use crate::EngineError;
use crate::folding;
use crate::ops::WeightLoader;
use cleave_checkpoint::{Adapter, AdapterPart, StoredMatrix, StoredTensor};
use cleave_models::{LayerSpec, ModelSpec, Projection};
use std::collections::BTreeMap;

/// A change of a product's output, `expand · (shrink · x)`, in f32.
#[derive(Debug)]
pub struct LowRank<M> {
    /// `(ranks, in)`, of [`WeightLoader::exact_matrix`].
    pub shrink: M,
    /// `(out, ranks)`, of the same; the adapter's scale is in it.
    pub expand: M,
}

/// The changes of one layer, by the stack whose product they are added to.
type LayerChanges<M> = BTreeMap<&'static [Projection], LowRank<M>>;

/// An adapter that is loaded.
pub(crate) struct AdapterWeights<P: WeightLoader> {
    layers: Vec<LayerChanges<P::Matrix>>,
}

impl<P: WeightLoader> AdapterWeights<P> {
    /// Loads an adapter of the model that `spec` describes.
    pub(crate) fn load(pack: &P, spec: &ModelSpec, adapter: &Adapter) -> Result<Self, EngineError> {
        let layers = (0..spec.layers.len()).map(|layer| {
            let stacks = stacks(spec, adapter, layer);
            stacks
                .map(|(stack, parts)| Ok((stack, low_rank(pack, spec, layer, stack, &parts)?)))
                .collect()
        });
        Ok(Self {
            layers: layers.collect::<Result<_, EngineError>>()?,
        })
    }

    /// The change of a stack's product; `None` if the adapter leaves it as it is.
    pub(crate) fn change(
        &self,
        layer: usize,
        stack: &'static [Projection],
    ) -> Option<&LowRank<P::Matrix>> {
        self.layers[layer].get(stack)
    }
}

/// The stacks of a layer that an adapter changes.
fn stacks<'a>(
    spec: &ModelSpec,
    adapter: &'a Adapter,
    layer: usize,
) -> impl Iterator<Item = (&'static [Projection], Vec<&'a AdapterPart>)> {
    let stacks = spec.layers[layer].stacks().into_iter();
    let parts = stacks.map(move |stack| (stack, adapter.stack(layer, stack).collect::<Vec<_>>()));
    parts.filter(|(_, parts)| !parts.is_empty())
}

/// Bytes of a loaded adapter's matrices.
pub(super) fn bytes(spec: &ModelSpec, adapter: &Adapter) -> u64 {
    let layers = 0..spec.layers.len();
    let elements = layers.flat_map(|layer| {
        let changed = stacks(spec, adapter, layer);
        changed.map(move |(stack, parts)| {
            let rows = stack_rows(&spec.layers[layer], stack, spec.hidden_size);
            ranks(&parts) * (rows + parts[0].a.columns())
        })
    });
    (elements.sum::<usize>() * size_of::<f32>()) as u64
}

fn stack_rows(layer: &LayerSpec, stack: &[Projection], hidden: usize) -> usize {
    stack.iter().map(|part| layer.rows_of(*part, hidden)).sum()
}

fn ranks(parts: &[&AdapterPart]) -> usize {
    parts.iter().map(|part| part.a.rows()).sum()
}

/// The pairs of a stack as one: first matrices one below the other, second ones as blocks.
fn low_rank<P: WeightLoader>(
    pack: &P,
    spec: &ModelSpec,
    layer: usize,
    stack: &'static [Projection],
    parts: &[&AdapterPart],
) -> Result<LowRank<P::Matrix>, EngineError> {
    let rows = stack_rows(&spec.layers[layer], stack, spec.hidden_size);
    let ranks = ranks(parts);
    let mut expand = vec![0.0; rows * ranks];
    let mut first_rank = 0;
    for part in parts {
        let AdapterPart {
            first_row,
            a,
            b,
            scale,
        } = part;
        let own = first_rank..first_rank + a.rows();
        let to = expand.chunks_exact_mut(ranks).skip(*first_row);
        for (row, to) in (0..b.rows()).zip(to) {
            let to = &mut to[own.clone()];
            b.read_row(row, to);
            to.iter_mut().for_each(|value| *value *= scale);
        }
        first_rank = own.end;
    }
    let expand = StoredTensor::from_f32("adapter", rows, ranks, &expand);
    let expand = match folding::row_order(spec, layer, stack) {
        Some(order) => expand.with_rows(&order),
        None => expand,
    };
    let shrink = parts.iter().map(|part| StoredMatrix::from(part.a.clone()));
    Ok(LowRank {
        shrink: pack.exact_matrix(&shrink.collect::<Vec<_>>(), None)?,
        expand: pack.exact_matrix(&[expand.into()], None)?,
    })
}
