//! An old NATS server is named in the log, by whatever connects to it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use shared::bus::{Bus, BusArgs};
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;

/// What was logged; clones share it.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

/// Speaks just enough of the protocol to be connected to, and says that it is of this version.
async fn server(version: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let (read, mut write) = stream.into_split();
        let info = serde_json::json!({"server_id": "script", "server_name": "script", "version": version, "proto": 1,
            "host": "127.0.0.1", "port": addr.port(), "headers": true, "max_payload": 1 << 20, "client_id": 1});
        write.write_all(format!("INFO {info}\r\n").as_bytes()).await.unwrap();
        let mut lines = BufReader::new(read).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            if line == "PING" {
                write.write_all(b"PONG\r\n").await.unwrap();
            }
        }
    });
    format!("nats://{addr}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_below_the_floor_is_warned_about_and_no_other() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
    for (version, is_old) in [("2.9.10", true), ("2.12.6", true), ("2.12.7", false), ("2.15.1", false)] {
        log.0.lock().unwrap().clear();
        let args = BusArgs { servers: Some(vec![server(version).await]), ..BusArgs::default() };
        let bus = Bus::connect(&args.resolve("test").unwrap().unwrap(), "agent", "test").await.unwrap();
        // The connection is logged first; what is to be said of it follows at once.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let said = log.text();
        assert!(said.contains("bus connected"), "{version}: {said}");
        let warning = said.lines().find(|l| l.contains("WARN") && l.contains("2.12.7"));
        assert_eq!(warning.is_some(), is_old, "{version}: {said}");
        assert!(warning.is_none_or(|w| w.contains(version)), "{version}: {said}");
        assert!(bus.is_connected());
    }
}
