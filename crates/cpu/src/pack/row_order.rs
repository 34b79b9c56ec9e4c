//! The order of a stack's rows in a packed matrix.
//!
//! Invariant: every row is one column of one panel.

use cleave_cpu_kernels::kernel::product::PANEL;

/// Order of a stack's rows in the columns of panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// Rows in the order of the stack.
    Stacked,
    /// Alternately sixteen rows of the first half and the same sixteen of the second.
    GateUpInterleaved,
}

impl RowOrder {
    /// Columns of the result.
    pub(super) fn columns(self, rows: usize) -> usize {
        match self {
            Self::Stacked => rows,
            Self::GateUpInterleaved => rows / 2,
        }
    }

    pub(crate) fn panels(self, rows: usize) -> usize {
        match self {
            Self::Stacked => rows.div_ceil(PANEL),
            Self::GateUpInterleaved => (rows / 2).div_ceil(PANEL / 2),
        }
    }

    /// Row of each column of all panels; `None` for padding.
    pub(super) fn row_of_column(self, rows: usize) -> impl Iterator<Item = Option<usize>> {
        const HALF: usize = PANEL / 2;
        let columns = self.columns(rows);
        (0..self.panels(rows) * PANEL).map(move |at| match self {
            Self::Stacked => (at < rows).then_some(at),
            Self::GateUpInterleaved => {
                let column = at / PANEL * HALF + at % HALF;
                let first = at % PANEL / HALF * columns;
                (column < columns).then_some(first + column)
            }
        })
    }
}
