//! Dishonest, broken and slow senders against a real decode worker's bulk port.
//!
//! After every attack the decoder must hold nothing more than before, must not show a single row of what was sent,
//! and must answer the prompt as a decoder that was never attacked.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::bulk::{Bulk, Reply, Rows, open_of, rows};
use pd_tests::decoder::{Answer, Decoder, fresh_id};
use pd_tests::stack::Worker;
use pd_tests::{tiny, wait};
use shared::control::{CacheIdentity, DecodeRequest, Require, TransferOffer};
use shared::hexbytes::Hex;
use shared::wire::{Abort, AbortCode, FrameHeader, FrameKind, Open};
use std::time::Duration;

const PROMPT: u32 = 75;
const BLOCK: u32 = 16;
const SOON: Duration = Duration::from_secs(5);

/// The attacked decoder and an untouched one with the same model.
struct Scene {
    worker: Worker,
    attacked: Decoder,
    _judge_worker: Worker,
    judge: Decoder,
    cache: CacheIdentity,
}

impl Scene {
    async fn new() -> Self {
        let args = ["--block-tokens", "16", "--node", "attacked"];
        let worker = Worker::decode(tiny::model(), &args);
        let judge_worker = Worker::decode(tiny::model(), &args);
        let attacked = worker.decoder().await;
        let judge = judge_worker.decoder().await;
        let cache = attacked.hello.cache.clone().unwrap();
        Self { worker, attacked, _judge_worker: judge_worker, judge, cache }
    }

    /// A prompt that nobody has used before.
    fn prompt() -> Vec<u32> {
        (0..PROMPT).map(|_| rand::random_range(3..259)).collect()
    }

    async fn offer(&self, tokens: &[u32], idle_ms: u64) -> (String, TransferOffer) {
        let id = fresh_id("bulk");
        assert_eq!(self.attacked.prepare(&id, tokens).await.unwrap(), 0);
        let offer = self.attacked.offer(&id, 0..PROMPT - 1, idle_ms).await.unwrap();
        (id, offer)
    }

    /// The answer to an attacked request: right, computed here, with the reason in the receipt.
    async fn falls_back(&self, what: &str, id: &str, tokens: &[u32], codes: &[AbortCode]) {
        let twin = fresh_id("twin");
        assert_eq!(self.attacked.prepare(&twin, tokens).await.unwrap(), 0, "{what}: rows became visible");
        self.attacked.notify(&DecodeRequest::Cancel { request_id: twin });
        let answer = self.attacked.generate(id, 6, Require::Nothing).await;
        let receipt = answer.receipt.clone().unwrap_or_else(|| panic!("{what}: {answer:?}"));
        assert_eq!(
            (receipt.cached_tokens, receipt.bridged_tokens, receipt.native_tokens),
            (0, 0, PROMPT),
            "{what}"
        );
        let failure = receipt.transfer_failure.unwrap_or_else(|| panic!("{what}: no reason in the receipt"));
        assert!(codes.contains(&failure.code), "{what}: {failure:?}, expected one of {codes:?}");
        assert_eq!(answer.ids, self.judge.native(tokens, 6).await.ids, "{what}: another answer");
    }

    /// Runs one attack from offer to fallback.
    async fn attack<F>(
        &self,
        what: &str,
        codes: &[AbortCode],
        act: impl FnOnce(Bulk, Open, Vec<Rows>) -> F,
    ) -> Reply
    where
        F: Future<Output = Bulk>,
    {
        let before = self.attacked.settled().await;
        let tokens = Self::prompt();
        let (id, offer) = self.offer(&tokens, 1500).await;
        let open = open_of(&offer, &self.cache, &tokens);
        let all = rows(&self.cache.layout, 0..PROMPT - 1);
        let mut bulk = act(Bulk::connect(&offer).await, open, all).await;
        let reply = bulk.reply(SOON).await;
        assert!(reply.receipt.is_none(), "{what}: the receiver confirmed it");
        assert!(reply.abort.is_some() || reply.closed, "{what}: the connection stays open");
        if let Some(abort) = &reply.abort {
            assert!(codes.contains(&abort.code), "{what}: {abort:?}, expected one of {codes:?}");
        }
        drop(bulk);
        self.falls_back(what, &id, &tokens, codes).await;
        let after = self.attacked.settled().await;
        assert_eq!(after.requests, before.requests, "{what}");
        reply
    }

