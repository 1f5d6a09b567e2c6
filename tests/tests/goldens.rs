//! The start model against mlx-lm: token ids, greedy answers of both routes, cache contents; and what a bridge costs.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; ties are listed"
)]

use pd_tests::decoder::{Answer, Decoder, fresh_id};
use pd_tests::golden::{self, GoldenPrompt};
use pd_tests::paths;
use pd_tests::stack::Worker;
use shared::control::{
    ClusterKey, ControlClient, Incoming, PairSpec, PrefillEvent, PrefillReport, PrefillRequest, PrefillSpec,
    Require,
};
use shared::model::Model;
use std::time::Duration;

/// The text that the gateway would encode.
fn text(model: &Model, p: &GoldenPrompt) -> String {
    match (&p.messages, &p.text) {
        (Some(messages), _) => {
            let template = model.template.as_ref().unwrap();
            template.render(messages, None, true, &serde_json::Map::default()).unwrap()
        }
        (None, Some(text)) => text.clone(),
        (None, None) => panic!("{} has no prompt", p.name),
    }
}

#[test]
fn tokens_equal_those_of_transformers() {
    let model = Model::open(&paths::model()).unwrap();
    let golden = golden::load();
    assert!(golden.prompts.len() >= 20);
    for p in &golden.prompts {
        assert_eq!(model.tokenizer.encode(&text(&model, p), false).unwrap(), p.prompt_ids, "{}", p.name);
        assert_eq!(
            model.tokenizer.decode_with_special(&p.prompt_ids).unwrap(),
            text(&model, p),
            "{}",
            p.name
        );
        assert_eq!(model.tokenizer.decode_with_special(&p.new_ids).unwrap(), p.text_out, "{}", p.name);
    }
}

/// Every difference is a failure, but for ties, which are listed.
fn judge(route: &str, results: Vec<Result<Option<String>, String>>) {
    let (mut ties, mut wrong) = (vec![], vec![]);
    for r in results {
        match r {
            Ok(None) => {}
            Ok(Some(tie)) => ties.push(tie),
            Err(difference) => wrong.push(difference),
        }
    }
    for tie in &ties {
        eprintln!("{route}: tie: {tie}");
    }
    assert!(wrong.is_empty(), "{route}: {wrong:#?}");
}

/// Both routes in one test: they share the machine, and one model is loaded at a time.
#[tokio::test(flavor = "multi_thread")]
async fn greedy_answers_equal_those_of_mlx_lm_on_both_routes() {
    let golden = golden::load();
    let n = |p: &GoldenPrompt| u32::try_from(p.new_ids.len()).unwrap();
    let decode = Worker::decode(&paths::model(), &[]);
    let decoder = decode.decoder().await;
    let mut native = vec![];
    for p in &golden.prompts {
        let answer = decoder.native(&p.prompt_ids, n(p)).await;
        native.push(answer.ids);
    }
    drop((decoder, decode));
    judge("native", golden.prompts.iter().zip(&native).map(|(p, ids)| p.compare(ids)).collect());

    let decode = Worker::decode(&paths::model(), &[]);
    let bridge = Bridge::start(&decode).await;
    let mut bridged = vec![];
    for p in &golden.prompts {
        let (answer, report) = bridge.answer(&p.prompt_ids, n(p)).await;
        let r = answer.receipt.as_ref().unwrap_or_else(|| panic!("{}: {answer:?}", p.name));
        let t = u32::try_from(p.prompt_ids.len()).unwrap();
        assert_eq!((r.cached_tokens, r.native_tokens), (t - 1, 1), "{}", p.name);
        let bytes = bridge.decoder.hello.cache.as_ref().unwrap().layout.bytes_per_token()
            * u64::from(r.bridged_tokens);
        assert!(report.payload_bytes * 100 <= bytes * 101 && report.payload_bytes >= bytes, "{}", p.name);
        bridged.push(answer.ids);
    }
    judge("bridged", golden.prompts.iter().zip(&bridged).map(|(p, ids)| p.compare(ids)).collect());
    let differing = golden.prompts.iter().zip(native.iter().zip(&bridged)).filter(|(_, (n, b))| n != b);
    for (p, (n, b)) in differing {
        let step = n.iter().zip(b).position(|(x, y)| x != y).unwrap();
        assert!(p.gaps[step] < golden::TIE_GAP, "{}: native and bridged differ at step {step}", p.name);
    }
}

