//! Bytes on a socket, for what no HTTP library would send.

use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Longest wait for the end of a response.
const LIMIT: Duration = Duration::from_secs(20);

/// One response, cut out of what came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// The lines before the body.
    pub head: String,
    /// The body, with its chunks joined.
    pub body: Vec<u8>,
}

impl Answer {
    /// A header's value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let line = |l: &'_ str| l.split_once(':').is_some_and(|(n, _)| n.eq_ignore_ascii_case(name));
        self.head.lines().find(|l| line(l)).and_then(|l| Some(l.split_once(':')?.1.trim()))
    }

    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A POST with a JSON body and more header lines, each ended by `\r\n`.
#[must_use]
pub fn post(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Sends the bytes and reads until the other side closes, or says nothing more for `quiet`.
pub async fn exchange(addr: &str, bytes: &[u8], quiet: Duration) -> Vec<u8> {
    let stream = TcpStream::connect(addr).await.unwrap();
    let (mut read, mut write) = stream.into_split();
    let bytes = bytes.to_vec();
    let writing = tokio::spawn(async move {
        // It may be cut off before it has said all.
        let _ = write.write_all(&bytes).await;
        write
    });
    let mut got = vec![];
    let mut buffer = [0; 16384];
    let reading = async {
        while let Ok(Ok(n)) = tokio::time::timeout(quiet, read.read(&mut buffer)).await {
            if n == 0 {
                break;
            }
            got.extend_from_slice(&buffer[..n]);
        }
    };
    assert!(tokio::time::timeout(LIMIT, reading).await.is_ok(), "it talks without end");
    writing.abort();
    got
}

/// Cuts a byte stream into responses; what is left over that is none ends the list.
#[must_use]
pub fn answers(mut bytes: &[u8]) -> Vec<Answer> {
    let mut all = vec![];
    while let Some(at) = find(bytes, b"\r\n\r\n") {
        let head = String::from_utf8_lossy(&bytes[..at]).into_owned();
        bytes = &bytes[at + 4..];
        let Some(status) = head.strip_prefix("HTTP/1.").and_then(|h| h.get(2..5)?.parse().ok()) else {
            break;
        };
        let mut answer = Answer { status, head, body: vec![] };
        if status < 200 {
            all.push(answer);
            continue;
        }
        if answer.header("transfer-encoding").is_some() {
            while let Some(line) = find(bytes, b"\r\n") {
                let size = usize::from_str_radix(&String::from_utf8_lossy(&bytes[..line]), 16).unwrap_or(0);
                let end = (line + 2 + size).min(bytes.len());
                answer.body.extend_from_slice(&bytes[line + 2..end]);
                bytes = bytes.get(end + 2..).unwrap_or_default();
                if size == 0 {
                    break;
                }
            }
        } else {
            let length = answer.header("content-length").and_then(|v| v.parse().ok()).unwrap_or(bytes.len());
            // The answer to a HEAD request announces a body that does not come.
            let length = if bytes.starts_with(b"HTTP/1.") { 0 } else { length.min(bytes.len()) };
            answer.body = bytes[..length].to_vec();
            bytes = &bytes[length..];
        }
        all.push(answer);
    }
    all
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|w| w == what)
}
