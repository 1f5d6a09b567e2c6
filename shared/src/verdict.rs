//! The verdict: what the `X-PD-Bridge` header says, written from the decoder's receipt.

use crate::control::{DecodeReceipt, PrefillReport};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// Longest free text in a verdict, in characters.
pub const MAX_REASON_CHARS: usize = 200;
/// Longest header value, in bytes.
pub const MAX_HEADER_BYTES: usize = 1024;

/// What happened to a request, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerdictKind {
    /// T − 1 positions came from cache, at least one of them from this request's transfer.
    Complete,
    /// Some came from this transfer, the decoder computed the rest.
    Partial,
    /// The decoder already held the prefix.
    Warm,
    /// The plan chose the decoder alone.
    Native,
    /// A transfer was tried and gave nothing usable.
    Failed,
    /// The client required a bridge and none was possible.
    Refused,
    /// The headers went out before the verdict was known.
    Pending,
}

impl VerdictKind {
    /// The snake_case name, as in JSON and in metric labels.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Partial => "partial",
            Self::Warm => "warm",
            Self::Native => "native",
            Self::Failed => "failed",
            Self::Refused => "refused",
            Self::Pending => "pending",
        }
    }
}

/// The whole verdict. Times in milliseconds, counts in prompt tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// What happened.
    pub verdict: VerdictKind,
    /// Why, where that is not obvious: a short snake_case code, or text cut at 200 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Prompt length T.
    pub prompt_tokens: u32,
    /// Positions served from cache, of any origin.
    pub cached_tokens: u32,
    /// Positions that came from this request's transfer.
    pub bridged_tokens: u32,
    /// Positions computed by the decoder.
    pub native_tokens: u32,
    /// Blocks of the prefix store that served the request.
    pub blocks: u32,
    /// Payload bytes received in this request's transfer.
    pub payload_bytes: u64,
    /// How the bytes travelled, e.g. `tcp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    /// Name of the prefill worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<String>,
    /// Name of the decode worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<String>,
    /// Prompt computing time: on the prefill worker where it bridged, else on the decoder.
    pub prefill_ms: f64,
    /// Transfer time not hidden behind prefill.
    pub transfer_ms: f64,
    /// Time to turn blocks into the engine's arrays.
    pub ingest_ms: f64,
    /// Time from the request's arrival to its first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// Name of the request.
    pub request_id: String,
    /// First 16 hex characters of the transfer digest that both ends computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// What the gateway had planned; decides between `native`, `warm` and `failed`, never a number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Planned {
    /// The decoder alone.
    Native {
        /// Why.
        reason: String,
    },
    /// The decoder's resident prefix is enough.
    Warm,
    /// A transfer was opened.
    Bridge,
}

/// Names that a verdict mentions.
#[derive(Debug, Clone, Default)]
pub struct Parties {
    /// The request.
    pub request_id: String,
    /// The prefill worker, if one took part.
    pub prefill: Option<String>,
    /// The decode worker.
    pub decode: Option<String>,
    /// How bytes travelled, if any did.
    pub transport: Option<String>,
}

impl Verdict {
    /// A verdict without numbers: for `refused`, `pending` and errors before a decoder said anything.
    #[must_use]
    pub fn without_receipt(
        kind: VerdictKind,
        reason: Option<String>,
        parties: Parties,
        prompt_tokens: u32,
    ) -> Self {
        Self {
            verdict: kind,
            reason: reason.map(|r| cut(&r)),
            prompt_tokens,
            cached_tokens: 0,
            bridged_tokens: 0,
            native_tokens: prompt_tokens,
            blocks: 0,
            payload_bytes: 0,
            transport: parties.transport,
            prefill: parties.prefill,
            decode: parties.decode,
            prefill_ms: 0.0,
            transfer_ms: 0.0,
            ingest_ms: 0.0,
            ttft_ms: None,
            request_id: parties.request_id,
            digest: None,
        }
    }

    /// The verdict of an answered request, from the decoder's receipt.
    #[must_use]
    pub fn from_receipt(
        planned: &Planned,
        receipt: &DecodeReceipt,
        prefill: Option<&PrefillReport>,
        parties: Parties,
    ) -> Self {
        let (verdict, reason) = judge(planned, receipt);
        let bridged = receipt.bridged_tokens > 0;
        Self {
            cached_tokens: receipt.cached_tokens,
            bridged_tokens: receipt.bridged_tokens,
            native_tokens: receipt.native_tokens,
            blocks: receipt.blocks,
            payload_bytes: receipt.payload_bytes,
            prefill_ms: match prefill {
                Some(report) if bridged => report.prefill_ms,
                _ => receipt.prefill_ms,
            },
            transfer_ms: prefill.map_or(0.0, |r| r.transfer_ms),
            ingest_ms: receipt.ingest_ms,
            digest: receipt.digest.map(|d| d.to_string().chars().take(16).collect()),
            ..Self::without_receipt(verdict, reason, parties, receipt.prompt_tokens)
        }
    }

