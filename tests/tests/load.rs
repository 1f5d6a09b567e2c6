//! A real gateway under load: a thousand streams at once, a thousand silent ones, and hours of clients that leave.
//!
//! Every answer's tokens are a series of its own (`pd_load::source::series`), so a token that is lost, doubled, moved
//! or given to another client shows.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; measured values are shown"
)]

use http_body_util::BodyExt as _;
use pd_load::client::{Connection, SseEvent, SseParser, Target};
use pd_load::source::{Voice, Worker, hello, series};
use pd_tests::fakes::{FakeDecode, Server, Step};
use pd_tests::http::metric;
use pd_tests::stack::Gateway;
use pd_tests::{tiny, wait};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use shared::control::Hello;
use shared::model::Model;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

/// Ids of `!` to `~` in the tiny model: three specials, then printable bytes in byte order.
const IDS: Range<u32> = 36..130;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn target(gateway: &Gateway) -> Target {
    Target { addr: gateway.addr.clone(), model: "tiny".to_owned(), authorization: None }
}

/// What the worker says to a request with this seed.
fn expected(seed: u64, tokens: u32) -> String {
    (0..tokens).map(|i| char::from_u32(series(seed, i, &IDS) - IDS.start + 0x21).unwrap()).collect()
}

async fn scripted(pace_us: u64) -> (Server, Arc<Worker>, Gateway) {
    let hello = hello(&Model::open(tiny::model()).unwrap());
    let worker = Arc::new(Worker::new(hello, Voice::Series { ids: IDS, pace_us }));
    let server = Server::start("127.0.0.1:0", worker.clone()).await;
    let gateway = Gateway::start(tiny::model(), &server.addr, None, &[]).await;
    (server, worker, gateway)
}

