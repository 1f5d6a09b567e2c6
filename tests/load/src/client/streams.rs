//! Many event streams at once, every event with its time of arrival.

use super::connection::{Connection, ConnectionError, Target};
use super::requests::micros;
use super::sse::{SseEvent, SseParser};
use super::stats::{Quantiles, Report};
use crate::timecode::{Reader, Words, now_us};
use http_body_util::BodyExt as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

/// What streams to open.
#[derive(Debug, Clone, Copy)]
pub struct StreamPlan {
    /// How many at once; each connection asks for one answer after the other.
    pub streams: u32,
    /// Answers per connection.
    pub rounds: u32,
    /// Tokens of an answer.
    pub tokens: u32,
    /// Time between two tokens at the source.
    pub pace_us: u64,
    /// Longest wait for the next bytes.
    pub stall: Duration,
}

/// What arrived on one stream.
#[derive(Debug, Default)]
struct Seen {
    /// Tokens that arrived.
    tokens: u64,
    /// Request to first token.
    first_token_us: u64,
    /// Request to end.
    answer_us: u64,
    /// Arrival of each event with text, on the machine's clock.
    arrivals_us: Vec<u64>,
    /// What each token spent on its way.
    on_the_way_us: Vec<u64>,
}

/// Opens the streams, their starts spread over one pace, and reads all to the end.
pub async fn streams(target: &Target, words: Arc<Words>, plan: StreamPlan) -> Report {
    let start = Instant::now() + Duration::from_millis(20);
    let mut running = JoinSet::new();
    for i in 0..plan.streams {
        let (target, words) = (target.clone(), words.clone());
        // Streams that start together would stay in step, which real ones are not.
        let spread = Duration::from_micros(plan.pace_us.max(1000)) * i / plan.streams;
        running.spawn(async move {
            let mut connection = Connection::open(&target).await?;
            sleep_until(start + spread).await;
            let mut seen = Vec::new();
            for round in 0..plan.rounds {
                let number = u64::from(i) << 16 | u64::from(round);
                seen.push(one(&mut connection, &target, &words, plan, number).await?);
            }
            Ok::<_, StreamError>(seen)
        });
    }
    let mut report = Report::default();
    let mut all = Vec::new();
    while let Some(ended) = running.join_next().await {
        match ended {
            Ok(Ok(seen)) => all.extend(seen),
            Ok(Err(error)) => report.fail(&error),
            Err(error) => report.fail(&error),
        }
    }
    report.wall_s = start.elapsed().as_secs_f64();
    report.answers = all.len() as u64;
    report.tokens = all.iter().map(|s| s.tokens).sum();
    report.answer = Quantiles::of(all.iter().map(|s| s.answer_us));
    report.first_token = Quantiles::of(all.iter().map(|s| s.first_token_us));
    report.inter_token =
        Quantiles::of(all.iter().flat_map(|s| s.arrivals_us.windows(2).map(|w| w[1] - w[0])));
    report.on_the_way = Quantiles::of(all.iter().flat_map(|s| s.on_the_way_us.iter().copied()));
    report
}

/// Why a stream is not counted as an answer.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    #[error("nothing arrived for {0:?}")]
    Stalled(Duration),
    #[error("{0}")]
    Wrong(String),
}

impl From<hyper::Error> for StreamError {
    fn from(error: hyper::Error) -> Self {
        Self::Connection(error.into())
    }
}

async fn one(
    connection: &mut Connection,
    target: &Target,
    words: &Words,
    plan: StreamPlan,
    number: u64,
) -> Result<Seen, StreamError> {
    let since = Instant::now();
    let asked = connection.send(target, target.chat(number, plan.tokens, plan.pace_us, true));
    let head = timeout(plan.stall, asked).await.map_err(|_| StreamError::Stalled(plan.stall))?;
    let mut body = head?.into_body();
    let (mut parser, mut reader, mut seen) =
        (SseParser::default(), Reader::new(plan.pace_us), Seen::default());
    let (mut finished, mut done, mut wrong) = (0, 0, None);
    loop {
        let frame = timeout(plan.stall, body.frame()).await.map_err(|_| StreamError::Stalled(plan.stall))?;
        let Some(frame) = frame.transpose()? else { break };
        let arrived_us = now_us();
        let Some(data) = frame.data_ref() else { continue };
        parser.push(data, |event| match event {
            _ if done > 0 => wrong = Some(format!("{event:?} after [DONE]")),
            SseEvent::Content(text) => {
                if seen.arrivals_us.is_empty() {
                    seen.first_token_us = micros(since.elapsed());
                }
                seen.arrivals_us.push(arrived_us);
                for word in text.split_ascii_whitespace() {
                    match words.number(word) {
                        Some(number) => {
                            seen.tokens += 1;
                            seen.on_the_way_us.extend(reader.next(number, arrived_us));
                        }
                        None => wrong = Some(format!("{word:?} is no word of the source")),
                    }
                }
            }
            SseEvent::Finish => finished += 1,
            SseEvent::Done => done += 1,
            SseEvent::Other => {}
            SseEvent::Error(error) => wrong = Some(error),
        });
    }
    seen.answer_us = micros(since.elapsed());
    let tokens = u64::from(plan.tokens);
    match wrong {
        Some(what) => Err(StreamError::Wrong(what)),
        None if seen.tokens != tokens => {
            Err(StreamError::Wrong(format!("{} of {tokens} tokens", seen.tokens)))
        }
        None if (finished, done) != (1, 1) => {
            Err(StreamError::Wrong(format!("{finished} finish reasons and {done} [DONE]")))
        }
        None if reader.misplaced > 0 => {
            Err(StreamError::Wrong(format!("{} misplaced tokens", reader.misplaced)))
        }
        None => Ok(seen),
    }
}