    /// Sends everything as it should be and reads the receipt.
    async fn honest(&self, tokens: &[u32], offer: &TransferOffer) -> Reply {
        let mut bulk = Bulk::connect(offer).await;
        bulk.control(FrameKind::Open, &open_of(offer, &self.cache, tokens)).await;
        for r in rows(&self.cache.layout, 0..PROMPT - 1) {
            bulk.data(&r).await;
        }
        let commit = bulk.commit_of(0, PROMPT - 1);
        bulk.control(FrameKind::Commit, &commit).await;
        bulk.reply(SOON).await
    }
}

use std::future::Future;

/// Opens and sends `rows`, then commits what was sent.
async fn send(mut bulk: Bulk, open: Open, rows: &[Rows]) -> Bulk {
    bulk.control(FrameKind::Open, &open).await;
    for r in rows {
        bulk.data(r).await;
    }
    let commit = bulk.commit_of(0, PROMPT - 1);
    bulk.control(FrameKind::Commit, &commit).await;
    bulk
}

async fn open_only(mut bulk: Bulk, open: Open) -> Bulk {
    bulk.control(FrameKind::Open, &open).await;
    bulk
}

#[tokio::test]
async fn an_honest_sender_is_believed() {
    let s = Scene::new().await;
    let tokens = Scene::prompt();
    let (id, offer) = s.offer(&tokens, 5000).await;
    let reply = s.honest(&tokens, &offer).await;
    let receipt = reply.receipt.unwrap_or_else(|| panic!("{:?}", reply.abort));
    assert_eq!(receipt.token_end, PROMPT - 1);
    assert_eq!(receipt.payload_bytes, s.cache.layout.bytes_per_token() * u64::from(PROMPT - 1));
    let answer = s.attacked.generate(&id, 3, Require::Complete).await;
    let r = answer.receipt.unwrap();
    assert_eq!((r.cached_tokens, r.bridged_tokens, r.native_tokens), (PROMPT - 1, PROMPT - 1, 1));
    assert_eq!(r.digest.unwrap(), receipt.digest);
    s.attacked.settled().await;
    // The full blocks are there for the next request, the tail is not.
    let next = fresh_id("next");
    assert_eq!(s.attacked.prepare(&next, &tokens).await.unwrap(), (PROMPT - 1) / BLOCK * BLOCK);
}

#[tokio::test]
async fn field_01_another_block_size_is_refused() {
    let s = Scene::new().await;
    let other = shared::layout::CacheLayout { block_tokens: BLOCK * 2, ..s.cache.layout.clone() };
    let reply = s
        .attack("block size", &[AbortCode::LayoutMismatch], |b, mut open, _| async move {
            open.layout_digest = Hex(other.digest());
            open_only(b, open).await
        })
        .await;
    assert!(reply.abort.is_some(), "refused without a word");
    s.attack("fingerprint", &[AbortCode::FingerprintMismatch], |b, mut open, _| async move {
        open.fingerprint = Hex([1; 32]);
        open_only(b, open).await
    })
    .await;
    s.attack("tokens", &[AbortCode::TokensMismatch], |b, mut open, _| async move {
        open.tokens_digest = Hex([1; 32]);
        open_only(b, open).await
    })
    .await;
    s.attack("range", &[AbortCode::ProtocolError, AbortCode::TokensMismatch], |b, mut open, _| async move {
        open.token_end -= 1;
        open_only(b, open).await
    })
    .await;
}

#[tokio::test]
async fn field_02_corrupt_bytes_are_dropped() {
    let s = Scene::new().await;
    let checksum = [AbortCode::Checksum];
    s.attack("a flipped bit", &checksum, |mut b, open, all| async move {
        b.control(FrameKind::Open, &open).await;
        let header = b.header_of(&all[0]);
        let mut payload = all[0].payload.clone();
        payload[9] ^= 0x10;
        b.frame(&header, &payload).await;
        b
    })
    .await;
    s.attack(
        "another digest",
        &[AbortCode::Checksum, AbortCode::Incomplete],
        |mut b, open, all| async move {
            b.control(FrameKind::Open, &open).await;
            for r in &all {
                b.data(r).await;
            }
            let mut commit = b.commit_of(0, PROMPT - 1);
            commit.digest.0[0] ^= 1;
            b.control(FrameKind::Commit, &commit).await;
            b
        },
    )
    .await;
}

