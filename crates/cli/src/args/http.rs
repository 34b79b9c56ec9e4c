//! The flags of the HTTP side: certificates, ports, and limits of connections and requests.

use super::AccessArgs;
use crate::values::{
    SecondsArg, parse_body_bytes, parse_body_memory, parse_seconds, parse_seconds_or_zero,
    parse_swap_bytes,
};
use anyhow::bail;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Args, Command};
use cleave_api::{ApiOptions, OutputOptions, ParserChoice, ResponseStoreLimits};
use cleave_server::HttpLimits;
use cleave_text::{ReasoningField, ReasoningParser, ToolCallParser, UnknownParser};
use cleave_tls::CertificateFiles;
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::Duration;

/// Defaults of the library crates, which the flags show and use.
static API: LazyLock<ApiOptions> = LazyLock::new(ApiOptions::default);
static HTTP: LazyLock<HttpLimits> = LazyLock::new(HttpLimits::default);

/// Flags of the ports for clients and operators.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "HTTP")]
pub(crate) struct HttpArgs {
    /// TLS certificate for clients, in PEM, followed by its chain; clients must then use TLS.
    /// Reloaded when it changes.
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    pub(crate) ssl_certfile: Option<PathBuf>,
    /// Private key of `--ssl-certfile`, in PEM.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_keyfile: Option<PathBuf>,
    /// Address for /admin, with /metrics, /health and /ready; the client port if absent. Port 0
    /// picks a free port.
    #[arg(long, value_name = "ADDR")]
    pub(crate) admin_listen: Option<SocketAddr>,
    /// Seconds after SIGTERM during which /ready answers 503 and everything else continues, so that
    /// load balancers notice. Then the process drains.
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(Duration::ZERO), value_parser = parse_seconds_or_zero)]
    pub(crate) shutdown_delay: SecondsArg,
    /// Limit of connections, of clients and workers; 16384 if absent, and at most half of the
    /// process's limit of open files.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_connections: Option<u32>,
    /// Limit of concurrent requests on one HTTP/2 connection.
    #[arg(long, value_name = "N", default_value_t = HTTP.streams_max, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_streams: u32,
    /// Largest request body, such as 8MiB.
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = parse_body_bytes)]
    pub(crate) max_body: usize,
    /// Memory for all request bodies that are read at once, such as 64MiB. A body takes four times
    /// its bytes. A quarter is for bodies of at most 64 KiB. The rest, or four times `--max-body`
    /// if that is more, is for longer ones: with the defaults it holds one body of 8 MiB at a time.
    /// Further requests wait five seconds and are then refused with 429. Chat templates have memory
    /// of their own: see `--template-memory`.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_body_memory)]
    pub(crate) body_memory: usize,
    /// Memory for all chat templates that are rendered and texts that are tokenized at once, such
    /// as 256MiB. One rendering reserves 8 MiB and 16 bytes for each byte of the body. A text
    /// reserves 128 bytes for each byte that the `tokenizers` library gets at once: at most 128 KiB
    /// of a body, or all of a text that only the library can tokenize. `/tokenize` and
    /// `/detokenize` reserve up to 96 bytes a token. Further requests wait some seconds and are
    /// then refused with 429. One rendering of `--max-body` always fits.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_body_memory)]
    pub(crate) template_memory: usize,
    /// Memory for the vectors of embedding and reranking requests from their start until their
    /// answers were sent, such as 256MiB: 4 bytes for each number. A request whose vectors would
    /// take more is refused with 400. Others wait five seconds for it and are then refused with
    /// 429.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_body_memory)]
    pub(crate) vector_memory: usize,
    /// Time limit, in seconds, for the headers of a request from their first byte on, and for a TLS
    /// handshake.
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(HTTP.headers_wait_max), value_parser = parse_seconds)]
    pub(crate) header_timeout: SecondsArg,
    /// Time limit, in seconds, for the body of a request.
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(API.body_wait_max), value_parser = parse_seconds)]
    pub(crate) body_timeout: SecondsArg,
    /// Time limit, in seconds, of a connection without a request. Set it above the idle time of
    /// load balancers.
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(HTTP.idle_max), value_parser = parse_seconds)]
    pub(crate) idle_timeout: SecondsArg,
    /// Time limit, in seconds, of a client that accepts no bytes of an answer. (`--reader-wait`
    /// limits the same in tokens.)
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(HTTP.stall_max), value_parser = parse_seconds)]
    pub(crate) stall_timeout: SecondsArg,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
    #[command(flatten)]
    pub(crate) responses: ResponseStoreArgs,
    /// Format of the model's tool calls, by its name in vLLM; chosen by the chat template if
    /// absent, and `none` leaves calls in the text. `MODEL=NAME` is for one of several models; may
    /// be repeated.
    #[arg(long, help_heading = "Outputs", value_name = "NAME", value_parser = OfModel(parser_of::<ToolCallParser>(ToolCallParser::names())))]
    pub(crate) tool_call_parser: Vec<(Option<String>, ToolCallParser)>,
    /// Format of the model's reasoning, by its name in vLLM; chosen by the chat template if absent,
    /// and `none` leaves reasoning in the text. `MODEL=NAME` is for one of several models; may be
    /// repeated.
    #[arg(long, help_heading = "Outputs", value_name = "NAME", value_parser = OfModel(parser_of::<ReasoningParser>(ReasoningParser::names())))]
    pub(crate) reasoning_parser: Vec<(Option<String>, ReasoningParser)>,
    /// Field of messages that has the reasoning: `reasoning_content`, or `reasoning` as in vLLM.
    #[arg(long, help_heading = "Outputs", value_name = "FIELD", default_value = ReasoningField::default().name(), value_parser = parser_of::<ReasoningField>(ReasoningField::NAMES.into_iter()))]
    pub(crate) reasoning_field: ReasoningField,
}

