//! Spellings of tensors' names in files, which differ from a family's.
//!
//! Owns: how a family's name becomes a file's. Never: reads a file.

/// A spelling: beginnings of a family's names, each with the one that files have in its place.
#[derive(Debug)]
pub struct NameSpelling {
    /// Beginnings in the family, and in the files. Other names stay.
    pub(crate) beginnings: &'static [(&'static str, &'static str)],
    /// Whether files of this spelling can have a head of their own.
    pub has_head: bool,
}

/// Spellings of a text model that no class wraps: the family's, and that of a model which was
/// stored without a head, as `AutoModel` does, and so without the leading `model.`.
pub(crate) static ALONE: [NameSpelling; 2] = [
    NameSpelling {
        beginnings: &[],
        has_head: true,
    },
    NameSpelling {
        beginnings: &[("model.", "")],
        has_head: false,
    },
];

impl NameSpelling {
    /// The name in the files of a tensor that the family calls `name`.
    pub fn spell(&self, name: &str) -> String {
        let mut spelled = self.beginnings.iter().filter_map(|(family, file)| {
            let rest = name.strip_prefix(family)?;
            Some(format!("{file}{rest}"))
        });
        spelled.next().unwrap_or_else(|| name.to_owned())
    }
}
