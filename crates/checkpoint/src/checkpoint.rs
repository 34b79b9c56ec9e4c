//! An open checkpoint: a model's description and all of its tensors.
//!
//! Owns: the match between the tensors that the description calls for and those of the files.
//! Never: reads a weight, but for the few that decide a layout.

use crate::config_file;
use crate::error::CheckpointError;
use crate::folder::TensorFolder;
use crate::generation::GenerationConfig;
use crate::quantization::{EXPERT_ENDINGS, ProjectionModule, Quantization};
use crate::quantized::{QuantizedTensor, QuantizedType, StoredMatrix};
use crate::revision::{self, CheckpointStamp, Revision, SourceFile};
use crate::stacks::ExpertsTensor;
use crate::tensor::{StoredTensor, StoredType};
use cleave_domain::TokenId;
use cleave_models::{
    DescribedModel, ExpertAxes, ModelSpec, ModelTensor, NameSpelling, Projection, TensorPlace,
    TensorRole, read_model,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Progress of loading or writing a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointProgress {
    /// Bytes that are on the device, or written.
    pub bytes_done: u64,
    /// Bytes to load or write in all.
    pub bytes_total: u64,
}

/// A mapped and validated checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    model: DescribedModel,
    /// Layout of quantised projections; `None` if all are floats of 16 or 32 bits.
    quantization: Option<Quantization>,
    generation: GenerationConfig,
    /// Every tensor of the model, as a dense checkpoint has them.
    layout: Vec<ModelTensor>,
    /// Name of the tensor of a role.
    names: BTreeMap<(TensorRole, TensorPlace), String>,
    /// Tensors with a stack of projections of all experts of a layer, by the stack and the layer.
    experts: BTreeMap<(&'static [Projection], usize), ExpertsTensor>,
    /// Biases of such stacks, by the same.
    expert_biases: BTreeMap<(&'static [Projection], usize), ExpertsTensor>,
    tensors: BTreeMap<String, StoredTensor>,
    /// Quantised weights, by the name that they would have if they were dense.
    quantized: BTreeMap<String, Arc<QuantizedTensor>>,
    /// Name of the head's tensor, if the head is the embedding.
    tied_head: Option<String>,
    has_head: bool,
    /// Beginnings of names of tensors that predict further tokens, and are not used.
    mtp_tensors: Vec<String>,
    kv_scales: Option<KvScales>,
    files: Vec<SourceFile>,
    revision: OnceLock<Revision>,
}

/// Range of the calibrated scales of an fp8 KV cache, one per layer: key = stored value × scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvScales {
    /// Smallest scale of all layers.
    pub min: f32,
    /// Largest scale of all layers.
    pub max: f32,
}

/// Reads the KV scales of a folder. Some writers store -1 for a layer that was not calibrated.
fn kv_scales(folder: &TensorFolder) -> Result<Option<KvScales>, CheckpointError> {
    let mut scales: Option<KvScales> = None;
    for name in folder.names() {
        if !name.ends_with(".k_scale") && !name.ends_with(".v_scale") {
            continue;
        }
        let shape = folder.find(name).expect("it has this name").shape;
        for scale in folder.tensor(name, shape)?.to_f32() {
            if scale > 0.0 {
                let KvScales {
                    min: least,
                    max: most,
                } = scales.unwrap_or(KvScales {
                    min: scale,
                    max: scale,
                });
                scales = Some(KvScales {
                    min: least.min(scale),
                    max: most.max(scale),
                });
            }
        }
    }
    Ok(scales)
}

impl Checkpoint {
    /// Opens a folder: maps its files and checks everything that can be checked without reading
    /// the weights themselves.
    ///
    /// # Errors
    /// See [`CheckpointError`]; each names the file and the field or tensor.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        if !dir.is_dir() {
            let problem = "not a folder; --model takes a Hugging Face checkpoint's folder";
            return Err(CheckpointError::absent(dir, problem));
        }
        let fields = config_file::read_config(&dir.join("config.json"))?;
        let (model, described) = read_model(&fields, |fields| {
            Quantization::read(fields).map_err(CheckpointError::from)
        })?;
        let quantization = match described {
            Some(described) => Some(described),
            None => quantization_of_own_file(dir)?,
        };
        let vocab_size = model.spec.vocab_size;
        let generation = GenerationConfig::read(&dir.join("generation_config.json"), vocab_size)?;
        let folder = TensorFolder::open(dir)?;
        let spelling = spelling(&model, &folder);
        let head = spelling.spell(family_name(&model, TensorRole::Head));
        let model_is_tied = model.spec.tied == Some(true);
        // A model stored without a head has none, whatever its config says of one.
        let tied = match model.spec.tied {
            _ if !spelling.has_head => true,
            Some(tied) => tied,
            None => !folder.contains(&head),
        };
        let mut layout = model.spec.tensors(model.family.tensors, tied);
        for tensor in &mut layout {
            tensor.name = spelling.spell(&tensor.name);
        }
        let (mut tensors, mut quantized) = (BTreeMap::new(), BTreeMap::new());
        let mut names = BTreeMap::new();
        let (mut experts, mut expert_biases) = (BTreeMap::new(), BTreeMap::new());
        for tensor in &layout {
            let name = tensor.name.clone();
            names.insert((tensor.role, tensor.place), name.clone());
            if let Some((stack, of_experts)) = ExpertsTensor::of(tensor) {
                let list = if of_experts.is_bias() {
                    &mut expert_biases
                } else {
                    &mut experts
                };
                list.insert(stack, of_experts);
            }
            match quantized_weight(quantization.as_ref(), &folder, tensor)? {
                Some(found) => drop(quantized.insert(name, Arc::new(found))),
                None => drop(tensors.insert(name, folder.tensor(&tensor.name, &tensor.shape)?)),
            }
        }
        let mtp_tensors = model.mtp_tensors().map(|name| spelling.spell(&name));
        let opened = Self {
            dir: dir.to_owned(),
            mtp_tensors: mtp_tensors.collect(),
            model,
            quantization,
            generation,
            layout,
            names,
            experts,
            expert_biases,
            tensors,
            quantized,
            has_head: spelling.has_head || model_is_tied,
            tied_head: tied.then_some(head),
            kv_scales: kv_scales(&folder)?,
            files: folder.shards().iter().map(SourceFile::of).collect(),
            revision: OnceLock::new(),
        };
        match folder
            .names()
            .find(|name| !opened.is_expected(&folder, name))
        {
            Some(extra) => Err(CheckpointError::unsupported(
                folder.file_of(extra),
                format!("tensor `{extra}`"),
                format!(
                    "is not part of a {} model as config.json describes it; it would be ignored, \
                     and the answers would be wrong",
                    opened.model.family.name
                ),
            )),
            None => Ok(opened),
        }
    }

    /// Whether a tensor of the files is used by the model, or may be ignored.
    fn is_expected(&self, folder: &TensorFolder, name: &str) -> bool {
        if self.tensors.contains_key(name)
            || self.quantized.contains_key(name)
            || self.may_be_unused(name)
        {
            return true;
        }
        let Some(quantization) = &self.quantization else {
            return false;
        };
        let is_of_experts = EXPERT_ENDINGS.iter().any(|ending| {
            let tensor = name.strip_suffix(ending);
            tensor.is_some_and(|tensor| self.quantized.contains_key(tensor))
        });
        if is_of_experts {
            return true;
        }
        let is_quantized = |module: &str| self.quantized.contains_key(&format!("{module}.weight"));
        name.rsplit_once('.').is_some_and(|(module, kind)| {
            let is_weight_part =
                is_quantized(module) || module.ends_with(self.model.family.attention_module);
            // A global scale belongs to four-bit floats alone.
            let has_global = self
                .quantized_tensor(&format!("{module}.weight"))
                .is_some_and(|tensor| tensor.element() == QuantizedType::E2m1);
            let is_of_weight = has_global || !quantization.is_global_scale(kind);
            let is_method_part = is_weight_part && is_of_weight && quantization.is_known(kind);
            // Some writers give every quantised module a bias, filled with zeros where the model
            // has none.
            is_method_part || (is_quantized(module) && kind == "bias" && folder.is_zero(name))
        })
    }

    /// A quantised tensor, by the name of the dense one.
    pub(crate) fn quantized_tensor(&self, name: &str) -> Option<&QuantizedTensor> {
        self.quantized.get(name).map(|tensor| &**tensor)
    }

    /// Whether an unused tensor may be ignored: the family never uses it, it stores a tied head
    /// twice, it predicts further tokens, or it is no text model's.
    fn may_be_unused(&self, name: &str) -> bool {
        let mut endings = self.model.family.unused_tensors.iter();
        endings.any(|ending| name.ends_with(ending))
            || self.tied_head.as_deref() == Some(name)
            || self.mtp_tensors.iter().any(|each| name.starts_with(each))
            || self.is_of_other_part(name)
    }

    /// Whether a tensor belongs to the part of a wrapped model that is not text.
    fn is_of_other_part(&self, name: &str) -> bool {
        let mut beginnings = self
            .model
            .wrapper
            .iter()
            .flat_map(|each| each.other_tensors);
        beginnings.any(|beginning| name.starts_with(beginning))
    }

    /// The class around a text model, whose other parts are not used, if there is one.
    pub fn wrapper(&self) -> Option<&'static str> {
        self.model.wrapper.map(|wrapper| wrapper.class)
    }

    /// Folder that contains the checkpoint.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Description of the model.
    pub fn spec(&self) -> &ModelSpec {
        &self.model.spec
    }

    /// Every tensor of the model, in the shapes of a dense checkpoint.
    pub(crate) fn layout(&self) -> &[ModelTensor] {
        &self.layout
    }

    /// Every tensor of the model with the name that the family gives it; files may have another.
    pub(crate) fn named_tensors(&self) -> impl Iterator<Item = (&ModelTensor, String)> {
        let tied = self.tied_head.is_some();
        let family = self.model.spec.tensors(self.model.family.tensors, tied);
        let names = family.into_iter().map(|tensor| tensor.name);
        self.layout.iter().zip(names)
    }

    /// Element type of the embedding; nearly always also that of the other dense matrices.
    pub fn stored_type(&self) -> StoredType {
        self.embedding().stored()
    }

    /// Tokens that end a text: generation_config.json's, or else config.json's.
    pub fn eos(&self) -> &[TokenId] {
        self.generation.eos.as_ref().unwrap_or(&self.model.spec.eos)
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<TokenId> {
        self.generation.bos.or(self.model.spec.bos)
    }

    /// Quantisation of the projections in words: `awq int4`.
    pub fn quantization(&self) -> Option<String> {
        let method = self.quantization.as_ref()?.name();
        let mut names: Vec<&str> = self
            .quantized
            .values()
            .map(|t| t.element().name())
            .collect();
        names.sort_unstable();
        names.dedup();
        match names.as_slice() {
            [] => None,
            [name] if *name == method => Some(method.to_owned()),
            names => Some(format!("{method} {}", names.join(" and "))),
        }
    }

    /// Range of the makers' KV scales, which the engine does not use.
    pub fn kv_scales(&self) -> Option<KvScales> {
        self.kv_scales
    }

    /// Every tensor of the model that is not quantised, by name.
    pub fn tensors(&self) -> impl Iterator<Item = &StoredTensor> {
        self.tensors.values()
    }

    /// A weight `(out, in)`, by its name in the dense model.
    pub fn matrix(&self, name: &str) -> Option<StoredMatrix> {
        let quantized = self
            .quantized
            .get(name)
            .cloned()
            .map(StoredMatrix::Quantized);
        quantized.or_else(|| self.tensors.get(name).cloned().map(StoredMatrix::Dense))
    }

    /// Number of weights; a tied head counts once.
    pub fn parameters_count(&self) -> u64 {
        let dense = self.tensors.values().map(|t| (t.rows(), t.columns()));
        let quantized = self.quantized.values().map(|t| (t.rows(), t.columns()));
        let shapes = dense.chain(quantized);
        shapes.map(|(rows, columns)| (rows * columns) as u64).sum()
    }

    /// Bytes that loading reads; a tied head is read twice.
    pub fn bytes_total(&self) -> u64 {
        let dense = self.tensors.values().map(|t| t.bytes().len());
        let quantized = self
            .quantized
            .values()
            .flat_map(|tensor| tensor.part_bytes());
        let stored: usize = dense.chain(quantized.map(<[u8]>::len)).sum();
        let stored = stored as u64;
        if self.tied_head.is_some() {
            stored + self.embedding().bytes().len() as u64
        } else {
            stored
        }
    }

    /// Identity of the weights.
    pub fn revision(&self) -> Revision {
        *self
            .revision
            .get_or_init(|| revision::revision_of(&self.model.spec, &self.tensors, &self.quantized))
    }

    /// Identity of the weights and of their files' state; any write to a file changes it.
    pub fn stamp(&self) -> CheckpointStamp {
        revision::stamp_of(self.revision(), &self.files)
    }

    /// The embedding, `(vocab, hidden)`.
    pub fn embedding(&self) -> &StoredTensor {
        self.vector(TensorRole::Embedding, TensorPlace::Model)
    }

    /// Whether the model can generate: a model that was stored without a head, as embedding models
    /// are, can only if its head is tied to the embedding.
    pub fn has_head(&self) -> bool {
        self.has_head
    }

    /// The head, `(vocab, hidden)`: its own, or the embedding. The embedding stands in for the head
    /// of a model without one, which nothing reads then.
    pub fn head(&self) -> &StoredTensor {
        let role = if self.tied_head.is_some() {
            TensorRole::Embedding
        } else {
            TensorRole::Head
        };
        self.vector(role, TensorPlace::Model)
    }

    /// A tensor that is never quantised.
    ///
    /// # Panics
    /// If the model has no such tensor.
    pub fn vector(&self, role: TensorRole, place: TensorPlace) -> &StoredTensor {
        self.tensor(self.name(role, place))
    }

    /// Names of the tensors that have a stack: of each projection, or of all.
    pub(crate) fn stack_names(
        &self,
        parts: &'static [Projection],
        place: TensorPlace,
    ) -> Vec<&str> {
        let whole = TensorRole::Stack(parts);
        if self.names.contains_key(&(whole, place)) {
            return vec![self.name(whole, place)];
        }
        let parts = parts.iter();
        parts
            .map(|part| self.name(TensorRole::Weight(*part), place))
            .collect()
    }

    /// The tensor with a stack of all experts of a layer, if there is one.
    pub(crate) fn experts(
        &self,
        parts: &'static [Projection],
        layer: usize,
    ) -> Option<&ExpertsTensor> {
        self.experts.get(&(parts, layer))
    }

    /// The tensor with the biases of a stack of all experts of a layer, if there is one.
    pub(crate) fn expert_biases(
        &self,
        parts: &'static [Projection],
        layer: usize,
    ) -> Option<&ExpertsTensor> {
        self.expert_biases.get(&(parts, layer))
    }

    /// Every tensor of the model that is not quantised, with its role.
    pub fn tensors_by_role(&self) -> impl Iterator<Item = (TensorRole, &StoredTensor)> {
        self.layout.iter().filter_map(|tensor| {
            let stored = self.tensors.get(&tensor.name)?;
            Some((tensor.role, stored))
        })
    }

    fn name(&self, role: TensorRole, place: TensorPlace) -> &str {
        let name = self.names.get(&(role, place));
        name.unwrap_or_else(|| panic!("the model has no {role:?} in {place:?}"))
    }

    /// A tensor that the configuration calls for, and that is never quantised.
    pub(crate) fn tensor(&self, name: &str) -> &StoredTensor {
        self.tensors
            .get(name)
            .expect("open() found every tensor of the layout")
    }
}

