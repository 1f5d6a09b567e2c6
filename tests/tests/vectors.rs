//! Fixed vectors that Python computed from the protocol's text (`tests/vectors/make_vectors.py`).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use base64::Engine as _;
use serde_json::Value;
use shared::hexbytes::Hex;
use shared::keys::{BlockKey, tokens_digest};
use shared::layout::{CacheLayout, Part};
use shared::tokens::TokenIds;
use shared::wire::{FrameHeader, FrameKind, HEADER_BYTES, TransferDigest, payload_crc};

fn vectors() -> Value {
    let path = pd_tests::paths::root().join("tests/vectors/vectors.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn list<'a>(v: &'a Value, key: &str) -> &'a [Value] {
    let list = v[key].as_array().unwrap();
    assert!(!list.is_empty(), "{key}");
    list
}

fn bytes<const N: usize>(v: &Value) -> [u8; N] {
    let mut out = [0; N];
    hex::decode_to_slice(v.as_str().unwrap(), &mut out).unwrap();
    out
}

fn number<T: TryFrom<u64>>(v: &Value) -> T {
    T::try_from(v.as_u64().unwrap()).ok().unwrap()
}

/// The rule that `vectors.json` states.
fn payload(v: &Value) -> Vec<u8> {
    let mut x: u32 = number(&v["payload_seed"]);
    let next = |_| {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 24) as u8
    };
    (0..number::<usize>(&v["payload_bytes"])).map(next).collect()
}

fn kind(name: &str) -> FrameKind {
    match name {
        "open" => FrameKind::Open,
        "layout" => FrameKind::Layout,
        "data" => FrameKind::Data,
        "commit" => FrameKind::Commit,
        "abort" => FrameKind::Abort,
        "credit" => FrameKind::Credit,
        "receipt" => FrameKind::Receipt,
        other => unreachable!("{other}"),
    }
}

#[test]
fn layout_digests() {
    for v in list(&vectors(), "layouts") {
        let layout: CacheLayout = serde_json::from_value(v["layout"].clone()).unwrap();
        layout.validate().unwrap();
        assert_eq!(hex::encode(layout.digest()), v["digest"], "{layout:?}");
        assert_eq!(serde_json::to_value(&layout).unwrap(), v["layout"]);
    }
}

/// FIELD-CASES 11: the hash of the same tokens differed between processes.
#[test]
fn field_11_block_keys_equal_in_every_language() {
    for v in list(&vectors(), "block_keys") {
        let tokens: TokenIds = serde_json::from_value(v["tokens_base64"].clone()).unwrap();
        let decoded =
            base64::engine::general_purpose::STANDARD.decode(v["tokens_base64"].as_str().unwrap()).unwrap();
        assert_eq!(decoded.len(), tokens.len() * 4);
        assert_eq!(hex::encode(tokens_digest(&tokens)), v["tokens_digest"]);
        let root = BlockKey::root(&bytes(&v["fingerprint"]), &bytes(&v["layout_digest"]));
        assert_eq!(hex::encode(root.0), v["root"]);
        let chain: Vec<String> =
            root.chain(&tokens, number(&v["block_tokens"])).iter().map(|k| hex::encode(k.0)).collect();
        assert_eq!(serde_json::json!(chain), v["keys"]);
    }
}

#[test]
fn frame_headers() {
    assert_eq!(u64::from(payload_crc(b"123456789")), vectors()["crc32c_check"]["crc32c"].as_u64().unwrap());
    assert_eq!(payload_crc(b"123456789"), 0xe306_9283, "the check value of CRC-32C (RFC 3720)");
    for v in list(&vectors(), "frames") {
        let payload = payload(v);
        let header = FrameHeader {
            kind: kind(v["kind"].as_str().unwrap()),
            transfer_id: Hex(bytes(&v["transfer_id"])),
            seq: v["seq"].as_u64().unwrap(),
            layer: number(&v["layer"]),
            part: number(&v["part"]),
            token_start: number(&v["token_start"]),
            token_count: number(&v["token_count"]),
            payload_bytes: payload.len() as u64,
            crc32c: payload_crc(&payload),
        };
        assert_eq!(hex::encode(header.encode()), v["header"]);
        assert_eq!(FrameHeader::decode(&bytes::<HEADER_BYTES>(&v["header"])), Ok(header));
    }
}

#[test]
fn transfer_digests() {
    let v = &vectors()["transfer"];
    assert_eq!(hex::encode(TransferDigest::default().finish()), v["empty_digest"]);
    let mut digest = TransferDigest::default();
    for f in list(v, "frames") {
        let part = Part::try_from(number::<u16>(&f["part"])).unwrap();
        digest.add(
            number(&f["layer"]),
            part,
            number(&f["token_start"]),
            number(&f["token_count"]),
            &payload(f),
        );
    }
    assert_eq!(hex::encode(digest.finish()), v["digest"]);
}
