//! The requesting side of a control connection.

use super::handshake::{ClientHandshake, ClusterKey, Handshake};
use super::inbox::Inbox;
use super::server::send_all;
use super::{Envelope, Hello};
use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::{WebSocketStream, client_async_with_config};
use tokio_util::sync::CancellationToken;

/// How often a ping goes out.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// A peer that says nothing at all, not even in answer to a ping, for so many intervals is gone.
const SILENT_LOOKS: u32 = 3;
/// Largest message taken from a worker that has proved the key: one layer's K and V projections in f32 must fit
/// (200 MiB for 13B parameters without grouped heads).
const MAX_ANSWER_BYTES: usize = 1 << 30;
/// Events of one request that may wait for its reader. A reader that falls this far behind a decoder
/// is cut off rather than allowed to stall every other request of the connection.
const EVENT_BACKLOG: usize = 65_536;

/// An open control connection; clones share it. `Req` and `Ev` are the message types of the worker.
pub struct ControlClient<Req, Ev> {
    shared: Arc<Shared<Ev>>,
    out: mpsc::Sender<Message>,
    _request: std::marker::PhantomData<fn(Req)>,
}

/// Where the messages of each request go.
type Waiting<Ev> = HashMap<u64, Arc<Inbox<Ev>>>;

struct Shared<Ev> {
    waiting: Mutex<Waiting<Ev>>,
    next_id: AtomicU64,
    closed: CancellationToken,
}

/// A message that belongs to a request.
#[derive(Debug)]
pub enum Incoming<Ev> {
    /// A JSON event.
    Event(Ev),
    /// A binary message (projection weights).
    Binary(Bytes),
}

/// Why a control exchange failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// No connection, or it broke.
    #[error("control connection: {0}")]
    Io(#[from] std::io::Error),
    /// The peer does not speak WebSocket.
    #[error("control connection: {0}")]
    WebSocket(Box<tokio_tungstenite::tungstenite::Error>),
    /// Wrong version, key or role.
    #[error("control handshake: {0}")]
    Handshake(String),
    /// The connection closed while an answer was due.
    #[error("the worker's control connection closed")]
    Closed,
    /// No answer in time.
    #[error("no answer from the worker within {0:?}")]
    Timeout(Duration),
    /// An answer that does not fit the request.
    #[error("unexpected answer from the worker: {0}")]
    Unexpected(String),
}

impl From<tokio_tungstenite::tungstenite::Error> for ControlError {
    fn from(e: tokio_tungstenite::tungstenite::Error) -> Self {
        Self::WebSocket(Box::new(e))
    }
}

impl<Req, Ev> Clone for ControlClient<Req, Ev> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), out: self.out.clone(), _request: std::marker::PhantomData }
    }
}

impl<Req, Ev> ControlClient<Req, Ev>
where
    Req: Serialize,
    Ev: DeserializeOwned + Send + 'static,
{
    /// Connects, proves the key and reads the worker's hello, all within `timeout`.
    ///
    /// # Errors
    /// [`ControlError`]; a version or key mismatch is [`ControlError::Handshake`] with the reason.
    pub async fn connect(
        addr: &str,
        key: &ClusterKey,
        timeout: Duration,
    ) -> Result<(Self, Hello), ControlError> {
        let opened = tokio::time::timeout(timeout, open(addr, key)).await;
        let (socket, hello) = opened.map_err(|_| ControlError::Timeout(timeout))??;
        let (out, queue) = mpsc::channel(1024);
        let shared = Arc::new(Shared {
            waiting: Mutex::default(),
            next_id: AtomicU64::new(1),
            closed: CancellationToken::new(),
        });
        tokio::spawn(drive(socket, queue, shared.clone()));
        Ok((Self { shared, out, _request: std::marker::PhantomData }, hello))
    }

    /// Sends a request whose events are read from the returned stream.
    ///
    /// # Errors
    /// [`ControlError::Closed`].
    pub async fn request(&self, body: &Req) -> Result<EventStream<Ev>, ControlError> {
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let inbox = Arc::new(Inbox::new());
        self.shared.lock().insert(id, inbox.clone());
        let stream = EventStream { id, inbox, shared: self.shared.clone(), arrived: Instant::now() };
        // Registering first and checking second closes the gap in which the driver ends unseen.
        if self.shared.closed.is_cancelled() {
            return Err(ControlError::Closed);
        }
        self.out.send(encode(id, body)?).await.map_err(|_| ControlError::Closed)?;
        Ok(stream)
    }

    /// Sends a request and waits for its single answer.
    ///
    /// # Errors
    /// [`ControlError::Timeout`], [`ControlError::Closed`], [`ControlError::Unexpected`] on a binary answer.
    pub async fn call(&self, body: &Req, timeout: Duration) -> Result<Ev, ControlError> {
        let exchange = async { self.request(body).await?.only().await };
        tokio::time::timeout(timeout, exchange).await.map_err(|_| ControlError::Timeout(timeout))?
    }

    /// Sends a request that has no answer, from anywhere (also from `Drop`). Lost when the connection is
    /// closed, in which case the worker frees everything of this connection by itself.
    pub fn notify(&self, body: &Req) {
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let Ok(message) = encode(id, body) else { return };
        if let Err(mpsc::error::TrySendError::Full(message)) = self.out.try_send(message)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let out = self.out.clone();
            runtime.spawn(async move { out.send(message).await });
        }
    }

    /// Whether the connection is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.closed.is_cancelled()
    }

    /// Resolves when the connection is gone.
    pub async fn closed(&self) {
        self.shared.closed.cancelled().await;
    }
}

/// Events of one request, in order. Dropping it stops listening; it does not cancel the request.
pub struct EventStream<Ev> {
    id: u64,
    inbox: Arc<Inbox<Ev>>,
    shared: Arc<Shared<Ev>>,
    arrived: Instant,
}