#[tokio::test]
async fn field_03_the_end_of_the_connection_is_no_commit() {
    let s = Scene::new().await;
    let lost = [AbortCode::ConnectionLost];
    let close = |mut b: Bulk| async move {
        b.close().await;
        b
    };
    s.attack("closed after 1 of 4 layers", &lost, |mut b, open, all| async move {
        b.control(FrameKind::Open, &open).await;
        for r in all.iter().filter(|r| r.layer == 0) {
            b.data(r).await;
        }
        close(b).await
    })
    .await;
    s.attack("closed before the commit", &lost, |mut b, open, all| async move {
        b.control(FrameKind::Open, &open).await;
        for r in &all {
            b.data(r).await;
        }
        close(b).await
    })
    .await;
    s.attack("closed inside a payload", &lost, |mut b, open, all| async move {
        b.control(FrameKind::Open, &open).await;
        let bytes = [&b.header_of(&all[0]).encode()[..], &all[0].payload[..7]].concat();
        b.raw(&bytes).await;
        close(b).await
    })
    .await;
    s.attack("closed inside a header", &lost, |mut b, open, all| async move {
        b.control(FrameKind::Open, &open).await;
        let bytes = b.header_of(&all[0]).encode();
        b.raw(&bytes[..30]).await;
        close(b).await
    })
    .await;
    s.attack("the sender gives up", &[AbortCode::PrefillFailed], |mut b, open, all| async move {
        b.control(FrameKind::Open, &open).await;
        b.data(&all[0]).await;
        b.control(FrameKind::Abort, &Abort::new(AbortCode::PrefillFailed, "out of memory")).await;
        b
    })
    .await;
}

#[tokio::test]
async fn field_04_a_short_transfer_serves_what_it_brought_and_no_more() {
    let s = Scene::new().await;
    for end in [BLOCK, 3 * BLOCK, 50] {
        let tokens = Scene::prompt();
        let (id, offer) = s.offer(&tokens, 5000).await;
        let mut bulk = Bulk::connect(&offer).await;
        bulk.control(FrameKind::Open, &open_of(&offer, &s.cache, &tokens)).await;
        for r in rows(&s.cache.layout, 0..end) {
            bulk.data(&r).await;
        }
        let mut commit = bulk.commit_of(0, end);
        commit.short_reason = Some("timeout".to_owned());
        bulk.control(FrameKind::Commit, &commit).await;
        assert_eq!(bulk.reply(SOON).await.receipt.unwrap().token_end, end);
        let Answer { receipt, .. } = s.attacked.generate(&id, 2, Require::Nothing).await;
        let r = receipt.unwrap();
        assert_eq!((r.bridged_tokens, r.cached_tokens, r.native_tokens), (end, end, PROMPT - end));
        assert!(r.transfer_failure.is_some(), "a short transfer must say why");
        s.attacked.settled().await;
    }
    let codes = [AbortCode::ProtocolError, AbortCode::Incomplete];
    s.attack("a commit beyond the offer", &codes, |mut b, open, all| async move {
        b.control(FrameKind::Open, &open).await;
        for r in &all {
            b.data(r).await;
        }
        let commit = b.commit_of(0, PROMPT);
        b.control(FrameKind::Commit, &commit).await;
        b
    })
    .await;
}

#[tokio::test]
async fn field_05_rows_must_cover_the_range_exactly() {
    let s = Scene::new().await;
    let codes = [AbortCode::Incomplete, AbortCode::ProtocolError];
    s.attack("the last rows of one layer are missing", &codes, |b, open, mut all| async move {
        let last = all.iter().rposition(|r| r.layer == 2).unwrap();
        all.remove(last);
        send(b, open, &all).await
    })
    .await;
    s.attack("one row of one frame is missing", &codes, |b, open, mut all| async move {
        let r = all.iter_mut().find(|r| r.layer == 1 && r.count == BLOCK).unwrap();
        r.payload.truncate(r.payload.len() / BLOCK as usize * (BLOCK as usize - 1));
        r.count -= 1;
        send(b, open, &all).await
    })
    .await;
    s.attack("a frame twice", &codes, |mut b, open, all| async move {
        b.control(FrameKind::Open, &open).await;
        for r in all.iter().chain([&all[3]]) {
            b.data(r).await;
        }
        let mut commit = b.commit_of(0, PROMPT - 1);
        commit.frames += 1;
        commit.payload_bytes += all[3].payload.len() as u64;
        b.control(FrameKind::Commit, &commit).await;
        b
    })
    .await;
    s.attack("overlapping rows", &codes, |b, open, mut all| async move {
        let mut extra = all[0].clone();
        extra.payload.truncate(extra.payload.len() / BLOCK as usize * 4);
        extra.count = 4;
        extra.start += 2;
        all.push(extra);
        send(b, open, &all).await
    })
    .await;
    s.attack("nothing at all", &codes, |b, open, _| send(b, open, &[])).await;
}