    /// Whether the numbers fit together.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        u64::from(self.cached_tokens) + u64::from(self.native_tokens) == u64::from(self.prompt_tokens)
            && self.bridged_tokens <= self.cached_tokens
    }

    /// Compact ASCII JSON of at most [`MAX_HEADER_BYTES`] bytes.
    #[must_use]
    pub fn to_header_value(&self) -> String {
        let full = ascii_json(self);
        if full.len() <= MAX_HEADER_BYTES {
            return full;
        }
        // Escapes can make a legal text six times longer; names and reason give way, numbers never do.
        let short = |s: &String| s.chars().filter(char::is_ascii_graphic).take(48).collect::<String>();
        ascii_json(&Self {
            reason: self.reason.as_ref().map(short),
            prefill: self.prefill.as_ref().map(short),
            decode: self.decode.as_ref().map(short),
            transport: self.transport.as_ref().map(short),
            request_id: short(&self.request_id),
            ..self.clone()
        })
    }
}

/// The rule: what a receipt means under a plan.
fn judge(planned: &Planned, receipt: &DecodeReceipt) -> (VerdictKind, Option<String>) {
    let failure = receipt.transfer_failure.as_ref().map(|f| f.code.as_str().to_owned());
    match planned {
        Planned::Native { reason } => (VerdictKind::Native, Some(reason.clone())),
        Planned::Warm if receipt.cached_tokens > 0 => (VerdictKind::Warm, None),
        Planned::Warm => (VerdictKind::Native, Some("evicted".to_owned())),
        Planned::Bridge if receipt.bridged_tokens == 0 => {
            (VerdictKind::Failed, failure.or_else(|| Some("nothing_arrived".to_owned())))
        }
        Planned::Bridge if receipt.cached_tokens + 1 == receipt.prompt_tokens => {
            (VerdictKind::Complete, None)
        }
        Planned::Bridge => (VerdictKind::Partial, failure.or_else(|| Some("short_transfer".to_owned()))),
    }
}

fn cut(text: &str) -> String {
    text.chars().take(MAX_REASON_CHARS).collect()
}

fn ascii_json(verdict: &Verdict) -> String {
    let rounded = Verdict {
        prefill_ms: round(verdict.prefill_ms),
        transfer_ms: round(verdict.transfer_ms),
        ingest_ms: round(verdict.ingest_ms),
        ttft_ms: verdict.ttft_ms.map(round),
        ..verdict.clone()
    };
    let json = serde_json::to_string(&rounded).unwrap_or_default();
    let mut out = String::with_capacity(json.len());
    for unit in json.encode_utf16() {
        match u8::try_from(unit) {
            Ok(byte @ 0x20..=0x7e) => out.push(char::from(byte)),
            _ => {
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
    out
}

fn round(ms: f64) -> f64 {
    (ms * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Abort, AbortCode};
    use proptest::prelude::*;

    fn receipt(prompt: u32, cached: u32, bridged: u32) -> DecodeReceipt {
        DecodeReceipt {
            prompt_tokens: prompt,
            cached_tokens: cached,
            bridged_tokens: bridged,
            native_tokens: prompt - cached,
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

    fn kind(planned: &Planned, receipt: &DecodeReceipt) -> (VerdictKind, Option<String>) {
        let v = Verdict::from_receipt(planned, receipt, None, Parties::default());
        assert!(v.is_consistent());
        (v.verdict, v.reason)
    }

    #[test]
    fn one_rule_per_line_of_the_table() {
        let native = || Planned::Native { reason: "short_prompt".into() };
        assert_eq!(kind(&Planned::Bridge, &receipt(100, 99, 99)).0, VerdictKind::Complete);
        assert_eq!(kind(&Planned::Bridge, &receipt(100, 99, 1)).0, VerdictKind::Complete);
        assert_eq!(kind(&Planned::Bridge, &receipt(100, 98, 10)).0, VerdictKind::Partial);
        assert_eq!(kind(&Planned::Bridge, &receipt(100, 0, 0)).0, VerdictKind::Failed);
        assert_eq!(kind(&Planned::Warm, &receipt(100, 64, 0)).0, VerdictKind::Warm);
        assert_eq!(kind(&Planned::Warm, &receipt(100, 0, 0)), (VerdictKind::Native, Some("evicted".into())));
        assert_eq!(kind(&native(), &receipt(9, 0, 0)), (VerdictKind::Native, Some("short_prompt".into())));
    }

    #[test]
    fn a_full_cache_without_a_transfer_is_never_called_complete() {
        let mut r = receipt(100, 99, 0);
        r.transfer_failure = Some(Abort::new(AbortCode::Checksum, "x"));
        assert_eq!(kind(&Planned::Bridge, &r), (VerdictKind::Failed, Some("checksum".into())));
    }

    proptest! {
        #[test]
        fn header_is_short_ascii_json(reason in "\\PC{0,400}", node in "\\PC{0,300}", id in "\\PC{0,300}") {
            let parties = Parties { request_id: id, prefill: Some(node.clone()), decode: Some(node), transport: None };
            let v = Verdict::without_receipt(VerdictKind::Failed, Some(reason), parties, u32::MAX);
            let text = v.to_header_value();
            prop_assert!(text.len() <= MAX_HEADER_BYTES && text.bytes().all(|b| (0x20..0x7f).contains(&b)));
            let back: Verdict = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(back.prompt_tokens, u32::MAX);
        }
    }
}
