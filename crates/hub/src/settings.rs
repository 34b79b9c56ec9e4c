//! Settings of the hub, from the variables that Python's tools read.

use crate::proxy::ProxySettings;
use crate::retry::RetryOptions;
use std::fs;
use std::path::{Path, PathBuf};

const ENDPOINT_DEFAULT: &str = "https://huggingface.co";
/// Longest file with a token that is read, in bytes.
const TOKEN_BYTES_MAX: u64 = 4096;

/// The hub, the cache, and the rules between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubSettings {
    /// Address of the hub, without a slash at its end.
    pub endpoint: String,
    /// Folder of the cache, which Python's tools share.
    pub cache: PathBuf,
    /// Token that is sent to `endpoint` alone.
    pub token: Option<HubToken>,
    /// Whether the network may be used.
    pub network: NetworkUse,
    pub retry: RetryOptions,
    pub proxies: ProxySettings,
    /// A file of certificates in PEM; without it, the system's authorities.
    pub authorities: Option<PathBuf>,
}

/// Whether the hub may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkUse {
    Allowed,
    /// The variable `HF_HUB_OFFLINE` is set.
    Forbidden,
}

/// A user's token; no message shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct HubToken(String);

impl std::fmt::Debug for HubToken {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("HubToken")
    }
}

impl HubToken {
    pub(crate) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Reads a token; text that no header can carry is none.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        let text = text.trim();
        let is_header = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
        is_header.then(|| Self(text.to_owned()))
    }
}

impl HubSettings {
    /// Reads this process's variables, and the file of the token.
    #[must_use]
    pub fn of_process() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let read = |path: &Path| {
            let is_small = fs::metadata(path).is_ok_and(|file| file.len() <= TOKEN_BYTES_MAX);
            is_small.then(|| fs::read_to_string(path).ok()).flatten()
        };
        Self::of(&variable, &read)
    }

    /// Reads `variable`s by name, and the file of the token with `read`.
    fn of(
        variable: &dyn Fn(&str) -> Option<String>,
        read: &dyn Fn(&Path) -> Option<String>,
    ) -> Self {
        let home_of_user = variable("HOME").map_or_else(|| PathBuf::from("."), PathBuf::from);
        let path = |text: String| match text.strip_prefix("~/") {
            Some(rest) => home_of_user.join(rest),
            None => PathBuf::from(text),
        };
        let home = variable("HF_HOME").map(path).unwrap_or_else(|| {
            let caches = variable("XDG_CACHE_HOME").map(path);
            caches
                .unwrap_or_else(|| home_of_user.join(".cache"))
                .join("huggingface")
        });
        let cache = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE"));
        let token_path = variable("HF_TOKEN_PATH").map_or_else(|| home.join("token"), path);
        let token = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN"));
        let token = token.or_else(|| read(&token_path));
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT_DEFAULT.to_owned());
        let offline = variable("HF_HUB_OFFLINE").or_else(|| variable("TRANSFORMERS_OFFLINE"));
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache: cache.map_or_else(|| home.join("hub"), path),
            token: token.as_deref().and_then(HubToken::of),
            network: if offline.is_some_and(|text| is_true(&text)) {
                NetworkUse::Forbidden
            } else {
                NetworkUse::Allowed
            },
            retry: RetryOptions::default(),
            proxies: ProxySettings::of(variable),
            authorities: None,
        }
    }
}

/// Whether Python's tools take the text of a variable for true.
fn is_true(text: &str) -> bool {
    ["1", "ON", "YES", "TRUE"].contains(&text.to_uppercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::ProxyVariable;

    #[track_caller]
    fn settings(variables: &[(&str, &str)]) -> HubSettings {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, text)| (*text).to_owned())
        };
        let read = |path: &Path| (path == Path::new("/hf/token")).then(|| "stored\n".to_owned());
        HubSettings::of(&variable, &read)
    }

    #[test]
    fn variables_mean_what_they_mean_to_python() {
        let plain = settings(&[("HOME", "/u")]);
        assert_eq!(plain.cache, Path::new("/u/.cache/huggingface/hub"));
        assert_eq!(plain.endpoint, "https://huggingface.co");
        assert_eq!((plain.token, plain.network), (None, NetworkUse::Allowed));
        let caches = settings(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")]);
        assert_eq!(caches.cache, Path::new("/x/huggingface/hub"));
        let home = settings(&[("HF_HOME", "/hf"), ("HF_HUB_OFFLINE", "1")]);
        assert_eq!(home.cache, Path::new("/hf/hub"));
        assert_eq!(home.token, HubToken::of("stored"));
        assert_eq!(home.network, NetworkUse::Forbidden);
        let given = settings(&[
            ("HF_HOME", "/hf"),
            ("HF_HUB_CACHE", "/c"),
            ("HF_TOKEN", "given"),
            ("HF_ENDPOINT", "http://h:1/"),
            ("HF_HUB_OFFLINE", "0"),
        ]);
        assert_eq!(given.cache, Path::new("/c"));
        assert_eq!(given.token, HubToken::of("given"));
        assert_eq!(given.endpoint, "http://h:1");
        assert_eq!(given.network, NetworkUse::Allowed);
    }

    #[test]
    fn proxies_are_read_in_lower_case_first() {
        let given = settings(&[("HTTPS_PROXY", "http://a:1"), ("https_proxy", "http://b:2")]);
        let set = |variable: &ProxyVariable| (variable.name.clone(), variable.address.clone());
        let named = |name: &str, address: &str| (name.to_owned(), address.to_owned());
        assert_eq!(
            set(&given.proxies.https),
            named("https_proxy", "http://b:2")
        );
        let given = settings(&[("NO_PROXY", "10.0.0.0/8"), ("ALL_PROXY", "http://c:3")]);
        assert_eq!(set(&given.proxies.all), named("ALL_PROXY", "http://c:3"));
        assert_eq!(given.proxies.none, "10.0.0.0/8");
        assert_eq!(given.proxies.http, ProxyVariable::default());
        let shown = format!("{:?}", settings(&[("HTTP_PROXY", "http://u:secret@a:1")]));
        assert!(!shown.contains("secret"), "{shown}");
    }

    #[test]
    fn a_token_is_shown_nowhere() {
        let token = HubToken::of(" secret\n").unwrap();
        assert!(!format!("{token:?}").contains("secret"));
        assert_eq!(token.header(), "Bearer secret");
        assert_eq!(HubToken::of("a\nb"), None);
    }
}
