use super::*;
use crate::engine::testing::{BLOCK_TOKENS, block, layout};
use crate::store::{PrefixStore, StoreStats};
use shared::layout::Part;
use shared::transport::{FrameReceiver, FrameSender, TcpFrameReceiver, TcpFrameSender, connect};
use shared::wire::{Commit, FrameHeader, FrameKind, Open, TransferDigest, TransferReceipt, payload_crc};
use std::time::Instant;
use tokio::net::TcpListener;

const BYTES_PER_TOKEN: u64 = 16;
const IDLE: Duration = Duration::from_secs(5);

struct Bench {
    transfers: Transfers,
    store: PrefixStore,
    addr: std::net::SocketAddr,
    shutdown: CancellationToken,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

async fn bench() -> Bench {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let expected = Expected {
        fingerprint: Hex([1; 32]),
        layout: Arc::new(layout()),
        layout_digest: Hex(layout().digest()),
    };
    let transfers = Transfers::new(expected, addr.to_string());
    let shutdown = CancellationToken::new();
    tokio::spawn(serve_bulk(listener, transfers.clone(), shutdown.clone()));
    Bench { transfers, store: PrefixStore::new(1 << 20), addr, shutdown }
}

fn prompt() -> Vec<u32> {
    (100..130).collect()
}

fn keys() -> Vec<BlockKey> {
    BlockKey::root(&[1; 32], &layout().digest()).chain(&prompt(), BLOCK_TOKENS)
}

impl Bench {
    fn open(&self, start: u32, end: u32, idle: Duration) -> (TransferOffer, Transfer) {
        let full = start as usize / BLOCK_TOKENS..end as usize / BLOCK_TOKENS;
        self.transfers.open(TransferPlan {
            tokens_digest: [2; 32],
            token_start: start,
            token_end: end,
            keys: keys()[full].to_vec(),
            idle_timeout: idle,
            reservation: self.store.reserve(u64::from(end - start) * BYTES_PER_TOKEN).unwrap(),
        })
    }

    async fn sender(&self, offer: &TransferOffer) -> Sender {
        let (tx, rx) = connect(self.addr, IDLE).await.unwrap();
        Sender { tx, rx, id: offer.transfer_id, seq: 0, digest: TransferDigest::default() }
    }

    /// After the end of a transfer that gave nothing, nothing may be left.
    async fn assert_untouched(&self) {
        while self.transfers.n_open() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let empty = StoreStats { budget_bytes: 1 << 20, ..StoreStats::default() };
        assert_eq!(self.store.stats(), empty);
    }
}

struct Sender {
    tx: TcpFrameSender,
    rx: TcpFrameReceiver,
    id: Hex<16>,
    seq: u64,
    digest: TransferDigest,
}

fn open_body(offer: &TransferOffer) -> Open {
    Open {
        ticket: offer.ticket,
        fingerprint: Hex([1; 32]),
        layout_digest: Hex(layout().digest()),
        tokens_digest: Hex([2; 32]),
        token_start: offer.token_start,
        token_end: offer.token_end,
    }
}

impl Sender {
    async fn control(&mut self, kind: FrameKind, payload: &[u8]) {
        let header = FrameHeader::control(kind, self.id, self.seq, payload);
        self.seq += 1;
        self.tx.send(&header, payload).await.unwrap();
    }

    async fn open(&mut self, open: &Open) {
        self.control(FrameKind::Open, &serde_json::to_vec(open).unwrap()).await;
    }

    fn data_header(&mut self, layer: u16, part: Part, start: u32, count: u32, payload: &[u8]) -> FrameHeader {
        let header = FrameHeader {
            kind: FrameKind::Data,
            transfer_id: self.id,
            seq: self.seq,
            layer,
            part: part as u16,
            token_start: start,
            token_count: count,
            payload_bytes: payload.len() as u64,
            crc32c: payload_crc(payload),
        };
        self.seq += 1;
        self.digest.add(layer, part, start, count, payload);
        header
    }

    /// Rows of tokens `start..start+count` of every array but `skip`.
    async fn rows(&mut self, start: u32, count: u32, skip: Option<(u16, Part)>) {
        let tokens = &prompt()[start as usize..(start + count) as usize];
        let payload: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        for (layer, part) in layout().arrays().filter(|array| Some(*array) != skip) {
            let header = self.data_header(layer, part, start, count, &payload);
            self.tx.send(&header, &payload).await.unwrap();
        }
    }

    fn commit_body(&self, start: u32, end: u32) -> Commit {
        Commit {
            token_start: start,
            token_end: end,
            frames: self.digest.frames(),
            payload_bytes: self.digest.payload_bytes(),
            digest: Hex(self.digest.finish()),
            short_reason: None,
        }
    }

