//! Two workers and the exchanges of a verification.

use super::{GREEDY_TOKENS, VerifyError};
use crate::deadlines;
use crate::model::TextModel;
use crate::up::{ChildSpec, Running};
use serde::Serialize;
use shared::control::{
    CacheIdentity, ClusterKey, ControlClient, DecodeEvent, DecodeReceipt, DecodeRequest, EventStream,
    GenerateSpec, Hello, Incoming, PairSpec, PrefillEvent, PrefillReport, PrefillRequest, PrefillSpec,
    Require, Sampling,
};
use shared::layout::CacheLayout;
use shared::tokens::TokenIds;
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Nothing in a verification is worth giving up earlier.
const STEP_TIMEOUT: Duration = Duration::from_secs(3600);

type DecodeClient = ControlClient<DecodeRequest, DecodeEvent>;
type PrefillClient = ControlClient<PrefillRequest, PrefillEvent>;

/// A prefill worker and a decoder, paired.
pub(super) struct Session {
    decode_spec: ChildSpec,
    decode: (Running, DecodeClient, Hello),
    prefill: (Running, PrefillClient, Hello),
    tokens: TokenIds,
}

/// What ran.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Engines {
    pub(super) decode: String,
    pub(super) prefill: String,
}

/// How the bridge of the end-to-end comparison went.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Transfer {
    pub(super) prompt_tokens: u32,
    pub(super) bridged_tokens: u32,
    pub(super) payload_bytes: u64,
    pub(super) prefill_ms: f64,
    pub(super) transfer_ms: f64,
    pub(super) digests_equal: bool,
}

impl Session {
    /// Starts and pairs both workers.
    pub(super) async fn start(
        decode: ChildSpec,
        prefill: &ChildSpec,
        tokens: TokenIds,
    ) -> Result<Self, VerifyError> {
        let (d, p) = tokio::try_join!(connect(&decode), connect(prefill))?;
        let session = Self { decode_spec: decode, decode: d, prefill: p, tokens };
        session.pair().await?;
        Ok(session)
    }

    /// Ends the decoder and starts another one with an empty prefix store.
    pub(super) async fn restart_decoder(&mut self) -> Result<(), VerifyError> {
        let fresh = connect(&self.decode_spec).await?;
        let old = std::mem::replace(&mut self.decode, fresh);
        old.0.stop().await;
        self.pair().await
    }

    /// Ends both workers.
    pub(super) async fn stop(self) {
        tokio::join!(self.decode.0.stop(), self.prefill.0.stop());
    }

    /// The decoder's cache layout.
    pub(super) fn layout(&self) -> Result<CacheLayout, VerifyError> {
        self.identity().map(|c| c.layout.clone())
    }

    pub(super) fn engines(&self) -> Engines {
        Engines { decode: self.decode.2.engine.clone(), prefill: self.prefill.2.engine.clone() }
    }

    /// Has the decoder compute the prompt alone and write down inputs, cache and logits.
    pub(super) async fn inspect_native(&self, file: &str) -> Result<DecodeReceipt, VerifyError> {
        self.prepare("native").await?;
        self.inspect("native", file).await
    }

    /// Has the prefill worker make a cache from written-down inputs.
    pub(super) async fn reconstruct(&self, input: &str, output: &str) -> Result<(), VerifyError> {
        let request = PrefillRequest::Reconstruct {
            fingerprint: self.identity()?.fingerprint,
            input_file: input.to_owned(),
            output_file: output.to_owned(),
        };
        match self.prefill.1.call(&request, STEP_TIMEOUT).await? {
            PrefillEvent::Reconstructed => Ok(()),
            PrefillEvent::Error(error) => Err(VerifyError::Worker { step: "reconstruct", error }),
            other => Err(unexpected("reconstruct", &other)),
        }
    }

    /// Bridges the prompt and has the decoder write down the cache it got.
    pub(super) async fn inspect_bridged(&self, file: &str) -> Result<Transfer, VerifyError> {
        let resident = self.prepare("bridged").await?;
        let mut prefill = self.open_bridge("bridged", resident).await?;
        let (receipt, report) = tokio::join!(self.inspect("bridged", file), finished(&mut prefill));
        let (receipt, report) = (receipt?, report?);
        if receipt.bridged_tokens + 1 != receipt.prompt_tokens {
            let why =
                receipt.transfer_failure.map_or_else(|| "no reason given".to_owned(), |f| f.to_string());
            let message =
                format!("{} of {} tokens bridged: {why}", receipt.bridged_tokens, receipt.prompt_tokens);
            return Err(VerifyError::Unexpected { step: "bridge", message });
        }
        Ok(Transfer {
            prompt_tokens: receipt.prompt_tokens,
            bridged_tokens: receipt.bridged_tokens,
            payload_bytes: receipt.payload_bytes,
            prefill_ms: report.prefill_ms,
            transfer_ms: report.transfer_ms,
            digests_equal: receipt.digest == Some(report.digest),
        })
    }