/// Flags of the stored responses.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Stored responses")]
pub(crate) struct ResponseStoreArgs {
    /// Memory for the stored responses of OpenAI's Responses API, with their inputs and keys, such
    /// as 256MiB. Where it is taken, a response takes the place of the oldest ones of its tenant. 0
    /// stores none. A restart forgets all.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_swap_bytes)]
    pub(crate) response_store_memory: u64,
    /// The part of `--response-store-memory` that one tenant may take; a longer conversation is not
    /// stored.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_swap_bytes)]
    pub(crate) response_store_tenant_memory: u64,
    /// Seconds after which a stored response is removed.
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(API.responses.age_max), value_parser = parse_seconds)]
    pub(crate) response_store_age: SecondsArg,
}

impl ResponseStoreArgs {
    /// Converts the flags into the limits of the HTTP side.
    ///
    /// # Errors
    /// If a tenant may take more than there is.
    pub(crate) fn limits(self) -> anyhow::Result<ResponseStoreLimits> {
        let Self {
            response_store_memory: bytes_max,
            response_store_tenant_memory: tenant_bytes_max,
            response_store_age: SecondsArg(age_max),
        } = self;
        if bytes_max > 0 && tenant_bytes_max > bytes_max {
            bail!(
                "--response-store-tenant-memory is more than --response-store-memory, of which it is a part"
            );
        }
        if bytes_max > 0 && tenant_bytes_max == 0 {
            bail!(
                "--response-store-tenant-memory 0 stores nothing: give --response-store-memory 0 if that is meant"
            );
        }
        Ok(ResponseStoreLimits {
            bytes_max: usize::try_from(bytes_max)?,
            tenant_bytes_max: usize::try_from(tenant_bytes_max)?,
            age_max,
        })
    }
}

/// Parses one of these names.
fn parser_of<T>(names: impl Iterator<Item = &'static str>) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = UnknownParser> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse::<T>())
}

/// Parses a value, with the served name of a model before it and `=` between them if it is for that
/// model alone.
#[derive(Clone)]
struct OfModel<P>(P);

