//! The rotary embedding's frequencies.
//!
//! Owns: the supported scalings, their effect on the frequencies, and the elements that are
//! rotated. Never: rotates a vector; the device does.
//! Invariant: every frequency is finite and not negative; the rotated elements are an even number
//! of at most a head's.

use crate::error::ConfigError;
use crate::fields::ConfigFields;
use std::f64::consts::TAU;

/// Bounds on values in a file, far beyond any model, so that frequencies stay finite in f32.
const THETA_MAX: f64 = 1e12;
const FACTOR_MIN: f64 = 1e-3;
const FACTOR_MAX: f64 = 1e9;

/// A rotary embedding: base, scaling, and the elements of a head that it rotates.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling for longer contexts.
    pub scaling: RopeScaling,
    /// Elements of each head that are rotated, its first ones; 0 rotates nothing.
    pub rotated_dim: usize,
    /// Elements that are rotated together.
    pub pairs: RopePairs,
    /// Growth of queries at far positions, if they grow.
    pub query_growth: Option<QueryGrowth>,
}

/// Elements that one angle rotates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RopePairs {
    /// Pairs `(i, i + rotated_dim / 2)`.
    #[default]
    Halves,
    /// Pairs `(2i, 2i + 1)`, also called interleaved.
    Neighbours,
}

/// A factor of rotated queries, `1 + beta · ln(1 + ⌊position / original_context⌋)` (Llama 4).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// Weight of the logarithm.
    pub beta: f64,
    /// The context the model was first trained on, in tokens.
    pub original_context: f64,
}

/// Scaling of the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Every frequency stays as it is.
    None,
    /// Divides every frequency by the factor.
    Linear {
        /// Stretching factor, usually above 1.
        factor: f64,
    },
    /// Llama 3.1: divides low frequencies by the factor, keeps high ones, and interpolates between
    /// them.
    Llama3 {
        /// Stretching factor, usually above 1.
        factor: f64,
        /// Wavelengths over `original / low_freq_factor` are stretched by the whole factor.
        low_freq_factor: f64,
        /// Wavelengths under `original / high_freq_factor` are not stretched.
        high_freq_factor: f64,
        /// The context the model was first trained on, in tokens.
        original_context: f64,
    },
    /// YaRN (Peng et al. 2023): as Llama 3.1, interpolated over the pairs' numbers.
    Yarn(YarnScaling),
    /// LongRoPE (Ding et al. 2024): divides each pair's frequency by a factor of its own.
    LongRope(LongRopeScaling),
}

/// Parameters of YaRN (arXiv:2309.00071).
#[derive(Clone, Debug, PartialEq)]
pub struct YarnScaling {
    /// Stretching factor, usually above 1.
    pub factor: f64,
    /// The context the model was first trained on, in tokens.
    pub original_context: f64,
    /// Pairs that turn more often than this in the original context are not stretched.
    pub beta_fast: f64,
    /// Pairs that turn less often than this in the original context are stretched by the factor.
    pub beta_slow: f64,
    /// Whether the bounds between these pairs are whole numbers.
    pub truncate: bool,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
}

/// Parameters of LongRoPE. One of the two lists holds for all positions of an engine, see
/// [`Rope::is_long`]: keys that were rotated by one could not be read beside those of the other.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRopeScaling {
    /// Factors within the original context, `(rotated_dim / 2)`.
    pub short_factors: Vec<f64>,
    /// Factors beyond it, `(rotated_dim / 2)`.
    pub long_factors: Vec<f64>,
    /// The context the model was first trained on, in tokens.
    pub original_context: f64,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
}

/// Rotary embeddings of layers with full and with sliding attention.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LayerRopes {
    pub(crate) full: Rope,
    pub(crate) sliding: Rope,
}

/// Embedding of layers with sliding attention.
#[derive(Clone, Copy)]
pub(crate) enum SlidingRope {
    /// That of layers with full attention.
    AsFull,
    /// One without scaling, by this base or else that of layers with full attention.
    Unscaled(Option<f64>),
}

