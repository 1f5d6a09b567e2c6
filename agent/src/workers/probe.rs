//! Asks one worker every few seconds how it is.

use super::Workers;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shared::bus::{HEARTBEAT_INTERVAL, WorkerBeat};
use shared::control::{
    ControlClient, ControlError, DecodeEvent, DecodeRequest, Hello, PrefillEvent, PrefillRequest, Rates, Role,
};
use shared::hexbytes::Hex;
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);
/// A worker that is not there is looked for this often; it is on this machine, so that costs nothing.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The part of a worker's statistics that a heartbeat tells.
struct Numbers {
    queue: u32,
    queue_tokens: u64,
    rates: Rates,
    link_bytes_per_s: f64,
    prefix_bytes: u64,
    resident_memory_bytes: u64,
}

/// Goes on for ever.
pub(super) async fn follow(workers: &Workers, role: Role, addr: &str) {
    loop {
        let ended = match role {
            Role::Decode => connection(workers, role, addr, &DecodeRequest::GetStats, decode).await,
            Role::Prefill => connection(workers, role, addr, &PrefillRequest::GetStats, prefill).await,
        };
        if let Err(error) = ended {
            tracing::debug!(?role, addr, %error, "worker does not answer");
        }
        workers.lost(role, addr);
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Asks again and again until the connection ends.
async fn connection<Req, Ev>(
    workers: &Workers,
    role: Role,
    addr: &str,
    question: &Req,
    read: fn(&Ev) -> Option<Numbers>,
) -> Result<(), ControlError>
where
    Req: Serialize,
    Ev: DeserializeOwned + Send + 'static,
{
    let (client, hello) = ControlClient::<Req, Ev>::connect(addr, &workers.0.key, CONNECT_TIMEOUT).await?;
    if hello.role != role {
        return Err(ControlError::Unexpected(format!("a {:?} worker", hello.role)));
    }
    tracing::info!(?role, addr, name = %hello.node, model = %hello.model, "worker answers");
    loop {
        let numbers = read(&client.call(question, ANSWER_TIMEOUT).await?);
        let numbers = numbers.ok_or_else(|| ControlError::Unexpected("no statistics".to_owned()))?;
        workers.note(role, addr, describe(&hello, workers.advertised(addr), &numbers));
        tokio::select! {
            () = tokio::time::sleep(HEARTBEAT_INTERVAL) => {}
            () = client.closed() => return Ok(()),
        }
    }
}

fn describe(hello: &Hello, control_addr: String, numbers: &Numbers) -> WorkerBeat {
    let cache = hello.cache.as_ref();
    WorkerBeat {
        role: hello.role,
        name: hello.node.clone(),
        control_addr,
        reachable: true,
        version: hello.version.clone(),
        engine: hello.engine.clone(),
        model: hello.model.clone(),
        tokenizer_digest: Some(hello.tokenizer_digest),
        fingerprint: cache.map(|c| c.fingerprint),
        layout_digest: cache.map(|c| Hex(c.layout.digest())),
        bulk_addr: cache.map(|c| c.bulk_addr.clone()),
        max_tokens: hello.max_tokens,
        capacity_tokens: hello.capacity_tokens,
        queue: numbers.queue,
        queue_tokens: numbers.queue_tokens,
        rates: numbers.rates,
        link_bytes_per_s: numbers.link_bytes_per_s,
        prefix_bytes: numbers.prefix_bytes,
        resident_memory_bytes: numbers.resident_memory_bytes,
    }
}

fn decode(event: &DecodeEvent) -> Option<Numbers> {
    let DecodeEvent::Stats(stats) = event else { return None };
    Some(Numbers {
        queue: stats.requests,
        queue_tokens: 0,
        rates: stats.rates,
        link_bytes_per_s: 0.0,
        prefix_bytes: stats.store_bytes,
        resident_memory_bytes: stats.resident_memory_bytes,
    })
}

fn prefill(event: &PrefillEvent) -> Option<Numbers> {
    let PrefillEvent::Stats(stats) = event else { return None };
    Some(Numbers {
        queue: stats.requests,
        queue_tokens: stats.queued_tokens,
        rates: stats.rates,
        link_bytes_per_s: stats.link_bytes_per_s,
        prefix_bytes: stats.prefix_cache_bytes,
        resident_memory_bytes: stats.resident_memory_bytes,
    })
}
