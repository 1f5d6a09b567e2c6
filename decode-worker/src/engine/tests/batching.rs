//! Many requests in one pass: who joins, who leaves, who waits.

use super::*;

const SLOW: Duration = Duration::from_millis(2);

#[tokio::test]
async fn requests_join_and_leave_between_passes_and_each_answer_is_its_own() {
    let bench = bench(TestEngine { pass: SLOW, ..TestEngine::default() }).await;
    let mut answers = Vec::new();
    for i in 0..9_u32 {
        let prompt: Vec<u32> = (0..=i).collect();
        let n = 10 + 7 * (i % 4);
        let (job, events) = bench.job(&prompt, n, 64);
        bench.handle.generate(job);
        answers.push((prompt, n, tokio::spawn(tokens(events))));
        tokio::time::sleep(SLOW * 3).await;
    }
    for (prompt, n, answer_of) in answers {
        let expected = (answer(&prompt, n as usize), Some(FinishReason::Length));
        assert_eq!(answer_of.await.unwrap(), expected);
    }
    bench.idle().await;
    let batches = bench.engine.batches.lock();
    assert!(batches.iter().any(|&rows| rows > 3), "{batches:?}");
    assert_eq!(*batches.last().unwrap(), 1);
}

#[tokio::test]
async fn eight_answers_take_hardly_more_passes_than_one() {
    let bench = bench(TestEngine { pass: SLOW, ..TestEngine::default() }).await;
    bench.engine.batches.lock().clear();
    let jobs: Vec<_> = (0..8).map(|i| bench.job(&[i], 50, 64)).collect();
    let events: Vec<_> =
        jobs.into_iter().map(|(job, events)| (bench.handle.generate(job), events).1).collect();
    for events in events {
        assert_eq!(tokens(events).await.0.len(), 50);
    }
    // 49 each after the prompt's own; one prompt is read per round, so they begin up to 8 rounds apart.
    let passes = bench.engine.batches.lock().len();
    assert!((49..49 + 10).contains(&passes), "{passes}");
}

#[tokio::test]
async fn a_reader_that_stops_reading_costs_the_others_no_pass() {
    let bench = bench(TestEngine { pass: SLOW, ..TestEngine::default() }).await;
    let (stuck, unread) = bench.job(&[1], 1000, 8);
    bench.handle.generate(stuck);
    let others: Vec<_> = (2..9).map(|i| bench.job(&[i], 100, 256)).collect();
    bench.engine.batches.lock().clear();
    let start = Instant::now();
    let events: Vec<_> =
        others.into_iter().map(|(job, events)| (bench.handle.generate(job), events).1).collect();
    for (i, events) in (2..9).zip(events) {
        assert_eq!(tokens(events).await.0, answer(&[i], 100));
    }
    let took = start.elapsed();
    let batches = bench.engine.batches.lock().clone();
    assert!(batches.len() < 99 + 15, "{} passes", batches.len());
    assert!(batches.iter().filter(|&&rows| rows == 8).count() < 10, "the stuck one took part: {batches:?}");
    assert!(took < SLOW * 99 * 4, "{took:?}");
    drop(unread);
    bench.idle().await;
}

#[tokio::test]
async fn everybody_gets_the_same_share_of_passes() {
    let bench = bench(TestEngine { pass: SLOW, ..TestEngine::default() }).await;
    let jobs: Vec<_> = (0..8).map(|i| bench.job(&[i], 10_000, 4096)).collect();
    let mut readers: Vec<_> =
        jobs.into_iter().map(|(job, events)| (bench.handle.generate(job), events).1).collect();
    tokio::time::sleep(Duration::from_millis(400)).await;
    let counts: Vec<usize> = readers
        .iter_mut()
        .map(|events| {
            std::iter::from_fn(|| events.try_recv().ok())
                .filter(|e| matches!(e, JobEvent::Token { .. }))
                .count()
        })
        .collect();
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    assert!(*least > 50 && most - least <= 10, "{counts:?}");
    drop(readers);
    bench.idle().await;
}

#[tokio::test]
async fn a_failed_pass_ends_the_requests_in_it_and_no_other() {
    let bench = bench(TestEngine { pass: SLOW, poison: Some(49), ..TestEngine::default() }).await;
    // Some first token leads to the poison within a few steps; this finds one.
    let doomed = (0..49).find(|&t| answer(&[t], 30).contains(&49)).unwrap();
    let (job, mut events) = bench.job(&[doomed], 60, 128);
    bench.handle.generate(job);
    loop {
        match events.recv().await {
            Some(JobEvent::Failed(error)) => break assert_eq!(error.0, "poison"),
            Some(_) => {}
            None => panic!("no reason was given"),
        }
    }
    bench.idle().await;
    let safe = (0..49).find(|&t| !answer(&[t], 10).contains(&49)).unwrap();
    let (job, events) = bench.job(&[safe], 10, 64);
    bench.handle.generate(job);
    assert_eq!(tokens(events).await.0, answer(&[safe], 10));
}

#[tokio::test]
async fn requests_wait_for_memory_in_order_and_one_alone_never_does() {
    // Room for 40 tokens at 16 bytes; each of these plans for 30 or 20.
    let engine = TestEngine { pass: SLOW, ..TestEngine::default() };
    let on_thread = engine.clone();
    let (handle, ()) = EngineHandle::start(40 * 16, move || Ok((on_thread, ()))).await.unwrap();
    let bench = Bench { handle, engine, ..bench(TestEngine::default()).await };
    let (huge, events) = bench.job(&(0..50).collect::<Vec<_>>(), 10, 64);
    bench.handle.generate(huge);
    assert!(tokens(events).await.1.is_some());

    bench.engine.batches.lock().clear();
    let jobs = [bench.job(&[1], 29, 64), bench.job(&[2], 29, 64), bench.job(&[3], 19, 64)];
    let events: Vec<_> =
        jobs.into_iter().map(|(job, events)| (bench.handle.generate(job), events).1).collect();
    for (i, events) in (1..4).zip(events) {
        assert!(!tokens(events).await.0.is_empty(), "{i}");
    }
    assert!(bench.engine.batches.lock().iter().all(|&rows| rows <= 2));
    bench.idle().await;
    // One that waits can be cancelled.
    let (running, events) = bench.job(&[1], 29, 64);
    let (waiting, waited) = bench.job(&[2], 29, 64);
    let cancel = waiting.cancel.clone();
    bench.handle.generate(running);
    bench.handle.generate(waiting);
    cancel.cancel();
    assert_eq!(tokens(waited).await, (vec![], None));
    assert!(tokens(events).await.1.is_some());
    bench.idle().await;
}
