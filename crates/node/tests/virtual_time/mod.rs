//! Fleets of mock workers in this process, under a clock that only jumps: a day of theirs takes a
//! moment, and the same day is the same to the nanosecond.

mod fleet;
mod parity;
mod routers;
