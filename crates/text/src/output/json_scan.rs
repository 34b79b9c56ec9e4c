//! The end of a JSON value in text that arrives character by character.

/// Finds the end of one JSON value. It follows strings and brackets, and judges nothing else.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonScan {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    in_scalar: bool,
}

/// The place of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanStep {
    /// It belongs to the value, or precedes it as whitespace.
    Inside,
    /// It is the last one of the value.
    Last,
    /// The value ended before it.
    Behind,
    /// No JSON value has it here.
    Stray,
}

impl JsonScan {
    /// Whether the next character belongs to a string.
    pub(super) fn is_in_string(&self) -> bool {
        self.in_string
    }

    pub(super) fn push(&mut self, c: char) -> ScanStep {
        if self.in_string {
            match c {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                '"' => {
                    self.in_string = false;
                    if self.depth == 0 {
                        return ScanStep::Last;
                    }
                }
                _ => {}
            }
            return ScanStep::Inside;
        }
        let ends_scalar = self.depth == 0 && self.in_scalar;
        match c {
            '"' | '{' | '[' if ends_scalar => ScanStep::Stray,
            '"' => {
                self.in_string = true;
                ScanStep::Inside
            }
            '{' | '[' => {
                self.depth += 1;
                ScanStep::Inside
            }
            '}' | ']' | ',' if ends_scalar => ScanStep::Behind,
            '}' | ']' if self.depth > 0 => {
                self.depth -= 1;
                if self.depth == 0 {
                    ScanStep::Last
                } else {
                    ScanStep::Inside
                }
            }
            ',' | ':' if self.depth > 0 => ScanStep::Inside,
            ' ' | '\t' | '\n' | '\r' if ends_scalar => ScanStep::Behind,
            ' ' | '\t' | '\n' | '\r' => ScanStep::Inside,
            '+' | '-' | '.' | '0'..='9' | 'a'..='z' | 'A'..='Z' => {
                self.in_scalar |= self.depth == 0;
                ScanStep::Inside
            }
            _ => ScanStep::Stray,
        }
    }
}
