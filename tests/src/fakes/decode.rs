//! A decode worker without an engine: it answers by a script, the same for every prompt or one that the prompt decides.

use super::Server;
use shared::control::{
    ConnectionId, Constraint, DecodeEvent, DecodeReceipt, DecodeRequest, DecodeStats, FinishReason,
    GenerateSpec, Handler, Hello, Rates, Responder, Role, TokenLogprobs, TransferOffer, WorkerError,
    WorkerErrorCode,
};
use shared::hexbytes::Hex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// One thing that the fake does while it answers.
#[derive(Debug, Clone)]
pub enum Step {
    /// Waits.
    Pause(Duration),
    /// Says that the prompt is in, all of it computed here.
    Started,
    /// Sends tokens of the first choice.
    Tokens(Vec<u32>),
    /// Ends the first choice well.
    Finished(FinishReason),
    /// Sends tokens of a choice.
    TokensOf(u32, Vec<u32>),
    /// Ends a choice well.
    FinishedOf(u32, FinishReason),
    /// Sends these tokens as every choice that was asked for, and ends it well.
    All(Vec<u32>),
    /// Ends badly.
    Error(WorkerError),
    /// Closes every control connection.
    Vanish,
    /// Never says anything again.
    Silence,
}

/// What is answered to a prompt.
type Director = Box<dyn Fn(&[u32]) -> Vec<Step> + Send + Sync>;

/// The fake worker.
pub struct FakeDecode {
    /// Its server.
    pub server: Server,
    state: Arc<State>,
}

struct State {
    hello: Hello,
    director: Mutex<Director>,
    prompts: Mutex<HashMap<String, Vec<u32>>>,
    running: Mutex<HashMap<String, CancellationToken>>,
    cancelled: Mutex<Vec<(String, Instant)>>,
    aborted: Mutex<Vec<(String, Instant)>>,
    generated: Mutex<Vec<Instant>>,
    prompts_seen: Mutex<Vec<Vec<u32>>>,
    specs: Mutex<Vec<GenerateSpec>>,
    constraints: Mutex<Vec<Constraint>>,
    refusal: Mutex<Option<String>>,
    stopped: Mutex<Vec<u32>>,
    vanish: CancellationToken,
}

impl FakeDecode {
    /// Starts it for a model, with the script of every answer.
    pub async fn start(model: &Path, script: Vec<Step>) -> Self {
        Self::named("fake-decode", "127.0.0.1:0", model, script).await
    }

    /// The same at some address.
    pub async fn listening_on(addr: &str, model: &Path, script: Vec<Step>) -> Self {
        Self::named("fake-decode", addr, model, script).await
    }

    /// The same under a name.
    pub async fn named(name: &str, addr: &str, model: &Path, script: Vec<Step>) -> Self {
        let cache = super::invented_cache(crate::tiny::LAYERS, "127.0.0.1:9");
        let vanish = CancellationToken::new();
        let state = Arc::new(State {
            hello: Hello { node: name.to_owned(), ..super::hello(model, Role::Decode, Some(cache)) },
            director: Mutex::new(Box::new(move |_| script.clone())),
            prompts: Mutex::default(),
            running: Mutex::default(),
            cancelled: Mutex::default(),
            aborted: Mutex::default(),
            generated: Mutex::default(),
            prompts_seen: Mutex::default(),
            specs: Mutex::default(),
            constraints: Mutex::default(),
            refusal: Mutex::default(),
            stopped: Mutex::default(),
            vanish: vanish.clone(),
        });
        let server = Server::start(addr, state.clone()).await;
        let shutdown = server.shutdown.clone();
        tokio::spawn(async move {
            vanish.cancelled().await;
            shutdown.cancel();
        });
        Self { server, state }
    }

    /// Replaces the script.
    pub fn play(&self, script: Vec<Step>) {
        self.direct(move |_| script.clone());
    }

