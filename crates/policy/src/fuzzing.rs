//! Texts that operators give as a policy, for tests and libFuzzer.

/// A policy's text.
///
/// # Panics
/// If a text is refused without a reason, or with one whose place is not in it.
pub fn policy(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else {
        return;
    };
    let Err(diagnostics) = crate::parse(text) else {
        return;
    };
    assert!(!diagnostics.is_empty(), "refused without a reason");
    // Lines of YAML end in either sign, or in both.
    let lines = text.split(['\n', '\r']).count() as u64;
    for diagnostic in diagnostics {
        assert!(
            diagnostic.line <= lines + 1,
            "{diagnostic:?} of {lines} lines"
        );
        assert!(!diagnostic.message.is_empty(), "{diagnostic:?}");
    }
}