/// Cache contents that mlx-lm holds after the same prompt, in mean, size and single elements.
#[tokio::test(flavor = "multi_thread")]
async fn caches_equal_those_of_mlx_lm() {
    let golden = golden::load();
    let dir = tempfile::tempdir().unwrap();
    let inspect = ["--inspect-dir", dir.path().to_str().unwrap(), "--cache-dtype", "f32"];
    let decode = Worker::decode(&paths::model(), &inspect);
    let bridge = Bridge::start(&decode).await;
    let mut compared = 0;
    for p in golden.prompts.iter().filter(|p| p.cache.is_some()) {
        for route in ["native", "bridged"] {
            let file = format!("{}-{route}.safetensors", p.name);
            bridge.inspect(&p.prompt_ids, &file, route == "bridged").await;
            let bytes = std::fs::read(dir.path().join(&file)).unwrap();
            let arrays = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            for (layer, expected) in p.cache.as_ref().unwrap().iter().enumerate() {
                for (part, e) in ["k", "v"].iter().zip(expected) {
                    let array = arrays.tensor(&format!("layers.{layer}.{part}")).unwrap();
                    let (tokens, dim) = (array.shape()[1], array.shape()[2]);
                    assert_eq!(tokens, p.prompt_ids.len() - 1);
                    let (words, _) = array.data().as_chunks::<4>();
                    let x: Vec<f64> = words.iter().map(|w| f64::from(f32::from_le_bytes(*w))).collect();
                    let mean = x.iter().sum::<f64>() / x.len() as f64;
                    let rms = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64).sqrt();
                    let what = format!("{} {route} layer {layer} {part}", p.name);
                    // f32 sums in another order, through up to 30 layers.
                    let near = |got: f64, want: f64, tolerance: f64| (got - want).abs() <= tolerance;
                    assert!(near(rms, e.rms, 1e-4 * e.rms), "{what}: rms {rms}, mlx-lm has {}", e.rms);
                    assert!(near(mean, e.mean, 1e-4 * e.rms), "{what}: mean {mean}, mlx-lm has {}", e.mean);
                    for (h, t, d, want) in &e.samples {
                        let got = x[(h * tokens + t) * dim + d];
                        assert!(
                            near(got, *want, 2e-3 * e.rms),
                            "{what} [{h}, {t}, {d}]: {got}, mlx-lm has {want}"
                        );
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 2000, "{compared}");
}

/// FIELD-CASES 22: peak memory grew with the prompt while blocks were written.
#[tokio::test(flavor = "multi_thread")]
async fn field_22_memory_of_a_transfer_is_bounded() {
    let decode = Worker::decode(&paths::model(), &[]);
    let bridge = Bridge::start(&decode).await;
    let per_token = bridge.decoder.hello.cache.as_ref().unwrap().layout.bytes_per_token();
    let peaks = |w: &Worker| w.process.memory_bytes("VmHWM");
    let (Some(_), Some(_)) = (peaks(&decode), peaks(&bridge.prefill)) else { return };
    let ids =
        |n: u32, salt: u32| (0..n).map(|i| 3 + (i * 7919 + salt * 104_729) % 49_000).collect::<Vec<u32>>();
    // Warm up: thread pools, scratch buffers of a full chunk.
    bridge.answer(&ids(700, 1), 1).await;
    let before = (peaks(&decode).unwrap(), peaks(&bridge.prefill).unwrap());
    let tokens = 2000;
    bridge.answer(&ids(tokens, 2), 1).await;
    let after = (peaks(&decode).unwrap(), peaks(&bridge.prefill).unwrap());
    let cache = per_token * u64::from(tokens);
    // The decoder keeps the blocks in its store and the sequence in the engine; the prefill worker its own cache and
    // a prefix cache of it: two copies of the cache on either side, and at most 64 MiB beyond.
    let grown = [after.0 - before.0, after.1 - before.1];
    eprintln!(
        "cache {} MiB; peaks grew by: decode {} MiB, prefill {} MiB",
        cache >> 20,
        grown[0] >> 20,
        grown[1] >> 20
    );
    for (side, grown) in ["decode", "prefill"].iter().zip(grown) {
        assert!(grown <= 2 * cache + (64 << 20), "{side} grew by {} MiB", grown >> 20);
    }
    let stats = bridge.stats().await;
    assert!(stats.send_buffer_peak_bytes <= 64 << 20, "{stats:?}");
}

/// A prefill worker that is paired with a decode worker, driven without a gateway.
struct Bridge {
    decoder: Decoder,
    prefill: Worker,
    client: ControlClient<PrefillRequest, PrefillEvent>,
}

impl Bridge {
    async fn start(decode: &Worker) -> Self {
        let prefill = Worker::prefill(&paths::model(), &[]);
        let decoder = decode.decoder().await;
        let limit = Duration::from_secs(60);
        let (client, _) =
            ControlClient::connect(&prefill.addresses.control, &ClusterKey::loopback(), limit).await.unwrap();
        let pair = PairSpec {
            cache: decoder.hello.cache.clone().unwrap(),
            tokenizer_digest: decoder.hello.tokenizer_digest,
            control_addr: decode.addresses.control.clone(),
        };
        let paired = client.call(&PrefillRequest::Pair(pair), limit).await.unwrap();
        assert!(matches!(paired, PrefillEvent::Paired { foreign_layers: 0 }), "{paired:?}");
        Self { decoder, prefill, client }
    }

    /// Prepares, opens a transfer for what is missing, and starts the prefill.
    async fn begin(&self, tokens: &[u32]) -> (String, tokio::task::JoinHandle<PrefillReport>) {
        let id = fresh_id("bridge");
        let resident = self.decoder.prepare(&id, tokens).await.unwrap();
        let end = u32::try_from(tokens.len()).unwrap() - 1;
        let offer = self.decoder.offer(&id, resident..end, 120_000).await.unwrap();
        let spec = PrefillSpec {
            request_id: id.clone(),
            tokens: tokens.to_vec().into(),
            fingerprint: self.decoder.hello.cache.as_ref().unwrap().fingerprint,
            offer,
            deadline_ms: 300_000,
        };
        let mut events = self.client.request(&PrefillRequest::Prefill(spec)).await.unwrap();
        let report = tokio::spawn(async move {
            loop {
                match events.next().await {
                    Some(Incoming::Event(PrefillEvent::Progress { .. })) => {}
                    Some(Incoming::Event(PrefillEvent::Done(report))) => return report,
                    other => panic!("{other:?}"),
                }
            }
        });
        (id, report)
    }

    async fn answer(&self, tokens: &[u32], max_new_tokens: u32) -> (Answer, PrefillReport) {
        let (id, report) = self.begin(tokens).await;
        let answer = self.decoder.generate(&id, max_new_tokens, Require::Complete).await;
        (answer, report.await.unwrap())
    }

    async fn inspect(&self, tokens: &[u32], file: &str, bridged: bool) {
        let id = if bridged {
            let (id, report) = self.begin(tokens).await;
            report.await.unwrap();
            id
        } else {
            let id = fresh_id("inspect");
            self.decoder.prepare(&id, tokens).await.unwrap();
            id
        };
        self.decoder.inspect(&id, file).await;
    }

    async fn stats(&self) -> shared::control::PrefillStats {
        match self.client.call(&PrefillRequest::GetStats, Duration::from_secs(10)).await.unwrap() {
            PrefillEvent::Stats(stats) => stats,
            other => panic!("{other:?}"),
        }
    }
}
