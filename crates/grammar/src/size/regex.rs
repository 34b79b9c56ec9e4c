//! Sizes of regular expressions.

use super::GrammarSize;

/// Parts of a class of letters by their property: it has hundreds of ranges.
const PROPERTY_PARTS: u64 = 4;
/// Letters of a class that count as a part.
const CLASS_LETTERS: u64 = 8;

impl GrammarSize {
    /// Counts the parts of an expression: each sign, class and escape, and each letter if its case
    /// does not count.
    pub(super) fn regex_parts(&mut self, regex: &str) -> u64 {
        let mut reader = RegexReader {
            rest: regex,
            ..RegexReader::default()
        };
        while reader.next() {}
        self.repetitions = self.repetitions.max(reader.repetitions);
        reader.parts + reader.class_letters / CLASS_LETTERS
    }
}

/// Reads an expression from its start to its end.
#[derive(Default)]
struct RegexReader<'a> {
    rest: &'a str,
    parts: u64,
    class_letters: u64,
    class_depth: u32,
    ignores_case: bool,
    /// The largest product of repetitions in the open groups, the outermost first.
    outer: Vec<u64>,
    /// The largest product in this group.
    repetitions: u64,
    /// The product within the item before the reader.
    item: u64,
}

impl RegexReader<'_> {
    fn next(&mut self) -> bool {
        let mut letters = self.rest.chars();
        let Some(letter) = letters.next() else {
            return false;
        };
        self.rest = letters.as_str();
        match letter {
            '\\' => self.escape(),
            '[' => {
                self.class_depth += 1;
                self.part();
            }
            ']' if self.class_depth > 0 => self.class_depth -= 1,
            _ if self.class_depth > 0 => self.class_letters += 1,
            '(' => self.open(),
            ')' => {
                self.item = self.repetitions.max(1);
                self.repetitions = self.outer.pop().unwrap_or(0).max(self.repetitions);
            }
            '{' => self.repeat(),
            '?' | '*' | '+' => self.parts += 1,
            '|' | '.' => self.part(),
            _ if self.ignores_case => self.part(),
            _ => self.item = 1,
        }
        true
    }

    fn part(&mut self) {
        self.parts += 1;
        self.item = 1;
    }

    fn escape(&mut self) {
        let mut letters = self.rest.chars();
        let kind = letters.next();
        self.rest = letters.as_str();
        self.part();
        if matches!(kind, Some('p' | 'P' | 'w' | 'W')) {
            self.parts += PROPERTY_PARTS;
        }
        if matches!(kind, Some('p' | 'P' | 'x' | 'u' | 'U'))
            && self.rest.starts_with('{')
            && let Some(end) = self.rest.find('}')
        {
            self.rest = &self.rest[end + 1..];
        }
    }

    fn open(&mut self) {
        self.part();
        self.outer.push(std::mem::take(&mut self.repetitions));
        if let Some(flags) = self.rest.strip_prefix('?') {
            let end = flags.find([':', ')', '<', '>']).unwrap_or(flags.len());
            self.ignores_case |= flags[..end].contains('i');
            self.rest = &flags[end..];
        }
    }

    /// `{n}`, `{n,}` or `{n,m}`.
    fn repeat(&mut self) {
        self.parts += 1;
        let Some(end) = self.rest.find('}') else {
            return;
        };
        let bounds = self.rest[..end].split(',');
        let most = bounds.filter_map(|bound| bound.trim().parse().ok()).max();
        self.rest = &self.rest[end + 1..];
        self.item = self.item.max(1).saturating_mul(most.unwrap_or(1));
        self.repetitions = self.repetitions.max(self.item);
    }
}
