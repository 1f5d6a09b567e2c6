//! A question to the model behind this node's own OpenAI endpoint.

use super::session::Outlet;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper_util::rt::TokioIo;
use shared::bus::{AskSpec, Exit, Frame, MAX_CHUNK_BYTES};
use std::time::Duration;
use tokio::net::TcpStream;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Headers that an operator may set.
const PASSED_ON: &str = "x-pd-bridge-";

/// Sends the request and passes the answer on: status and headers as one line of JSON on stderr, the body as it comes on
/// stdout. Exit code 0 is an answer with a status of 2xx.
pub(super) async fn run(addr: &str, spec: &AskSpec, outlet: &mut Outlet) -> Exit {
    match exchange(addr, spec, outlet).await {
        Ok(exit) => exit,
        Err(message) => Exit::Failed { message: format!("the model at {addr}: {message}") },
    }
}

async fn exchange(addr: &str, spec: &AskSpec, outlet: &mut Outlet) -> Result<Exit, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(addr)).await;
    let stream = stream.map_err(|e| text(&e))?.map_err(|e| text(&e))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| text(&e))?;
    let driving = tokio::spawn(connection);
    let mut request =
        Request::post("/v1/chat/completions").header("host", addr).header("content-type", "application/json");
    for (name, value) in
        spec.headers.iter().filter(|(name, _)| name.to_ascii_lowercase().starts_with(PASSED_ON))
    {
        request = request.header(name, value);
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
