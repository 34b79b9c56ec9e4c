//! The worker's brain from outside.
//!
//! Owns: the list of its tests, and the stage that they share. Never: reads a clock or a socket.

/// Makes one test for each script: the golden has the test's name.
macro_rules! scenarios {
    ($($name:ident: $script:literal)*) => {
        $(#[test]
        fn $name() {
            insta::assert_snapshot!(stringify!($name), play($script));
        })*
    };
}

mod ahead;
mod audit;
mod moves;
mod pair;
mod pooling;
mod scenarios;
mod slo_targets;
mod speculation;
mod stage;
mod states;
mod tier;
mod windows;
