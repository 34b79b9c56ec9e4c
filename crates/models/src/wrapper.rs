//! Text models within a class of models that also read images.
//!
//! Owns: the choice of a wrapper, and which of the two objects of its config.json says what.
//! Never: describes the part that reads images; its tensors and keys are known and not used.

use crate::error::ConfigError;
use crate::families;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::ModelSpec;
use crate::spelling::NameSpelling;

/// Key of the description of a wrapped text model.
pub(crate) const TEXT_CONFIG: &str = "text_config";

/// A class of models of images and text, whose text part is a model of a family, described by
/// config.json's `text_config`.
#[derive(Debug)]
pub struct Wrapper {
    /// Name of the class's models, as config.json's `model_type` has it.
    pub name: &'static str,
    /// Published models, for people.
    pub models: &'static str,
    /// The class, as config.json's `architectures` has it.
    pub class: &'static str,
    /// Families that the text part may be of.
    pub(crate) families: &'static [&'static Family],
    /// Spellings of the text part's tensors.
    pub(crate) spellings: &'static [NameSpelling],
    /// Beginnings of names of the other parts' tensors.
    pub other_tensors: &'static [&'static str],
    /// Keys of config.json about the other parts, or said again in `text_config`.
    pub(crate) other_keys: &'static [&'static str],
}

static WRAPPERS: [&Wrapper; 2] = [&families::wrappers::GEMMA3, &families::wrappers::MISTRAL3];

/// Every wrapper, in the order in which errors list them.
pub fn wrappers() -> impl Iterator<Item = &'static Wrapper> {
    WRAPPERS.into_iter()
}

impl Wrapper {
    /// Checks that a text part may be of this family.
    ///
    /// # Errors
    /// A family that is not one of the class's.
    pub(crate) fn check_family(
        &self,
        fields: &ConfigFields,
        family: &Family,
    ) -> Result<(), ConfigError> {
        if self.families.iter().any(|each| each.name == family.name) {
            return Ok(());
        }
        let (name, class) = (family.name, self.class);
        let problem = format!("{name} is not the text part of a {class}");
        Err(fields.unsupported(TEXT_CONFIG, problem))
    }

    /// Takes from the outer object what `text_config` leaves out.
    ///
    /// # Errors
    /// An outer field of another type.
    pub(crate) fn complete(
        &self,
        fields: &ConfigFields,
        spec: &mut ModelSpec,
    ) -> Result<(), ConfigError> {
        fields.ignore(self.other_keys);
        // Both objects and the class have an opinion on whether the head is shared; the files tell.
        spec.tied = None;
        let ids = |name| fields.token_ids(name, spec.vocab_size, u64::from(u32::MAX));
        let (bos, eos) = (ids("bos_token_id")?, ids("eos_token_id")?);
        spec.bos = spec.bos.or(bos.and_then(|ids| ids.first().copied()));
        if spec.eos.is_empty() {
            spec.eos = eos.unwrap_or_default();
        }
        Ok(())
    }
}