    /// Lets the prompt's token ids decide what is answered.
    pub fn direct(&self, director: impl Fn(&[u32]) -> Vec<Step> + Send + Sync + 'static) {
        *self.state.director.lock().unwrap() = Box::new(director);
    }

    /// Requests that were cancelled, and when.
    #[must_use]
    pub fn cancelled(&self) -> Vec<(String, Instant)> {
        self.state.cancelled.lock().unwrap().clone()
    }

    /// Requests whose transfer was aborted, and when.
    #[must_use]
    pub fn aborted(&self) -> Vec<(String, Instant)> {
        self.state.aborted.lock().unwrap().clone()
    }

    /// Refuses every constraint from now on, with this message.
    pub fn refuse_constraints(&self, message: &str) {
        *self.state.refusal.lock().unwrap() = Some(message.to_owned());
    }

    /// Token ids of every prompt so far.
    #[must_use]
    pub fn prompts(&self) -> Vec<Vec<u32>> {
        self.state.prompts_seen.lock().unwrap().clone()
    }

    /// What every `generate` so far asked for.
    #[must_use]
    pub fn specs(&self) -> Vec<GenerateSpec> {
        self.state.specs.lock().unwrap().clone()
    }

    /// Constraints so far, of requests that had one.
    #[must_use]
    pub fn constraints(&self) -> Vec<Constraint> {
        self.state.constraints.lock().unwrap().clone()
    }

    /// Choices that were stopped alone.
    #[must_use]
    pub fn stopped(&self) -> Vec<u32> {
        self.state.stopped.lock().unwrap().clone()
    }

    /// When each `generate` came.
    #[must_use]
    pub fn generated(&self) -> Vec<Instant> {
        self.state.generated.lock().unwrap().clone()
    }
}

impl Handler for State {
    type Request = DecodeRequest;
    type Event = DecodeEvent;

    fn hello(&self) -> Hello {
        self.hello.clone()
    }

    async fn handle(&self, _: ConnectionId, request: DecodeRequest, responder: Responder<DecodeEvent>) {
        match request {
            DecodeRequest::Prepare { request_id, tokens, constraint } => {
                if let Some(constraint) = constraint {
                    self.constraints.lock().unwrap().push(constraint);
                    let refusal = self.refusal.lock().unwrap().clone();
                    if let Some(message) = refusal {
                        let error = WorkerError::new(WorkerErrorCode::InvalidRequest, message);
                        responder.send(&DecodeEvent::Error(error)).await;
                        return;
                    }
                }
                self.prompts_seen.lock().unwrap().push(tokens.to_vec());
                self.prompts.lock().unwrap().insert(request_id, tokens.to_vec());
                let prepared =
                    DecodeEvent::Prepared { resident_tokens: 0, queue: 0, rates: Rates::default() };
                responder.send(&prepared).await;
            }
            DecodeRequest::OpenTransfer { token_start, token_end, .. } => {
                let bulk_addr = "127.0.0.1:9".to_owned();
                let offer = TransferOffer {
                    transfer_id: Hex::random(),
                    ticket: Hex::random(),
                    bulk_addr,
                    token_start,
                    token_end,
                };
                responder.send(&DecodeEvent::Offer(offer)).await;
            }
            DecodeRequest::AbortTransfer { request_id, .. } => {
                self.aborted.lock().unwrap().push((request_id, Instant::now()));
            }
            DecodeRequest::Cancel { request_id } => {
                if let Some(token) = self.running.lock().unwrap().remove(&request_id) {
                    token.cancel();
                }
                self.cancelled.lock().unwrap().push((request_id, Instant::now()));
            }
            DecodeRequest::Generate(spec) => {
                self.generated.lock().unwrap().push(Instant::now());
                let prompt = self.prompts.lock().unwrap().remove(&spec.request_id).unwrap_or(vec![0]);
                let cancel = CancellationToken::new();
                self.running.lock().unwrap().insert(spec.request_id.clone(), cancel.clone());
                self.specs.lock().unwrap().push(spec.clone());
                let script = (*self.director.lock().unwrap())(&prompt);
                let vanish = self.vanish.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        () = cancel.cancelled() => {}
                        () = answer(script, prompt.len(), spec, responder, vanish) => {}
                    }
                });
            }
            DecodeRequest::StopChoice { choice, .. } => self.stopped.lock().unwrap().push(choice),
            DecodeRequest::GetStats => {
                responder.send(&DecodeEvent::Stats(DecodeStats::default())).await;
            }
            _ => {}
        }
    }

    async fn disconnected(&self, _: ConnectionId) {}
}

