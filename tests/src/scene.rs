//! The usual cast: a decode worker, a prefill worker behind a relay, a gateway; and a judge that never bridges.

use crate::fakes::{FakePrefill, Meddle, Play, Seen};
use crate::http::{self, Reply, completion};
use crate::stack::{Gateway, Worker};
use crate::tiny;
use shared::verdict::VerdictKind;
use std::path::Path;
use std::time::Duration;

/// Tokens of a block in every scene.
pub const BLOCK: u32 = 16;

/// Real workers with the tiny model, and a relay that can meddle with their frames.
pub struct Scene {
    /// Front door.
    pub gateway: Gateway,
    /// The relay before the prefill worker.
    pub relay: FakePrefill,
    /// The prefill worker.
    pub prefill: Worker,
    /// The decode worker.
    pub decode: Worker,
    judge: Gateway,
    _judge_decode: Worker,
}

impl Scene {
    /// Starts everything.
    pub async fn new() -> Self {
        Self::with(&[], &[]).await
    }

    /// Starts everything, with more flags for the workers.
    pub async fn with(decode: &[&str], prefill: &[&str]) -> Self {
        Self::of(tiny::model(), decode, prefill).await
    }

    /// Starts everything with a certain model.
    pub async fn of(model: &Path, decode: &[&str], prefill: &[&str]) -> Self {
        let blocks = ["--block-tokens", "16"];
        let decode = Worker::decode(model, &[&blocks, decode].concat());
        let judge_decode = Worker::decode(model, &blocks);
        let prefill = Worker::prefill(model, prefill);
        let relay = FakePrefill::before(&prefill.addresses.control, Play::Relay(Meddle::nothing())).await;
        let gateway = Gateway::start(model, &decode.addresses.control, Some(&relay.server.addr), &[]).await;
        let judge = Gateway::start(model, &judge_decode.addresses.control, None, &[]).await;
        Self { gateway, relay, prefill, decode, judge, _judge_decode: judge_decode }
    }

    /// Changes what the relay does.
    pub fn meddle(&self, meddle: Meddle) {
        self.relay.play(Play::Relay(meddle));
    }

    /// Asks for a bridged completion.
    pub async fn ask(&self, prompt: &str, max_tokens: u32) -> Reply {
        http::post(&self.gateway.addr, "/v1/completions", &[http::BRIDGE], &completion(prompt, max_tokens))
            .await
    }

    /// What a decoder that never bridges answers.
    pub async fn truth(&self, prompt: &str, max_tokens: u32) -> String {
        let reply =
            http::post(&self.judge.addr, "/v1/completions", &[http::NATIVE], &completion(prompt, max_tokens))
                .await;
        assert_eq!(reply.status, 200);
        reply.text()
    }

    /// The transfer that just crossed the relay.
    pub async fn last_transfer(&self) -> Seen {
        crate::wait::until("a transfer", Duration::from_secs(10), || async { self.relay.seen().pop() }).await
    }

    /// Waits until a bridge succeeds, after a worker was killed; the relay must not be meddling.
    pub async fn bridges_again(&self) {
        crate::wait::until("bridging again", Duration::from_secs(60), || async {
            let reply = self.ask(&prompt(40), 1).await;
            (reply.status == 200 && reply.verdict().verdict == VerdictKind::Complete).then_some(())
        })
        .await;
        self.last_transfer().await;
    }
}

/// A prompt of exactly `tokens` tokens (the tiny model has one per byte) that nobody has used before.
#[must_use]
pub fn prompt(tokens: usize) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    while text.len() < tokens {
        let _ = write!(text, "{:x} ", rand::random::<u64>());
    }
    text.truncate(tokens);
    text
}
