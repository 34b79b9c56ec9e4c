//! A struct of series as a table: each row has a field, its type, its name and its help.
//!
//! Invariant: series are registered in the order of the rows, each once.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use std::hash::Hash;

/// Makes the struct, and its constructor, which registers every row. A field begins with its
/// default, or with the value behind `=`; a field without a name is no series.
macro_rules! series_table {
    (
        $(#[$doc:meta])* $visible:vis struct $table:ident;
        $($seen:vis $field:ident: $kind:ty $(= $first:expr)? $(, $name:literal, $help:literal)?;)*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        $visible struct $table {
            $($seen $field: $kind,)*
        }

        impl $table {
            pub(crate) fn register(registry: &mut cleave_api::MetricRegistry) -> Self {
                let series = Self {
                    $($field: series_table!(@first $($first)?),)*
                };
                $($(registry.register($name, $help, series.$field.clone());)?)*
                series
            }
        }
    };
    (@first) => { Default::default() };
    (@first $first:expr) => { $first };
}

pub(crate) use series_table;

/// Creates the series of a family with these labels, as zeros.
pub(crate) fn begin<L, M, C>(family: &Family<L, M, C>, labels: impl IntoIterator<Item = L>)
where
    L: Clone + Hash + Eq,
    C: MetricConstructor<M>,
{
    for labels in labels {
        drop(family.get_or_create(&labels));
    }
}

/// Counters that are there from the start.
pub(crate) fn zeros<L: Clone + Hash + Eq>(
    labels: impl IntoIterator<Item = L>,
) -> Family<L, Counter> {
    let family = Family::default();
    begin(&family, labels);
    family
}
