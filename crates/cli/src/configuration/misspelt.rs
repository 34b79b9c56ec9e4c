//! Variables that look like those of flags, and are none.
//!
//! Owns: finding them. Never: refuses one: programs beside this one, and Kubernetes, may have
//! variables of the same beginning.

use super::definition::command;
use clap::Command;
use std::collections::BTreeSet;
use tracing::warn;

/// Variables are misspelt if they differ from a flag's by so many letters at most.
const LETTERS_MAX: usize = 2;

/// Logs a warning for each variable of this process that is probably a misspelt one.
pub(crate) fn warn_of_misspelt_variables() {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let names: Vec<String> = names.filter(|name| name.starts_with("CLEAVE_")).collect();
    if names.is_empty() {
        return;
    }
    let known = known_variables(&command());
    for name in names {
        if let Some(meant) = meant_variable(&name, &known) {
            warn!(
                variable = name,
                meant, "no flag has this variable: it changes nothing"
            );
        }
    }
}

/// The variables of all flags of all commands.
fn known_variables(command: &Command) -> BTreeSet<String> {
    let own = command
        .get_arguments()
        .filter_map(|argument| argument.get_long());
    let mut known: BTreeSet<String> = own.map(super::definition::variable).collect();
    for inside in command.get_subcommands() {
        known.extend(known_variables(inside));
    }
    known
}

fn meant_variable<'a>(name: &str, known: &'a BTreeSet<String>) -> Option<&'a str> {
    if known.contains(name) {
        return None;
    }
    let distance = |one: &&String| cleave_yaml::distance(one, name);
    let nearest = known.iter().min_by_key(distance)?;
    (distance(&nearest) <= LETTERS_MAX).then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_found_and_others_are_left() {
        let known = known_variables(&command());
        let meant = |name| meant_variable(name, &known);
        assert_eq!(meant("CLEAVE_PRT"), Some("CLEAVE_PORT"));
        assert_eq!(meant("CLEAVE_MAX_NUM_SEQ"), Some("CLEAVE_MAX_NUM_SEQS"));
        for name in [
            "CLEAVE_PORT",
            "CLEAVE_CONFIG",
            "CLEAVE_SERVICE_HOST",
            "CLEAVE_SERVICE_PORT_HTTP",
            "CLEAVE_PORT_8000_TCP_ADDR",
            "CLEAVE_HOME_OF_ANOTHER_PROGRAM",
        ] {
            assert_eq!(meant(name), None, "{name}");
        }
    }
}
