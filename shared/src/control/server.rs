//! The answering side of control connections.

use super::client::config;
use super::handshake::{ClusterKey, Handshake, WorkerHandshake};
use super::{Envelope, Hello, MAX_MESSAGE_BYTES};
use crate::trace::TraceContext;
use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::{SinkExt as _, StreamExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{WebSocketStream, accept_async_with_config};
use tokio_util::sync::CancellationToken;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const SILENCE_LIMIT: Duration = Duration::from_secs(15);
/// Messages that may wait for a slow gateway before the worker's tasks wait too.
const OUT_BACKLOG: usize = 1024;
/// Most messages that share a write, so that pings get their turn.
const MOST_TOGETHER: usize = 256;

/// Names a connection for as long as the process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub u64);

/// A worker's answers to requests.
pub trait Handler: Send + Sync + 'static {
    /// Request type of this worker.
    type Request: DeserializeOwned + Send;
    /// Event type of this worker.
    type Event: Serialize + Send;

    /// The current self-description, asked for at every connect.
    fn hello(&self) -> Hello;

    /// Handles one request. Called in order of arrival on one connection; anything slow must be spawned.
    fn handle(
        &self,
        connection: ConnectionId,
        request: Self::Request,
        responder: Responder<Self::Event>,
    ) -> impl Future<Output = ()> + Send;

    /// The connection is gone: cancel everything it asked for.
    fn disconnected(&self, connection: ConnectionId) -> impl Future<Output = ()> + Send;
}

/// Sends the events of one request.
pub struct Responder<Ev> {
    id: u64,
    out: mpsc::Sender<Message>,
    closed: CancellationToken,
    trace: Option<TraceContext>,
    observer: Option<Observer<Ev>>,
}

/// Sees the events of a request before they are sent.
type Observer<Ev> = Arc<dyn Fn(&Ev) + Send + Sync>;

impl<Ev> Clone for Responder<Ev> {
    fn clone(&self) -> Self {
        Self {
            id: self.id,
            out: self.out.clone(),
            closed: self.closed.clone(),
            trace: self.trace.clone(),
            observer: self.observer.clone(),
        }
    }
}

impl<Ev: Serialize> Responder<Ev> {
    /// Sends an event; `false` when the connection is gone.
    pub async fn send(&self, event: &Ev) -> bool {
        match self.encode(event) {
            Some(message) => self.out.send(message).await.is_ok(),
            None => false,
        }
    }

    /// Sends an event from a thread that is not async; `false` when the connection is gone.
    pub fn blocking_send(&self, event: &Ev) -> bool {
        match self.encode(event) {
            Some(message) => self.out.blocking_send(message).is_ok(),
            None => false,
        }
    }

    /// Sends an event without waiting; `false` when the connection is gone or its queue is full.
    pub fn try_send(&self, event: &Ev) -> bool {
        self.encode(event).is_some_and(|message| self.out.try_send(message).is_ok())
    }

    /// Sends raw bytes; `false` when the connection is gone.
    pub async fn send_binary(&self, payload: &[u8]) -> bool {
        let mut data = BytesMut::with_capacity(8 + payload.len());
        data.put_u64_le(self.id);
        data.put_slice(payload);
        self.out.send(Message::Binary(data.freeze())).await.is_ok()
    }

    /// The span that the request belongs to, if it is traced.
    #[must_use]
    pub fn trace(&self) -> Option<&TraceContext> {
        self.trace.as_ref()
    }

    /// Shows all further events to `observer`, which lives as long as this responder and its clones.
    #[must_use]
    pub fn observed(self, observer: impl Fn(&Ev) + Send + Sync + 'static) -> Self {
        Self { observer: Some(Arc::new(observer)), ..self }
    }

    /// Whether the connection is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    fn encode(&self, event: &Ev) -> Option<Message> {
        if let Some(observer) = &self.observer {
            observer(event);
        }
        let envelope = Envelope { id: self.id, body: event, trace: None };
        serde_json::to_string(&envelope).ok().map(Message::text)
    }
}

