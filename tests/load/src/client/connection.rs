//! One HTTP/1.1 connection to a gateway.

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Where requests go and what they say.
#[derive(Debug, Clone)]
pub struct Target {
    /// `host:port`.
    pub addr: String,
    /// Model name to ask for.
    pub model: String,
    /// Value of the `authorization` header.
    pub authorization: Option<String>,
}

/// What went wrong with a request.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// No connection.
    #[error("connect: {0}")]
    Io(#[from] std::io::Error),
    /// The connection broke.
    #[error("http: {0}")]
    Http(#[from] hyper::Error),
    /// The request could not be made.
    #[error("request: {0}")]
    Request(#[from] hyper::http::Error),
    /// An answer other than 200.
    #[error("status {0}: {1}")]
    Status(StatusCode, String),
}

/// An open connection.
#[derive(Debug)]
pub struct Connection {
    sender: SendRequest<Full<Bytes>>,
}

impl Target {
    /// A chat request: `max_tokens` and `pace_us` are the source's script, `number` makes every prompt another one.
    #[must_use]
    pub fn chat(&self, number: u64, max_tokens: u32, pace_us: u64, stream: bool) -> Bytes {
        let model = &self.model;
        let body = format!(
            r#"{{"model":"{model}","messages":[{{"role":"system","content":"You are a helpful assistant."}},{{"role":"user","content":"Say hello to visitor number {number}, please."}}],"max_tokens":{max_tokens},"seed":{pace_us},"stream":{stream}}}"#
        );
        Bytes::from(body)
    }
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// [`ConnectionError`].
    pub async fn open(target: &Target) -> Result<Self, ConnectionError> {
        let stream = TcpStream::connect(&target.addr).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Self { sender })
    }

    /// Whether another request can be sent at once.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    /// Sends a chat request and reads the head of the answer.
    ///
    /// # Errors
    /// [`ConnectionError`]; an answer other than 200 is one.
    pub async fn send(
        &mut self,
        target: &Target,
        body: Bytes,
    ) -> Result<Response<Incoming>, ConnectionError> {
        let mut request = Request::post("/v1/chat/completions")
            .header("host", &target.addr)
            .header("content-type", "application/json");
        if let Some(authorization) = &target.authorization {
            request = request.header("authorization", authorization);
        }
        self.sender.ready().await?;
        let response = self.sender.send_request(request.body(Full::new(body))?).await?;
        if response.status() == StatusCode::OK {
            return Ok(response);
        }
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        Err(ConnectionError::Status(status, String::from_utf8_lossy(&body).chars().take(300).collect()))
    }

    /// Sends a chat request and reads the whole answer.
    ///
    /// # Errors
    /// [`ConnectionError`].
    pub async fn whole(&mut self, target: &Target, body: Bytes) -> Result<Bytes, ConnectionError> {
        Ok(self.send(target, body).await?.into_body().collect().await?.to_bytes())
    }
}
