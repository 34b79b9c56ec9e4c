//! OpenAI's Python client against a server.
//!
//! Owns: the folder of the installed client. Never: judges an answer; the script does.

use super::root;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Runs a script of `tests/openai`, and says so on stderr if the client cannot be installed here.
///
/// # Panics
/// If the script fails.
pub(crate) fn run_client(script: &str, url: &str) {
    // The first script installs the client; another one must not see half of it.
    static FOLDER: Mutex<()> = Mutex::new(());
    let _alone = FOLDER.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("openai-client");
    let output = Command::new(root().join("tests/openai/run.sh"))
        .args([folder.as_os_str(), url.as_ref(), script.as_ref()])
        .output()
        .expect("the script starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(77) {
        // Writes to stderr directly, past the capture of a passing test's output, so that a skipped
        // test is seen.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: the OpenAI client can't be installed here: {text}"
        );
        return;
    }
    assert!(output.status.success(), "{text}");
}