/// Reads a stream to its end and checks all of it.
async fn check_stream(connection: &mut Connection, target: &Target, seed: u64, tokens: u32) {
    let response = connection.send(target, target.chat(seed, tokens, seed, true)).await.unwrap();
    let mut body = response.into_body();
    let (mut parser, mut text, mut ends) = (SseParser::default(), String::new(), vec![]);
    while let Some(frame) = body.frame().await {
        parser.push(frame.unwrap().data_ref().unwrap(), |event| match event {
            SseEvent::Content(piece) => {
                assert!(ends.is_empty(), "{piece:?} after {ends:?}");
                text.push_str(&piece);
            }
            SseEvent::Other => {}
            end => ends.push(end),
        });
    }
    assert_eq!(text, expected(seed, tokens), "stream {seed}");
    assert_eq!(ends, [SseEvent::Finish, SseEvent::Done], "stream {seed}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_streams_lose_double_and_move_nothing() {
    let (streams, tokens) = (1000, 200);
    let (_server, worker, gateway) = scripted(50_000).await;
    let target = target(&gateway);
    let since = Instant::now();
    let mut running = JoinSet::new();
    for seed in 1..=streams {
        let target = target.clone();
        running.spawn(async move {
            let mut connection = Connection::open(&target).await.unwrap();
            check_stream(&mut connection, &target, seed, tokens).await;
        });
    }
    while let Some(ended) = running.join_next().await {
        ended.unwrap();
    }
    let elapsed = since.elapsed();
    eprintln!("{streams} streams x {tokens} tokens in {elapsed:.1?}");
    assert_eq!(worker.open_requests(), 0);
    let metrics = gateway.metrics().await;
    assert_eq!(
        metric(&metrics, "pd_bridge_completion_tokens_total", ""),
        (streams * u64::from(tokens)) as f64
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_stream_costs_at_most_64_kib() {
    let streams = 1000;
    let script = vec![Step::Started, Step::Tokens(vec![40]), Step::Silence];
    let decode = FakeDecode::start(tiny::model(), script).await;
    let gateway = Gateway::start(tiny::model(), &decode.server.addr, None, &[]).await;
    let target = target(&gateway);
    let before = gateway.process.memory_bytes("VmRSS").unwrap();
    let mut open = vec![];
    for seed in 0..streams {
        let mut connection = Connection::open(&target).await.unwrap();
        let mut body =
            connection.send(&target, target.chat(seed, 100, seed, true)).await.unwrap().into_body();
        // The head and the role come first; the stream is open and silent once its token is there.
        let mut parser = SseParser::default();
        let mut text = String::new();
        while text.is_empty() {
            let frame = body.frame().await.unwrap().unwrap();
            parser.push(frame.data_ref().unwrap(), |e| {
                if let SseEvent::Content(piece) = e {
                    text.push_str(&piece);
                }
            });
        }
        open.push((connection, body));
    }
    let with = gateway.process.memory_bytes("VmRSS").unwrap();
    let each = with.saturating_sub(before) / streams;
    eprintln!("{each} bytes per silent stream ({before} before, {with} with {streams})");
    assert!(each <= 64 << 10, "{each} bytes per stream");
    drop(open);
    wait::until("all requests end", Duration::from_secs(20), || is_idle(&gateway)).await;
    assert_eq!(decode.cancelled().len() as u64, streams);
}

/// A client that stops reading holds its own answer up, and nothing else: what waits for it is bounded, others go on at
/// full speed, and it can go on where it stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stops_reading_stops_its_own_answer_only() {
    let (slow, tokens) = (8, 100_000);
    let hello = Hello { max_tokens: 1 << 20, ..hello(&Model::open(tiny::model()).unwrap()) };
    let worker = Arc::new(Worker::new(hello, Voice::Series { ids: IDS, pace_us: 50 }));
    let server = Server::start("127.0.0.1:0", worker.clone()).await;
    let gateway = Gateway::start(tiny::model(), &server.addr, None, &[]).await;
    let target = target(&gateway);
    let before = gateway.process.memory_bytes("VmRSS").unwrap();
    let mut stopped = vec![];
    for seed in 1..=slow {
        stopped.push(SlowStream::open(&gateway.addr, target.chat(seed, tokens, seed, true)).await);
    }
    // The sockets' buffers fill first; then nothing more is sent.
    let limit = Duration::from_secs(30);
    let sent = wait::until("the answers stand still", limit, || async {
        let sent = worker.sent_tokens();
        tokio::time::sleep(Duration::from_millis(500)).await;
        (sent > slow && worker.sent_tokens() == sent).then_some(sent)
    })
    .await;
    assert!(sent < slow * u64::from(tokens) / 2, "{sent} tokens were sent to clients that read nothing");
    let with = gateway.process.memory_bytes("VmRSS").unwrap();
    let each = with.saturating_sub(before) / slow;
    eprintln!("{} tokens sent to each stopped client, {each} bytes held for it", sent / slow);
    assert!(each < 1 << 20, "{each} bytes for each stopped client");
    // 400 tokens at 50 us take 20 ms, and a timer's grain of 1 ms on top of each of them at worst.
    let since = Instant::now();
    let mut connection = Connection::open(&target).await.unwrap();
    for seed in 100..104 {
        check_stream(&mut connection, &target, seed, 400).await;
    }
    let elapsed = since.elapsed();
    assert!(elapsed < Duration::from_secs(4), "answers beside stopped ones took {elapsed:?}");
    let last = stopped.pop().unwrap();
    drop(stopped);
    assert_eq!(last.rest().await, expected(slow, tokens));
    settled(&gateway, &worker).await;
}

/// A client with small buffers that reads an answer only when told to.
struct SlowStream(TcpStream);

impl SlowStream {
    async fn open(addr: &str, body: bytes::Bytes) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut stream = socket.connect(addr.parse().unwrap()).await.unwrap();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&body).await.unwrap();
        Self(stream)
    }

    /// All text of the answer.
    async fn rest(mut self) -> String {
        let (mut bytes, mut text) = (vec![], String::new());
        self.0.read_to_end(&mut bytes).await.unwrap();
        // A chunk of the transfer encoding is a whole event.
        SseParser::default().push(&bytes, |event| match event {
            SseEvent::Content(piece) => text.push_str(&piece),
            SseEvent::Error(error) => panic!("{error}"),
            SseEvent::Other | SseEvent::Finish | SseEvent::Done => {}
        });
        text
    }
}

