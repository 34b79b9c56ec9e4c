//! Tables whose cells are never cut: columns are as wide as their contents, and the least important
//! ones are left out where the terminal is too narrow.

use ratatui::layout::Constraint;
use ratatui::style::{Modifier, Style};
use ratatui::widgets::{Row, Table};

/// Cells between two columns.
const SPACING: usize = 1;

/// A column of a table.
pub(super) struct Column {
    pub(super) title: &'static str,
    /// The cells, one for each row.
    pub(super) cells: Vec<String>,
    /// The columns of the largest ranks are left out first; that of rank 0 never is.
    pub(super) rank: u8,
}

impl Column {
    fn width(&self) -> usize {
        let widths = self.cells.iter().map(|cell| cell.chars().count());
        let most = widths.max().unwrap_or_default();
        most.max(self.title.chars().count())
    }
}

/// The table of the columns that fit, and the styles of its rows.
pub(super) fn table(mut columns: Vec<Column>, styles: &[Style], width: u16) -> Table<'static> {
    while taken(&columns) > usize::from(width)
        && let Some(last) = least_important(&columns)
    {
        columns.remove(last);
    }
    let widths: Vec<Constraint> = columns
        .iter()
        .map(|column| Constraint::Length(u16::try_from(column.width()).unwrap_or(u16::MAX)))
        .collect();
    let rows = styles.iter().enumerate().map(|(at, style)| {
        let cells = columns.iter().map(|column| column.cells[at].clone());
        Row::new(cells.collect::<Vec<_>>()).style(*style)
    });
    let titles: Vec<&str> = columns.iter().map(|column| column.title).collect();
    let table = Table::new(rows, widths);
    if titles.iter().all(|title| title.is_empty()) {
        return table;
    }
    let style = Style::new().add_modifier(Modifier::BOLD | Modifier::DIM);
    table.header(Row::new(titles).style(style))
}

fn taken(columns: &[Column]) -> usize {
    let widths: usize = columns.iter().map(Column::width).sum();
    widths + SPACING * columns.len().saturating_sub(1)
}

fn least_important(columns: &[Column]) -> Option<usize> {
    let ranks = columns.iter().enumerate();
    let (at, column) = ranks.max_by_key(|(_, column)| column.rank)?;
    (column.rank > 0).then_some(at)
}

/// A text of at most this many characters; a longer one ends with an ellipsis.
pub(super) fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let kept: String = text.chars().take(most.saturating_sub(1)).collect();
    kept + "…"
}