impl<Ev> EventStream<Ev> {
    /// The next message; `None` when the connection closed.
    pub async fn next(&mut self) -> Option<Incoming<Ev>> {
        let (arrived, message) = poll_fn(|cx| self.inbox.poll(cx)).await?;
        self.arrived = arrived;
        Some(message)
    }

    /// The answer of a request that has only one.
    ///
    /// # Errors
    /// [`ControlError::Closed`], [`ControlError::Unexpected`] on a binary answer.
    pub async fn only(&mut self) -> Result<Ev, ControlError> {
        match self.next().await {
            Some(Incoming::Event(event)) => Ok(event),
            Some(Incoming::Binary(_)) => Err(ControlError::Unexpected("a binary message".to_owned())),
            None => Err(ControlError::Closed),
        }
    }

    /// When the last message that [`Self::next`] returned was read from the socket.
    #[must_use]
    pub fn arrived(&self) -> Instant {
        self.arrived
    }
}

impl<Ev> Drop for EventStream<Ev> {
    fn drop(&mut self) {
        self.shared.lock().remove(&self.id);
    }
}

impl<Ev> Shared<Ev> {
    fn lock(&self) -> std::sync::MutexGuard<'_, Waiting<Ev>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, id: u64, at: Instant, message: Incoming<Ev>) {
        let mut waiting = self.lock();
        if let Some(inbox) = waiting.get(&id)
            && !inbox.put(at, message, EVENT_BACKLOG)
        {
            waiting.remove(&id);
        }
    }

    /// Ends every stream of events.
    fn close(&self) {
        self.closed.cancel();
        for (_, inbox) in self.lock().drain() {
            inbox.close();
        }
    }
}

type Socket = WebSocketStream<TcpStream>;

async fn open(addr: &str, key: &ClusterKey) -> Result<(Socket, Hello), ControlError> {
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let url = format!("ws://{addr}/control");
    let (mut socket, _) = client_async_with_config(url, stream, Some(config(MAX_ANSWER_BYTES))).await?;
    let (handshake, proof) =
        ClientHandshake::answer(key, &read_json(&mut socket).await?).map_err(ControlError::Handshake)?;
    let proof = serde_json::to_string(&proof).map_err(|e| ControlError::Handshake(e.to_string()))?;
    socket.send(Message::text(proof)).await?;
    let hello = handshake.finish(read_json(&mut socket).await?).map_err(ControlError::Handshake)?;
    Ok((socket, hello))
}

async fn read_json(socket: &mut Socket) -> Result<Handshake, ControlError> {
    loop {
        match socket.next().await {
            Some(Ok(Message::Text(text))) => {
                return serde_json::from_str(&text).map_err(|e| ControlError::Handshake(e.to_string()));
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(_)) => return Err(ControlError::Handshake("not a text message".to_owned())),
            Some(Err(e)) => return Err(e.into()),
            None => return Err(ControlError::Closed),
        }
    }
}

/// Limits of a WebSocket whose messages have at most that many bytes.
pub(super) fn config(max_message_bytes: usize) -> WebSocketConfig {
    WebSocketConfig::default()
        .max_message_size(Some(max_message_bytes))
        .max_frame_size(Some(max_message_bytes))
}

fn encode<T: Serialize>(id: u64, body: &T) -> Result<Message, ControlError> {
    let trace = crate::trace::current().map(|context| context.to_string());
    let text = serde_json::to_string(&Envelope { id, body, trace });
    text.map(Message::text).map_err(|e| ControlError::Unexpected(e.to_string()))
}

/// Owns the socket until either side ends it.
async fn drive<Ev: DeserializeOwned>(
    socket: Socket,
    mut queue: mpsc::Receiver<Message>,
    shared: Arc<Shared<Ev>>,
) {
    let (mut sink, mut stream) = socket.split();
    // Looked at now and then, which is cheaper than a timer for every message.
    let heard = AtomicBool::new(true);
    let listening = async {
        let mut look = tokio::time::interval(PING_INTERVAL);
        let mut silent = 0;
        while silent < SILENT_LOOKS {
            look.tick().await;
            silent = if heard.swap(false, Ordering::Relaxed) { 0 } else { silent + 1 };
        }
    };
    let writing = async {
        let mut ping = tokio::time::interval(PING_INTERVAL);
        loop {
            let message = tokio::select! {
                next = queue.recv() => match next {
                    Some(message) => {
                        // Whoever else is about to ask gets into the same write.
                        tokio::task::yield_now().await;
                        message
                    }
                    None => {
                        let _ = sink.close().await;
                        return;
                    }
                },
                _ = ping.tick() => Message::Ping(Bytes::new()),
            };
            if send_all(&mut sink, message, &mut queue).await.is_err() {
                return;
            }
        }
    };
    let reading = async {
        while let Some(Ok(message)) = stream.next().await {
            heard.store(true, Ordering::Relaxed);
            match message {
                Message::Text(text) => match serde_json::from_str::<Envelope<Ev>>(&text) {
                    Ok(envelope) => {
                        shared.deliver(envelope.id, Instant::now(), Incoming::Event(envelope.body));
                    }
                    Err(error) => {
                        tracing::error!(%error, "unreadable message from a worker");
                        return;
                    }
                },
                Message::Binary(data) if data.len() >= 8 => {
                    let (id, _) = data.as_chunks::<8>();
                    let message = Incoming::Binary(data.slice(8..));
                    shared.deliver(u64::from_le_bytes(id[0]), Instant::now(), message);
                }
                Message::Binary(_) | Message::Close(_) => return,
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    };
    tokio::select! { () = writing => {}, () = reading => {}, () = listening => {} }
    shared.close();
}
