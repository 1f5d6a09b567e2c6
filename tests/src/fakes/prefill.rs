//! A prefill worker that follows a script, or passes requests on to a real one with meddling on the bulk link.

use super::Server;
use super::relay::{Meddle, Relay, Seen};
use shared::control::{
    ClusterKey, ConnectionId, ControlClient, Handler, Hello, Incoming, PrefillEvent, PrefillRequest,
    PrefillSpec, PrefillStats, Responder, Role, WorkerError, WorkerErrorCode,
};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// What the fake does with a `prefill` request.
#[derive(Clone)]
pub enum Play {
    /// Says at once that it failed.
    Fail(WorkerErrorCode),
    /// Takes the request and does nothing.
    Hang,
    /// Says that it is done without having sent anything.
    Lie,
    /// Closes every control connection.
    Vanish,
    /// Lets the real worker do it, with this done to its frames.
    Relay(Meddle),
}

/// The fake worker.
pub struct FakePrefill {
    /// Its server.
    pub server: Server,
    state: Arc<State>,
}

type Real = ControlClient<PrefillRequest, PrefillEvent>;

struct State {
    hello: Hello,
    real: Mutex<Option<Real>>,
    play: Mutex<Play>,
    specs: Mutex<Vec<PrefillSpec>>,
    cancelled: Mutex<Vec<String>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    vanish: CancellationToken,
    /// The fake itself was dropped.
    gone: CancellationToken,
}

impl FakePrefill {
    /// Starts it alone; it can do everything but [`Play::Relay`].
    pub async fn start(model: &Path, play: Play) -> Self {
        Self::listening_on("127.0.0.1:0", model, play).await
    }

    /// The same at some address.
    pub async fn listening_on(addr: &str, model: &Path, play: Play) -> Self {
        Self::with(addr, super::hello(model, Role::Prefill, None), None, play).await
    }

    /// Starts it before a real prefill worker. When that one dies, so do all connections here; when it is back, they
    /// are welcome again at the same address.
    pub async fn before(real: &str, play: Play) -> Self {
        let (client, mut hello) = dial(real).await.unwrap();
        hello.node = "relay".to_owned();
        let fake = Self::with("127.0.0.1:0", hello, Some(client), play).await;
        let (state, addr, real) = (fake.state.clone(), fake.server.addr.clone(), real.to_owned());
        let (ended, mut server) = (fake.server.shutdown.clone(), None);
        tokio::spawn(async move {
            loop {
                let Some(client) = state.real() else { return };
                tokio::select! {
                    () = client.closed() => {}
                    () = state.gone.cancelled() => return,
                }
                ended.cancel();
                drop(server.take());
                let client = loop {
                    if let Ok((client, _)) = dial(&real).await {
                        break client;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                };
                *state.real.lock().unwrap() = Some(client);
                server = Some(Server::start(&addr, state.clone()).await);
            }
        });
        fake
    }

    async fn with(addr: &str, hello: Hello, real: Option<Real>, play: Play) -> Self {
        let state = Arc::new(State {
            hello,
            real: Mutex::new(real),
            play: Mutex::new(play),
            specs: Mutex::default(),
            cancelled: Mutex::default(),
            seen: Arc::default(),
            vanish: CancellationToken::new(),
            gone: CancellationToken::new(),
        });
        let server = Server::start(addr, state.clone()).await;
        let (vanish, shutdown) = (state.vanish.clone(), server.shutdown.clone());
        tokio::spawn(async move {
            vanish.cancelled().await;
            shutdown.cancel();
        });
        Self { server, state }
    }

    /// Changes what is done with the next requests.
    pub fn play(&self, play: Play) {
        *self.state.play.lock().unwrap() = play;
    }

    /// Requests that came.
    #[must_use]
    pub fn specs(&self) -> Vec<PrefillSpec> {
        self.state.specs.lock().unwrap().clone()
    }

    /// Requests that were cancelled.
    #[must_use]
    pub fn cancelled(&self) -> Vec<String> {
        self.state.cancelled.lock().unwrap().clone()
    }

    /// What crossed the relay since the last call, one entry per transfer.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state.seen.lock().unwrap())
    }
}

impl State {
    fn real(&self) -> Option<Real> {
        self.real.lock().unwrap().clone()
    }

    async fn pass_on(&self, request: &PrefillRequest, responder: Responder<PrefillEvent>) {
        let real = self.real();
        let Some(real) = &real else {
            responder.send(&PrefillEvent::Paired { foreign_layers: 0 }).await;
            return;
        };
        let Ok(mut events) = real.request(request).await else { return };
        tokio::spawn(async move {
            while let Some(Incoming::Event(event)) = events.next().await {
                let more = matches!(event, PrefillEvent::Progress { .. });
                responder.send(&event).await;
                if !more {
                    return;
                }
            }
            let gone = WorkerError::new(WorkerErrorCode::Engine, "the real worker is gone");
            responder.send(&PrefillEvent::Error(gone)).await;
        });
    }

    async fn prefill(&self, mut spec: PrefillSpec, responder: Responder<PrefillEvent>) {
        self.specs.lock().unwrap().push(spec.clone());
        let play = self.play.lock().unwrap().clone();
        match play {
            Play::Fail(code) => {
                responder.send(&PrefillEvent::Error(WorkerError::new(code, "as the script says"))).await;
            }
            Play::Hang => {}
            Play::Vanish => self.vanish.cancel(),
            Play::Lie => {
                responder.send(&PrefillEvent::Done(untrue_report(&spec))).await;
            }
            Play::Relay(meddle) => {
                let relay = Relay::start(&spec.offer.bulk_addr, meddle, self.seen.clone()).await;
                spec.offer.bulk_addr = relay;
                self.pass_on(&PrefillRequest::Prefill(spec), responder).await;
            }
        }
    }
}

impl Drop for FakePrefill {
    fn drop(&mut self) {
        self.state.gone.cancel();
    }
}

async fn dial(real: &str) -> Result<(Real, Hello), shared::control::ControlError> {
    Real::connect(real, &ClusterKey::loopback(), Duration::from_secs(5)).await
}

fn untrue_report(spec: &PrefillSpec) -> shared::control::PrefillReport {
    shared::control::PrefillReport {
        computed_tokens: spec.offer.token_end,
        reused_tokens: 0,
        queue_ms: 0.0,
        prefill_ms: 1.0,
        transfer_ms: 1.0,
        payload_bytes: 1,
        token_end: spec.offer.token_end,
        digest: shared::hexbytes::Hex([0; 32]),
        rates: shared::control::Rates::default(),
    }
}

impl Handler for State {
    type Request = PrefillRequest;
    type Event = PrefillEvent;

    fn hello(&self) -> Hello {
        self.hello.clone()
    }

    async fn handle(&self, _: ConnectionId, request: PrefillRequest, responder: Responder<PrefillEvent>) {
        match request {
            PrefillRequest::Prefill(spec) => self.prefill(spec, responder).await,
            PrefillRequest::Cancel { request_id } => {
                self.cancelled.lock().unwrap().push(request_id.clone());
                if let Some(real) = &self.real() {
                    real.notify(&PrefillRequest::Cancel { request_id });
                }
            }
            PrefillRequest::GetStats if self.real().is_none() => {
                responder.send(&PrefillEvent::Stats(PrefillStats::default())).await;
            }
            other => self.pass_on(&other, responder).await,
        }
    }

    async fn disconnected(&self, _: ConnectionId) {}
}