/// The spelling of names that a folder has, by the name of its embedding.
fn spelling(model: &DescribedModel, folder: &TensorFolder) -> &'static NameSpelling {
    let embedding = family_name(model, TensorRole::Embedding);
    let spellings = model.spellings();
    let mut found = spellings.iter();
    let found = found.find(|spelling| folder.contains(&spelling.spell(embedding)));
    found.unwrap_or(&spellings[0])
}

/// A family's name of a tensor of no layer.
fn family_name(model: &DescribedModel, wanted: TensorRole) -> &'static str {
    let mut names = model.family.tensors.iter().copied().flatten();
    let name = names.find(|(_, role)| *role == wanted);
    name.expect("every family names its embedding and its head")
        .0
}

/// Reads the file in which older versions of modelopt describe the quantisation.
fn quantization_of_own_file(dir: &Path) -> Result<Option<Quantization>, CheckpointError> {
    let Some(fields) = config_file::read(&dir.join("hf_quant_config.json"))? else {
        return Ok(None);
    };
    let quantization = Quantization::read_own_file(&fields)?;
    fields.refuse_unread()?;
    Ok(Some(quantization))
}

/// Reads an expected tensor if it is a projection's weight and quantised.
fn quantized_weight(
    quantization: Option<&Quantization>,
    folder: &TensorFolder,
    expected: &ModelTensor,
) -> Result<Option<QuantizedTensor>, CheckpointError> {
    let Some(quantization) = quantization else {
        return Ok(None);
    };
    if expected.role == TensorRole::Head {
        return refuse_quantized_head(quantization, folder, &expected.name).map(|()| None);
    }
    if let (TensorRole::Experts { axes, .. }, &[count, a, b]) =
        (expected.role, expected.shape.as_slice())
    {
        let (out, columns) = match axes {
            ExpertAxes::OutIn => (a, b),
            ExpertAxes::InOut => (b, a),
        };
        let experts = ProjectionModule {
            name: &expected.name,
            rows: count * out,
            columns,
        };
        return quantization.experts(folder, experts, count);
    }
    match (expected.projection_name(), expected.shape.as_slice()) {
        (Some(name), &[rows, columns]) => {
            let module = ProjectionModule {
                name,
                rows,
                columns,
            };
            quantization.weight(folder, module)
        }
        _ => Ok(None),
    }
}

/// Refuses a quantised head; nearly all published checkpoints keep it dense.
fn refuse_quantized_head(
    quantization: &Quantization,
    folder: &TensorFolder,
    head: &str,
) -> Result<(), CheckpointError> {
    let module = head.strip_suffix(".weight").unwrap_or(head);
    let is_part = |name: &&str| {
        let kind = name.strip_prefix(module).and_then(|n| n.strip_prefix('.'));
        kind.is_some_and(|kind| quantization.is_known(kind))
    };
    match folder.names().find(is_part) {
        None => Ok(()),
        Some(name) => Err(CheckpointError::unsupported(
            folder.file_of(name),
            format!("tensor `{name}`"),
            "a quantised lm_head is not supported; one in BF16, F16 or F32 is",
        )),
    }
}
