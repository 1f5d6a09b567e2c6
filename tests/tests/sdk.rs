//! Foreign clients as judges of what the front door says, against the real model where its skill does not matter, and a
//! scripted decode worker where an answer must be a certain one. The scripts are in `clients/`.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; versions are shown"
)]

use pd_tests::clients::{self, Doors, Program};
use pd_tests::http::{Event, get, post};
use pd_tests::stack::Stack;
use pd_tests::tiny;
use serde_json::json;

async fn judged(program: Program, script: &str) {
    let doors = Doors::open().await;
    eprintln!("{}", doors.judged(program, script).await);
}

#[tokio::test]
async fn the_official_python_sdk_is_content() {
    judged(Program::Python, "openai_sdk.py").await;
}

#[tokio::test]
async fn the_official_node_sdk_is_content() {
    judged(Program::Node, "node/openai_sdk.mjs").await;
}

#[tokio::test]
async fn the_ai_sdk_is_content() {
    judged(Program::Node, "node/ai_sdk.mjs").await;
}

#[tokio::test]
async fn langchain_is_content() {
    judged(Program::Frameworks, "frameworks/langchain_client.py").await;
}

#[tokio::test]
async fn litellm_is_content() {
    judged(Program::Frameworks, "frameworks/litellm_client.py").await;
}

#[tokio::test]
async fn llm_comply_is_content() {
    judged(Program::Frameworks, "frameworks/llm_comply_run.py").await;
}

#[tokio::test]
async fn the_openapi_document_is_true() {
    let stack = Stack::start(tiny::model(), &["--block-tokens", "16"], &[], &[]).await;
    let addr = &stack.gateway.addr;
    let argument = json!({"url": format!("http://{addr}"), "examples": 20, "seed": 7});
    eprintln!("{}", clients::judged(Program::Frameworks, "frameworks/schemathesis_run.py", &argument).await);

    // What schemathesis cannot look into: the parts of streams that end with `[DONE]`.
    let document = get(addr, "/openapi.json").await.json();
    for (path, part) in [("/v1/chat/completions", "ChatChunk"), ("/v1/completions", "CompletionChunk")] {
        let mut schema = document.clone();
        schema["$ref"] = format!("#/components/schemas/{part}").into();
        let judge = jsonschema::validator_for(&schema).unwrap();
        assert!(!judge.is_valid(&json!({"id": 1})));
        for more in [json!({}), json!({"stream_options": {"include_usage": true}, "n": 2})] {
            let mut body = json!({"stream": true, "max_tokens": 3, "prompt": "x", "logprobs": 1,
                "messages": [{"role": "user", "content": "x"}]});
            if part == "ChatChunk" {
                body["logprobs"] = true.into();
            }
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let events = post(addr, path, &[], &body).await.events();
            let (Some(Event::Done), chunks) = (events.last(), &events[..events.len() - 1]) else {
                panic!("{events:?}")
            };
            assert!(chunks.len() >= 2, "{events:?}");
            for chunk in chunks {
                let Event::Data(chunk) = chunk else { panic!("{chunk:?}") };
                let errors: Vec<_> = judge.iter_errors(chunk).map(|e| e.to_string()).collect();
                assert!(errors.is_empty(), "{errors:?}: {chunk}");
            }
        }
    }
}
