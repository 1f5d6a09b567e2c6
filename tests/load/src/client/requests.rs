//! Whole answers: at a fixed rate whatever the gateway does, or as many as it can give.

use super::connection::{Connection, ConnectionError, Target};
use super::stats::{Quantiles, Report};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// Sends requests at `rate_per_s` for `duration`. A late answer delays no later request. Times count from when this
/// client's timer fired, which has a grain of a millisecond; how late that was is in the report too.
pub async fn fixed_rate(target: &Target, rate_per_s: f64, duration: Duration, max_tokens: u32) -> Report {
    let target = Arc::new(target.clone());
    let idle: Arc<Mutex<Vec<Connection>>> = Arc::default();
    let start = Instant::now() + Duration::from_millis(50);
    let mut running = JoinSet::new();
    let mut late = Vec::new();
    let n = (rate_per_s * duration.as_secs_f64()) as u64;
    for i in 0..n {
        let due = start + Duration::from_secs_f64(i as f64 / rate_per_s);
        sleep_until(due).await;
        late.push(micros(due.elapsed()));
        let since = Instant::now();
        let (target, idle) = (target.clone(), idle.clone());
        running.spawn(async move {
            let answered = on_some_connection(&target, &idle, i, max_tokens).await;
            answered.map(|()| micros(since.elapsed()))
        });
    }
    let mut report = Report { late: Quantiles::of(late), ..Report::default() };
    let mut times = Vec::new();
    while let Some(ended) = running.join_next().await {
        match ended {
            Ok(Ok(time)) => times.push(time),
            Ok(Err(error)) => report.fail(&error),
            Err(error) => report.fail(&error),
        }
    }
    finish(report, times, start)
}

async fn on_some_connection(
    target: &Target,
    idle: &Mutex<Vec<Connection>>,
    number: u64,
    max_tokens: u32,
) -> Result<(), ConnectionError> {
    let kept = {
        let mut idle = idle.lock().await;
        idle.retain(Connection::is_ready);
        idle.pop()
    };
    let mut connection = match kept {
        Some(connection) => connection,
        None => Connection::open(target).await?,
    };
    let body = target.chat(number, max_tokens, 0, false);
    let answer = connection.whole(target, body).await?;
    check(&answer)?;
    idle.lock().await.push(connection);
    Ok(())
}

/// Keeps `connections` busy for `duration`.
pub async fn closed_loop(target: &Target, connections: u64, duration: Duration, max_tokens: u32) -> Report {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for c in 0..connections {
        let target = target.clone();
        running.spawn(async move {
            let mut times = Vec::new();
            let mut connection = Connection::open(&target).await?;
            let mut number = c << 32;
            while start.elapsed() < duration {
                let since = Instant::now();
                let answer = connection.whole(&target, target.chat(number, max_tokens, 0, false)).await?;
                check(&answer)?;
                times.push(micros(since.elapsed()));
                number += 1;
            }
            Ok::<_, ConnectionError>(times)
        });
    }
    let mut report = Report::default();
    let mut times = Vec::new();
    while let Some(ended) = running.join_next().await {
        match ended {
            Ok(Ok(some)) => times.extend(some),
            Ok(Err(error)) => report.fail(&error),
            Err(error) => report.fail(&error),
        }
    }
    finish(report, times, start)
}

/// An answer that does not end as the script does is a failure, not a fast answer.
fn check(answer: &[u8]) -> Result<(), ConnectionError> {
    let text = String::from_utf8_lossy(answer);
    let squeezed: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    if squeezed.contains(r#""finish_reason":"length""#) {
        return Ok(());
    }
    Err(ConnectionError::Status(hyper::StatusCode::OK, text.chars().take(300).collect()))
}

fn finish(mut report: Report, times: Vec<u64>, start: Instant) -> Report {
    report.wall_s = start.elapsed().as_secs_f64();
    report.answers = times.len() as u64;
    report.answer = Quantiles::of(times);
    report
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