/// Reads the rotary embeddings of a config.json; each field is a difference between families.
#[derive(Clone, Copy)]
pub(crate) struct RopeReader {
    pub(crate) head_dim: usize,
    /// Base where config.json has none.
    pub(crate) theta: f64,
    /// Share of each head that is rotated where config.json has none, in a family that rotates
    /// parts of heads; the others refuse any but whole heads.
    pub(crate) share: Option<f64>,
    pub(crate) pairs: RopePairs,
    /// Embedding of layers with sliding attention, where config.json has one embedding only.
    pub(crate) sliding: SlidingRope,
    /// Whether the family reads `llama_4_scaling_beta`.
    pub(crate) has_query_growth: bool,
}

impl RopeReader {
    /// Whole heads in halves, with the usual base.
    pub(crate) const fn new(head_dim: usize) -> Self {
        Self {
            head_dim,
            theta: 10_000.0,
            share: None,
            pairs: RopePairs::Halves,
            sliding: SlidingRope::AsFull,
            has_query_growth: false,
        }
    }

    /// Reads the embedding of a model that has one for all layers: `rope_parameters`, or the older
    /// `rope_theta` with `rope_scaling`.
    pub(crate) fn read(&self, fields: &ConfigFields) -> Result<Rope, ConfigError> {
        let LayerRopes { full, sliding } = self.read_by_layer(fields)?;
        if full != sliding {
            let problem =
                "its sliding_attention differs from full_attention; one for all is supported";
            return Err(fields.unsupported("rope_parameters", problem));
        }
        Ok(full)
    }

    /// Reads `rope_parameters`, which may differ by the layers' attention, or the older spelling,
    /// which has one for all.
    pub(crate) fn read_by_layer(&self, fields: &ConfigFields) -> Result<LayerRopes, ConfigError> {
        let theta = fields.number("rope_theta")?;
        let share = fields.number("partial_rotary_factor")?;
        let base = BaseRope { theta, share };
        // The older spelling may have its base inside too, and some writers keep both objects.
        let newer = fields.object("rope_parameters")?;
        let older = fields.object("rope_scaling")?;
        let read = |object: &Option<ConfigFields>| {
            let object = object.as_ref();
            object
                .map(|object| self.read_object(fields, object, base))
                .transpose()
        };
        match (read(&newer)?, read(&older)?) {
            (Some(newer), Some(older)) if newer != older => {
                let problem = "differs from rope_parameters; which of them holds is unknown";
                Err(fields.unsupported("rope_scaling", problem))
            }
            (Some(ropes), _) | (None, Some(ropes)) => Ok(ropes),
            (None, None) => {
                let rope = self.checked(fields, base, RopeScaling::None)?;
                self.with_sliding(fields, rope)
            }
        }
    }

    /// Adds the embedding of layers with sliding attention to the only one that there is.
    fn with_sliding(&self, fields: &ConfigFields, full: Rope) -> Result<LayerRopes, ConfigError> {
        let sliding = match self.sliding {
            SlidingRope::AsFull => full.clone(),
            SlidingRope::Unscaled(theta) => {
                let theta = theta.or(Some(full.theta));
                let share = None;
                self.checked(fields, BaseRope { theta, share }, RopeScaling::None)?
            }
        };
        Ok(LayerRopes { full, sliding })
    }

    fn read_object(
        &self,
        fields: &ConfigFields,
        object: &ConfigFields,
        base: BaseRope,
    ) -> Result<LayerRopes, ConfigError> {
        let of_type = |name: &str| {
            let nested = object.object(name)?;
            nested
                .map(|nested| self.read_parameters(fields, &nested, base))
                .transpose()
        };
        match (of_type("full_attention")?, of_type("sliding_attention")?) {
            (None, None) => {
                let rope = self.read_parameters(fields, object, base)?;
                self.with_sliding(fields, rope)
            }
            (Some(full), Some(sliding)) => Ok(LayerRopes { full, sliding }),
            (Some(full), None) => self.with_sliding(fields, full),
            (None, Some(rope)) => Ok(LayerRopes {
                full: rope.clone(),
                sliding: rope,
            }),
        }
    }

