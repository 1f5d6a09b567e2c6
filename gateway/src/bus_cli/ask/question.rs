//! A question on its way to a node's own model.

use super::answer::{Answer, AnswerReader, AskError};
use crate::bus_cli::following::Following;
use serde_json::{Value, json};
use shared::bus::{Action, AskSpec, Frame, NodeId, Operator, WINDOW_BYTES};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Who is to read the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Route {
    /// The node's gateway decides.
    Auto,
    /// The prefill worker.
    Bridge,
    /// The decoder alone.
    Native,
}

/// What to ask.
#[derive(Debug, Clone)]
pub(crate) struct Question {
    /// Chat messages of role and text.
    pub(crate) messages: Vec<(&'static str, String)>,
    pub(crate) max_tokens: u32,
    pub(crate) route: Route,
    pub(crate) timeout: Duration,
}

impl Question {
    /// Asks a node and reads its answer; a cancel ends it over there, too.
    ///
    /// # Errors
    /// [`AskError`].
    pub(crate) async fn put(
        &self,
        operator: &Operator,
        node: &NodeId,
        cancel: &CancellationToken,
    ) -> Result<Answer, AskError> {
        let begun = Instant::now();
        let mut following = Following::start(operator, node, Action::Ask(self.spec()), cancel).await?;
        let mut reader = AnswerReader::default();
        loop {
            match following.next().await? {
                Frame::Stderr(bytes) => reader.head(&bytes)?,
                Frame::Stdout(bytes) => reader.body(&bytes, begun.elapsed())?,
                Frame::End(end) => return reader.finish(end.exit, begun.elapsed()),
            }
        }
    }

    fn spec(&self) -> AskSpec {
        let route = match self.route {
            Route::Auto => None,
            Route::Bridge => Some("bridge"),
            Route::Native => Some("native"),
        };
        AskSpec {
            headers: route.map(|r| ("x-pd-bridge-route".to_owned(), r.to_owned())).into_iter().collect(),
            body: self.body().to_string(),
            timeout_ms: u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX),
            window_bytes: WINDOW_BYTES,
        }
    }

    /// Without a model's name: whatever the node serves is asked.
    fn body(&self) -> Value {
        let messages = self.messages.iter().map(|(role, text)| json!({"role": role, "content": text}));
        json!({
            "messages": messages.collect::<Vec<_>>(),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        })
    }
}
