//! Regular expressions of grammars in Lark's syntax.
//!
//! Owns: the part of Lark's syntax that a regular expression can have: rules and terminals without
//! recursion, literals, expressions, groups, repetitions, and a few common terminals.
//! Invariant: the expression matches the texts of the grammar and no others; what cannot be written
//! so is refused with its name.

use crate::compile::GrammarError;
use crate::compose::regex_of_text;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Depth of names and brackets within each other: the writer recurses along both.
const DEPTH_MAX: usize = 64;

/// Common terminals, by their names in Lark's library.
const COMMON: [(&str, &str); 12] = [
    ("CR", r"\r"),
    ("LF", r"\n"),
    ("NEWLINE", r"(?:\r?\n)+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("WS_INLINE", r"[ \t]+"),
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[0-9a-fA-F]"),
    ("INT", "[0-9]+"),
    ("LCASE_LETTER", "[a-z]"),
    ("UCASE_LETTER", "[A-Z]"),
    ("LETTER", "[a-zA-Z]"),
    ("WORD", "[a-zA-Z]+"),
];

/// Returns a regular expression, not longer than `bytes_max`, that matches the texts of a grammar
/// with the rule `start`.
///
/// # Errors
/// `Refused` with the part that is not regular or not known; `TooComplex` if it would be longer.
pub fn regex_of_lark(lark: &str, bytes_max: usize) -> Result<String, GrammarError> {
    let tokens = tokens(lark)?;
    let grammar = LarkRules::read(&tokens)?;
    let mut writer = RegexWriter {
        grammar: &grammar,
        open: Vec::new(),
        depth: 0,
        bytes_max,
    };
    writer.name("start")
}

fn refused(reason: impl Into<String>) -> GrammarError {
    GrammarError::Refused(reason.into())
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum LarkToken {
    Name(String),
    /// A text, and whether its case does not count.
    Text(String, bool),
    Regex(String),
    Number(u32),
    Sign(char),
    /// `->`, whose name means nothing here.
    Arrow,
    /// `..` between the ends of a range.
    Range,
    /// `%` with a word.
    Directive(String),
    LineBreak,
}

/// Divides a grammar into its tokens.
fn tokens(lark: &str) -> Result<Vec<LarkToken>, GrammarError> {
    let mut tokens = Vec::new();
    let mut rest = lark;
    while let Some(c) = rest.chars().next() {
        let word = |text: &str| {
            let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
            text.find(|c| !is_part(c)).unwrap_or(text.len())
        };
        let taken = match c {
            '\n' => {
                tokens.push(LarkToken::LineBreak);
                1
            }
            ' ' | '\t' | '\r' => 1,
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '"' => {
                let (text, taken) = quoted(rest)?;
                let ignores_case = rest[taken..].starts_with('i');
                tokens.push(LarkToken::Text(text, ignores_case));
                taken + usize::from(ignores_case)
            }
            '/' => {
                let (regex, taken) = slashed(rest)?;
                tokens.push(LarkToken::Regex(regex));
                taken
            }
            '%' => {
                let length = word(&rest[1..]);
                tokens.push(LarkToken::Directive(rest[1..=length].to_owned()));
                1 + length
            }
            '-' if rest.starts_with("->") => {
                tokens.push(LarkToken::Arrow);
                2
            }
            '.' if rest.starts_with("..") => {
                tokens.push(LarkToken::Range);
                2
            }
            '0'..='9' => {
                let length = rest
                    .find(|c: char| !c.is_ascii_digit())
                    .unwrap_or(rest.len());
                let number = rest[..length].parse();
                tokens.push(LarkToken::Number(
                    number.map_err(|_| refused("a long number"))?,
                ));
                length
            }
            'a'..='z' | 'A'..='Z' | '_' => {
                let length = word(rest);
                tokens.push(LarkToken::Name(rest[..length].to_owned()));
                length
            }
            ':' | '|' | '(' | ')' | '[' | ']' | '?' | '*' | '+' | '~' | '.' | ',' | '!' => {
                tokens.push(LarkToken::Sign(c));
                1
            }
            other => return Err(refused(format!("`{other}` in a grammar"))),
        };
        rest = &rest[taken..];
    }
    Ok(tokens)
}

/// Reads a text in quotes; returns it, and its length with them.
fn quoted(text: &str) -> Result<(String, usize), GrammarError> {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '\n' => break,
            '"' => {
                let found = serde_json::from_str(&text[..=at]);
                let found = found.map_err(|_| refused(format!("the text {}", &text[..=at])))?;
                return Ok((found, at + 1));
            }
            _ => {}
        }
    }
    Err(refused("a text without its end"))
}

