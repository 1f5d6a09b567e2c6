//! Connections beyond the cap: told so, and closed.

use crate::metrics::Metrics;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

const ANSWER: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
connection: close\r\ncontent-length: 117\r\n\r\n\
{\"error\":{\"message\":\"too many connections, try again soon\",\"type\":\"server_error\",\
\"param\":null,\"code\":\"overloaded\"}}\n\n";
/// Connections that may linger at once so that their clients see the answer.
const MAX_LINGERING: usize = 256;
/// How long one lingers.
const LINGER: Duration = Duration::from_millis(500);

/// Answers 503 without waiting for a request. Behind TLS nothing can be said before a handshake, which is more than
/// a full house can afford.
pub(super) fn turn_away(stream: TcpStream, is_tls: bool, metrics: &Metrics) {
    static LINGERING: AtomicUsize = AtomicUsize::new(0);
    metrics.connections_refused.inc();
    if is_tls || LINGERING.fetch_add(1, Ordering::Relaxed) >= MAX_LINGERING {
        if !is_tls {
            LINGERING.fetch_sub(1, Ordering::Relaxed);
        }
        return;
    }
    tokio::spawn(async move {
        let _ = tokio::time::timeout(LINGER, say_and_wait(stream)).await;
        LINGERING.fetch_sub(1, Ordering::Relaxed);
    });
}

/// Closing with unread bytes would reset the connection, and the client might never see why.
async fn say_and_wait(mut stream: TcpStream) {
    use tokio::io::AsyncWriteExt as _;
    if stream.write_all(ANSWER).await.is_err() || stream.shutdown().await.is_err() {
        return;
    }
    let mut sink = [0; 4096];
    while stream.read(&mut sink).await.is_ok_and(|n| n > 0) {}
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_answer_is_as_long_as_it_says() {
        let text = std::str::from_utf8(super::ANSWER).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("content-length: {}\r\n", body.len()))
                || head.ends_with(&format!("content-length: {}", body.len())),
            "{}",
            body.len()
        );
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"]["code"], "overloaded");
    }
}
