//! A small HTTP client that sees raw bytes.

use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const LIMIT: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    headers: Vec<(String, String)>,
    pub(super) body: String,
}

impl Reply {
    pub(super) fn header(&self, name: &str) -> Option<String> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone())
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }

    pub(super) fn verdict(&self) -> Value {
        serde_json::from_str(&self.header("x-pd-bridge").expect("a verdict header")).unwrap()
    }

    pub(super) fn events(&self) -> Vec<String> {
        self.body.split("\n\n").filter_map(|e| e.strip_prefix("data: ")).map(str::to_owned).collect()
    }

    pub(super) fn streamed_text(&self) -> String {
        let json = self.events().into_iter().filter_map(|e| serde_json::from_str::<Value>(&e).ok());
        json.filter_map(|e| Some(e["choices"][0]["text"].as_str()?.to_owned())).collect()
    }
}

pub(super) async fn get(addr: SocketAddr, path: &str) -> Reply {
    exchange(addr, format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await
}

pub(super) async fn post(addr: SocketAddr, path: &str, headers: &[(&str, &str)], body: &Value) -> Reply {
    exchange(addr, request(path, headers, body)).await
}

/// A connection whose answer is read piece by piece.
pub(super) struct Open {
    stream: TcpStream,
    seen: String,
}

pub(super) async fn stream(addr: SocketAddr, path: &str, headers: &[(&str, &str)], body: &Value) -> Open {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(request(path, headers, body).as_bytes()).await.unwrap();
    Open { stream, seen: String::new() }
}

impl Open {
    /// How often a text has come so far.
    pub(super) fn count(&self, text: &str) -> usize {
        self.seen.matches(text).count()
    }

    pub(super) async fn wait_for(&mut self, text: &str) {
        let reading = async {
            let mut buffer = [0; 4096];
            while !self.seen.contains(text) {
                let n = self.stream.read(&mut buffer).await.unwrap();
                assert!(n > 0, "the connection closed after {}", self.seen);
                self.seen.push_str(&String::from_utf8_lossy(&buffer[..n]));
            }
        };
        tokio::time::timeout(LIMIT, reading).await.unwrap();
    }
}

fn request(path: &str, headers: &[(&str, &str)], body: &Value) -> String {
    let extra: String = headers.iter().map(|(n, v)| format!("{n}: {v}\r\n")).collect();
    let body = body.to_string();
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{extra}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn exchange(addr: SocketAddr, request: String) -> Reply {
    let exchange = async {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.unwrap();
        String::from_utf8(bytes).unwrap()
    };
    let text = tokio::time::timeout(LIMIT, exchange).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers: Vec<(String, String)> =
        lines.filter_map(|l| l.split_once(": ")).map(|(n, v)| (n.to_lowercase(), v.to_owned())).collect();
    let chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
    Reply { status, headers, body: if chunked { dechunk(body) } else { body.to_owned() } }
}

fn dechunk(mut rest: &str) -> String {
    let mut out = String::new();
    while let Some((size, tail)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        out.push_str(&tail[..size]);
        rest = tail[size..].trim_start_matches("\r\n");
    }
    out
}
