mod batching;
mod choices;

use super::testing::{BLOCK_TOKENS, TestEngine, answer, block};
use super::*;
use crate::sampler::Sampler;
use crate::store::PrefixStore;
use shared::control::{DecodeReceipt, FinishReason, Sampling};
use shared::keys::BlockKey;
use std::time::Duration;
use tokio::sync::mpsc as queue;

fn greedy() -> Sampling {
    Sampling::greedy()
}

struct Bench {
    handle: EngineHandle,
    engine: TestEngine,
    library: Library,
}

async fn bench(engine: TestEngine) -> Bench {
    let on_thread = engine.clone();
    let (handle, ()) = EngineHandle::start(u64::MAX, move || Ok((on_thread, ()))).await.unwrap();
    engine.computed.store(0, Ordering::Relaxed);
    let root = BlockKey::root(&[0; 32], &[0; 32]);
    let library = Library { store: PrefixStore::new(1 << 20), root, block_tokens: BLOCK_TOKENS };
    Bench { handle, engine, library }
}

impl Bench {
    fn job(&self, prompt: &[u32], max_new_tokens: u32, room: usize) -> (Job, queue::Receiver<JobEvent>) {
        let (events, receiver) = queue::channel(room);
        let receipt = DecodeReceipt {
            prompt_tokens: prompt.len() as u32,
            cached_tokens: 0,
            bridged_tokens: 0,
            native_tokens: prompt.len() as u32,
            blocks: 0,
            payload_bytes: 0,
            digest: None,
            transfer_failure: None,
            queue_ms: 0.0,
            wait_ms: 0.0,
            ingest_ms: 0.0,
            prefill_ms: 0.0,
        };
        let job = Job {
            prompt: prompt.to_vec().into(),
            served: Served::default(),
            receipt,
            max_new_tokens,
            samplers: vec![Sampler::new(greedy(), &[]).unwrap()],
            constraint: None,
            logprobs: None,
            prompt_logprobs: None,
            stop_token_ids: vec![],
            stops: Stops::new(1),
            library: self.library.clone(),
            events,
            cancel: CancellationToken::new(),
            submitted: Instant::now(),
        };
        (job, receiver)
    }

    async fn idle(&self) {
        while self.handle.n_jobs() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(self.handle.sequence_bytes(), 0);
    }
}

async fn tokens(mut events: queue::Receiver<JobEvent>) -> (Vec<u32>, Option<FinishReason>) {
    let mut ids = Vec::new();
    while let Some(event) = events.recv().await {
        match event {
            JobEvent::Token { id, .. } => ids.push(id),
            JobEvent::Finished { reason, completion_tokens, .. } => {
                assert_eq!(completion_tokens as usize, ids.len());
                return (ids, Some(reason));
            }
            _ => {}
        }
    }
    (ids, None)
}

#[tokio::test]
async fn a_hit_never_changes_the_answer_and_answers_enter_the_store() {
    let bench = bench(TestEngine::default()).await;
    let prompt: Vec<u32> = (0..19).collect();
    let (job, events) = bench.job(&prompt, 10, 64);
    bench.handle.generate(job);
    let (first, reason) = tokens(events).await;
    assert_eq!((&first, reason), (&answer(&prompt, 10), Some(FinishReason::Length)));
    // 28 tokens are in the cache (the last one is not): 7 blocks.
    assert_eq!(bench.library.store.stats().blocks, 7);

    let conversation = [&prompt[..], &first].concat();
    let keys = bench.library.root.chain(&conversation, BLOCK_TOKENS);
    for n_blocks in 1..=7 {
        let lease = bench.library.store.lease_prefix(&keys[..n_blocks], Duration::from_secs(1));
        let (mut job, events) = bench.job(&conversation, 5, 64);
        job.served.blocks = lease.blocks().unwrap().into_iter().map(|(block, _)| block).collect();
        job.served.holds.leases.push(lease);
        bench.engine.computed.store(0, Ordering::Relaxed);
        bench.handle.generate(job);
        assert_eq!(tokens(events).await.0, answer(&conversation, 5));
        assert_eq!(bench.engine.computed.load(Ordering::Relaxed), 29 - n_blocks * BLOCK_TOKENS + 4);
    }
    bench.idle().await;
    assert_eq!(bench.library.store.stats().references, 0);
}

#[tokio::test]
async fn prompts_are_cut_alike_with_and_without_a_hit() {
    let bench = bench(TestEngine::default()).await;
    let prompt: Vec<u32> = (0..700).map(|i| i % 50).collect();
    bench.engine.passes.lock().clear();
    let (job, events) = bench.job(&prompt, 1, 64);
    bench.handle.generate(job);
    tokens(events).await;
    let cold = std::mem::take(&mut *bench.engine.passes.lock());
    assert_eq!(cold, [(0, 256), (256, 256), (512, 187), (699, 1)]);

    let keys = bench.library.root.chain(&prompt, BLOCK_TOKENS);
    let lease = bench.library.store.lease_prefix(&keys[..80], Duration::from_secs(1));
    let (mut job, events) = bench.job(&prompt, 1, 64);
    job.served.blocks = lease.blocks().unwrap().into_iter().map(|(block, _)| block).collect();
    bench.handle.generate(job);
    tokens(events).await;
    assert_eq!(*bench.engine.passes.lock(), [(320, 192), (512, 187), (699, 1)]);
}