impl<P: TypedValueParser> TypedValueParser for OfModel<P> {
    type Value = (Option<String>, P::Value);

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Self::Value, clap::Error> {
        let named = value.to_str().and_then(|text| text.rsplit_once('='));
        let (model, value) = match named {
            Some((model, value)) => (Some(model.to_owned()), OsStr::new(value)),
            None => (None, value),
        };
        Ok((model, self.0.parse_ref(command, argument, value)?))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        self.0.possible_values()
    }
}

/// The choice that the values of a flag make; of two for one model the later one counts.
fn parser_choice<T: Copy>(values: &[(Option<String>, T)]) -> ParserChoice<T> {
    let others = values.iter().rev().find(|(model, _)| model.is_none());
    let named = values
        .iter()
        .filter_map(|(model, parser)| Some((model.clone()?, *parser)));
    ParserChoice {
        others: others.map(|(_, parser)| *parser),
        by_model: named.collect(),
    }
}

impl HttpArgs {
    pub(crate) fn certificate(&self) -> Option<CertificateFiles> {
        let (certificate, key) = (self.ssl_certfile.clone()?, self.ssl_keyfile.clone()?);
        Some(CertificateFiles { certificate, key })
    }

    pub(crate) fn outputs(&self) -> OutputOptions {
        OutputOptions {
            reasoning_parser: parser_choice(&self.reasoning_parser),
            tool_call_parser: parser_choice(&self.tool_call_parser),
            reasoning_field: self.reasoning_field,
        }
    }

    pub(crate) fn http_limits(&self) -> HttpLimits {
        HttpLimits {
            connections_max: self.max_connections,
            streams_max: self.max_streams,
            headers_wait_max: self.header_timeout.0,
            idle_max: self.idle_timeout.0,
            stall_max: self.stall_timeout.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct HttpFlags {
        #[command(flatten)]
        face: HttpArgs,
        /// A flag of the same commands, which excludes keys.
        #[arg(long)]
        policy: Option<String>,
    }

    #[test]
    fn a_tenant_may_not_store_more_than_there_is() {
        let limits = |flags: &[&str]| {
            let flags = ["cleave"].into_iter().chain(flags.iter().copied());
            HttpFlags::parse_from(flags).face.responses.limits()
        };
        assert_eq!(limits(&[]).unwrap(), ResponseStoreLimits::default());
        assert!(limits(&["--response-store-memory", "32MiB"]).is_err());
        assert!(limits(&["--response-store-tenant-memory", "0"]).is_err());
        assert!(limits(&["--response-store-memory", "0"]).is_ok());
    }

    #[test]
    fn a_parser_may_be_for_one_of_several_models() {
        let outputs = |flags: &[&str]| {
            let flags = ["cleave"].into_iter().chain(flags.iter().copied());
            HttpFlags::try_parse_from(flags).map(|flags| flags.face.outputs())
        };
        let hermes = Some("hermes".parse::<ToolCallParser>().unwrap());
        let of = |flags: &[&str]| outputs(flags).unwrap().tool_call_parser;
        assert_eq!(of(&["--tool-call-parser", "hermes"]).others, hermes);
        let two = [
            "--tool-call-parser",
            "org/a=hermes",
            "--tool-call-parser",
            "none",
        ];
        let two = of(&two);
        assert_eq!(two.by_model.get("org/a").copied(), hermes);
        assert_ne!(two.others, hermes);
        assert!(two.others.is_some());
        assert!(outputs(&["--tool-call-parser", "org/a=nonsense"]).is_err());
    }

    #[test]
    fn max_connections_is_set_only_by_its_flag() {
        let default = HttpLimits::CONNECTIONS_MAX.to_string();
        let given = ["cleave", "--max-connections", &default];
        let given = HttpFlags::parse_from(given).face.http_limits();
        let absent = HttpFlags::parse_from(["cleave"]);
        assert_eq!(given.connections_max, Some(HttpLimits::CONNECTIONS_MAX));
        assert_eq!(absent.face.http_limits(), HttpLimits::default());
        assert_eq!(absent.policy, None);
        let mut help = <HttpFlags as clap::CommandFactory>::command();
        assert!(help.render_long_help().to_string().contains(&default));
    }
}
