//! Server-sent events.
//!
//! Owns: the order of chunks in a stream. Never: starts a stream before the first event is there
//! (an error before that is an HTTP status). Invariant: a stream ends with `data: [DONE]` if and
//! only if all of the answer was sent; otherwise its last event is an error object, so that
//! nobody takes half an answer for a whole one (lesson 16).

use super::{Frame, Kind, usage};
use crate::ask::UsageShown;
use crate::choice::Delta;
use crate::error::ApiError;
use crate::flights::Flights;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream as streams};
use serde_json::{Map, Value};
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

/// A stream to be: everything known after the first event.
pub(crate) struct Live {
    pub(crate) frame: Frame,
    pub(crate) flights: Flights,
    pub(crate) usage: UsageShown,
    pub(crate) keep_alive: Option<Duration>,
}

/// The response, beginning with the first addition.
pub(crate) fn stream(live: Live, first: (usize, Delta)) -> Response {
    let mut sender = Sender {
        waiting: vec![Delta::default(); live.flights.count()],
        live,
        ready: VecDeque::new(),
        over: false,
    };
    sender.open();
    sender.add(first);
    let chunks = streams::unfold(sender, |mut sender| async {
        let chunk = match AssertUnwindSafe(sender.next()).catch_unwind().await {
            Ok(chunk) => chunk,
            Err(_) => Some(sender.panicked()),
        };
        chunk.map(|chunk| (chunk, sender))
    });
    let mut response = Response::new(Body::from_stream(
        chunks.map(Ok::<_, std::convert::Infallible>),
    ));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies of nginx's kind would collect the stream otherwise.
    headers.insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    response
}

struct Sender {
    live: Live,
    /// What each choice has that no client would notice yet: scores of text that is held back.
    waiting: Vec<Delta>,
    ready: VecDeque<Bytes>,
    over: bool,
}

impl Sender {
    fn open(&mut self) {
        if self.live.frame.kind == Kind::Chat {
            for index in 0..self.live.flights.count() {
                let chunk = self.live.frame.opening(index);
                self.send(chunk);
            }
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Some(chunk);
            }
            if self.over {
                return None;
            }
            let next = self.live.flights.next();
            let next = match self.live.keep_alive {
                None => next.await,
                Some(span) => match tokio::time::timeout(span, next).await {
                    Ok(next) => next,
                    Err(_) => return Some(Bytes::from_static(b": keep-alive\n\n")),
                },
            };
            match next {
                Some(Ok(added)) => self.add(added),
                Some(Err(error)) => {
                    self.ready.push_back(event(&error.object()));
                    self.over = true;
                }
                None => self.close(),
            }
        }
    }

    fn panicked(&mut self) -> Bytes {
        let error = ApiError::internal("panicked", "The server failed on this request.");
        self.live.flights.fail(&error);
        self.ready.clear();
        self.over = true;
        event(&error.object())
    }

    fn add(&mut self, (index, delta): (usize, Delta)) {
        let Delta {
            text,
            scores,
            finish,
        } = delta;
        let waiting = &mut self.waiting[index];
        waiting.text += &text;
        waiting.scores.extend(scores);
        waiting.finish = finish;
        if !waiting.is_empty() {
            let delta = std::mem::take(waiting);
            let chunk = self.live.frame.addition(index, &delta);
            self.send(chunk);
        }
    }

    fn close(&mut self) {
        if self.live.usage != UsageShown::Never {
            let chunk = self.live.frame.closing(&self.live.flights);
            self.ready.push_back(event(&Value::Object(chunk)));
        }
        self.ready
            .push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.over = true;
    }

    fn send(&mut self, mut chunk: Map<String, Value>) {
        match self.live.usage {
            UsageShown::Never => {}
            UsageShown::AtEnd => drop(chunk.insert("usage".into(), Value::Null)),
            UsageShown::Always => {
                drop(chunk.insert("usage".into(), usage(self.live.flights.counts())));
            }
        }
        self.ready.push_back(event(&Value::Object(chunk)));
    }
}

fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}