/// Reads an expression between slashes, with its flags; returns it, and its length with them.
fn slashed(text: &str) -> Result<(String, usize), GrammarError> {
    let (mut regex, mut is_escaped) = (String::new(), false);
    for (at, c) in text.char_indices().skip(1) {
        match c {
            // A slash needs no escape outside a grammar.
            '/' if is_escaped => {
                regex.pop();
                regex.push('/');
                is_escaped = false;
            }
            '/' => {
                let flags = &text[at + 1..];
                let is_flag = |c: char| matches!(c, 'i' | 'm' | 's' | 'x' | 'l' | 'u');
                let length = flags.find(|c| !is_flag(c)).unwrap_or(flags.len());
                let flags = &flags[..length];
                if flags.contains(['l', 'u', 'x']) {
                    return Err(refused(format!("the flags `{flags}` of an expression")));
                }
                let regex = if flags.is_empty() {
                    format!("(?:{regex})")
                } else {
                    format!("(?{flags}:{regex})")
                };
                return Ok((regex, at + 1 + length));
            }
            '\n' => break,
            _ => {
                is_escaped = c == '\\' && !is_escaped;
                regex.push(c);
            }
        }
    }
    Err(refused("an expression without its end"))
}

/// The rules and terminals of a grammar, each with the tokens of its body.
struct LarkRules<'a>(BTreeMap<&'a str, RuleBody<'a>>);

enum RuleBody<'a> {
    Tokens(&'a [LarkToken]),
    Common(&'static str),
}

impl<'a> LarkRules<'a> {
    fn read(tokens: &'a [LarkToken]) -> Result<Self, GrammarError> {
        let mut rules = BTreeMap::new();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                LarkToken::LineBreak | LarkToken::Sign('?' | '!') => {}
                LarkToken::Directive(word) if word == "import" => {
                    let end = line_end(tokens, at);
                    let (name, regex) = imported(&tokens[at..end])?;
                    rules.insert(name, RuleBody::Common(regex));
                    at = end;
                }
                LarkToken::Directive(word) => return Err(refused(format!("`%{word}`"))),
                LarkToken::Name(name) => {
                    // A priority divides the work of a parser, and changes no text.
                    if let [LarkToken::Sign('.'), LarkToken::Number(_), ..] = tokens[at..] {
                        at += 2;
                    }
                    if tokens.get(at) != Some(&LarkToken::Sign(':')) {
                        return Err(refused(format!("the rule `{name}` without a colon")));
                    }
                    let end = body_end(tokens, at + 1);
                    let body = RuleBody::Tokens(&tokens[at + 1..end]);
                    if rules.insert(name, body).is_some() {
                        return Err(refused(format!("`{name}` twice")));
                    }
                    at = end;
                }
                other => return Err(refused(format!("{other:?} where a rule begins"))),
            }
        }
        Ok(Self(rules))
    }
}

fn line_end(tokens: &[LarkToken], from: usize) -> usize {
    let rest = tokens[from..].iter();
    let length = rest
        .take_while(|token| **token != LarkToken::LineBreak)
        .count();
    from + length
}

/// The end of a rule's body: it goes on in lines that begin with `|`, and within brackets.
fn body_end(tokens: &[LarkToken], from: usize) -> usize {
    let (mut at, mut depth) = (from, 0_usize);
    while let Some(token) = tokens.get(at) {
        match token {
            LarkToken::Sign('(' | '[') => depth += 1,
            LarkToken::Sign(')' | ']') => depth = depth.saturating_sub(1),
            LarkToken::LineBreak if depth == 0 => {
                let mut next = tokens[at..].iter();
                let next = next.find(|token| **token != LarkToken::LineBreak);
                if next != Some(&LarkToken::Sign('|')) {
                    return at;
                }
            }
            _ => {}
        }
        at += 1;
    }
    at
}

