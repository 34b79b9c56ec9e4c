//! Small worlds, explored whole. `EXPLORE_STATES` explores further, `EXPLORE_WORLD` only one.

use cleave_sim::explore::{self, Guard, explore};

#[test]
fn nothing_breaks_in_any_small_world() {
    let number = |text: String| text.parse().expect("a number");
    let states_max = std::env::var("EXPLORE_STATES").map_or(1_000_000, number);
    let only = std::env::var("EXPLORE_WORLD").ok();
    let mut states = 0;
    for world in explore::worlds() {
        if only.as_ref().is_some_and(|only| only != world) {
            continue;
        }
        let explored = explore(world, None, states_max).unwrap_or_else(|broken| panic!("{broken}"));
        for explored in explored {
            println!("{explored}");
            states += explored.states;
        }
    }
    println!("{states} states in all");
}

#[test]
fn without_any_one_guard_something_breaks() {
    let only = std::env::var("EXPLORE_GUARD").ok();
    for guard in Guard::ALL {
        if only.as_ref().is_some_and(|only| *only != guard.to_string()) {
            continue;
        }
        let mut found = None;
        for world in explore::worlds() {
            if let Err(broken) = explore(world, Some(guard), 100_000) {
                println!(
                    "{guard:<16} {world:<10} {:>7} states: {}",
                    broken.states, broken.what
                );
                if only.is_some() {
                    println!("{broken}");
                }
                found = Some(broken);
                break;
            }
        }
        if found.is_none() {
            println!("{guard:<16} nothing breaks");
        }
    }
}