    fn read_parameters(
        &self,
        fields: &ConfigFields,
        object: &ConfigFields,
        base: BaseRope,
    ) -> Result<Rope, ConfigError> {
        let base = BaseRope {
            theta: object.number("rope_theta")?.or(base.theta),
            share: object.number("partial_rotary_factor")?.or(base.share),
        };
        let original = OriginalContext { fields, object };
        let scaling = RopeScaling::read(object, &original)?;
        let mut rope = self.checked(object, base, scaling)?;
        if self.has_query_growth
            && let Some(beta) = object.number("llama_4_scaling_beta")?
        {
            if !(0.0..=FACTOR_MAX).contains(&beta) {
                let problem = format!("{beta} is not from 0 to {FACTOR_MAX}");
                return Err(object.damaged("llama_4_scaling_beta", problem));
            }
            object.ignore(&["max_position_embeddings"]);
            rope.query_growth = Some(QueryGrowth {
                beta,
                original_context: original.read()?,
            });
        }
        Ok(rope)
    }

    fn checked(
        &self,
        fields: &ConfigFields,
        base: BaseRope,
        scaling: RopeScaling,
    ) -> Result<Rope, ConfigError> {
        let theta = base.theta.unwrap_or(self.theta);
        let is_yarn = matches!(scaling, RopeScaling::Yarn(_));
        if !(1.0..=THETA_MAX).contains(&theta) || (is_yarn && theta < 1.1) {
            let problem = format!("{theta} is not from 1 to {THETA_MAX}, and above 1 with yarn");
            return Err(fields.damaged("rope_theta", problem));
        }
        let rotated_dim = self.rotated_dim(fields, base.share)?;
        if let RopeScaling::LongRope(scaling) = &scaling {
            let lists = [
                ("short_factor", &scaling.short_factors),
                ("long_factor", &scaling.long_factors),
            ];
            for (name, list) in lists {
                if list.len() != rotated_dim / 2 {
                    let (len, pairs) = (list.len(), rotated_dim / 2);
                    let problem = format!("has {len} factors for {pairs} rotated pairs");
                    return Err(fields.damaged(name, problem));
                }
            }
        }
        Ok(Rope {
            theta,
            scaling,
            rotated_dim,
            pairs: self.pairs,
            query_growth: None,
        })
    }

    fn rotated_dim(&self, fields: &ConfigFields, share: Option<f64>) -> Result<usize, ConfigError> {
        const NAME: &str = "partial_rotary_factor";
        let Some(default) = self.share else {
            return match share {
                Some(share) if share != 1.0 => {
                    let problem = format!("{share} is not supported; only whole heads are rotated");
                    Err(fields.unsupported(NAME, problem))
                }
                _ => Ok(self.head_dim),
            };
        };
        let share = share.unwrap_or(default);
        let rotated = (self.head_dim as f64 * share) as usize;
        if !(0.0..=1.0).contains(&share) || rotated == 0 || !rotated.is_multiple_of(2) {
            let problem = format!(
                "{share} of heads of {} is not an even number of elements from 2 to all",
                self.head_dim
            );
            return Err(fields.damaged(NAME, problem));
        }
        Ok(rotated)
    }
}

/// Base and share of a rotary embedding as the objects around it have them.
#[derive(Clone, Copy)]
struct BaseRope {
    theta: Option<f64>,
    share: Option<f64>,
}

/// The context that a model was first trained on: a key of config.json, of the embedding's own
/// object, or else the context of today.
struct OriginalContext<'a> {
    fields: &'a ConfigFields,
    object: &'a ConfigFields,
}

impl OriginalContext<'_> {
    fn read(&self) -> Result<f64, ConfigError> {
        const NAME: &str = "original_max_position_embeddings";
        if self.fields.number(NAME)?.is_some() {
            self.object.ignore(&[NAME]);
            return positive(self.fields, NAME);
        }
        if self.object.number(NAME)?.is_some() {
            return positive(self.object, NAME);
        }
        positive(self.fields, "max_position_embeddings")
    }

    /// Times that the context of today is as long.
    fn growth(&self) -> Result<f64, ConfigError> {
        Ok(positive(self.fields, "max_position_embeddings")? / self.read()?)
    }
}

impl Rope {
    /// An embedding that rotates nothing, for layers without one.
    pub(crate) fn absent() -> Self {
        Self {
            theta: 10_000.0,
            scaling: RopeScaling::None,
            rotated_dim: 0,
            pairs: RopePairs::Halves,
            query_growth: None,
        }
    }

