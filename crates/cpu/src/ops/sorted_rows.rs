//! Rows of a step, sorted by the experts that they use.
//!
//! Owns: the order. Never: knows a weight.
//! Invariant: a *place* is one row's use of one expert; places are in ascending order of experts,
//! and of rows within an expert.

use std::ops::Range;

/// Experts of each row, and the places in the order of experts.
#[derive(Debug, Default)]
pub(super) struct SortedRows {
    /// Experts of each row, `(rows, uses)`, ascending within a row.
    experts: Vec<u32>,
    /// Place of each of them.
    places: Vec<u32>,
    /// Row of each place.
    rows: Vec<u32>,
    /// First place of each expert, and the number of places.
    first_places: Vec<u32>,
}

impl SortedRows {
    /// Experts of each row, to be written before [`SortedRows::sort`].
    pub(super) fn experts_mut(&mut self, uses_total: usize) -> &mut [u32] {
        self.experts.resize(uses_total, 0);
        &mut self.experts
    }

    /// Sorts the rows, each of which has `uses` experts.
    pub(super) fn sort(&mut self, experts_count: usize, uses: usize) {
        let Self {
            experts,
            places,
            rows,
            first_places,
        } = self;
        first_places.clear();
        first_places.resize(experts_count + 1, 0);
        for expert in &*experts {
            first_places[*expert as usize + 1] += 1;
        }
        for expert in 0..experts_count {
            first_places[expert + 1] += first_places[expert];
        }
        places.resize(experts.len(), 0);
        rows.resize(experts.len(), 0);
        for (at, expert) in experts.iter().enumerate() {
            let next = &mut first_places[*expert as usize];
            places[at] = *next;
            rows[*next as usize] = (at / uses) as u32;
            *next += 1;
        }
        // Each entry has become the first place of the next expert.
        first_places.rotate_right(1);
        first_places[0] = 0;
    }

    /// Places of neighbouring experts.
    pub(super) fn places_of(&self, experts: &Range<usize>) -> Range<usize> {
        self.first_places[experts.start] as usize..self.first_places[experts.end] as usize
    }

    /// Rows of these places.
    pub(super) fn rows_at(&self, places: Range<usize>) -> &[u32] {
        &self.rows[places]
    }

    /// Expert and place of a row's use, number `row × uses + use`.
    pub(super) fn at(&self, index: usize) -> (usize, usize) {
        (self.experts[index] as usize, self.places[index] as usize)
    }

    /// The experts from `first` on that have at most `places_max` places together, at least one
    /// expert.
    pub(super) fn piece(&self, first: usize, places_max: usize) -> Range<usize> {
        let experts_count = self.first_places.len() - 1;
        let fits = |last: &usize| self.places_of(&(first..last + 1)).len() <= places_max;
        let more = (first + 1..experts_count).take_while(fits);
        first..first + 1 + more.count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted() -> SortedRows {
        let mut sorted = SortedRows::default();
        let experts = [1, 3, 0, 3, 1, 2, 0, 3];
        sorted.experts_mut(8).copy_from_slice(&experts);
        sorted.sort(5, 2);
        sorted
    }

    #[test]
    fn places_are_in_order_of_experts_and_rows() {
        let sorted = sorted();
        let of = |expert: usize| sorted.rows_at(sorted.places_of(&(expert..expert + 1)));
        let rows: Vec<&[u32]> = (0..5).map(of).collect();
        assert_eq!(rows, [&[1, 3][..], &[0, 2], &[2], &[0, 1, 3], &[]]);
        for index in 0..8 {
            let (expert, place) = sorted.at(index);
            assert!(sorted.places_of(&(expert..expert + 1)).contains(&place));
            assert_eq!(sorted.rows_at(place..place + 1), [index as u32 / 2]);
        }
    }

    #[test]
    fn pieces_are_whole_experts_up_to_the_limit() {
        let sorted = sorted();
        assert_eq!(sorted.piece(0, 5), 0..3);
        assert_eq!(sorted.piece(3, 2), 3..4, "one expert above the limit");
        assert_eq!(sorted.piece(3, 3), 3..5, "and one without rows");
        assert_eq!(sorted.piece(0, 100), 0..5);
    }
}
