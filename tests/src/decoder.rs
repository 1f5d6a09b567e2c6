//! A client of a decode worker's control port, for tests that speak to it directly.

use shared::control::{
    ClusterKey, Constraint, ControlClient, DecodeEvent, DecodeReceipt, DecodeRequest, DecodeStats,
    EventStream, FinishReason, GenerateSpec, Hello, Incoming, Require, Sampling, TransferOffer, WorkerError,
};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for any single answer.
const LIMIT: Duration = Duration::from_secs(120);

/// A connected decode worker.
pub struct Decoder {
    client: ControlClient<DecodeRequest, DecodeEvent>,
    /// What it said of itself.
    pub hello: Hello,
}

/// How an answer went.
#[derive(Debug, Default)]
pub struct Answer {
    /// The receipt, once the prompt was in.
    pub receipt: Option<DecodeReceipt>,
    /// Token ids.
    pub ids: Vec<u32>,
    /// When each token message came, since the call.
    pub at: Vec<Duration>,
    /// Why it ended, if well.
    pub finish: Option<FinishReason>,
    /// Why it ended, if not.
    pub error: Option<WorkerError>,
}

/// A request name that no other test of this process uses.
#[must_use]
pub fn fresh_id(prefix: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{prefix}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

impl Decoder {
    /// Connects over loopback.
    pub async fn connect(addr: &str) -> Self {
        let (client, hello) = ControlClient::connect(addr, &ClusterKey::loopback(), LIMIT).await.unwrap();
        Self { client, hello }
    }

    /// Current occupancy.
    pub async fn stats(&self) -> DecodeStats {
        match self.client.call(&DecodeRequest::GetStats, LIMIT).await.unwrap() {
            DecodeEvent::Stats(stats) => stats,
            other => panic!("{other:?}"),
        }
    }

    /// Prepares a prompt; gives the resident prefix.
    ///
    /// # Errors
    /// What the worker said.
    pub async fn prepare(&self, id: &str, tokens: &[u32]) -> Result<u32, WorkerError> {
        self.prepare_constrained(id, tokens, None).await
    }

    /// Prepares a prompt whose answer must have a form; gives the resident prefix.
    ///
    /// # Errors
    /// What the worker said.
    pub async fn prepare_constrained(
        &self,
        id: &str,
        tokens: &[u32],
        constraint: Option<Constraint>,
    ) -> Result<u32, WorkerError> {
        let request =
            DecodeRequest::Prepare { request_id: id.to_owned(), tokens: tokens.to_vec().into(), constraint };
        match self.client.call(&request, LIMIT).await.unwrap() {
            DecodeEvent::Prepared { resident_tokens, .. } => Ok(resident_tokens),
            DecodeEvent::Error(e) => Err(e),
            other => panic!("{other:?}"),
        }
    }

    /// Opens a transfer.
    ///
    /// # Errors
    /// What the worker said.
    pub async fn offer(
        &self,
        id: &str,
        range: std::ops::Range<u32>,
        idle_ms: u64,
    ) -> Result<TransferOffer, WorkerError> {
        let request = DecodeRequest::OpenTransfer {
            request_id: id.to_owned(),
            token_start: range.start,
            token_end: range.end,
            idle_timeout_ms: idle_ms,
        };
        match self.client.call(&request, LIMIT).await.unwrap() {
            DecodeEvent::Offer(offer) => Ok(offer),
            DecodeEvent::Error(e) => Err(e),
            other => panic!("{other:?}"),
        }
    }

    /// Starts an answer; events are read from the stream.
    pub async fn start(&self, id: &str, max_new_tokens: u32, require: Require) -> EventStream<DecodeEvent> {
        let spec = GenerateSpec {
            request_id: id.to_owned(),
            max_new_tokens,
            sampling: Sampling::greedy(),
            stop_token_ids: vec![],
            require,
            transfer_timeout_ms: 30_000,
            choices: 1,
            logprobs: None,
            prompt_logprobs: None,
            window: 0,
        };
        self.client.request(&DecodeRequest::Generate(spec)).await.unwrap()
    }

    /// Generates to the end, greedily, stopping at no token.
    pub async fn generate(&self, id: &str, max_new_tokens: u32, require: Require) -> Answer {
        let begun = Instant::now();
        let events = self.start(id, max_new_tokens, require).await;
        read(id, begun, events).await
    }

    /// Generates to the end as the specification says: one choice, without log probabilities.
    pub async fn generate_as(&self, spec: GenerateSpec) -> Answer {
        let (id, begun) = (spec.request_id.clone(), Instant::now());
        read(&id, begun, self.client.request(&DecodeRequest::Generate(spec)).await.unwrap()).await
    }

    /// Prepares and generates without any transfer.
    pub async fn native(&self, tokens: &[u32], max_new_tokens: u32) -> Answer {
        let id = fresh_id("native");
        self.prepare(&id, tokens).await.unwrap();
        self.generate(&id, max_new_tokens, Require::Nothing).await
    }

    /// Writes the cache of a prepared prompt to a file in the worker's inspection folder.
    pub async fn inspect(&self, id: &str, file: &str) {
        let request = DecodeRequest::Inspect { request_id: id.to_owned(), file: file.to_owned() };
        match self.client.call(&request, LIMIT).await.unwrap() {
            DecodeEvent::Inspected(_) => {}
            other => panic!("{other:?}"),
        }
    }

    /// Sends a message that has no answer.
    pub fn notify(&self, request: &DecodeRequest) {
        self.client.notify(request);
    }

    /// Waits until nothing runs and nothing is held, and gives the occupancy then.
    pub async fn settled(&self) -> DecodeStats {
        let limit = Duration::from_secs(20);
        let idle = || async {
            let s = self.stats().await;
            (s.requests == 0
                && s.transfers == 0
                && s.store_references == 0
                && s.reserved_bytes == 0
                && s.sequence_bytes == 0)
                .then_some(s)
        };
        let start = Instant::now();
        loop {
            if let Some(stats) = idle().await {
                return stats;
            }
            assert!(start.elapsed() < limit, "still held after {limit:?}: {:?}", self.stats().await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Reads an answer to its end.
async fn read(id: &str, begun: Instant, mut events: EventStream<DecodeEvent>) -> Answer {
    let mut answer = Answer::default();
    loop {
        let event = tokio::time::timeout(LIMIT * 3, events.next()).await;
        match event.unwrap_or_else(|_| panic!("{id}: the answer stalled after {answer:?}")) {
            Some(Incoming::Event(DecodeEvent::Started(r))) => answer.receipt = Some(*r),
            Some(Incoming::Event(DecodeEvent::Token { ids, .. })) => {
                answer.ids.extend(ids);
                answer.at.push(begun.elapsed());
            }
            Some(Incoming::Event(DecodeEvent::Finished { reason, .. })) => {
                answer.finish = Some(reason);
                return answer;
            }
            Some(Incoming::Event(DecodeEvent::Error(e))) => {
                answer.error = Some(e);
                return answer;
            }
            Some(Incoming::Event(DecodeEvent::Progress { .. })) => {}
            other => panic!("{id}: {other:?}"),
        }
    }
}
