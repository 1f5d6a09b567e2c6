//! A question to the model behind this node's own OpenAI endpoint.

use super::session::Outlet;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::header::{HeaderName, HeaderValue};
use hyper_util::rt::TokioIo;
use shared::bus::{AskSpec, Exit, Frame, MAX_CHUNK_BYTES};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;
use tokio::net::TcpStream;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Headers that an operator may set.
const PASSED_ON: &str = "x-pd-bridge-";

/// The node's own OpenAI endpoint.
#[derive(Clone)]
pub(crate) struct Endpoint {
    /// `host:port`.
    addr: String,
    /// `Authorization`, where the endpoint wants a key.
    authorization: Option<HeaderValue>,
}

impl Endpoint {
    /// The endpoint at `addr`, with the API key in a file that nobody else may read, if there is one.
    ///
    /// # Errors
    /// What is wrong with the file, for people.
    pub(super) fn new(addr: String, key_file: Option<&Path>) -> Result<Self, String> {
        let authorization =
            key_file.map(|file| read_key(file).map_err(|e| format!("{}: {e}", file.display())));
        Ok(Self { addr, authorization: authorization.transpose()? })
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("addr", &self.addr).finish_non_exhaustive()
    }
}

fn read_key(file: &Path) -> Result<HeaderValue, String> {
    let mode = std::fs::metadata(file).map_err(|e| e.to_string())?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err("others can read it; chmod 600".to_owned());
    }
    let key = std::fs::read_to_string(file).map_err(|e| e.to_string())?;
    let value = HeaderValue::try_from(format!("Bearer {}", key.trim()));
    let mut value = value.ok().filter(|_| !key.trim().is_empty()).ok_or("it holds no API key")?;
    value.set_sensitive(true);
    Ok(value)
}

/// Refuses headers that could change who asks, or where the question ends.
///
/// # Errors
/// What is wrong, for people.
pub(super) fn approve(spec: &AskSpec) -> Result<(), String> {
    for (name, value) in &spec.headers {
        if !name.to_ascii_lowercase().starts_with(PASSED_ON) || HeaderName::try_from(name).is_err() {
            return Err(format!("the header {name:?} may not be set"));
        }
        if HeaderValue::try_from(value).is_err() {
            return Err(format!("the header {name} can't have the value {value:?}"));
        }
    }
    Ok(())
}

/// Sends the request and passes the answer on: status and headers as one line of JSON on stderr, the body as it comes on
/// stdout. Exit code 0 is an answer with a status of 2xx.
pub(super) async fn run(endpoint: &Endpoint, spec: &AskSpec, outlet: &mut Outlet) -> Exit {
    match exchange(endpoint, spec, outlet).await {
        Ok(exit) => exit,
        Err(message) => Exit::Failed { message: format!("the model at {}: {message}", endpoint.addr) },
    }
}

async fn exchange(endpoint: &Endpoint, spec: &AskSpec, outlet: &mut Outlet) -> Result<Exit, String> {
    let addr = endpoint.addr.as_str();
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(addr)).await;
    let stream = stream.map_err(|e| text(&e))?.map_err(|e| text(&e))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| text(&e))?;
    let driving = tokio::spawn(connection);
    let mut request =
        Request::post("/v1/chat/completions").header("host", addr).header("content-type", "application/json");
    for (name, value) in &spec.headers {
        request = request.header(name, value);
    }
    if let Some(authorization) = &endpoint.authorization {
        request = request.header("authorization", authorization);
    }
    let request = request.body(Full::new(Bytes::from(spec.body.clone()))).map_err(|e| text(&e))?;
    let answer = sender.send_request(request).await.map_err(|e| text(&e))?;
    let is_success = answer.status().is_success();
    let headers: serde_json::Map<_, _> = answer
        .headers()
        .iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into()))
        .collect();
    let head = serde_json::json!({"status": answer.status().as_u16(), "headers": headers});
    outlet.room().await;
    outlet.send(Frame::Stderr(format!("{head}\n").into())).await;
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        let Ok(mut data) = frame.map_err(|e| text(&e))?.into_data() else { continue };
        while !data.is_empty() {
            let room = outlet.room().await;
            let piece = data.split_to(room.min(MAX_CHUNK_BYTES).min(data.len()));
            if !outlet.send(Frame::Stdout(piece)).await {
                return Ok(Exit::OutputLimit {});
            }
        }
    }
    driving.abort();
    Ok(Exit::Code { code: i32::from(!is_success) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_key_is_private_and_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        let open = || Endpoint::new("127.0.0.1:1".to_owned(), Some(&file));
        assert!(open().unwrap_err().contains("key"));
        for (text, mode, good) in [
            ("sk-1234\n", 0o600, true),
            ("sk-1234\n", 0o644, false),
            (" \n", 0o600, false),
            ("a\nb", 0o600, false),
        ] {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(open().is_ok(), good, "{text:?} {mode:o}");
            if let Ok(endpoint) = open() {
                assert!(!format!("{endpoint:?} {:?}", endpoint.authorization).contains("1234"));
            }
        }
    }
}
