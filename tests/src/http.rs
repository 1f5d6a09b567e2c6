//! An HTTP and SSE client that keeps the time of arrival of every piece.

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use shared::verdict::{MAX_HEADER_BYTES, Verdict};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Longest wait for the next piece of a response.
const LIMIT: Duration = Duration::from_secs(300);

/// A response whose body is still arriving. Dropping it closes the connection.
#[derive(Debug)]
pub struct Response {
    /// Status code.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    body: Incoming,
    begun: Instant,
    connection: tokio::task::JoinHandle<()>,
}

/// A whole response.
#[derive(Debug)]
pub struct Reply {
    /// Status code.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
    /// Pieces of the body with the time since the request.
    pub pieces: Vec<(Duration, Bytes)>,
}

/// One line of an event stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// `data: {…}`
    Data(Value),
    /// `data: [DONE]`
    Done,
    /// `: …`
    Comment(String),
    /// Anything else that is not a blank line.
    Other(String),
}

impl Response {
    /// The verdict in the header.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        verdict(&self.headers)
    }

    /// The next piece of the body with the time since the request; `None` at its end.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn piece(&mut self) -> Result<Option<(Duration, Bytes)>, hyper::Error> {
        loop {
            let frame = tokio::time::timeout(LIMIT, self.body.frame()).await.expect("the response stalled");
            match frame.transpose()?.map(hyper::body::Frame::into_data) {
                None => return Ok(None),
                Some(Ok(data)) => return Ok(Some((self.begun.elapsed(), data))),
                Some(Err(_)) => {}
            }
        }
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn finish(mut self) -> Result<Reply, hyper::Error> {
        let mut pieces = vec![];
        while let Some(piece) = self.piece().await? {
            pieces.push(piece);
        }
        let body: Vec<u8> = pieces.iter().flat_map(|(_, b)| b.to_vec()).collect();
        Ok(Reply {
            status: self.status,
            headers: std::mem::take(&mut self.headers),
            body: body.into(),
            pieces,
        })
    }
}

impl Drop for Response {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Reply {
    /// The verdict in the header.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        verdict(&self.headers)
    }

    /// The body as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e}: {:?}", String::from_utf8_lossy(&self.body)))
    }

    /// The body as an event stream.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        events(std::str::from_utf8(&self.body).unwrap())
    }

    /// The answer's text, from a stream or not, of chat or completion.
    #[must_use]
    pub fn text(&self) -> String {
        let is_stream = self.headers["content-type"].to_str().unwrap().starts_with("text/event-stream");
        let parts = if is_stream {
            self.events()
                .into_iter()
                .filter_map(|e| if let Event::Data(v) = e { Some(v) } else { None })
                .collect()
        } else {
            vec![self.json()]
        };
        let choice_text = |v: &Value| {
            let c = v["choices"].get(0)?;
            let text =
                ["text"].iter().map(|k| &c[*k]).chain([&c["delta"]["content"], &c["message"]["content"]]);
            text.filter_map(Value::as_str).map(str::to_owned).next()
        };
        parts.iter().filter_map(choice_text).collect()
    }

    /// `usage` of the answer.
    #[must_use]
    pub fn usage(&self) -> Value {
        self.json()["usage"].clone()
    }
}

/// Sends a request and reads the head of the response.
///
/// # Errors
/// The connection broke before the head was there.
pub async fn send(
    addr: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<&Value>,
) -> Result<Response, Box<dyn std::error::Error + Send + Sync>> {
    let begun = Instant::now();
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(async move {
        let _ = connection.await;
    });
    let mut request = Request::builder().method(method).uri(path).header("host", addr);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let bytes = body.map_or_else(Bytes::new, |b| b.to_string().into());
    let request = request.header("content-type", "application/json").body(Full::new(bytes))?;
    let response = tokio::time::timeout(LIMIT, sender.send_request(request)).await??;
    let (head, body) = response.into_parts();
    Ok(Response { status: head.status, headers: head.headers, body, begun, connection })
}

/// `GET`, read to the end.
pub async fn get(addr: &str, path: &str) -> Reply {
    send(addr, "GET", path, &[], None).await.unwrap().finish().await.unwrap()
}

/// `POST` of JSON, read to the end.
pub async fn post(addr: &str, path: &str, headers: &[(&str, &str)], body: &Value) -> Reply {
    send(addr, "POST", path, headers, Some(body)).await.unwrap().finish().await.unwrap()
}

/// A greedy completion request.
#[must_use]
pub fn completion(prompt: &str, max_tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
}

/// Force the plan to bridge.
pub const BRIDGE: (&str, &str) = ("x-pd-bridge-route", "bridge");
/// Force the plan to the decoder alone.
pub const NATIVE: (&str, &str) = ("x-pd-bridge-route", "native");

/// Reads the verdict header and checks what must hold for every verdict.
#[must_use]
pub fn verdict(headers: &HeaderMap) -> Verdict {
    let text = headers.get("x-pd-bridge").unwrap_or_else(|| panic!("no verdict in {headers:?}"));
    let text = text.to_str().unwrap();
    assert!(text.len() <= MAX_HEADER_BYTES && text.is_ascii(), "{text}");
    let verdict: Verdict = serde_json::from_str(text).unwrap();
    assert!(verdict.is_consistent(), "{text}");
    verdict
}

/// Lines of an event stream.
#[must_use]
pub fn events(text: &str) -> Vec<Event> {
    text.lines()
        .filter(|l| !l.is_empty())
        .map(|line| match (line.strip_prefix("data: "), line.strip_prefix(':')) {
            (Some("[DONE]"), _) => Event::Done,
            (Some(data), _) => {
                serde_json::from_str(data).map_or_else(|_| Event::Other(line.to_owned()), Event::Data)
            }
            (_, Some(comment)) => Event::Comment(comment.trim().to_owned()),
            _ => Event::Other(line.to_owned()),
        })
        .collect()
}

/// The value of a sample in Prometheus text: the sum over all series of `name` whose labels contain `labels`.
#[must_use]
pub fn metric(text: &str, name: &str, labels: &str) -> f64 {
    text.lines()
        .filter(|l| l.starts_with(name) && l[name.len()..].starts_with(['{', ' ']) && l.contains(labels))
        .filter_map(|l| l.rsplit_once(' ')?.1.parse::<f64>().ok())
        .sum()
}