    /// Generates greedily, bridged or not.
    pub(super) async fn generate(
        &self,
        id: &str,
        model: &TextModel,
        bridged: bool,
    ) -> Result<Vec<u32>, VerifyError> {
        let resident = self.prepare(id).await?;
        let missing = resident < self.length() - 1;
        let prefill = if bridged && missing { Some(self.open_bridge(id, resident).await?) } else { None };
        let spec = GenerateSpec {
            request_id: id.to_owned(),
            max_new_tokens: GREEDY_TOKENS,
            sampling: Sampling::greedy(),
            stop_token_ids: model.spec.eos_token_ids.clone(),
            require: if bridged { Require::Complete } else { Require::Nothing },
            transfer_timeout_ms: u64::try_from(STEP_TIMEOUT.as_millis()).unwrap_or(u64::MAX),
            choices: 1,
            logprobs: None,
            prompt_logprobs: None,
            window: 0,
        };
        let mut events = self.decode.1.request(&DecodeRequest::Generate(spec)).await?;
        let mut tokens = Vec::new();
        loop {
            match next(&mut events).await? {
                DecodeEvent::Token { ids, .. } => tokens.extend(ids),
                DecodeEvent::Progress { .. } | DecodeEvent::Started(_) => {}
                DecodeEvent::Finished { .. } => break,
                DecodeEvent::Error(error) => return Err(VerifyError::Worker { step: "generate", error }),
                other => return Err(unexpected("generate", &other)),
            }
        }
        drop(prefill);
        Ok(tokens)
    }

    fn length(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    fn identity(&self) -> Result<&CacheIdentity, VerifyError> {
        let none = || VerifyError::Unexpected {
            step: "hello",
            message: "the decoder publishes no cache".to_owned(),
        };
        self.decode.2.cache.as_ref().ok_or_else(none)
    }

    async fn pair(&self) -> Result<(), VerifyError> {
        let spec = PairSpec {
            cache: self.identity()?.clone(),
            tokenizer_digest: self.decode.2.tokenizer_digest,
            control_addr: self.decode.0.control.clone(),
        };
        match self.prefill.1.call(&PrefillRequest::Pair(spec), STEP_TIMEOUT).await? {
            PrefillEvent::Paired { .. } => Ok(()),
            PrefillEvent::Error(error) => Err(VerifyError::Worker { step: "pair", error }),
            other => Err(unexpected("pair", &other)),
        }
    }

    async fn prepare(&self, id: &str) -> Result<u32, VerifyError> {
        let request = DecodeRequest::Prepare {
            request_id: id.to_owned(),
            tokens: self.tokens.clone(),
            constraint: None,
        };
        match self.decode.1.call(&request, deadlines::exchange(self.length())).await? {
            DecodeEvent::Prepared { resident_tokens, .. } => Ok(resident_tokens),
            DecodeEvent::Error(error) => Err(VerifyError::Worker { step: "prepare", error }),
            other => Err(unexpected("prepare", &other)),
        }
    }

    async fn inspect(&self, id: &str, file: &str) -> Result<DecodeReceipt, VerifyError> {
        let request = DecodeRequest::Inspect { request_id: id.to_owned(), file: file.to_owned() };
        let mut events = self.decode.1.request(&request).await?;
        loop {
            match next(&mut events).await? {
                DecodeEvent::Inspected(receipt) => return Ok(*receipt),
                DecodeEvent::Progress { .. } => {}
                DecodeEvent::Error(error) => return Err(VerifyError::Worker { step: "inspect", error }),
                other => return Err(unexpected("inspect", &other)),
            }
        }
    }

    async fn open_bridge(
        &self,
        id: &str,
        token_start: u32,
    ) -> Result<EventStream<PrefillEvent>, VerifyError> {
        let step_ms = u64::try_from(STEP_TIMEOUT.as_millis()).unwrap_or(u64::MAX);
        let request = DecodeRequest::OpenTransfer {
            request_id: id.to_owned(),
            token_start,
            token_end: self.length() - 1,
            idle_timeout_ms: step_ms,
        };
        let offer = match self.decode.1.call(&request, deadlines::exchange(self.length())).await? {
            DecodeEvent::Offer(offer) => offer,
            DecodeEvent::Error(error) => return Err(VerifyError::Worker { step: "open_transfer", error }),
            other => return Err(unexpected("open_transfer", &other)),
        };
        let spec = PrefillSpec {
            request_id: id.to_owned(),
            tokens: self.tokens.clone(),
            fingerprint: self.identity()?.fingerprint,
            offer,
            deadline_ms: step_ms,
        };
        Ok(self.prefill.1.request(&PrefillRequest::Prefill(spec)).await?)
    }
}

async fn connect<Req, Ev>(spec: &ChildSpec) -> Result<(Running, ControlClient<Req, Ev>, Hello), VerifyError>
where
    Req: Serialize,
    Ev: serde::de::DeserializeOwned + Send + 'static,
{
    let running = spec.start().await?;
    let (client, hello) =
        ControlClient::connect(&running.control, &ClusterKey::loopback(), CONNECT_TIMEOUT).await?;
    Ok((running, client, hello))
}

async fn finished(events: &mut EventStream<PrefillEvent>) -> Result<PrefillReport, VerifyError> {
    loop {
        match next(events).await? {
            PrefillEvent::Done(report) => return Ok(report),
            PrefillEvent::Progress { .. } => {}
            PrefillEvent::Error(error) => return Err(VerifyError::Worker { step: "prefill", error }),
            other => return Err(unexpected("prefill", &other)),
        }
    }
}

async fn next<Ev>(events: &mut EventStream<Ev>) -> Result<Ev, VerifyError> {
    use shared::control::ControlError;
    match tokio::time::timeout(STEP_TIMEOUT, events.next()).await {
        Ok(Some(Incoming::Event(event))) => Ok(event),
        Ok(Some(Incoming::Binary(_))) => Err(ControlError::Unexpected("a binary message".to_owned()).into()),
        Ok(None) => Err(ControlError::Closed.into()),
        Err(_) => Err(ControlError::Timeout(STEP_TIMEOUT).into()),
    }
}

fn unexpected(step: &'static str, event: &impl std::fmt::Debug) -> VerifyError {
    VerifyError::Unexpected { step, message: format!("unexpected {event:?}").chars().take(300).collect() }
}