/// Reads the rest of an import: `common.NAME`, or with `-> NAME` another name for it.
fn imported(tokens: &[LarkToken]) -> Result<(&str, &'static str), GrammarError> {
    let unknown = || refused("an import that is not of a common terminal");
    let (name, own) = match tokens {
        [
            LarkToken::Name(from),
            LarkToken::Sign('.'),
            LarkToken::Name(name),
        ] if from == "common" => (name, name),
        [
            LarkToken::Name(from),
            LarkToken::Sign('.'),
            LarkToken::Name(name),
            LarkToken::Arrow,
            LarkToken::Name(own),
        ] if from == "common" => (name, own),
        _ => return Err(unknown()),
    };
    let common = COMMON.iter().find(|(known, _)| known == name);
    let (_, regex) = common.ok_or_else(unknown)?;
    Ok((own, regex))
}

/// Writes bodies as expressions, each name in full where it stands.
struct RegexWriter<'a> {
    grammar: &'a LarkRules<'a>,
    /// Names within which the writer is.
    open: Vec<&'a str>,
    /// Names and brackets within which the writer is.
    depth: usize,
    bytes_max: usize,
}

impl<'a> RegexWriter<'a> {
    fn name(&mut self, name: &str) -> Result<String, GrammarError> {
        let Some((name, body)) = self.grammar.0.get_key_value(name) else {
            return Err(refused(format!("`{name}`, which is no rule")));
        };
        let tokens = match body {
            RuleBody::Common(regex) => return Ok(format!("(?:{regex})")),
            RuleBody::Tokens(tokens) => tokens,
        };
        if self.open.contains(name) {
            return Err(refused(format!("the recursion of `{name}`")));
        }
        self.open.push(*name);
        let mut at = 0;
        let regex = self.choice(tokens, &mut at)?;
        self.open.pop();
        if let Some(token) = tokens.get(at) {
            return Err(refused(format!("{token:?} in the rule `{name}`")));
        }
        Ok(regex)
    }

    fn check(&self, regex: &str) -> Result<(), GrammarError> {
        if regex.len() > self.bytes_max {
            return Err(GrammarError::TooComplex);
        }
        Ok(())
    }

    /// Alternatives, up to a closing bracket or the end.
    fn choice(&mut self, tokens: &[LarkToken], at: &mut usize) -> Result<String, GrammarError> {
        if self.depth >= DEPTH_MAX {
            return Err(GrammarError::TooComplex);
        }
        self.depth += 1;
        let mut regex = "(?:".to_owned();
        loop {
            match tokens.get(*at) {
                None | Some(LarkToken::Sign(')' | ']')) => break,
                Some(LarkToken::LineBreak) => *at += 1,
                Some(LarkToken::Sign('|')) => {
                    *at += 1;
                    regex.push('|');
                }
                Some(LarkToken::Arrow) => *at += 2,
                Some(_) => {
                    regex += &self.item(tokens, at)?;
                    self.check(&regex)?;
                }
            }
        }
        regex.push(')');
        self.depth -= 1;
        Ok(regex)
    }

    /// One item with its repetition.
    fn item(&mut self, tokens: &[LarkToken], at: &mut usize) -> Result<String, GrammarError> {
        let token = &tokens[*at];
        *at += 1;
        let mut regex = match token {
            LarkToken::Text(text, ignores_case) => {
                if tokens.get(*at) == Some(&LarkToken::Range) {
                    *at += 1;
                    let last = tokens.get(*at);
                    *at += 1;
                    range(text, last)?
                } else if *ignores_case {
                    format!("(?i:{})", regex_of_text(text))
                } else {
                    format!("(?:{})", regex_of_text(text))
                }
            }
            LarkToken::Regex(regex) => regex.clone(),
            LarkToken::Name(name) => self.name(name)?,
            LarkToken::Sign(open @ ('(' | '[')) => {
                let inside = self.choice(tokens, at)?;
                let close = if *open == '(' { ')' } else { ']' };
                if tokens.get(*at) != Some(&LarkToken::Sign(close)) {
                    return Err(refused(format!("`{open}` without `{close}`")));
                }
                *at += 1;
                if *open == '[' {
                    format!("{inside}?")
                } else {
                    inside
                }
            }
            other => return Err(refused(format!("{other:?} in a rule"))),
        };
        if let Some(LarkToken::Sign(sign @ ('?' | '*' | '+'))) = tokens.get(*at) {
            *at += 1;
            regex = format!("(?:{regex}){sign}");
        } else if tokens.get(*at) == Some(&LarkToken::Sign('~')) {
            *at += 1;
            let Some(LarkToken::Number(least)) = tokens.get(*at) else {
                return Err(refused("`~` without a number"));
            };
            *at += 1;
            let mut most = least;
            if let [LarkToken::Range, LarkToken::Number(number), ..] = &tokens[*at..] {
                most = number;
                *at += 2;
            }
            regex = format!("(?:{regex})");
            write!(regex, "{{{least},{most}}}").expect("a string takes every text");
        }
        Ok(regex)
    }
}

