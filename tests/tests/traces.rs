//! One request, one trace, three processes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::collector::{Collector, Span};
use pd_tests::http::{BRIDGE, completion, post};
use pd_tests::scene::prompt;
use pd_tests::stack::Stack;
use pd_tests::{tiny, wait};
use shared::verdict::VerdictKind;
use std::time::Duration;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT: &str = "b7ad6b7169203331";

/// Every span that one bridged request makes: program, name, and the name of its parent.
const TREE: [(&str, &str, &str); 15] = [
    ("pd-bridge", "POST /v1/completions", "client"),
    ("pd-bridge", "queue", "POST /v1/completions"),
    ("pd-bridge", "tokenize", "POST /v1/completions"),
    ("pd-bridge", "plan", "POST /v1/completions"),
    ("pd-bridge", "prefill", "POST /v1/completions"),
    ("pd-bridge", "transfer", "POST /v1/completions"),
    ("pd-bridge", "decode", "POST /v1/completions"),
    ("pd-prefill", "prefill worker", "prefill"),
    ("pd-prefill", "compute", "prefill worker"),
    ("pd-prefill", "send rest", "prefill worker"),
    ("pd-decode", "decode worker", "decode"),
    ("pd-decode", "wait for transfer", "decode worker"),
    ("pd-decode", "ingest", "decode worker"),
    ("pd-decode", "prefill rest", "decode worker"),
    ("pd-decode", "decode steps", "decode worker"),
];

#[tokio::test]
async fn a_request_is_one_trace_over_all_three_processes() {
    let collector = Collector::start().await;
    let flags = ["--otlp-endpoint", collector.url.as_str()];
    let decode = [&["--block-tokens", "16"], &flags[..]].concat();
    let stack = Stack::start(tiny::model(), &decode, &flags, &flags).await;
    let text = prompt(300);
    let parent = format!("00-{TRACE}-{CLIENT}-01");
    let asked = [BRIDGE, ("traceparent", parent.as_str())];
    let reply = post(&stack.gateway.addr, "/v1/completions", &asked, &completion(&text, 6)).await;
    assert_eq!((reply.status.as_u16(), reply.verdict().verdict), (200, VerdictKind::Complete));
    let own = reply.headers["traceparent"].to_str().unwrap().to_owned();
    let spans = wait::until("all spans", Duration::from_secs(20), || async {
        let spans: Vec<Span> = collector.spans().into_iter().filter(|s| s.trace_id == TRACE).collect();
        let has = |name: &str| spans.iter().any(|s| s.name == name);
        TREE.iter().all(|(_, name, _)| has(name)).then_some(spans)
    })
    .await;
    for (service, name, parent) in TREE {
        let span = spans.iter().find(|s| s.name == name).unwrap();
        assert_eq!(span.service, service, "{name}");
        let of_parent = spans.iter().find(|s| s.span_id == span.parent_id);
        let parent_name = if span.parent_id == CLIENT { "client" } else { &of_parent.unwrap().name };
        assert_eq!(parent_name, parent, "{name}");
        assert!(span.start_ns > 0 && span.end_ns >= span.start_ns, "{span:?}");
    }
    let named = |name: &str| spans.iter().find(|s| s.name == name).unwrap();
    let root = named("POST /v1/completions");
    assert_eq!(own, format!("00-{TRACE}-{}-01", root.span_id));
    let fact = |key: &str| root.attributes.iter().find(|(k, _)| k == key).unwrap().1.clone();
    assert_eq!(
        (fact("http.response.status_code"), fact("pd_bridge.verdict")),
        ("200".into(), "complete".into())
    );
    assert_eq!(
        (fact("gen_ai.usage.input_tokens"), fact("gen_ai.usage.output_tokens")),
        ("300".into(), "6".into())
    );
    // What happens within a span happens within its time; clocks are the same here.
    for name in ["plan", "prefill", "decode"] {
        let part = named(name);
        assert!(
            part.start_ns >= root.start_ns && part.end_ns <= root.end_ns,
            "{name} lies outside the request"
        );
    }
    // Nothing of the text is told.
    assert!(!format!("{spans:?}").contains(&text[..20]));
    // A client that says that it keeps no trace causes none; one that says nothing, or nonsense, begins one.
    let count = collector.spans().len();
    let unsampled = format!("00-{}-{CLIENT}-00", TRACE.replace('0', "1"));
    post(&stack.gateway.addr, "/v1/completions", &[("traceparent", &unsampled)], &completion(&text, 1)).await;
    let reply =
        post(&stack.gateway.addr, "/v1/completions", &[("traceparent", "00-x-y-z")], &completion(&text, 1))
            .await;
    let fresh = reply.headers["traceparent"].to_str().unwrap()[3..35].to_owned();
    wait::until("the new trace", Duration::from_secs(20), || async {
        collector.spans().iter().any(|s| s.trace_id == fresh && s.parent_id.is_empty()).then_some(())
    })
    .await;
    assert!(!collector.spans()[count..].iter().any(|s| unsampled.contains(&s.trace_id)));
}

#[tokio::test]
async fn without_an_endpoint_there_are_no_traces() {
    let stack = Stack::start(tiny::model(), &["--block-tokens", "16"], &[], &[]).await;
    let parent = format!("00-{TRACE}-{CLIENT}-01");
    let reply =
        post(&stack.gateway.addr, "/v1/completions", &[("traceparent", &parent)], &completion("x", 2)).await;
    assert_eq!(reply.status, 200);
    assert!(!reply.headers.contains_key("traceparent"));
}
