//! A request on the wire.

use super::{FleetWireError, nanos, proto, required};
use cleave_domain::{Request, RequestSlo, SamplingParams, StopRules, TokenId};
use std::time::Duration;

pub(super) fn pairs_out(pairs: Vec<(TokenId, f32)>) -> Vec<proto::TokenNumber> {
    let pair = |(token, number)| proto::TokenNumber { token, number };
    pairs.into_iter().map(pair).collect()
}

pub(super) fn pairs_in(pairs: Vec<proto::TokenNumber>) -> Vec<(TokenId, f32)> {
    let pair = |proto::TokenNumber { token, number }| (token, number);
    pairs.into_iter().map(pair).collect()
}

impl From<&Request> for proto::Request {
    fn from(request: &Request) -> Self {
        let Request {
            prompt,
            generated,
            sampling,
            stop,
            priority,
            cache_salt,
            slo,
        } = request;
        Self {
            prompt: prompt.to_vec(),
            generated: generated.to_vec(),
            sampling: Some(sampling.into()),
            stop: Some(stop.into()),
            priority: *priority,
            cache_salt: *cache_salt,
            slo: Some(slo.into()),
        }
    }
}

impl TryFrom<proto::Request> for Request {
    type Error = FleetWireError;

    fn try_from(request: proto::Request) -> Result<Self, FleetWireError> {
        let proto::Request {
            prompt,
            generated,
            sampling,
            stop,
            priority,
            cache_salt,
            slo,
        } = request;
        Ok(Self {
            prompt: prompt.into(),
            generated: generated.into(),
            sampling: required(sampling, "request.sampling")?.into(),
            stop: required(stop, "request.stop")?.into(),
            priority,
            cache_salt,
            slo: required(slo, "request.slo")?.into(),
        })
    }
}

impl From<&SamplingParams> for proto::Sampling {
    fn from(sampling: &SamplingParams) -> Self {
        let SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            seed,
            logprobs,
            prompt_logprobs,
        } = sampling.clone();
        Self {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias: pairs_out(logit_bias),
            seed,
            logprobs,
            prompt_logprobs,
        }
    }
}

impl From<proto::Sampling> for SamplingParams {
    fn from(sampling: proto::Sampling) -> Self {
        let proto::Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            seed,
            logprobs,
            prompt_logprobs,
        } = sampling;
        Self {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias: pairs_in(logit_bias),
            seed,
            logprobs,
            prompt_logprobs,
        }
    }
}

impl From<&StopRules> for proto::StopRules {
    fn from(stop: &StopRules) -> Self {
        let StopRules {
            max_tokens,
            min_tokens,
            stop_tokens,
        } = stop;
        Self {
            max_tokens: *max_tokens,
            min_tokens: *min_tokens,
            stop_tokens: stop_tokens.to_vec(),
        }
    }
}

impl From<proto::StopRules> for StopRules {
    fn from(stop: proto::StopRules) -> Self {
        let proto::StopRules {
            max_tokens,
            min_tokens,
            stop_tokens,
        } = stop;
        Self {
            max_tokens,
            min_tokens,
            stop_tokens: stop_tokens.into(),
        }
    }
}

impl From<&RequestSlo> for proto::Slo {
    fn from(slo: &RequestSlo) -> Self {
        let RequestSlo {
            class,
            tenant,
            ttft,
            tpot,
            e2e,
            priority,
        } = slo;
        Self {
            class: class.clone(),
            tenant: tenant.clone(),
            ttft_nanos: ttft.map(nanos),
            tpot_nanos: tpot.map(nanos),
            e2e_nanos: e2e.map(nanos),
            priority: *priority,
        }
    }
}

impl From<proto::Slo> for RequestSlo {
    fn from(slo: proto::Slo) -> Self {
        let proto::Slo {
            class,
            tenant,
            ttft_nanos,
            tpot_nanos,
            e2e_nanos,
            priority,
        } = slo;
        Self {
            class,
            tenant,
            ttft: ttft_nanos.map(Duration::from_nanos),
            tpot: tpot_nanos.map(Duration::from_nanos),
            e2e: e2e_nanos.map(Duration::from_nanos),
            priority,
        }
    }
}
