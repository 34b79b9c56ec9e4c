//! The route that a request to an unknown path means.
//!
//! Owns: usual mistakes in the URLs of clients, and the paths of other servers. Never: answers in
//! place of the route that is meant, because a client that works by chance fails elsewhere.

use crate::openapi::routes;

/// (path of another server, the route here that does the same)
const OTHER_SERVERS: [(&str, &str); 12] = [
    // Ollama.
    ("/api/chat", "/v1/chat/completions"),
    ("/api/generate", "/v1/completions"),
    ("/api/embed", "/v1/embeddings"),
    ("/api/embeddings", "/v1/embeddings"),
    ("/api/tags", "/v1/models"),
    // llama.cpp, TGI and SGLang.
    ("/completion", "/v1/completions"),
    ("/embedding", "/v1/embeddings"),
    ("/generate", "/v1/completions"),
    ("/generate_stream", "/v1/completions"),
    // Shortened.
    ("/chat", "/v1/chat/completions"),
    ("/v1/chat", "/v1/chat/completions"),
    ("/v1", "/v1/models"),
];

/// The route that is probably meant by a path that is none, and the method that it takes: the
/// longest one that the path ends with, `/v1` in front of it or not.
pub(crate) fn meant_route(path: &str) -> Option<(String, &'static str)> {
    let path = path.trim_end_matches('/');
    let other = OTHER_SERVERS.iter().find(|(theirs, _)| *theirs == path);
    let meant = match other {
        Some((_, ours)) => Some(*ours),
        None => served_routes()
            .filter(|route| path.ends_with(tail(route)))
            // Of two with the same tail the one below /v1, as clients of OpenAI send.
            .max_by_key(|route| (tail(route).len(), route.len())),
    };
    let meant = meant?;
    Some((verb_of(meant)?, meant))
}

/// The base URL that clients of a route need: OpenAI's clients add the path after `/v1` to theirs,
/// Anthropic's the whole path.
pub(crate) fn base_url_rule(route: &str) -> &'static str {
    if route.starts_with("/v1/messages") {
        "The base URL of Anthropic's clients has no /v1, because they add it."
    } else if route == "/v1/models" {
        "The base URL of clients of OpenAI ends in /v1, that of Anthropic's clients does not."
    } else {
        "The base URL of clients of OpenAI ends in /v1."
    }
}

/// The method that a route takes, such as `POST`.
pub(crate) fn verb_of(path: &str) -> Option<String> {
    let (_, doc) = routes().find(|(route, _)| *route == path)?;
    let verbs = std::iter::once(doc.verb()).chain(doc.delete.map(|_| "delete"));
    let verbs: Vec<String> = verbs.map(str::to_uppercase).collect();
    Some(verbs.join(" or "))
}

/// Routes of clients without a part that varies.
fn served_routes() -> impl Iterator<Item = &'static str> {
    let paths = routes().map(|(path, _)| path);
    paths.filter(|path| path.starts_with("/v1/") && !path.contains('{'))
}

fn tail(route: &str) -> &str {
    route.strip_prefix("/v1").unwrap_or(route)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_path_leads_to_the_route_that_is_meant() {
        for (path, verb, route) in [
            ("/chat/completions", "POST", "/v1/chat/completions"),
            ("/completions", "POST", "/v1/completions"),
            ("/models", "GET", "/v1/models"),
            ("/embeddings", "POST", "/v1/embeddings"),
            ("/v1/v1/chat/completions", "POST", "/v1/chat/completions"),
            ("/v1/v1/models/", "GET", "/v1/models"),
            ("/v1/chat/completions/", "POST", "/v1/chat/completions"),
            (
                "/openai/deployments/m/chat/completions",
                "POST",
                "/v1/chat/completions",
            ),
            ("/messages", "POST", "/v1/messages"),
            (
                "/messages/count_tokens",
                "POST",
                "/v1/messages/count_tokens",
            ),
            ("/responses", "POST", "/v1/responses"),
            ("/api/chat", "POST", "/v1/chat/completions"),
            ("/api/generate", "POST", "/v1/completions"),
            ("/api/tags", "GET", "/v1/models"),
            ("/v1", "GET", "/v1/models"),
        ] {
            assert_eq!(meant_route(path), Some((verb.to_owned(), route)), "{path}");
        }
        for path in ["/", "/favicon.ico", "/v2/unknown", "/wp-login.php"] {
            assert_eq!(meant_route(path), None, "{path}");
        }
    }

    #[test]
    fn each_route_names_the_base_url_of_its_clients() {
        for route in served_routes() {
            let rule = base_url_rule(route);
            let is_anthropic = route.starts_with("/v1/messages");
            assert_eq!(rule.contains("has no /v1"), is_anthropic, "{route}: {rule}");
            assert_eq!(rule.contains("OpenAI"), !is_anthropic, "{route}: {rule}");
        }
        assert!(base_url_rule("/v1/models").contains("Anthropic's clients does not"));
    }

    #[test]
    fn paths_of_other_servers_lead_to_routes() {
        for (_, ours) in OTHER_SERVERS {
            assert!(verb_of(ours).is_some(), "{ours}");
        }
        assert_eq!(verb_of("/v1/chat/completions").as_deref(), Some("POST"));
    }
}
