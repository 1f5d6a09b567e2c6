//! `GET /v1/bridge/events`: a WebSocket that tells what has changed, five times a second at most.
//!
//! Messages are JSON objects: `hello` first (version, model), then `update`s:
//!
//! ```json
//! {"type": "update", "now_ms": 1764538000000.0,
//!  "totals": {"in_flight": 1, "requests": 7, "completion_tokens": 311},
//!  "nodes": [{"node": "mac", "role": "decode", …}],
//!  "requests": [{"id": "…", "began_ms": …, "age_ms": …, "prompt_tokens": 1740, "done_tokens": 512,
//!                "stages": [{"stage": "plan", "start_ms": 0.0, "end_ms": 1.2}, …], "verdict": {…}, "ending": "answered"}]}
//! ```
//!
//! The first update holds every request of the table, later ones only those that changed. `nodes` is there when it
//! changed. What a client sends is ignored.

use super::hub::{Live, unix_ms};
use axum::extract::ws::{Message, WebSocket};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

/// Shortest time between two updates: short enough to look like motion.
const UPDATE_INTERVAL: Duration = Duration::from_millis(200);
/// Longest time without a message, so that a viewer can tell silence from a dead connection.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// A viewer that takes longer to accept a message is gone.
const SEND_LIMIT: Duration = Duration::from_secs(10);
/// Most bytes of a message from a viewer; all are ignored.
pub(crate) const MAX_INBOUND_BYTES: usize = 1024;

/// What a socket shows besides requests.
pub(crate) trait Surroundings: Send + Sync + 'static {
    /// The model's name as clients see it.
    fn model(&self) -> &str;
    /// Workers and machines, newest state.
    fn nodes(&self) -> Value;
}

#[derive(Serialize)]
struct Update<'a> {
    r#type: &'static str,
    now_ms: f64,
    totals: super::Totals,
    #[serde(skip_serializing_if = "Option::is_none")]
    nodes: Option<&'a Value>,
    requests: Vec<Box<RawValue>>,
}

/// Serves one viewer until it leaves or the gateway ends.
pub(crate) async fn serve(
    mut socket: WebSocket,
    live: Arc<Live>,
    around: Arc<dyn Surroundings>,
    shutdown: CancellationToken,
) {
    let hello = serde_json::json!({
        "type": "hello", "version": env!("CARGO_PKG_VERSION"), "model": around.model(),
    });
    if !send(&mut socket, hello.to_string()).await {
        return;
    }
    let mut ticks = interval(UPDATE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut view = View::default();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => {
                let _ = timeout(SEND_LIMIT, socket.send(Message::Close(None))).await;
                return;
            }
            message = socket.recv() => match message {
                Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                Some(Ok(_)) => {}
            },
            _ = ticks.tick() => {
                if let Some(update) = view.update(&live, &around.nodes(), Instant::now())
                    && !send(&mut socket, update).await
                {
                    return;
                }
            }
        }
    }
}

/// What one viewer knows.
#[derive(Default)]
struct View {
    clock: u64,
    nodes: Option<Value>,
    told: Option<Instant>,
}

impl View {
    /// The next message, if there is anything to say.
    fn update(&mut self, live: &Live, nodes: &Value, now: Instant) -> Option<String> {
        let changes = live.changes(self.clock);
        let nodes_changed = self.nodes.as_ref() != Some(nodes);
        let silent = self.told.is_none_or(|at| now - at >= HEARTBEAT);
        if changes.requests.is_empty() && !nodes_changed && !silent {
            return None;
        }
        self.clock = changes.clock;
        self.told = Some(now);
        let update = Update {
            r#type: "update",
            now_ms: unix_ms(),
            totals: live.totals(),
            nodes: nodes_changed.then_some(nodes),
            requests: changes.requests,
        };
        let text = serde_json::to_string(&update).ok();
        if nodes_changed {
            self.nodes = Some(nodes.clone());
        }
        text
    }
}

async fn send(socket: &mut WebSocket, text: String) -> bool {
    matches!(timeout(SEND_LIMIT, socket.send(Message::Text(text.into()))).await, Ok(Ok(())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn update(view: &mut View, live: &Live, nodes: &Value, now: Instant) -> Option<Value> {
        view.update(live, nodes, now).map(|text| serde_json::from_str(&text).unwrap())
    }

    #[test]
    fn a_view_tells_changes_once_and_shows_life_in_silence() {
        let live = Live::new(true);
        let watched = live.begin("a", 3, std::time::Instant::now());
        let (mut view, nodes) = (View::default(), json!([{"node": "n"}]));
        let now = Instant::now();
        let first = update(&mut view, &live, &nodes, now).unwrap();
        assert_eq!((&first["requests"][0]["id"], &first["nodes"]), (&json!("a"), &nodes));
        assert!(update(&mut view, &live, &nodes, now).is_none());
        watched.tokens(2);
        let second = update(&mut view, &live, &nodes, now).unwrap();
        assert_eq!((second["requests"].as_array().unwrap().len(), &second["nodes"]), (1, &Value::Null));
        let third = update(&mut view, &live, &nodes, now + HEARTBEAT).unwrap();
        assert_eq!(third["requests"], json!([]));
        assert_eq!(third["totals"]["completion_tokens"], 2);
    }
}