/// Accepts control connections until `shutdown`.
///
/// # Errors
/// Only when the listener itself fails.
pub async fn serve<H: Handler>(
    listener: TcpListener,
    key: ClusterKey,
    handler: Arc<H>,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let mut next = 0;
    loop {
        let stream = tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) if is_transient(&error) => {
                    tracing::warn!(%error, "control accept");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
                Err(error) => return Err(error),
            },
        };
        let id = ConnectionId(next);
        next += 1;
        let (key, handler, shutdown) = (key.clone(), handler.clone(), shutdown.clone());
        tokio::spawn(async move {
            if let Err(message) = connection(stream, id, &key, &handler, shutdown).await {
                tracing::warn!(%message, "control connection");
            }
        });
    }
}

/// Errors of one connection attempt, or of a full descriptor table, which pass.
fn is_transient(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted)
        || matches!(error.raw_os_error(), Some(23 | 24))
}

type Socket = WebSocketStream<TcpStream>;
pub(super) type Sink = futures_util::stream::SplitSink<Socket, Message>;

async fn connection<H: Handler>(
    stream: TcpStream,
    id: ConnectionId,
    key: &ClusterKey,
    handler: &Arc<H>,
    shutdown: CancellationToken,
) -> Result<(), String> {
    stream.set_nodelay(true).map_err(|e| e.to_string())?;
    let greeted = tokio::time::timeout(HANDSHAKE_TIMEOUT, greet(stream, key, &**handler)).await;
    let socket = greeted.map_err(|_| "handshake timed out".to_owned())??;
    let closed = CancellationToken::new();
    let (out, queue) = mpsc::channel(OUT_BACKLOG);
    let (sink, stream) = socket.split();
    let writer = tokio::spawn(write(sink, queue, closed.clone()));
    tokio::select! {
        () = read(stream, id, handler, &out, &closed) => {}
        () = closed.cancelled() => {}
        () = shutdown.cancelled() => {}
    }
    closed.cancel();
    handler.disconnected(id).await;
    drop(out);
    let _ = writer.await;
    Ok(())
}

async fn greet<H: Handler>(stream: TcpStream, key: &ClusterKey, handler: &H) -> Result<Socket, String> {
    let mut socket = accept_async_with_config(stream, Some(config(MAX_MESSAGE_BYTES)))
        .await
        .map_err(|e| format!("not a WebSocket: {e}"))?;
    let (handshake, challenge) = WorkerHandshake::start(key);
    say(&mut socket, &challenge).await?;
    let proof = loop {
        match socket.next().await {
            Some(Ok(Message::Text(text))) => break text,
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            _ => return Err("the peer left during the handshake".to_owned()),
        }
    };
    let proof: Handshake = serde_json::from_str(&proof).map_err(|e| e.to_string())?;
    match handshake.answer(&proof, handler.hello()) {
        Ok(welcome) => say(&mut socket, &welcome).await.map(|()| socket),
        Err(message) => {
            say(&mut socket, &Handshake::Refused { message: message.clone() }).await?;
            let _ = socket.close(None).await;
            Err(message)
        }
    }
}

async fn say(socket: &mut Socket, message: &Handshake) -> Result<(), String> {
    let text = serde_json::to_string(message).map_err(|e| e.to_string())?;
    socket.send(Message::text(text)).await.map_err(|e| e.to_string())
}

async fn read<H: Handler>(
    mut stream: futures_util::stream::SplitStream<Socket>,
    id: ConnectionId,
    handler: &Arc<H>,
    out: &mpsc::Sender<Message>,
    closed: &CancellationToken,
) {
    // A live client pings every few seconds, so silence means that it is gone.
    while let Ok(Some(Ok(message))) = tokio::time::timeout(SILENCE_LIMIT, stream.next()).await {
        match message {
            Message::Text(text) => match serde_json::from_str::<Envelope<H::Request>>(&text) {
                Ok(Envelope { id: request, body, trace }) => {
                    let responder = Responder {
                        id: request,
                        out: out.clone(),
                        closed: closed.clone(),
                        trace: trace.and_then(|text| text.parse().ok()),
                        observer: None,
                    };
                    handler.handle(id, body, responder).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "unreadable control request; closing the connection");
                    return;
                }
            },
            Message::Close(_) => return,
            Message::Ping(_) | Message::Pong(_) | Message::Binary(_) | Message::Frame(_) => {}
        }
    }
}