async fn answer(
    script: Vec<Step>,
    prompt: usize,
    spec: GenerateSpec,
    responder: Responder<DecodeEvent>,
    vanish: CancellationToken,
) {
    let mut sent = HashMap::<u32, usize>::new();
    for step in script {
        let event = match step {
            Step::Pause(time) => {
                tokio::time::sleep(time).await;
                continue;
            }
            Step::Vanish => {
                vanish.cancel();
                return;
            }
            Step::Silence => return std::future::pending().await,
            Step::Started => {
                responder.send(&DecodeEvent::Started(Box::new(receipt(prompt)))).await;
                let Some(top) = spec.prompt_logprobs else { continue };
                let logprobs = (1..prompt).map(|i| score(u32::try_from(i).unwrap(), top)).collect();
                DecodeEvent::PromptLogprobs { logprobs }
            }
            Step::All(ids) => {
                for choice in 0..spec.choices {
                    responder.send(&tokens(choice, ids.clone(), &spec, &mut sent)).await;
                    responder.send(&finished(choice, FinishReason::Stop, &sent)).await;
                }
                continue;
            }
            Step::Tokens(ids) => tokens(0, ids, &spec, &mut sent),
            Step::TokensOf(choice, ids) => tokens(choice, ids, &spec, &mut sent),
            Step::Finished(reason) => finished(0, reason, &sent),
            Step::FinishedOf(choice, reason) => finished(choice, reason, &sent),
            Step::Error(error) => DecodeEvent::Error(error),
        };
        responder.send(&event).await;
    }
}

fn tokens(choice: u32, ids: Vec<u32>, spec: &GenerateSpec, sent: &mut HashMap<u32, usize>) -> DecodeEvent {
    *sent.entry(choice).or_default() += ids.len();
    let logprobs = spec.logprobs.map_or_else(Vec::new, |top| ids.iter().map(|id| score(*id, top)).collect());
    DecodeEvent::Token { choice, ids, logprobs }
}

fn finished(choice: u32, reason: FinishReason, sent: &HashMap<u32, usize>) -> DecodeEvent {
    let completion_tokens = u32::try_from(sent.get(&choice).copied().unwrap_or(0)).unwrap();
    DecodeEvent::Finished { choice, reason, completion_tokens, decode_ms: 1.0 }
}

/// Invented log probabilities of a token: −0.5 for itself, and the ids after it as its alternatives.
fn score(id: u32, top: u32) -> TokenLogprobs {
    let alternative = |i: u32| (id + i, -0.5 - i as f32);
    TokenLogprobs { logprob: -0.5, top: (0..top).map(alternative).collect() }
}

fn receipt(prompt: usize) -> DecodeReceipt {
    let prompt = u32::try_from(prompt).unwrap();
    DecodeReceipt {
        prompt_tokens: prompt,
        cached_tokens: 0,
        bridged_tokens: 0,
        native_tokens: prompt,
        blocks: 0,
        payload_bytes: 0,
        digest: None,
        transfer_failure: None,
        queue_ms: 0.0,
        wait_ms: 0.0,
        ingest_ms: 0.0,
        prefill_ms: 0.0,
    }
}