    async fn commit(&mut self, commit: &Commit) {
        self.control(FrameKind::Commit, &serde_json::to_vec(commit).unwrap()).await;
    }

    /// The first frame from the receiver that is no credit.
    async fn verdict(&mut self) -> Result<TransferReceipt, Abort> {
        loop {
            let header = self.rx.header().await.unwrap().expect("closed without a word");
            let mut body = vec![0; header.payload_bytes as usize];
            self.rx.payload(&header, &mut body).await.unwrap();
            match header.kind {
                FrameKind::Credit => {}
                FrameKind::Receipt => return Ok(serde_json::from_slice(&body).unwrap()),
                FrameKind::Abort => return Err(serde_json::from_slice(&body).unwrap()),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Runs a sender against a transfer of tokens 4..11 and expects the same abort at both ends.
async fn refused<F: AsyncFnOnce(&mut Sender, &TransferOffer)>(act: F) -> AbortCode {
    let bench = bench().await;
    let (offer, mut transfer) = bench.open(4, 11, IDLE);
    let mut sender = bench.sender(&offer).await;
    act(&mut sender, &offer).await;
    let told = sender.verdict().await.unwrap_err();
    assert_eq!(transfer.outcome().await.unwrap_err(), told);
    bench.assert_untouched().await;
    told.code
}

#[tokio::test]
async fn a_transfer_in_any_order_and_pieces_becomes_blocks() {
    let bench = bench().await;
    let (offer, mut transfer) = bench.open(4, 11, IDLE);
    let mut sender = bench.sender(&offer).await;
    sender.open(&open_body(&offer)).await;
    sender.rows(9, 2, None).await;
    sender.rows(4, 4, None).await;
    sender.rows(8, 1, None).await;
    assert_eq!(bench.store.stats().blocks, 0, "nothing is visible before the commit");
    sender.commit(&sender.commit_body(4, 11)).await;
    let receipt = sender.verdict().await.unwrap();
    let committed = transfer.outcome().await.unwrap();
    assert_eq!((receipt.token_end, receipt.frames, receipt.payload_bytes), (11, 12, 7 * BYTES_PER_TOKEN));
    assert_eq!((receipt.digest, committed.payload_bytes), (committed.digest, receipt.payload_bytes));
    let expected = [block(&prompt()[4..8]), block(&prompt()[8..11])];
    assert!(committed.blocks.iter().map(|b| &**b).eq(&expected));
    assert!(bench.store.contains(&keys()[1]));
    let stats = bench.store.stats();
    assert_eq!((stats.blocks, stats.references, stats.reserved_bytes), (1, 1, 3 * BYTES_PER_TOKEN));
    drop(committed);
    let stats = bench.store.stats();
    assert_eq!((stats.blocks, stats.references, stats.reserved_bytes), (1, 0, 0));
}

#[tokio::test]
async fn a_short_commit_gives_a_usable_prefix() {
    let bench = bench().await;
    let (offer, mut transfer) = bench.open(4, 20, IDLE);
    let mut sender = bench.sender(&offer).await;
    sender.open(&open_body(&offer)).await;
    sender.rows(4, 4, None).await;
    sender.rows(8, 2, None).await;
    let commit = Commit { short_reason: Some("out of time".to_owned()), ..sender.commit_body(4, 10) };
    sender.commit(&commit).await;
    assert_eq!(sender.verdict().await.unwrap().token_end, 10);
    let committed = transfer.outcome().await.unwrap();
    assert_eq!((committed.token_end, committed.short_reason.as_deref()), (10, Some("out of time")));
    let expected = [block(&prompt()[4..8]), block(&prompt()[8..10])];
    assert!(committed.blocks.iter().map(|b| &**b).eq(&expected));
    assert_eq!(bench.store.stats().reserved_bytes, 2 * BYTES_PER_TOKEN);
}

#[tokio::test]
async fn senders_that_mean_something_else_are_refused() {
    type Change = fn(&mut Open);
    let cases: [(Change, AbortCode); 5] = [
        (|o| o.fingerprint = Hex([9; 32]), AbortCode::FingerprintMismatch),
        (|o| o.layout_digest = Hex([9; 32]), AbortCode::LayoutMismatch),
        (|o| o.tokens_digest = Hex([9; 32]), AbortCode::TokensMismatch),
        (|o| o.token_end = 10, AbortCode::TokensMismatch),
        (|o| o.token_start = 8, AbortCode::TokensMismatch),
    ];
    for (change, code) in cases {
        let got = refused(async |sender, offer| {
            let mut open = open_body(offer);
            change(&mut open);
            sender.open(&open).await;
        });
        assert_eq!(got.await, code);
    }
}

#[tokio::test]
async fn broken_rows_are_refused() {
    let corrupt = refused(async |sender, offer| {
        sender.open(&open_body(offer)).await;
        let header = sender.data_header(0, Part::K, 4, 4, &[7; 16]);
        sender.tx.send(&header, &[8; 16]).await.unwrap();
    });
    assert_eq!(corrupt.await, AbortCode::Checksum);
    let twice = refused(async |sender, offer| {
        sender.open(&open_body(offer)).await;
        sender.rows(4, 2, None).await;
        sender.rows(5, 1, None).await;
    });
    assert_eq!(twice.await, AbortCode::Incomplete);
    for (start, count) in [(0, 4), (11, 1), (6, 4), (4, 0), (u32::MAX, 2)] {
        let outside = refused(async |sender, offer| {
            sender.open(&open_body(offer)).await;
            let header = sender.data_header(0, Part::K, start, count, &[0; 16]);
            sender.tx.send(&header, &[0; 16]).await.unwrap();
        });
        assert_eq!(outside.await, AbortCode::Incomplete, "{start}+{count}");
    }
    let layer = refused(async |sender, offer| {
        sender.open(&open_body(offer)).await;
        let header = sender.data_header(9, Part::K, 4, 4, &[0; 16]);
        sender.tx.send(&header, &[0; 16]).await.unwrap();
    });
    assert_eq!(layer.await, AbortCode::LayoutMismatch);
}

#[tokio::test]
async fn an_absurd_length_is_refused_before_it_is_read() {
    let code = refused(async |sender, offer| {
        sender.open(&open_body(offer)).await;
        let mut header = sender.data_header(0, Part::K, 4, 4, &[0; 16]);
        header.payload_bytes = 1 << 60;
        sender.tx.send(&header, &[]).await.unwrap();
    });
    assert_eq!(code.await, AbortCode::ProtocolError);
}

#[tokio::test]
async fn commits_that_do_not_match_are_refused() {
    let missing_rows = refused(async |sender, offer| {
        sender.open(&open_body(offer)).await;
        sender.rows(4, 4, None).await;
        sender.rows(8, 3, Some((1, Part::V))).await;
        sender.commit(&sender.commit_body(4, 11)).await;
    });
    assert_eq!(missing_rows.await, AbortCode::Incomplete);
    type Change = fn(&mut Commit);
    let cases: [(Change, AbortCode); 7] = [
        (|c| c.digest = Hex([0; 32]), AbortCode::Checksum),
        (|c| c.frames -= 1, AbortCode::Incomplete),
        (|c| c.payload_bytes += 1, AbortCode::Incomplete),
        (|c| c.token_end = 10, AbortCode::Incomplete),
        (|c| c.token_end = 12, AbortCode::Incomplete),
        (|c| c.token_end = 4, AbortCode::Incomplete),
        (|c| c.token_start = 8, AbortCode::Incomplete),
    ];
    for (change, code) in cases {
        let got = refused(async |sender, offer| {
            sender.open(&open_body(offer)).await;
            sender.rows(4, 4, None).await;
            sender.rows(8, 3, None).await;
            let mut commit = sender.commit_body(4, 11);
            change(&mut commit);
            sender.commit(&commit).await;
        });
        assert_eq!(got.await, code);
    }
}

#[tokio::test]
async fn protocol_violations_are_refused() {
    let gap = refused(async |sender, offer| {
        sender.open(&open_body(offer)).await;
        sender.seq += 1;
        sender.rows(4, 1, None).await;
    });
    assert_eq!(gap.await, AbortCode::Incomplete);
    let kind = refused(async |sender, offer| {
        sender.open(&open_body(offer)).await;
        sender.open(&open_body(offer)).await;
    });
    assert_eq!(kind.await, AbortCode::ProtocolError);
    let other = refused(async |sender, offer| {
        sender.open(&open_body(offer)).await;
        sender.id = Hex([9; 16]);
        sender.rows(4, 1, None).await;
    });
    assert_eq!(other.await, AbortCode::ProtocolError);
    let no_json = refused(async |sender, offer| {
        sender.open(&open_body(offer)).await;
        sender.control(FrameKind::Commit, b"{").await;
    });
    assert_eq!(no_json.await, AbortCode::ProtocolError);
}

#[tokio::test]
async fn the_senders_own_abort_arrives() {
    let bench = bench().await;
    let (offer, mut transfer) = bench.open(4, 11, IDLE);
    let mut sender = bench.sender(&offer).await;
    sender.open(&open_body(&offer)).await;
    let abort = Abort::new(AbortCode::PrefillFailed, "out of memory");
    sender.control(FrameKind::Abort, &serde_json::to_vec(&abort).unwrap()).await;
    assert_eq!(transfer.outcome().await.unwrap_err(), abort);
    bench.assert_untouched().await;
}

#[tokio::test]
async fn a_closed_connection_is_noticed_at_once() {
    let bench = bench().await;
    let (offer, mut transfer) = bench.open(4, 11, Duration::from_secs(600));
    let mut sender = bench.sender(&offer).await;
    sender.open(&open_body(&offer)).await;
    sender.rows(4, 4, None).await;
    drop(sender);
    let start = Instant::now();
    assert_eq!(transfer.outcome().await.unwrap_err().code, AbortCode::ConnectionLost);
    assert!(start.elapsed() < Duration::from_secs(1));
    bench.assert_untouched().await;
}

#[tokio::test]
async fn silence_ends_a_transfer() {
    let bench = bench().await;
    let (_offer, mut unopened) = bench.open(4, 11, Duration::from_millis(50));
    assert_eq!(unopened.outcome().await.unwrap_err().code, AbortCode::Timeout);
    let (offer, mut stalled) = bench.open(4, 11, Duration::from_millis(50));
    let mut sender = bench.sender(&offer).await;
    sender.open(&open_body(&offer)).await;
    sender.rows(4, 4, None).await;
    assert_eq!(stalled.outcome().await.unwrap_err().code, AbortCode::Timeout);
    assert_eq!(sender.verdict().await.unwrap_err().code, AbortCode::Timeout);
    bench.assert_untouched().await;
}

#[tokio::test]
async fn ending_a_transfer_from_outside_closes_its_connection() {
    let bench = bench().await;
    for dropped in [false, true] {
        let (offer, mut transfer) = bench.open(4, 11, IDLE);
        let mut sender = bench.sender(&offer).await;
        sender.open(&open_body(&offer)).await;
        let credit = sender.rx.header().await.unwrap().unwrap();
        sender.rx.payload(&credit, &mut [0; 8]).await.unwrap();
        sender.rows(4, 4, None).await;
        let reason = Abort::new(AbortCode::PrefillFailed, "it died");
        if dropped {
            drop(transfer);
            assert_eq!(sender.verdict().await.unwrap_err().code, AbortCode::Cancelled);
        } else {
            transfer.control().abort(reason.clone());
            assert_eq!(transfer.outcome().await.unwrap_err(), reason);
            assert_eq!(sender.verdict().await.unwrap_err(), reason);
        }
        assert!(sender.rx.header().await.is_ok_and(|next| next.is_none()));
        bench.assert_untouched().await;
    }
}

#[tokio::test]
async fn tickets_work_once_and_strangers_disturb_nobody() {
    let bench = bench().await;
    let (offer, mut transfer) = bench.open(4, 11, IDLE);
    let mut stranger = bench.sender(&offer).await;
    stranger.open(&Open { ticket: Hex([0; 16]), ..open_body(&offer) }).await;
    assert_eq!(stranger.verdict().await.unwrap_err().code, AbortCode::BadTicket);
    let mut early = bench.sender(&offer).await;
    early.control(FrameKind::Commit, b"{}").await;
    assert_eq!(early.verdict().await.unwrap_err().code, AbortCode::ProtocolError);

    let mut sender = bench.sender(&offer).await;
    sender.open(&open_body(&offer)).await;
    sender.rows(4, 4, None).await;
    let mut second = bench.sender(&offer).await;
    second.open(&open_body(&offer)).await;
    assert_eq!(second.verdict().await.unwrap_err().code, AbortCode::BadTicket);
    sender.rows(8, 3, None).await;
    sender.commit(&sender.commit_body(4, 11)).await;
    sender.verdict().await.unwrap();
    transfer.outcome().await.unwrap();
}

#[tokio::test]
async fn several_transfers_run_at_a_time() {
    let bench = bench().await;
    let mut running = Vec::new();
    for _ in 0..3 {
        let (offer, transfer) = bench.open(4, 11, IDLE);
        let mut sender = bench.sender(&offer).await;
        sender.open(&open_body(&offer)).await;
        running.push((sender, transfer));
    }
    assert_eq!(bench.transfers.n_open(), 3);
    for (start, count) in [(4, 4), (8, 3)] {
        for (sender, _) in &mut running {
            sender.rows(start, count, None).await;
        }
    }
    for (mut sender, mut transfer) in running {
        sender.commit(&sender.commit_body(4, 11)).await;
        sender.verdict().await.unwrap();
        transfer.outcome().await.unwrap();
    }
    assert_eq!(bench.store.stats().blocks, 1);
}
