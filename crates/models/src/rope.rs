//! The rotary embedding's frequencies.
//!
//! Owns: the supported scalings and their effect on the frequencies.
//! Never: rotates a vector; the device does.
//! Invariant: every frequency is finite and not negative.

use crate::error::ConfigError;
use crate::fields::ConfigFields;
use std::f64::consts::TAU;

/// Bounds on values in a file, far beyond any model, so that frequencies stay finite in f32.
const THETA_MAX: f64 = 1e12;
const FACTOR_MIN: f64 = 1e-3;
const FACTOR_MAX: f64 = 1e9;

/// A rotary embedding: base and scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling for longer contexts.
    pub scaling: RopeScaling,
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
}

impl Rope {
    /// Reads `rope_parameters`, or the older `rope_theta` with `rope_scaling`.
    pub(crate) fn read(fields: &ConfigFields) -> Result<Self, ConfigError> {
        refuse_partial_rotation(fields)?;
        let theta = fields.number("rope_theta")?;
        // The older spelling may have its base inside too, and some writers keep both objects.
        let newer = fields.object("rope_parameters")?;
        let older = fields.object("rope_scaling")?;
        let read = |object: &Option<ConfigFields>| {
            let object = object.as_ref();
            object
                .map(|object| Self::read_parameters(object, theta))
                .transpose()
        };
        match (read(&newer)?, read(&older)?) {
            (Some(newer), Some(older)) if newer != older => {
                let problem = "differs from rope_parameters; which of them holds is unknown";
                Err(fields.unsupported("rope_scaling", problem))
            }
            (Some(rope), _) | (None, Some(rope)) => Ok(rope),
            (None, None) => Self::checked(fields, theta, RopeScaling::None),
        }
    }

    fn read_parameters(fields: &ConfigFields, theta: Option<f64>) -> Result<Self, ConfigError> {
        const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];
        let mut nested: Option<Self> = None;
        for name in LAYER_TYPES {
            let Some(object) = fields.object(name)? else {
                continue;
            };
            let rope = Self::read_parameters(&object, theta)?;
            if nested.as_ref().is_some_and(|first| *first != rope) {
                let problem = "differs from the other layers'; one embedding for all is supported";
                return Err(fields.unsupported(name, problem));
            }
            nested = Some(rope);
        }
        if let Some(rope) = nested {
            return Ok(rope);
        }
        let theta = fields.number("rope_theta")?.or(theta);
        refuse_partial_rotation(fields)?;
        Self::checked(fields, theta, RopeScaling::read(fields)?)
    }

    fn checked(
        fields: &ConfigFields,
        theta: Option<f64>,
        scaling: RopeScaling,
    ) -> Result<Self, ConfigError> {
        let theta = theta.unwrap_or(10_000.0);
        if !(1.0..=THETA_MAX).contains(&theta) {
            let problem = format!("{theta} is not from 1 to {THETA_MAX}");
            return Err(fields.damaged("rope_theta", problem));
        }
        Ok(Self { theta, scaling })
    }

    /// Radians per position of each pair, `(head_dim / 2)`.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|pair| {
                let exponent = (2 * pair) as f64 / head_dim as f64;
                self.scaling
                    .scale_frequency(1.0 / self.theta.powf(exponent)) as f32
            })
            .collect()
    }
}

impl RopeScaling {
    fn read(fields: &ConfigFields) -> Result<Self, ConfigError> {
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
            other => {
                let problem = format!("{other} scaling is not supported; linear and llama3 are");
                Err(fields.unsupported(name, problem))
            }
        }
    }

    fn scale_frequency(&self, frequency: f64) -> f64 {
        match *self {
            Self::None => frequency,
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

fn refuse_partial_rotation(fields: &ConfigFields) -> Result<(), ConfigError> {
    match fields.number("partial_rotary_factor")? {
        Some(share) if share != 1.0 => {
            let problem = format!("{share} is not supported; only whole heads are rotated");
            Err(fields.unsupported("partial_rotary_factor", problem))
        }
        _ => Ok(()),
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
