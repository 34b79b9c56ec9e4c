//! The choice of the traces that are recorded.
//!
//! Owns: OpenTelemetry's names for samplers. Never draws a random number: a trace's own id decides,
//! so that every service that sees it decides alike. Invariant: a trace that its client records is
//! recorded here too, unless the sampler's name ignores clients.

use cleave_api::TraceParent;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceSampler {
    /// The share of traces recorded, 0 to 1, where no client decides.
    ratio: f64,
    clients: ClientSampling,
}

/// Whether a client's decision counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientSampling {
    Followed,
    Ignored,
}

/// Errors in a sampler's name or argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceSamplerError {
    #[error(
        "OTEL_TRACES_SAMPLER={0}: known are always_on, always_off, traceidratio, and each of them with \
         parentbased_ before it"
    )]
    Name(String),
    #[error("{0} is not a share of 0 to 1")]
    Ratio(String),
}

impl Default for TraceSampler {
    fn default() -> Self {
        Self {
            ratio: 1.0,
            clients: ClientSampling::Followed,
        }
    }
}

impl TraceSampler {
    /// Records this share of the traces that begin here, and those that clients record.
    ///
    /// # Errors
    /// `Ratio` unless it is 0 to 1.
    pub fn share(text: &str) -> Result<Self, TraceSamplerError> {
        let ratio = text
            .parse()
            .ok()
            .filter(|ratio| (0.0..=1.0).contains(ratio));
        let ratio = ratio.ok_or_else(|| TraceSamplerError::Ratio(text.to_owned()))?;
        Ok(Self {
            ratio,
            ..Self::default()
        })
    }

    /// By `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG`, where they are set.
    /// Source: <https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/>
    ///
    /// # Errors
    /// `Name` or `Ratio`.
    pub fn named(name: &str, argument: Option<&str>) -> Result<Self, TraceSamplerError> {
        let (plain, clients) = match name.strip_prefix("parentbased_") {
            Some(plain) => (plain, ClientSampling::Followed),
            None => (name, ClientSampling::Ignored),
        };
        let ratio = match plain {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => Self::share(argument.unwrap_or("1"))?.ratio,
            _ => return Err(TraceSamplerError::Name(name.to_owned())),
        };
        Ok(Self { ratio, clients })
    }

    pub(super) fn records(&self, trace: u128, client: Option<TraceParent>) -> bool {
        match client {
            Some(client) if self.clients == ClientSampling::Followed => client.is_recorded(),
            // As OpenTelemetry's libraries do: by the 63 low bits.
            _ => {
                self.ratio >= 1.0
                    || ((trace as u64 >> 1) as f64) < self.ratio * (1_u64 << 63) as f64
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samplers_follow_the_client_or_the_ratio() {
        let client = |flags| {
            Some(TraceParent {
                trace: u128::MAX,
                span: 1,
                flags,
            })
        };
        let of = |name, argument| TraceSampler::named(name, argument).unwrap();
        assert!(of("always_on", None).records(u128::MAX, client(0)));
        assert!(!of("always_off", None).records(0, client(1)));
        assert!(of("parentbased_always_off", None).records(0, client(1)));
        assert!(!of("parentbased_always_off", None).records(0, None));
        assert!(!TraceSampler::default().records(0, client(0)));
        assert!(TraceSampler::default().records(u128::MAX, None));
        let tenth = TraceSampler::share("0.1").unwrap();
        let ids = (0..1000_u128).map(|id| id.wrapping_mul(0x9e37_79b9_7f4a_7c15_u128));
        let recorded = ids.filter(|id| tenth.records(*id, None)).count();
        assert!((50..200).contains(&recorded), "{recorded}");
        assert!(TraceSampler::named("jaeger_remote", None).is_err());
        for bad in ["2", "-1", "NaN", "x", ""] {
            assert!(TraceSampler::share(bad).is_err(), "{bad}");
        }
    }
}
