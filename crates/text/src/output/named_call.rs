//! A call as its name, a mark, and a JSON object.

use super::calls::{BodyStep, CallBody, CallHead};
use super::json_scan::{JsonScan, ScanStep};

/// The form of one format.
#[derive(Debug)]
pub(super) struct NamedForm {
    /// Mark between name and arguments.
    pub(super) separator: &'static str,
    /// Text in front of the name.
    pub(super) prefix: &'static str,
    pub(super) id: CallId,
}

/// The place of a call's id beside its name.
#[derive(Debug)]
pub(super) enum CallId {
    Absent,
    /// Behind the name and this mark, if the mark is there.
    Behind(&'static str),
    /// The id is the whole: the prefix, the name, a colon and a number.
    Whole,
}

impl NamedForm {
    /// Marks within a call; an empty one does not exist.
    pub(super) fn marks(&self) -> [&'static str; 3] {
        match self.id {
            CallId::Behind(mark) => [self.separator, self.prefix, mark],
            CallId::Absent | CallId::Whole => [self.separator, self.prefix, ""],
        }
    }

    /// Reads the text in front of the separator.
    fn head(&self, text: &str) -> CallHead {
        let text = text.trim();
        let named = text.strip_prefix(self.prefix).unwrap_or(text).trim();
        let (name, id) = match self.id {
            CallId::Absent => (named, None),
            CallId::Behind(mark) => match named.split_once(mark) {
                Some((name, id)) => (name, Some(id)),
                None => (named, None),
            },
            CallId::Whole => match named.rsplit_once(':') {
                Some((name, _)) => (name, Some(text)),
                None => (named, None),
            },
        };
        CallHead {
            name: name.trim().to_owned(),
            id: id.map(|id| id.trim().to_owned()),
        }
    }
}

/// Reads the name, then gives the object away as it comes.
#[derive(Debug)]
pub(super) struct NamedCall {
    form: &'static NamedForm,
    /// Text in front of the separator.
    text: String,
    head: Option<CallHead>,
    scan: Option<JsonScan>,
}

impl NamedCall {
    pub(super) fn new(form: &'static NamedForm) -> Self {
        Self {
            form,
            text: String::new(),
            head: None,
            scan: None,
        }
    }
}

impl CallBody for NamedCall {
    fn push(&mut self, c: char, arguments: &mut String) -> BodyStep {
        if let Some(scan) = &mut self.scan {
            let step = scan.push(c);
            return match step {
                ScanStep::Behind | ScanStep::Stray => BodyStep::EndBefore(c.into()),
                ScanStep::Inside | ScanStep::Last => {
                    arguments.push(c);
                    if step == ScanStep::Last {
                        BodyStep::End
                    } else {
                        BodyStep::More
                    }
                }
            };
        }
        if self.head.is_none() {
            self.text.push(c);
            if let Some(text) = self.text.strip_suffix(self.form.separator) {
                self.head = Some(self.form.head(text));
            }
            return BodyStep::More;
        }
        match self.head.take_if(|_| c == '{') {
            Some(head) => {
                let mut scan = JsonScan::default();
                scan.push(c);
                self.scan = Some(scan);
                arguments.push(c);
                BodyStep::Begin(head)
            }
            None if c.is_whitespace() => BodyStep::More,
            None => BodyStep::NoCall,
        }
    }

    fn finish(&mut self, _: &mut String) {}
}