    /// Whether an engine whose sequences have at most `context_tokens` tokens takes LongRoPE's
    /// factors for long contexts; `None` for every other scaling.
    pub fn is_long(&self, context_tokens: usize) -> Option<bool> {
        match &self.scaling {
            RopeScaling::LongRope(scaling) => {
                Some(context_tokens as f64 > scaling.original_context)
            }
            RopeScaling::None
            | RopeScaling::Linear { .. }
            | RopeScaling::Llama3 { .. }
            | RopeScaling::Yarn(_) => None,
        }
    }

    /// Radians per position of each pair, `(rotated_dim / 2)`, of an engine whose sequences have at
    /// most `context_tokens` tokens.
    pub fn frequencies(&self, context_tokens: usize) -> Vec<f32> {
        let is_long = self.is_long(context_tokens).unwrap_or(false);
        let frequencies = (0..self.rotated_dim / 2).map(|pair| {
            let exponent = (2 * pair) as f64 / self.rotated_dim as f64;
            let frequency = 1.0 / self.theta.powf(exponent);
            match &self.scaling {
                RopeScaling::Yarn(scaling) => scaling.scale(frequency, pair, self),
                RopeScaling::LongRope(scaling) if is_long => frequency / scaling.long_factors[pair],
                RopeScaling::LongRope(scaling) => frequency / scaling.short_factors[pair],
                other => other.scale_frequency(frequency),
            }
        });
        frequencies.map(|frequency| frequency as f32).collect()
    }

    /// Factor of cosines and sines.
    pub fn attention_factor(&self) -> f32 {
        match &self.scaling {
            RopeScaling::Yarn(scaling) => scaling.attention_factor as f32,
            RopeScaling::LongRope(scaling) => scaling.attention_factor as f32,
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
        }
    }
}

