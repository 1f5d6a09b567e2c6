//! What of a heartbeat is believed: everything in it comes from outside.

use shared::bus::{Heartbeat, HeartbeatError, WorkerBeat};
use shared::control::Rates;

/// Most workers of a machine.
const MAX_WORKERS: usize = 32;
/// Most accelerators of a machine.
const MAX_GPUS: usize = 64;
/// Longest text, in bytes; longer ones are cut.
const MAX_TEXT_BYTES: usize = 256;
/// No machine is faster than this.
const MAX_TOKENS_PER_S: f64 = 1e9;

/// Why a message is not taken for a heartbeat.
#[derive(Debug, thiserror::Error)]
pub(super) enum IntakeError {
    /// No heartbeat, or of somebody else.
    #[error(transparent)]
    Malformed(#[from] HeartbeatError),
    /// More than a machine can have.
    #[error("{count} {what}, at most {limit} are believed")]
    TooMuch {
        /// Of what.
        what: &'static str,
        /// How many.
        count: usize,
        /// The limit.
        limit: usize,
    },
}

/// Reads a message, checks it and cuts it to size.
pub(super) fn read(subject: &str, message: &[u8]) -> Result<Heartbeat, IntakeError> {
    let mut beat = Heartbeat::decode(subject, message)?;
    for (what, count, limit) in
        [("workers", beat.workers.len(), MAX_WORKERS), ("accelerators", beat.gpus.len(), MAX_GPUS)]
    {
        if count > limit {
            return Err(IntakeError::TooMuch { what, count, limit });
        }
    }
    for text in [&mut beat.version, &mut beat.host, &mut beat.os, &mut beat.arch, &mut beat.cpu.model] {
        cut(text);
    }
    beat.gpus.iter_mut().for_each(|gpu| cut(&mut gpu.name));
    beat.workers.retain_mut(tidy);
    Ok(beat)
}

/// Cuts texts and drops figures that can't be; answers whether the worker can be reached at all.
fn tidy(worker: &mut WorkerBeat) -> bool {
    for text in [&mut worker.name, &mut worker.version, &mut worker.engine, &mut worker.model] {
        cut(text);
    }
    worker.rates = Rates {
        prefill_tokens_per_s: possible(worker.rates.prefill_tokens_per_s),
        decode_tokens_per_s: possible(worker.rates.decode_tokens_per_s),
    };
    is_address(&worker.control_addr)
}

fn possible(tokens_per_s: f64) -> f64 {
    if (0.0..=MAX_TOKENS_PER_S).contains(&tokens_per_s) { tokens_per_s } else { 0.0 }
}

fn is_address(addr: &str) -> bool {
    let parts = addr.rsplit_once(':').filter(|(host, _)| !host.is_empty() && addr.len() <= MAX_TEXT_BYTES);
    let plain = |c: char| c.is_ascii_alphanumeric() || ".-_:[]%".contains(c);
    parts.is_some_and(|(host, port)| host.chars().all(plain) && port.parse::<u16>().is_ok_and(|p| p > 0))
}

fn cut(text: &mut String) {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{beat, worker};
    use super::*;
    use proptest::prelude::*;
    use shared::control::Role;

    const SUBJECT: &str = "pd.v1.heartbeat.a";

    #[test]
    fn what_cannot_be_is_not_believed() {
        let mut b = beat("a");
        b.host = "ä".repeat(10_000);
        b.workers = vec![
            worker(Role::Decode, "good", "[fe80::1%eth0]:7001"),
            worker(Role::Decode, "no port", "host"),
            worker(Role::Decode, "no host", ":1"),
            worker(Role::Decode, "evil", "host/../:1"),
            worker(Role::Decode, "long", &format!("{}:1", "h".repeat(300))),
        ];
        b.workers[0].rates.prefill_tokens_per_s = 1e300;
        b.workers[0].rates.decode_tokens_per_s = -1.0;
        let read = read(SUBJECT, &b.encode()).unwrap();
        assert!(read.host.len() <= MAX_TEXT_BYTES && read.host.starts_with('ä'));
        assert_eq!(read.workers.iter().map(|w| w.name.as_str()).collect::<Vec<_>>(), ["good"]);
        assert_eq!(read.workers[0].rates, Rates::default());
    }

    #[test]
    fn too_much_is_refused_whole() {
        let mut b = beat("a");
        b.workers = vec![worker(Role::Decode, "w", "h:1"); MAX_WORKERS + 1];
        assert!(matches!(read(SUBJECT, &b.encode()), Err(IntakeError::TooMuch { what: "workers", .. })));
        let huge = vec![b'['; 10 << 20];
        assert!(matches!(read(SUBJECT, &huge), Err(IntakeError::Malformed(HeartbeatError::TooLong(_)))));
        let deep = "[".repeat(200_000);
        assert!(matches!(read(SUBJECT, deep.as_bytes()), Err(IntakeError::Malformed(_))));
    }

    proptest! {
        #[test]
        fn no_message_is_trouble(message in prop::collection::vec(any::<u8>(), 0..300), at in 0usize..400, byte in any::<u8>()) {
            let _ = read(SUBJECT, &message);
            let mut nearly = beat("a").encode().to_vec();
            let at = at % nearly.len();
            nearly[at] = byte;
            let _ = read(SUBJECT, &nearly);
        }
    }
}