/// The class of the characters from one to another.
fn range(first: &str, last: Option<&LarkToken>) -> Result<String, GrammarError> {
    let one = |text: &str| {
        let mut chars = text.chars();
        chars.next().filter(|_| chars.next().is_none())
    };
    let last = match last {
        Some(LarkToken::Text(text, false)) => one(text),
        _ => None,
    };
    match (one(first), last) {
        (Some(first), Some(last)) if first <= last => {
            let bound = |c: char| format!("\\x{{{:X}}}", u32::from(c));
            Ok(format!("[{}-{}]", bound(first), bound(last)))
        }
        _ => Err(refused(format!("the range from {first:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regex(lark: &str) -> Result<String, GrammarError> {
        regex_of_lark(lark, 1 << 16)
    }

    #[test]
    fn a_grammar_without_recursion_is_an_expression() {
        for (lark, expected) in [
            ("start: \"a\"", "(?:(?:a))"),
            ("start: \"a.b\"", r"(?:(?:a\x2Eb))"),
            (
                "start: A b?\nA: /x\\/+/i\nb: \"c\" // end",
                r"(?:(?:(?i:x/+))(?:(?:(?:c)))?)",
            ),
            (
                "start: (\"a\" | \"b\")~2..3",
                r"(?:(?:(?:(?:a)|(?:b))){2,3})",
            ),
            (
                "start: [\"a\"] LF\n%import common.LF",
                r"(?:(?:(?:a))?(?:\n))",
            ),
            (
                "?start: a -> x\n  | \"b\"\na.2: \"c\"",
                "(?:(?:(?:c))|(?:b))",
            ),
            ("start: \"a\"..\"f\"", r"(?:[\x{61}-\x{66}])"),
        ] {
            assert_eq!(regex(lark).unwrap(), expected, "{lark}");
        }
    }

    #[test]
    fn a_part_that_is_not_regular_is_named() {
        for (lark, part) in [
            ("start: \"(\" start? \")\"", "recursion of `start`"),
            ("start: a\na: b\nb: a", "recursion of `a`"),
            ("start: x", "`x`, which is no rule"),
            ("begin: \"a\"", "`start`"),
            ("start: \"a\"\n%ignore WS", "`%ignore`"),
            (
                "start: STRING\n%import common.ESCAPED_STRING -> STRING",
                "import",
            ),
            ("start: \"a", "without its end"),
            ("start: <eos>", "`<`"),
            ("start: \"a\"\nstart: \"b\"", "`start` twice"),
            ("start: (\"a\"", "`(` without `)`"),
        ] {
            match regex(lark) {
                Err(GrammarError::Refused(reason)) => assert!(reason.contains(part), "{reason}"),
                other => panic!("{other:?} for {lark}"),
            }
        }
    }

    #[test]
    fn names_that_double_an_expression_reach_the_limit() {
        let mut lark = "start: a0\n".to_owned();
        for level in 0..40 {
            writeln!(lark, "a{level}: a{0} a{0}", level + 1).unwrap();
        }
        lark += "a40: \"x\"";
        assert!(matches!(regex(&lark), Err(GrammarError::TooComplex)));
        let deep = (0..100).map(|level| format!("a{level}: a{}\n", level + 1));
        let deep = format!("start: a0\n{}a100: \"x\"", deep.collect::<String>());
        assert!(matches!(regex(&deep), Err(GrammarError::TooComplex)));
    }
    /// The stack of the thread that reads a request would overflow, which ends the process.
    #[test]
    fn deep_brackets_reach_the_limit() {
        let nest = |open: &str, count: usize, close: &str| {
            let lark = format!("start: {}\"a\"{}", open.repeat(count), close.repeat(count));
            regex(&lark)
        };
        for (open, close) in [("(", ")"), ("[", "]"), ("([", "])")] {
            assert!(nest(open, 20, close).is_ok());
            let deep = nest(open, 50_000, close);
            assert_eq!(deep, Err(GrammarError::TooComplex), "{open}");
        }
        let unclosed = regex(&format!("start: {}", "(".repeat(50_000)));
        assert_eq!(unclosed, Err(GrammarError::TooComplex));
    }
}