impl YarnScaling {
    /// The frequency of pair number `pair`, which is `frequency` without scaling.
    fn scale(&self, frequency: f64, pair: usize, rope: &Rope) -> f64 {
        let dim = rope.rotated_dim as f64;
        let pair_of_turns = |turns: f64| {
            dim * (self.original_context / (turns * TAU)).ln() / (2.0 * rope.theta.ln())
        };
        let (mut low, mut high) = (pair_of_turns(self.beta_fast), pair_of_turns(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let stretched_share = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
        frequency / self.factor * stretched_share + frequency * (1.0 - stretched_share)
    }

    fn read(fields: &ConfigFields, original: &OriginalContext<'_>) -> Result<Self, ConfigError> {
        let factor = match fields.number("factor")? {
            Some(_) => positive(fields, "factor")?,
            None => original.growth()?,
        };
        let optional = |name: &str| match fields.number(name)? {
            Some(_) => positive(fields, name).map(Some),
            None => Ok(None),
        };
        let (fast, slow) = (optional("beta_fast")?, optional("beta_slow")?);
        let (beta_fast, beta_slow) = (fast.unwrap_or(32.0), slow.unwrap_or(1.0));
        if beta_slow >= beta_fast {
            let problem = format!("{beta_fast} is not above beta_slow, {beta_slow}");
            return Err(fields.damaged("beta_fast", problem));
        }
        let magnitude = |weight: f64| match factor {
            ..=1.0 => 1.0,
            _ => 0.1 * weight * factor.ln() + 1.0,
        };
        let stated = optional("attention_factor")?;
        let scales = (fields.number("mscale")?, fields.number("mscale_all_dim")?);
        let attention_factor = match (stated, scales) {
            (Some(stated), _) => stated,
            (None, (Some(of_some), Some(of_all))) if of_some != 0.0 && of_all != 0.0 => {
                magnitude(of_some) / magnitude(of_all)
            }
            (None, _) => magnitude(1.0),
        };
        if !(FACTOR_MIN..=FACTOR_MAX).contains(&attention_factor) {
            let problem = format!("gives a factor of {attention_factor}");
            return Err(fields.damaged("mscale", problem));
        }
        Ok(Self {
            factor,
            original_context: original.read()?,
            beta_fast,
            beta_slow,
            truncate: fields.flag("truncate")?.unwrap_or(true),
            attention_factor,
        })
    }
}

impl LongRopeScaling {
    fn read(fields: &ConfigFields, original: &OriginalContext<'_>) -> Result<Self, ConfigError> {
        let list = |name: &str| {
            let factors = fields.numbers(name)?;
            let factors = factors.ok_or_else(|| fields.damaged(name, "is missing"))?;
            let in_range = |factor: &f64| (FACTOR_MIN..=FACTOR_MAX).contains(factor);
            match factors.iter().find(|factor| !in_range(factor)) {
                None => Ok(factors),
                Some(factor) => {
                    let problem = format!("{factor} is not from {FACTOR_MIN} to {FACTOR_MAX}");
                    Err(fields.damaged(name, problem))
                }
            }
        };
        let original_context = original.read()?;
        let growth = match fields.number("factor")? {
            Some(_) => positive(fields, "factor")?,
            None => original.growth()?,
        };
        let attention_factor = match fields.number("attention_factor")? {
            Some(_) => positive(fields, "attention_factor")?,
            None if growth <= 1.0 => 1.0,
            None if original_context <= 1.0 => {
                let problem = format!("{original_context} is not above 1");
                return Err(fields.damaged("original_max_position_embeddings", problem));
            }
            None => (1.0 + growth.ln() / original_context.ln()).sqrt(),
        };
        if !(FACTOR_MIN..=FACTOR_MAX).contains(&attention_factor) {
            let problem = format!("gives a factor of {attention_factor} of cosines and sines");
            return Err(fields.damaged("original_max_position_embeddings", problem));
        }
        Ok(Self {
            short_factors: list("short_factor")?,
            long_factors: list("long_factor")?,
            original_context,
            attention_factor,
        })
    }
}

impl RopeScaling {
    fn read(fields: &ConfigFields, original: &OriginalContext<'_>) -> Result<Self, ConfigError> {
        let (name, kind) = match (fields.text("rope_type")?, fields.text("type")?) {
            (Some(kind), _) => ("rope_type", kind),
            (None, Some(kind)) => ("type", kind),
            (None, None) => ("rope_type", "default"),
        };
        match kind {
            "default" => {
                fields.ignore(&["factor", "original_max_position_embeddings"]);
                Ok(Self::None)
            }
            "linear" => {
                fields.ignore(&["original_max_position_embeddings"]);
                Ok(Self::Linear {
                    factor: positive(fields, "factor")?,
                })
            }
            "llama3" => {
                let (low, high) = (
                    positive(fields, "low_freq_factor")?,
                    positive(fields, "high_freq_factor")?,
                );
                if low >= high {
                    let problem = format!("{high} is not above low_freq_factor, {low}");
                    return Err(fields.damaged("high_freq_factor", problem));
                }
                Ok(Self::Llama3 {
                    factor: positive(fields, "factor")?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_context: positive(fields, "original_max_position_embeddings")?,
                })
            }
            "yarn" => YarnScaling::read(fields, original).map(Self::Yarn),
            // The second is the name of Phi-3's first release.
            "longrope" | "su" => LongRopeScaling::read(fields, original).map(Self::LongRope),
            other => {
                let problem = format!(
                    "{other} scaling is not supported; linear, llama3, yarn and longrope are"
                );
                Err(fields.unsupported(name, problem))
            }
        }
    }

    fn scale_frequency(&self, frequency: f64) -> f64 {
        match *self {
            Self::None | Self::Yarn(_) | Self::LongRope(_) => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let wavelengths = original_context * frequency / TAU;
                let unscaled_share =
                    (wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let unscaled_share = unscaled_share.clamp(0.0, 1.0);
                (1.0 - unscaled_share) * frequency / factor + unscaled_share * frequency
            }
        }
    }
}

fn positive(fields: &ConfigFields, name: &str) -> Result<f64, ConfigError> {
    match fields.number(name)? {
        Some(number) if (FACTOR_MIN..=FACTOR_MAX).contains(&number) => Ok(number),
        Some(number) => {
            let problem = format!("{number} is not from {FACTOR_MIN} to {FACTOR_MAX}");
            Err(fields.damaged(name, problem))
        }
        None => Err(fields.damaged(name, "is missing")),
    }
}