/// Sends a message and those that wait behind it, in one write where they fit: under load a system call carries the
/// tokens of many requests. Nothing waits for more to come.
pub(super) async fn send_all(
    sink: &mut Sink,
    message: Message,
    queue: &mut mpsc::Receiver<Message>,
) -> Result<(), tokio_tungstenite::tungstenite::Error> {
    sink.feed(message).await?;
    for _ in 0..MOST_TOGETHER {
        let Ok(next) = queue.try_recv() else { break };
        sink.feed(next).await?;
    }
    sink.flush().await
}

async fn write(mut sink: Sink, mut queue: mpsc::Receiver<Message>, closed: CancellationToken) {
    let mut ping = tokio::time::interval(Duration::from_secs(5));
    loop {
        let message = tokio::select! {
            () = closed.cancelled() => break,
            next = queue.recv() => match next {
                Some(message) => message,
                None => break,
            },
            _ = ping.tick() => Message::Ping(Bytes::new()),
        };
        let sent = tokio::select! {
            () = closed.cancelled() => break,
            sent = send_all(&mut sink, message, &mut queue) => sent,
        };
        if sent.is_err() {
            break;
        }
    }
    closed.cancel();
    let _ = tokio::time::timeout(Duration::from_secs(1), sink.close()).await;
}

#[cfg(test)]
mod tests {
    use super::super::{ControlClient, ControlError, Incoming, PROTOCOL_VERSION, Rates, Role};
    use super::*;
    use crate::hexbytes::Hex;

    struct Echo;

    impl Handler for Echo {
        type Request = String;
        type Event = String;

        fn hello(&self) -> Hello {
            Hello {
                protocol: PROTOCOL_VERSION,
                role: Role::Decode,
                node: "n".into(),
                version: "0".into(),
                engine: "none".into(),
                model: "m".into(),
                tokenizer_digest: Hex([0; 32]),
                vocab_size: 1,
                max_tokens: 1,
                capacity_tokens: 0,
                rates: Rates::default(),
                cache: None,
            }
        }

        async fn handle(&self, _: ConnectionId, request: String, responder: Responder<String>) {
            responder.send(&request).await;
            responder.send_binary(request.as_bytes()).await;
        }

        async fn disconnected(&self, _: ConnectionId) {}
    }

    async fn start(key: ClusterKey) -> (String, CancellationToken) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let shutdown = CancellationToken::new();
        tokio::spawn(serve(listener, key, Arc::new(Echo), shutdown.clone()));
        (addr, shutdown)
    }

    type Client = ControlClient<String, String>;

    #[tokio::test]
    async fn requests_are_multiplexed_and_closing_is_noticed() {
        let (addr, shutdown) = start(ClusterKey::loopback()).await;
        let limit = Duration::from_secs(5);
        let (client, hello) = Client::connect(&addr, &ClusterKey::loopback(), limit).await.unwrap();
        assert_eq!(hello.node, "n");
        let mut a = client.request(&"a".to_owned()).await.unwrap();
        let mut b = client.request(&"b".to_owned()).await.unwrap();
        assert!(matches!(b.next().await, Some(Incoming::Event(e)) if e == "b"));
        assert!(matches!(a.next().await, Some(Incoming::Event(e)) if e == "a"));
        assert!(matches!(a.next().await, Some(Incoming::Binary(e)) if &e[..] == b"a"));
        shutdown.cancel();
        client.closed().await;
        assert!(matches!(client.call(&"c".to_owned(), limit).await, Err(ControlError::Closed)));
    }

    #[tokio::test]
    async fn a_wrong_key_is_refused_with_the_reason() {
        let key = ClusterKey::from_secret(&"k".repeat(32)).unwrap();
        let (addr, _shutdown) = start(key).await;
        match Client::connect(&addr, &ClusterKey::loopback(), Duration::from_secs(5)).await {
            Err(ControlError::Handshake(why)) => assert!(why.contains("wrong cluster key"), "{why}"),
            other => panic!("{:?}", other.err()),
        }
    }
}
