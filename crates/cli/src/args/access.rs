//! The flags of those who may use the API.

use clap::Args;
use cleave_api::AllowedOrigin;
use std::path::PathBuf;

/// Flags of keys and origins of clients.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessArgs {
    /// Keys, one of which each request must have: `Authorization: Bearer KEY`, as clients of OpenAI
    /// send it, or `x-api-key`. Several may follow, and the flag may be repeated. Set it in the
    /// environment, where other users cannot see it. Not with `--policy`, whose tenants have keys
    /// of their own: `api_key_sha256`, which `cleave key --digest` prints.
    #[arg(
        long,
        value_name = "KEY",
        num_args = 1..,
        value_parser = parse_api_key,
        conflicts_with = "policy"
    )]
    pub(crate) api_key: Vec<ApiKey>,
    /// File of such keys, one in a line; read once, at the start.
    #[arg(long, value_name = "FILE", conflicts_with = "policy")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Origins whose web pages may call the API from a browser (CORS), separated by commas: `*` for
    /// all, or such as https://app.example. No other origin's page may if absent. It opens no route
    /// of /admin and /ui.
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    pub(crate) allowed_origins: Vec<AllowedOrigin>,
}

/// A key of clients.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct ApiKey(pub(crate) String);

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

/// Parses a key as a header can carry it.
pub(crate) fn parse_api_key(text: &str) -> Result<ApiKey, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        Ok(ApiKey(text.to_owned()))
    } else {
        Err("a key is visible ASCII without spaces, at least one letter".to_owned())
    }
}
