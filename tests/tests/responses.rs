//! `/v1/responses` with a decode worker that writes what a test says: every event, its number and its order.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::fakes::{FakeDecode, Step};
use pd_tests::http::{Event, post};
use pd_tests::stack::Gateway;
use pd_tests::tiny;
use serde_json::{Value, json};
use shared::control::FinishReason::{Length, Stop};
use shared::control::{Constraint, FinishReason, WorkerError, WorkerErrorCode};

const PATH: &str = "/v1/responses";

fn writes(pieces: &[&str], reason: FinishReason) -> Vec<Step> {
    let tokens = pieces.iter().map(|text| Step::Tokens(tiny::ids(text)));
    [vec![Step::Started], tokens.collect(), vec![Step::Finished(reason)]].concat()
}

async fn alone(script: Vec<Step>, extra: &[&str]) -> (FakeDecode, Gateway) {
    let decode = FakeDecode::start(tiny::model(), script).await;
    let gateway = Gateway::start(tiny::model(), &decode.server.addr, None, extra).await;
    (decode, gateway)
}

fn ask(more: &Value) -> Value {
    let mut body = json!({"input": "hi", "max_output_tokens": 100});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Events of a stream, after what holds for every stream was checked.
async fn events(gateway: &Gateway, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = true.into();
    let reply = post(&gateway.addr, PATH, &[], &body).await;
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let _ = reply.verdict();
    let mut names = Vec::new();
    let mut data = Vec::new();
    for event in reply.events() {
        match event {
            Event::Other(line) => names.push(line.strip_prefix("event: ").unwrap().to_owned()),
            Event::Data(value) => data.push(value),
            other => panic!("{other:?}"),
        }
    }
    let types: Vec<&str> = data.iter().map(|d| d["type"].as_str().unwrap()).collect();
    assert_eq!(names, types);
    let numbers: Vec<u64> = data.iter().map(|d| d["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..data.len() as u64).collect::<Vec<_>>());
    data
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|e| e["type"].as_str().unwrap().strip_prefix("response.").unwrap()).collect()
}

#[tokio::test]
async fn a_text_is_one_message_streamed_and_whole() {
    let (decode, gateway) = alone(writes(&["Hel", "lo"], Stop), &[]).await;
    let body = ask(&json!({"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5}));
    let whole = post(&gateway.addr, PATH, &[], &body).await.json();
    assert_eq!(
        (&whole["object"], &whole["status"], &whole["store"]),
        (&json!("response"), &json!("completed"), &json!(false))
    );
    assert_eq!(whole["output"].as_array().unwrap().len(), 1);
    let message = &whole["output"][0];
    assert_eq!(
        (&message["type"], &message["role"], &message["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    assert_eq!(
        message["content"][0],
        json!({"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []})
    );
    assert_eq!(
        (&whole["metadata"], &whole["temperature"], &whole["instructions"]),
        (&json!({"a": "b"}), &json!(0.5), &json!("Be brief."))
    );
    assert_eq!(whole["usage"]["output_tokens"], 5);
    assert_eq!(whole["usage"]["total_tokens"], whole["usage"]["input_tokens"].as_u64().unwrap() + 5);
    let prompt = tiny::text(decode.prompts().last().unwrap());
    assert!(prompt.starts_with("system\nBe brief.") && prompt.contains("user\nhi"), "{prompt}");
    assert_eq!(decode.specs().last().unwrap().max_new_tokens, 100);

    let events = events(&gateway, &body).await;
    let want = [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(types(&events), want);
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[0]["response"]["output"], json!([]));
    assert_eq!(
        (&events[4]["delta"], &events[5]["delta"], &events[6]["text"]),
        (&json!("Hel"), &json!("lo"), &json!("Hello"))
    );
    let id = &events[2]["item"]["id"];
    assert!(events[3..8].iter().all(|e| &e["item_id"] == id && e["output_index"] == 0));
    let last = &events[9]["response"];
    assert_eq!((&last["output"][0]["id"], &last["id"]), (id, &events[0]["response"]["id"]));
    assert_eq!(last["usage"], whole["usage"]);
}

#[tokio::test]
async fn thoughts_text_and_calls_are_items_in_order() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let script = writes(&["<think>", "hm", "</think>", "Sure.", call], Stop);
    let (decode, gateway) = alone(script, &["--reasoning-parser", "qwen3"]).await;
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]);
    let body = ask(&json!({ "tools": tools }));
    let whole = post(&gateway.addr, PATH, &[], &body).await.json();
    let kinds: Vec<&Value> = whole["output"].as_array().unwrap().iter().map(|i| &i["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(whole["output"][0]["content"], json!([{"type": "reasoning_text", "text": "hm"}]));
    let called = &whole["output"][2];
    assert_eq!((&called["name"], &called["arguments"]), (&json!("f"), &json!(r#"{"a":1}"#)));
    assert!(
        called["call_id"].as_str().unwrap().starts_with("call_")
            && called["id"].as_str().unwrap().starts_with("fc_")
    );
    let mut repeated = tools.clone();
    repeated[0]["description"] = Value::Null;
    repeated[0]["strict"] = Value::Null;
    assert_eq!(whole["tools"], repeated);
    assert!(whole["completed_at"].as_u64() >= whole["created_at"].as_u64());
    assert!(whole["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
    let events = events(&gateway, &body).await;
    let mut want = vec![
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
    ];
    let deltas = types(&events).iter().filter(|t| **t == "function_call_arguments.delta").count();
    assert!(deltas > 0);
    want.extend(vec!["function_call_arguments.delta"; deltas]);
    want.extend(["function_call_arguments.done", "output_item.done", "completed"]);
    assert_eq!(types(&events), want);
    // The next turn brings everything with it.
    let mut items = vec![json!({"role": "user", "content": "hi"})];
    items.extend(whole["output"].as_array().unwrap().clone());
    items.push(json!({"type": "function_call_output", "call_id": called["call_id"], "output": "42"}));
    let reply = post(&gateway.addr, PATH, &[], &ask(&json!({"input": items, "tools": tools}))).await;
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let prompt = tiny::text(decode.prompts().last().unwrap());
    assert!(prompt.contains("<tool_response>\n42\n</tool_response>") && prompt.contains("Sure."), "{prompt}");
}

#[tokio::test]
async fn ends_that_are_not_complete_say_so() {
    let (decode, gateway) = alone(writes(&["Hel"], Length), &[]).await;
    let whole = post(&gateway.addr, PATH, &[], &ask(&json!({}))).await.json();
    assert_eq!(
        (&whole["status"], &whole["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    assert_eq!(events(&gateway, &ask(&json!({}))).await.last().unwrap()["type"], "response.incomplete");
    let broken = Step::Error(WorkerError::new(WorkerErrorCode::Engine, "gone"));
    decode.play(vec![Step::Started, Step::Tokens(tiny::ids("x")), broken]);
    let events = events(&gateway, &ask(&json!({}))).await;
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["error"]["message"]),
        (&json!("response.failed"), &json!("gone"))
    );
    assert_eq!(post(&gateway.addr, PATH, &[], &ask(&json!({}))).await.status, 500);
}

#[tokio::test]
async fn forms_and_tools_of_this_endpoint_have_their_own_notation() {
    let (decode, gateway) = alone(writes(&["{}"], Stop), &[]).await;
    let schema = json!({"type": "object"});
    let format = json!({"format": {"type": "json_schema", "name": "x", "strict": true, "schema": schema}});
    let reply = post(&gateway.addr, PATH, &[], &ask(&json!({ "text": format }))).await;
    assert_eq!(reply.status, 200);
    assert_eq!(decode.constraints().pop(), Some(Constraint::JsonSchema { schema: schema.to_string() }));
    for (more, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "c"}), "conversation"),
        (json!({"background": true}), "background"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"input": null}), "input"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}),
            "input[0].content[0]",
        ),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name"),
        (json!({"text": {"format": {"type": "json_schema", "name": "x", "schema": 1}}}), "text.format"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"instructions": 1}), "instructions"),
    ] {
        let reply = post(&gateway.addr, PATH, &[], &ask(&more)).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["error"]["param"]), (400, &json!(param)), "{more}");
        let _ = reply.verdict();
    }
}
