//! Completion scripts for shells, and manual pages, both made from the command line's own
//! definition.

use crate::args::{CompletionsArgs, ManArgs};
use crate::configuration::command;
use anyhow::Context;
use clap::Command;
use clap_mangen::Man;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// Prints a completion script.
pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "cleave", &mut script);
    print(&script)
}

/// Prints the first manual page, or writes the pages of all commands.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let mut root = command();
    // Subcommands get the global flags and their full names.
    root.build();
    match &args.out {
        Some(folder) => {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot create the folder {}", folder.display()))?;
            write_pages(&root, "cleave", folder)
        }
        None => print(&page(&root, "cleave")?),
    }
}

/// Writes the page of a command, called `name`, and those of its subcommands: `cleave-bench-run.1`.
fn write_pages(command: &Command, name: &str, folder: &Path) -> anyhow::Result<()> {
    let path = folder.join(format!("{name}.1"));
    fs::write(&path, page(command, name)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    for subcommand in command.get_subcommands() {
        // clap adds a `help` to each command that has others.
        if !subcommand.is_hide_set() && subcommand.get_name() != "help" {
            write_pages(
                subcommand,
                &format!("{name}-{}", subcommand.get_name()),
                folder,
            )?;
        }
    }
    Ok(())
}

fn page(command: &Command, name: &str) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(command.clone())
        .title(name.to_uppercase())
        .render(&mut page)?;
    Ok(page)
}

/// Writes to standard output; a reader that left early, as `head` does, is no error.
fn print(bytes: &[u8]) -> anyhow::Result<()> {
    match io::stdout().lock().write_all(bytes) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap_complete::Shell;

    #[test]
    fn each_command_has_a_manual_page() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("man1");
        man(&ManArgs {
            out: Some(out.clone()),
        })
        .unwrap();
        let read = |name: &str| fs::read_to_string(out.join(name)).unwrap();
        assert!(
            read("cleave.1").contains("cleave\\-serve(1)"),
            "the first page names the others"
        );
        assert!(read("cleave-serve.1").contains("\\-\\-max\\-num\\-seqs"));
        assert!(read("cleave-bench-run.1").contains("CLEAVE-BENCH-RUN"));
        assert!(!out.join("cleave-help.1").exists());
    }

    #[test]
    fn each_shells_script_knows_commands_and_flags() {
        for shell in [
            Shell::Bash,
            Shell::Zsh,
            Shell::Fish,
            Shell::PowerShell,
            Shell::Elvish,
        ] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command(), "cleave", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["autoscale", "max-num-seqs"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
