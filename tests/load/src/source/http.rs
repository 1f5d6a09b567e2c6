//! OpenAI's chat completions over HTTP/1.1, as an inference engine behind a forwarding gateway serves them.

use crate::pace::{Pace, Script};
use crate::timecode::{Words, Writer, now_us};
use bytes::Bytes;
use futures_util::stream::unfold;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::net::TcpListener;

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Serves until the task is dropped.
///
/// # Errors
/// The listener failed.
pub async fn serve_http(listener: TcpListener, words: Arc<Words>, model: Arc<str>) -> std::io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let (words, model) = (words.clone(), model.clone());
        let service = service_fn(move |request| answer(request, words.clone(), model.clone()));
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

/// The part of a request that matters here.
#[derive(Deserialize)]
struct Ask {
    #[serde(default)]
    stream: bool,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    stream_options: StreamOptions,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

async fn answer(
    request: Request<Incoming>,
    words: Arc<Words>,
    model: Arc<str>,
) -> Result<Response<Body>, hyper::Error> {
    if request.method() == Method::GET {
        return Ok(about(request.uri().path(), &model));
    }
    let body = request.into_body().collect().await?.to_bytes();
    let ask = match serde_json::from_slice::<Ask>(&body) {
        Ok(ask) => ask,
        Err(error) => {
            return Ok(whole(StatusCode::BAD_REQUEST, format!("{{\"error\":{{\"message\":\"{error}\"}}}}")));
        }
    };
    let script = Script::new(ask.max_completion_tokens.or(ask.max_tokens).unwrap_or(16), ask.seed);
    if !ask.stream {
        return Ok(whole(StatusCode::OK, completion(script, &words, &model).await));
    }
    let stream = Stream::new(script, ask.stream_options.include_usage, words, &model);
    let frames = unfold(stream, |mut s| async move { s.next().await.map(|b| (Ok(Frame::data(b)), s)) });
    Ok(response("text/event-stream", StatusCode::OK, BodyExt::boxed_unsync(StreamBody::new(frames))))
}

/// Health checks and model lists that gateways ask for.
fn about(path: &str, model: &str) -> Response<Body> {
    let card = format!(
        r#"{{"id":"{model}","object":"model","created":1,"owned_by":"script","max_model_len":8192}}"#
    );
    match path {
        "/v1/models" => whole(StatusCode::OK, format!(r#"{{"object":"list","data":[{card}]}}"#)),
        "/health" | "/health_generate" | "/healthz" => whole(StatusCode::OK, "{}".to_owned()),
        "/get_server_info" | "/server_info" | "/get_model_info" | "/model_info" => whole(
            StatusCode::OK,
            format!(
                r#"{{"model_path":"{model}","served_model_name":"{model}","model_id":"{model}","is_generation":true}}"#
            ),
        ),
        _ => whole(StatusCode::NOT_FOUND, r#"{"error":{"message":"no such path"}}"#.to_owned()),
    }
}

fn whole(status: StatusCode, body: String) -> Response<Body> {
    response("application/json", status, BodyExt::boxed_unsync(Full::new(Bytes::from(body))))
}

fn response(content_type: &'static str, status: StatusCode, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// A whole answer, ready when its last token is due.
async fn completion(script: Script, words: &Words, model: &str) -> String {
    let (mut pace, mut writer, mut text) = (Pace::start(script), Writer::default(), String::new());
    while pace.next().await {
        text.push_str(words.word(writer.next(now_us())).1);
    }
    let usage = usage(script.tokens);
    format!(
        r#"{{"id":"chatcmpl-script","object":"chat.completion","created":1,"model":"{model}","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"logprobs":null,"finish_reason":"length"}}],"usage":{usage}}}"#
    )
}

fn usage(tokens: u32) -> String {
    format!(
        r#"{{"prompt_tokens":16,"completion_tokens":{tokens},"total_tokens":{}}}"#,
        16 + u64::from(tokens)
    )
}

/// The events of one streamed answer.
struct Stream {
    script: Script,
    pace: Pace,
    writer: Writer,
    words: Arc<Words>,
    /// Everything before the choice.
    head: String,
    include_usage: bool,
    step: Step,
}

enum Step {
    Role,
    Tokens,
    Done,
    Over,
}

impl Stream {
    fn new(script: Script, include_usage: bool, words: Arc<Words>, model: &str) -> Self {
        let head = format!(
            r#"data: {{"id":"chatcmpl-script","object":"chat.completion.chunk","created":1,"model":"{model}","choices":["#
        );
        let (pace, writer) = (Pace::start(script), Writer::default());
        Self { script, pace, writer, words, head, include_usage, step: Step::Role }
    }

    async fn next(&mut self) -> Option<Bytes> {
        match self.step {
            Step::Role => {
                self.step = Step::Tokens;
                Some(self.choice(r#"{"role":"assistant","content":""}"#, "null"))
            }
            Step::Tokens if self.pace.next().await => {
                let word = self.words.word(self.writer.next(now_us())).1;
                Some(self.choice(&format!(r#"{{"content":"{word}"}}"#), "null"))
            }
            Step::Tokens => {
                self.step = Step::Done;
                Some(self.choice("{}", "\"length\""))
            }
            Step::Done => {
                self.step = Step::Over;
                let usage = usage(self.script.tokens);
                let usage = format!("{}],\"usage\":{usage}}}\n\n", self.head);
                Some(Bytes::from(format!("{}data: [DONE]\n\n", if self.include_usage { &usage } else { "" })))
            }
            Step::Over => None,
        }
    }

    fn choice(&self, delta: &str, finish: &str) -> Bytes {
        let head = &self.head;
        let tail = format!(r#"{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]}}"#);
        Bytes::from(format!("{head}{tail}\n\n"))
    }
}
