//! The text with which a custom tool is called.
//!
//! Owns: the reading of that text out of the arguments of a call, which have it as their member
//! `input`. Never: knows a tool. Invariant: the text does not depend on how the arguments were cut,
//! and arguments of another form are the text themselves, so that nothing is lost.

/// The beginning of the arguments, without whitespace.
const FRAME: &str = r#"{"input":""#;
/// Places in the frame where whitespace may stand.
const GAPS: [usize; 4] = [0, 1, 8, 9];

/// Reads the arguments of one call.
#[derive(Debug, Default)]
pub(crate) struct CustomInput {
    stage: InputStage,
    /// Arguments that may turn out to be of another form.
    held: String,
    /// The first half of a character beyond the basic plane.
    high: Option<u16>,
}

#[derive(Debug, PartialEq, Eq)]
enum InputStage {
    /// So many bytes of the frame have come.
    Frame(usize),
    Text,
    Escape,
    /// The digits of an escape by number.
    Number(String),
    /// The text has ended.
    Ended,
    /// The arguments are of another form.
    Raw,
}

impl Default for InputStage {
    fn default() -> Self {
        Self::Frame(0)
    }
}

impl CustomInput {
    /// Takes the next arguments; returns the text that is certain.
    pub(crate) fn push(&mut self, arguments: &str) -> String {
        let mut text = String::new();
        for c in arguments.chars() {
            self.push_char(c, &mut text);
        }
        text
    }

    /// Ends the arguments; returns the rest of the text.
    pub(crate) fn finish(mut self) -> String {
        let mut text = std::mem::take(&mut self.held);
        self.end_half(&mut text);
        text
    }

    fn push_char(&mut self, c: char, text: &mut String) {
        match &mut self.stage {
            InputStage::Raw => text.push(c),
            InputStage::Ended => {}
            InputStage::Frame(at) => {
                self.held.push(c);
                if FRAME[*at..].starts_with(c) {
                    *at += 1;
                    if *at == FRAME.len() {
                        self.stage = InputStage::Text;
                        self.held.clear();
                    }
                } else if !(c.is_ascii_whitespace() && GAPS.contains(at)) {
                    self.stage = InputStage::Raw;
                    text.push_str(&std::mem::take(&mut self.held));
                }
            }
            InputStage::Text => match c {
                '\\' => self.stage = InputStage::Escape,
                '"' => {
                    self.end_half(text);
                    self.stage = InputStage::Ended;
                }
                _ => self.push_text(c, text),
            },
            InputStage::Escape => {
                self.stage = InputStage::Text;
                match c {
                    'u' => self.stage = InputStage::Number(String::new()),
                    'n' => self.push_text('\n', text),
                    't' => self.push_text('\t', text),
                    'r' => self.push_text('\r', text),
                    'b' => self.push_text('\u{8}', text),
                    'f' => self.push_text('\u{c}', text),
                    _ => self.push_text(c, text),
                }
            }
            InputStage::Number(digits) => {
                digits.push(c);
                if digits.len() >= 4 {
                    let unit = u16::from_str_radix(digits, 16).unwrap_or(0xfffd);
                    self.stage = InputStage::Text;
                    self.push_unit(unit, text);
                }
            }
        }
    }

    fn push_text(&mut self, c: char, text: &mut String) {
        self.end_half(text);
        text.push(c);
    }

    /// Takes a unit of UTF-16.
    fn push_unit(&mut self, unit: u16, text: &mut String) {
        if let (Some(high), 0xdc00..0xe000) = (self.high, unit) {
            self.high = None;
            let decoded = char::decode_utf16([high, unit]).next();
            text.push(
                decoded
                    .and_then(Result::ok)
                    .unwrap_or(char::REPLACEMENT_CHARACTER),
            );
            return;
        }
        self.end_half(text);
        match unit {
            0xd800..0xdc00 => self.high = Some(unit),
            _ => text.push(char::from_u32(unit.into()).unwrap_or(char::REPLACEMENT_CHARACTER)),
        }
    }

    /// A half that the other half does not follow is no character.
    fn end_half(&mut self, text: &mut String) {
        if self.high.take().is_some() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(parts: &[&str]) -> String {
        let mut input = CustomInput::default();
        let mut text: String = parts.iter().map(|part| input.push(part)).collect();
        text.push_str(&input.finish());
        text
    }

    #[test]
    fn the_text_is_the_member_of_the_arguments() {
        for (arguments, text) in [
            (
                r#"{"input": "a\n\"b\" \\ \u00e9 \ud83d\ude00"}"#,
                "a\n\"b\" \\ é 😀",
            ),
            (" {\n \"input\" : \"\"}", ""),
            (r#"{"input": "cut \u00"#, "cut "),
            (r#"{"input": "\ud83d!\udc00"}"#, "\u{fffd}!\u{fffd}"),
            (r#"{"other": "x"}"#, r#"{"other": "x"}"#),
            (r#"{"inp"#, r#"{"inp"#),
            ("plain", "plain"),
            ("", ""),
        ] {
            assert_eq!(read(&[arguments]), text, "{arguments}");
            for cut in (0..=arguments.len()).filter(|cut| arguments.is_char_boundary(*cut)) {
                let (first, rest) = arguments.split_at(cut);
                assert_eq!(read(&[first, rest]), text, "{arguments} at {cut}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_comes_back(text in ".*") {
            let arguments = serde_json::json!({"input": text}).to_string();
            prop_assert_eq!(read(&[&arguments]), text);
        }
    }
}