#[tokio::test]
async fn field_13_a_layer_is_stored_whole_or_not_at_all() {
    let s = Scene::new().await;
    let codes = [AbortCode::Incomplete];
    s.attack("no values in layer 3", &codes, |b, open, mut all| async move {
        all.retain(|r| r.layer != 3 || r.part == shared::layout::Part::K);
        send(b, open, &all).await
    })
    .await;
    s.attack("no layer 0", &codes, |b, open, mut all| async move {
        all.retain(|r| r.layer != 0);
        send(b, open, &all).await
    })
    .await;
}

#[tokio::test]
async fn frames_that_make_no_sense_end_the_transfer_and_nothing_else() {
    let s = Scene::new().await;
    let codes = [
        AbortCode::ProtocolError,
        AbortCode::LayoutMismatch,
        AbortCode::Incomplete,
        AbortCode::Checksum,
        AbortCode::OverBudget,
    ];
    type Change = fn(&mut FrameHeader);
    let changes: [(&str, Change); 10] = [
        ("a layer that does not exist", |h| h.layer = 4),
        ("a part that does not exist", |h| h.part = 7),
        ("tokens beyond the range", |h| h.token_start = 4096),
        ("a token count of zero", |h| h.token_count = 0),
        ("a token count that overflows", |h| h.token_count = u32::MAX),
        ("a payload of 2^63 bytes", |h| h.payload_bytes = 1 << 63),
        ("a gap in the numbering", |h| h.seq += 1),
        ("another transfer's id", |h| h.transfer_id = Hex([9; 16])),
        ("a receipt from the sender", |h| h.kind = FrameKind::Receipt),
        ("a layout frame", |h| h.kind = FrameKind::Layout),
    ];
    for (what, change) in changes {
        s.attack(what, &codes, |mut b, open, all| async move {
            b.control(FrameKind::Open, &open).await;
            let mut header = b.header_of(&all[0]);
            change(&mut header);
            b.frame(&header, &all[0].payload).await;
            b
        })
        .await;
    }
    s.attack("rows across a block border", &codes, |mut b, open, mut all| async move {
        b.control(FrameKind::Open, &open).await;
        all[0].start += 3;
        b.data(&all[0]).await;
        b
    })
    .await;
    s.attack("a second open", &codes, |b, open, _| async move {
        open_only(open_only(b, open.clone()).await, open).await
    })
    .await;
    s.attack("a commit of 1 GiB", &codes, |mut b, open, _| async move {
        b.control(FrameKind::Open, &open).await;
        let mut header = FrameHeader::control(FrameKind::Commit, b.transfer_id, b.seq, b"{}");
        header.payload_bytes = 1 << 30;
        b.frame(&header, b"{}").await;
        b
    })
    .await;
    s.attack("another frame version", &codes, |mut b, open, all| async move {
        b.control(FrameKind::Open, &open).await;
        let mut bytes = b.header_of(&all[0]).encode();
        bytes[4] = 2;
        b.raw(&bytes).await;
        b
    })
    .await;
    s.attack("noise", &codes, |mut b, open, _| async move {
        b.control(FrameKind::Open, &open).await;
        b.raw(&[0xa5; 5000]).await;
        b
    })
    .await;
}