/// `PD_TEST_SOAK_S` is the length; `make bench-soak` takes ten minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_soak_with_random_aborts_ends_where_it_began() {
    let seconds = setting("PD_TEST_SOAK_S", 15);
    let (_server, worker, gateway) = scripted(2_000).await;
    // The gateway keeps the last 8,192 verdicts; memory is level once these are full and every pool has seen its peak.
    soak(&gateway, Until::Requests(9_000), 1).await;
    soak(&gateway, Until::Time(Duration::from_secs(seconds.div_ceil(10).max(3))), 2).await;
    let before = settled(&gateway, &worker).await;
    let (whole, aborted) = soak(&gateway, Until::Time(Duration::from_secs(seconds)), 3).await;
    let after = settled(&gateway, &worker).await;
    eprintln!("{seconds} s: {whole} whole answers, {aborted} aborted, memory {before} -> {after} bytes");
    assert!(whole > 100 && aborted > 100, "{whole} whole, {aborted} aborted");
    assert!(after as f64 <= before as f64 * 1.05, "memory grew from {before} to {after} bytes");
}

#[derive(Clone, Copy)]
enum Until {
    Requests(u64),
    Time(Duration),
}

/// Clients that ask for streams and whole answers, and leave at random points of half of them. All answers that are read
/// to the end are checked.
async fn soak(gateway: &Gateway, until: Until, seed: u64) -> (u64, u64) {
    const CLIENTS: u64 = 48;
    let since = Instant::now();
    let mut running = JoinSet::new();
    for client in 0..CLIENTS {
        let target = target(gateway);
        running.spawn(async move {
            let mut rng = ChaCha8Rng::seed_from_u64(seed << 32 | client);
            let (mut whole, mut aborted) = (0, 0);
            let goes_on = |done: u64| match until {
                Until::Requests(all) => done < all / CLIENTS,
                Until::Time(time) => since.elapsed() < time,
            };
            let mut connection = Connection::open(&target).await.unwrap();
            while goes_on(whole + aborted) {
                let seed = rng.random_range(1..u64::from(u32::MAX));
                // The first part fills the store of verdicts, and for that short answers do.
                let tokens = if matches!(until, Until::Requests(_)) { 1 } else { rng.random_range(1..40) };
                if rng.random_bool(0.5) {
                    let patience = Duration::from_micros(rng.random_range(0..u64::from(tokens) * 4_000));
                    let asked = check_stream(&mut connection, &target, seed, tokens);
                    if tokio::time::timeout(patience, asked).await.is_ok() {
                        whole += 1;
                        continue;
                    }
                    connection = Connection::open(&target).await.unwrap();
                    aborted += 1;
                } else {
                    check_whole(&mut connection, &target, seed, tokens).await;
                    whole += 1;
                }
            }
            (whole, aborted)
        });
    }
    let mut sum = (0, 0);
    while let Some(ended) = running.join_next().await {
        let (whole, aborted) = ended.unwrap();
        sum = (sum.0 + whole, sum.1 + aborted);
    }
    sum
}

async fn check_whole(connection: &mut Connection, target: &Target, seed: u64, tokens: u32) {
    let body = connection.whole(target, target.chat(seed, tokens, seed, false)).await.unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], expected(seed, tokens), "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

/// Memory of the gateway once nothing runs any more, on either side.
async fn settled(gateway: &Gateway, worker: &Worker) -> u64 {
    wait::until("all requests end", Duration::from_secs(20), || is_idle(gateway)).await;
    let limit = Duration::from_secs(20);
    wait::until("the worker has none", limit, || async { (worker.open_requests() == 0).then_some(()) }).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    gateway.process.memory_bytes("VmRSS").unwrap()
}

async fn is_idle(gateway: &Gateway) -> Option<()> {
    (metric(&gateway.metrics().await, "pd_bridge_requests_in_flight", "") == 0.0).then_some(())
}
