//! Loading of very many matrices.

use crate::many_experts::{STEPS, best_times, write};

/// Eight times as many matrices take as long for each. A loop over all others would take eight
/// times as long; the bound leaves room for other work on the machine.
#[test]
fn loading_is_linear_in_the_number_of_matrices() {
    let (few, many) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(few.path(), 2, 64);
    write(many.path(), 16, 64);
    let (few, many) = (best_times(few.path(), 5), best_times(many.path(), 2));
    for ((step, few), many) in STEPS.iter().zip(few).zip(many) {
        let ratio = many.as_secs_f64() / 8.0 / few.as_secs_f64();
        assert!(ratio < 2.5, "{step}: {few:?}, {many:?}");
    }
}