/// Someone without the ticket must not be able to end, fill or block a transfer.
#[tokio::test]
async fn strangers_are_turned_away_and_the_transfer_goes_on() {
    let s = Scene::new().await;
    let tokens = Scene::prompt();
    let (id, offer) = s.offer(&tokens, 10_000).await;

    let mut wrong_ticket = open_of(&offer, &s.cache, &tokens);
    wrong_ticket.ticket = Hex([0; 16]);
    let mut stranger = open_only(Bulk::connect(&offer).await, wrong_ticket).await;
    let reply = stranger.reply(SOON).await;
    assert_eq!(reply.abort.unwrap().code, AbortCode::BadTicket);

    let mut rude = Bulk::connect(&offer).await;
    rude.raw(b"GET / HTTP/1.1\r\nHost: decoder\r\n\r\nand more than fifty-six bytes of it").await;
    let reply = rude.reply(SOON).await;
    assert!(reply.closed || reply.abort.is_some());

    let mut early = Bulk::connect(&offer).await;
    early.data(&rows(&s.cache.layout, 0..PROMPT - 1)[0]).await;
    let reply = early.reply(SOON).await;
    assert!(reply.closed || reply.abort.is_some(), "rows before an open");

    let reply = s.honest(&tokens, &offer).await;
    assert!(reply.receipt.is_some(), "{reply:?}");
    let mut again = open_only(Bulk::connect(&offer).await, open_of(&offer, &s.cache, &tokens)).await;
    assert_eq!(again.reply(SOON).await.abort.unwrap().code, AbortCode::BadTicket, "a ticket works once");
    let answer = s.attacked.generate(&id, 2, Require::Complete).await;
    assert_eq!(answer.receipt.unwrap().bridged_tokens, PROMPT - 1);

    let (id, offer) = s.offer(&Scene::prompt(), 10_000).await;
    s.attacked.notify(&DecodeRequest::Cancel { request_id: id });
    s.attacked.settled().await;
    let mut stale = open_only(Bulk::connect(&offer).await, open_of(&offer, &s.cache, &tokens)).await;
    assert_eq!(stale.reply(SOON).await.abort.unwrap().code, AbortCode::BadTicket, "the request is gone");
}

#[tokio::test]
async fn field_10_a_transfer_that_never_commits_is_given_up() {
    let s = Scene::new().await;
    s.attack("silence after the open", &[AbortCode::Timeout], open_only_with_rows).await;
    // Never even connected.
    let tokens = Scene::prompt();
    let (id, _) = s.offer(&tokens, 300).await;
    assert!(s.attacked.stats().await.reserved_bytes > 0);
    wait::until("the reservation is returned", SOON, || async {
        (s.attacked.stats().await.reserved_bytes == 0).then_some(())
    })
    .await;
    s.falls_back("never connected", &id, &tokens, &[AbortCode::Timeout]).await;
    // A sender that is slow but alive is not given up: 74 ms of silence at most, for longer than the idle limit.
    let tokens = Scene::prompt();
    let (id, offer) = s.offer(&tokens, 400).await;
    let mut bulk = Bulk::connect(&offer).await;
    bulk.control(FrameKind::Open, &open_of(&offer, &s.cache, &tokens)).await;
    for r in rows(&s.cache.layout, 0..PROMPT - 1) {
        tokio::time::sleep(Duration::from_millis(40)).await;
        bulk.data(&r).await;
    }
    let commit = bulk.commit_of(0, PROMPT - 1);
    bulk.control(FrameKind::Commit, &commit).await;
    assert!(bulk.reply(SOON).await.receipt.is_some());
    s.attacked.generate(&id, 1, Require::Complete).await;
    s.attacked.settled().await;
}

async fn open_only_with_rows(mut b: Bulk, open: Open, all: Vec<Rows>) -> Bulk {
    b.control(FrameKind::Open, &open).await;
    b.data(&all[0]).await;
    b
}

#[tokio::test]
async fn a_required_bridge_that_failed_is_an_error_not_an_answer() {
    let s = Scene::new().await;
    for require in [Require::Any, Require::Complete] {
        let (id, offer) = s.offer(&Scene::prompt(), 5000).await;
        drop(Bulk::connect(&offer).await);
        s.attacked.notify(&DecodeRequest::AbortTransfer {
            request_id: id.clone(),
            abort: Abort::new(AbortCode::PrefillFailed, "x"),
        });
        let answer = s.attacked.generate(&id, 2, require).await;
        assert_eq!(answer.error.unwrap().code.as_str(), "bridge_required");
        assert!(answer.ids.is_empty());
        s.attacked.settled().await;
    }
}

/// Many connections that say nothing must not keep others out, nor stay for ever.
#[tokio::test]
async fn silent_connections_do_not_block_the_port() {
    let s = Scene::new().await;
    let tokens = Scene::prompt();
    let (id, offer) = s.offer(&tokens, 10_000).await;
    let before = s.worker.process.sockets();
    let mut idle = vec![];
    for _ in 0..100 {
        idle.push(tokio::net::TcpStream::connect(&offer.bulk_addr).await.unwrap());
    }
    assert!(s.honest(&tokens, &offer).await.receipt.is_some());
    s.attacked.generate(&id, 1, Require::Complete).await;
    drop(idle);
    wait::until("sockets are closed", SOON, || async {
        (s.worker.process.sockets() <= before).then_some(())
    })
    .await;
}