#[tokio::test]
async fn stop_tokens_end_the_answer_and_are_not_part_of_it() {
    let bench = bench(TestEngine::default()).await;
    let expected = answer(&[1, 2, 3], 10);
    let stop = expected[4];
    let (mut job, events) = bench.job(&[1, 2, 3], 10, 64);
    job.stop_token_ids = vec![stop];
    bench.handle.generate(job);
    let first = expected.iter().position(|&t| t == stop).unwrap();
    assert_eq!(tokens(events).await, (expected[..first].to_vec(), Some(FinishReason::Stop)));

    let (job, events) = bench.job(&[1, 2, 3], 0, 64);
    bench.handle.generate(job);
    assert_eq!(tokens(events).await, (vec![], Some(FinishReason::Length)));
}

#[tokio::test]
async fn a_reader_that_stops_reading_blocks_nobody_else() {
    let bench = bench(TestEngine::default()).await;
    let (stuck, mut unread) = bench.job(&[1], 1000, 8);
    let cancel = stuck.cancel.clone();
    bench.handle.generate(stuck);
    let (job, events) = bench.job(&[2], 200, 8);
    bench.handle.generate(job);
    assert_eq!(tokens(events).await.0, answer(&[2], 200));
    // It goes on where it stopped once somebody reads.
    let mut ids = Vec::new();
    while ids.len() < 100 {
        if let JobEvent::Token { id, .. } = unread.recv().await.unwrap() {
            ids.push(id);
        }
    }
    assert_eq!(ids, answer(&[1], 100));
    cancel.cancel();
    bench.idle().await;
}

#[tokio::test]
async fn cancel_and_a_lost_reader_end_a_job_within_one_step() {
    let bench = bench(TestEngine { pass: Duration::from_millis(5), ..TestEngine::default() }).await;
    for drop_reader in [false, true] {
        let (job, mut events) = bench.job(&[1, 2], 100_000, 64);
        let cancel = job.cancel.clone();
        bench.handle.generate(job);
        while !matches!(events.recv().await, Some(JobEvent::Token { .. })) {}
        let before = bench.engine.computed.load(Ordering::Relaxed);
        if drop_reader {
            drop(events);
        } else {
            cancel.cancel();
        }
        bench.idle().await;
        assert!(bench.engine.computed.load(Ordering::Relaxed) <= before + 2);
    }
}

#[tokio::test]
async fn long_prompts_and_answers_interleave() {
    let bench = bench(TestEngine { pass: Duration::from_millis(1), ..TestEngine::default() }).await;
    let long: Vec<u32> = (0..20_000).map(|i| i % 50).collect();
    let (job, mut writing) = bench.job(&[1], 300, 512);
    bench.handle.generate(job);
    while !matches!(writing.recv().await, Some(JobEvent::Token { .. })) {}
    let (job, mut reading) = bench.job(&long, 1, 512);
    bench.handle.generate(job);
    let mut chunks = 0;
    while let Some(JobEvent::Progress(_)) = reading.recv().await {
        chunks += 1;
    }
    assert!(chunks >= 5, "{chunks} chunks");
    let mut written = 0;
    while let Ok(event) = writing.try_recv() {
        written += usize::from(matches!(event, JobEvent::Token { .. }));
    }
    assert!(written >= chunks, "{written} tokens during {chunks} chunks");
}

#[tokio::test]
async fn an_engine_failure_ends_that_job_alone() {
    let bench = bench(TestEngine { poison: Some(49), ..TestEngine::default() }).await;
    let (job, mut events) = bench.job(&[1, 49, 3], 5, 64);
    bench.handle.generate(job);
    assert!(matches!(events.recv().await, Some(JobEvent::Failed(_))));
    assert!(events.recv().await.is_none());
    let (job, events) = bench.job(&[1], 1, 64);
    bench.handle.generate(job);
    assert!(tokens(events).await.1.is_some());
}

#[tokio::test]
async fn a_full_store_costs_blocks_but_no_answers() {
    let mut bench = bench(TestEngine::default()).await;
    bench.library.store = PrefixStore::new(crate::block::block_bytes(&block(&[0; BLOCK_TOKENS])) * 2);
    let pinned = bench.library.store.reserve(1).unwrap();
    let (job, events) = bench.job(&(0..30).collect::<Vec<_>>(), 10, 64);
    bench.handle.generate(job);
    assert!(tokens(events).await.1.is_some());
    assert_eq!(bench.library.store.stats().blocks, 1);
    drop(pinned);
}

#[tokio::test]
async fn inspections_capture_everything_when_nothing_is_served() {
    let bench = bench(TestEngine::default()).await;
    let (job, _events) = bench.job(&[5, 6, 7, 8, 9, 10], 0, 64);
    for served in [vec![], vec![Arc::new(block(&[5, 6, 7, 8])), Arc::new(block(&[9]))]] {
        let (reply, result) = oneshot::channel();
        let captured = served.is_empty();
        bench.handle.inspect(InspectJob {
            prompt: job.prompt.clone(),
            served: Served { blocks: served, ..Served::default() },
            receipt: job.receipt.clone(),
            reply,
            cancel: CancellationToken::new(),
            submitted: Instant::now(),
        });
        let inspection = result.await.unwrap().unwrap();
        assert_eq!(inspection.cache, block(&[5, 6, 7, 8, 9]));
        assert_eq!(
            inspection.logits.iter().position(|&x| x == 1.0).unwrap() as u32,
            answer(&job.prompt, 1)[0]
        );
        let expected = if captured { vec![vec![5.0, 6.0, 7.0, 8.0, 9.0]; 2] } else { vec![] };
        assert_eq!(inspection.attention_inputs, expected);
    }
}

#[tokio::test]
async fn a_failed_load_is_reported() {
    let result =
        EngineHandle::start(u64::MAX, || Err::<(TestEngine, ()), _>(EngineError("no".to_owned()))).await;
    assert_eq!(result.err(), Some(EngineError("no".to_owned())));
}
