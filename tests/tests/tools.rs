//! Tools, forms of answers and thoughts, with a decode worker that writes what a test says: exact bytes where clients look
//! at them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::fakes::{FakeDecode, Step};
use pd_tests::http::{Event, post};
use pd_tests::stack::{Gateway, Worker};
use pd_tests::tiny;
use serde_json::{Value, json};
use shared::control::FinishReason::{Length, Stop};
use shared::control::{Constraint, FinishReason};

const CHAT: &str = "/v1/chat/completions";

/// The model writes this text, one byte per message.
fn writes(text: &str, reason: FinishReason) -> Vec<Step> {
    let tokens = tiny::ids(text).into_iter().map(|id| Step::Tokens(vec![id]));
    [vec![Step::Started], tokens.collect(), vec![Step::Finished(reason)]].concat()
}

async fn alone(script: Vec<Step>, extra: &[&str]) -> (FakeDecode, Gateway) {
    let decode = FakeDecode::start(tiny::model(), script).await;
    let gateway = Gateway::start(tiny::model(), &decode.server.addr, None, extra).await;
    (decode, gateway)
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "does it", "parameters": {"type": "object",
        "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false}}})
}

fn chat(more: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Chunks of a stream: delta and reason of each.
async fn deltas(gateway: &Gateway, body: &Value) -> Vec<(Value, Value)> {
    let reply = post(&gateway.addr, CHAT, &[], body).await;
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let events = reply.events();
    assert_eq!(events.last(), Some(&Event::Done));
    let chunk = |e: Event| match e {
        Event::Data(v) => Some((v["choices"][0]["delta"].clone(), v["choices"][0]["finish_reason"].clone())),
        _ => None,
    };
    events.into_iter().filter_map(chunk).collect()
}

const CALLS: &str = "Sure.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}\n</tool_call>\n\
                     <tool_call>\n{\"name\": \"time\", \"arguments\": {\"city\": \"Bonn\"}}\n</tool_call>";

#[tokio::test]
async fn field_15_tool_calls_stream_and_end_as_such() {
    let (decode, gateway) = alone(writes(CALLS, Stop), &[]).await;
    let tools = json!({"tools": [tool("weather"), tool("time")]});
    let reply = post(&gateway.addr, CHAT, &[], &chat(&tools)).await.json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Sure.\n");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let call = |i: usize| {
        (calls[i]["function"]["name"].as_str().unwrap(), calls[i]["function"]["arguments"].as_str().unwrap())
    };
    assert_eq!([call(0), call(1)], [("weather", r#"{"city":"Köln"}"#), ("time", r#"{"city":"Bonn"}"#)]);
    assert!(calls[0]["type"] == "function" && calls[0]["id"].as_str().unwrap().starts_with("call_"));
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let mut body = chat(&tools);
    body["stream"] = true.into();
    let chunks = deltas(&gateway, &body).await;
    assert_eq!(chunks.first().unwrap().0, json!({"role": "assistant", "content": ""}));
    assert_eq!(chunks.last().unwrap(), &(json!({}), json!("tool_calls")));
    assert!(chunks[..chunks.len() - 1].iter().all(|(_, reason)| reason.is_null()));
    let (mut names, mut arguments, mut steps) = (vec![], vec![String::new(); 2], 0);
    for (delta, _) in &chunks {
        let Some(call) = delta["tool_calls"].get(0) else { continue };
        let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
        if let Some(name) = call["function"]["name"].as_str() {
            assert!(call["id"].is_string() && call["type"] == "function" && names.len() == index);
            names.push(name);
        } else {
            assert!(call.get("id").is_none() && call.get("type").is_none());
            steps += 1;
        }
        arguments[index].push_str(call["function"]["arguments"].as_str().unwrap());
    }
    assert_eq!(names, ["weather", "time"]);
    assert_eq!(arguments, [r#"{"city":"Köln"}"#, r#"{"city":"Bonn"}"#]);
    assert!(steps > 4, "arguments come in pieces: {chunks:?}");
    // The tools are in the prompt, though this template knows nothing of tools.
    let prompt = tiny::text(decode.prompts().last().unwrap());
    assert!(prompt.contains("<tools>") && prompt.contains(r#""name":"weather""#), "{prompt}");
    assert!(decode.constraints().is_empty());
    // One call only; a call that the budget cut is no complete call.
    let one = chat(&json!({"tools": [tool("weather"), tool("time")], "parallel_tool_calls": false}));
    let reply = post(&gateway.addr, CHAT, &[], &one).await.json();
    assert_eq!(reply["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    decode.play(writes(&CALLS[..60], Length));
    let reply = post(&gateway.addr, CHAT, &[], &chat(&tools)).await.json();
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn without_tools_marks_are_text() {
    let (decode, gateway) = alone(writes(CALLS, Stop), &[]).await;
    for more in [json!({}), json!({"tools": [tool("weather")], "tool_choice": "none"}), json!({"tools": []})]
    {
        let reply = post(&gateway.addr, CHAT, &[], &chat(&more)).await.json();
        let choice = &reply["choices"][0];
        assert_eq!(choice["message"]["content"], CALLS);
        assert_eq!((&choice["finish_reason"], choice["message"].get("tool_calls")), (&json!("stop"), None));
        assert!(!tiny::text(decode.prompts().last().unwrap()).contains("weather"));
    }
}

#[tokio::test]
async fn forced_calls_are_a_grammar_in_the_model_s_format() {
    let (decode, gateway) = alone(writes(CALLS, Stop), &[]).await;
    let named = json!({"type": "function", "function": {"name": "time"}});
    for (choice, has_weather) in [(json!("required"), true), (named, false)] {
        let more = json!({"tools": [tool("weather"), tool("time")], "tool_choice": choice});
        let reply = post(&gateway.addr, CHAT, &[], &chat(&more)).await.json();
        assert_eq!(reply["choices"][0]["finish_reason"], "tool_calls");
        let Some(Constraint::Lark { grammar }) = decode.constraints().pop() else { panic!("no grammar") };
        assert!(grammar.contains(r#""<tool_call>\n{\"name\": \"time\", \"arguments\": ""#), "{grammar}");
        assert_eq!(grammar.contains("weather"), has_weather);
    }
    // A model whose marks are no text gets a plain list, and it is read as calls.
    let list = r#"[{"name": "time", "parameters": {"city": "Bonn"}}]"#;
    let (decode, gateway) = alone(writes(list, Stop), &["--tool-parser", "mistral"]).await;
    let more = json!({"tools": [tool("time")], "tool_choice": "required"});
    let reply = post(&gateway.addr, CHAT, &[], &chat(&more)).await.json();
    let call = &reply["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(call, &json!({"name": "time", "arguments": r#"{"city":"Bonn"}"#}));
    assert_eq!(reply["choices"][0]["message"]["content"], Value::Null);
    assert!(matches!(decode.constraints().pop(), Some(Constraint::Lark { .. })));
}

#[tokio::test]
async fn forms_become_constraints_and_bad_ones_are_named() {
    let (decode, gateway) = alone(writes("{}", Stop), &[]).await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    let want = Constraint::JsonSchema { schema: schema.to_string() };
    for (path, more, want) in [
        (CHAT, json!({"response_format": format}), want.clone()),
        (CHAT, json!({"response_format": {"type": "json_object"}}), Constraint::JsonObject),
        (CHAT, json!({"guided_json": schema}), want.clone()),
        (CHAT, json!({"guided_regex": "[ab]+"}), Constraint::Regex { pattern: "[ab]+".into() }),
        (
            CHAT,
            json!({"guided_grammar": "start: \"a\""}),
            Constraint::Lark { grammar: "start: \"a\"".into() },
        ),
        ("/v1/completions", json!({"prompt": "x", "response_format": format}), want),
    ] {
        let reply = post(&gateway.addr, path, &[], &chat(&more)).await;
        assert_eq!(reply.status, 200, "{more}");
        assert_eq!(decode.constraints().pop(), Some(want));
    }
    let bad = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}});
    let reply = post(&gateway.addr, CHAT, &[], &chat(&json!({"response_format": bad}))).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["error"]["param"]), (400, &json!("response_format")));
    // What only the decoder can judge is as clear.
    decode.refuse_constraints("unsupported keyword");
    let reply = post(&gateway.addr, CHAT, &[], &chat(&json!({"response_format": format}))).await;
    let error = &reply.json()["error"];
    assert_eq!((reply.status.as_u16(), &error["param"]), (400, &json!("response_format")));
    assert!(error["message"].as_str().unwrap().contains("unsupported keyword"));
    let more = json!({"tools": [tool("time")], "tool_choice": "required"});
    let reply = post(&gateway.addr, CHAT, &[], &chat(&more)).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["error"]["param"]), (400, &json!("tools")));
}

#[tokio::test]
async fn field_25_bad_tools_and_calls_are_400() {
    let (decode, gateway) = alone(writes("ok", Stop), &[]).await;
    let function = |f: Value| json!({"tools": [{"type": "function", "function": f}]});
    let deep = (0..80).fold(json!({}), |inner, _| json!({ "not": inner }));
    for (more, param) in [
        (function(json!({"name": "a b"})), "tools[0].function.name"),
        (function(json!({"name": "f", "parameters": {"properties": 1}})), "tools[0].function.parameters"),
        (function(json!({"name": "f", "parameters": deep})), "tools[0].function.parameters"),
        (json!({"tools": "x"}), "tools"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (
            json!({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
            "tool_choice",
        ),
        (json!({"chat_template_kwargs": 1}), "chat_template_kwargs"),
    ] {
        let reply = post(&gateway.addr, CHAT, &[], &chat(&more)).await;
        assert_eq!(
            (reply.status.as_u16(), &reply.json()["error"]["param"]),
            (400, &json!(param)),
            "{more:.200}"
        );
    }
    assert!(decode.specs().is_empty());
}

#[tokio::test]
async fn earlier_calls_and_results_are_in_the_prompt() {
    let (decode, gateway) = alone(writes("ok", Stop), &[]).await;
    let messages = json!([{"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c1", "type": "function",
            "function": {"name": "weather", "arguments": "{\"city\": \"Bonn\"}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"}]);
    let reply =
        post(&gateway.addr, CHAT, &[], &json!({"messages": messages, "tools": [tool("weather")]})).await;
    assert_eq!(reply.status, 200);
    let prompt = tiny::text(decode.prompts().last().unwrap());
    let call = "<tool_call>\n{\"name\":\"weather\",\"arguments\":{\"city\":\"Bonn\"}}\n</tool_call>";
    assert!(prompt.contains(call) && prompt.contains("<tool_response>\nrain\n</tool_response>"), "{prompt}");
}

#[tokio::test]
async fn thoughts_have_both_names() {
    let written = "<think>hmm\n</think>\n\nyes";
    let (decode, gateway) = alone(writes(written, Stop), &["--reasoning-parser", "qwen3"]).await;
    let reply = post(&gateway.addr, CHAT, &[], &chat(&json!({}))).await.json();
    let message = &reply["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["reasoning"]), (&json!("hmm\n"), &json!("hmm\n")));
    assert_eq!(message["content"], "yes");
    let usage = &reply["usage"];
    let thought = usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!(0 < thought && thought < usage["completion_tokens"].as_u64().unwrap(), "{usage}");
    let chunks = deltas(&gateway, &chat(&json!({"stream": true}))).await;
    let joined = |name: &str| chunks.iter().filter_map(|(d, _)| d[name].as_str()).collect::<String>();
    assert_eq!(
        (joined("reasoning_content"), joined("reasoning"), joined("content")),
        ("hmm\n".into(), "hmm\n".into(), "yes".into())
    );
    // A form begins after the thought.
    let reply =
        post(&gateway.addr, CHAT, &[], &chat(&json!({"response_format": {"type": "json_object"}}))).await;
    assert_eq!(reply.status, 200);
    let Some(Constraint::Lark { grammar }) = decode.constraints().pop() else { panic!("no grammar") };
    assert!(grammar.contains("</think>") && grammar.contains("%json"), "{grammar}");
}

/// The same promises kept by the real decode worker, whose tiny model knows nothing and is held by the grammar alone.
#[tokio::test]
async fn a_real_decoder_keeps_to_every_form() {
    let worker = Worker::decode(tiny::model(), &["--block-tokens", "16"]);
    let gateway = Gateway::start(tiny::model(), &worker.addresses.control, None, &[]).await;
    let ask = async |path: &str, more: Value| {
        let reply = post(&gateway.addr, path, &[], &chat(&more)).await;
        assert_eq!(reply.status, 200, "{more}: {}", String::from_utf8_lossy(&reply.body));
        reply.json()
    };
    let integer = json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"], "additionalProperties": false});
    let function =
        |name: &str| json!({"type": "function", "function": {"name": name, "parameters": integer}});
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "sub"}})] {
        for format in ["seed 1", "seed 2"] {
            let more = json!({"tools": [function("add"), function("sub")], "tool_choice": choice, "seed": format.len(),
                "parallel_tool_calls": false, "messages": [{"role": "user", "content": format}]});
            let answer = ask(CHAT, more).await;
            let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
            let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
            assert!((0..100).contains(&arguments["a"].as_i64().unwrap()), "{call}");
            assert!(choice == "required" || call["name"] == "sub");
            assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
            assert_eq!(answer["choices"][0]["message"]["content"], Value::Null);
        }
    }
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": integer}});
    let answer = ask(CHAT, json!({"response_format": format, "n": 3, "seed": 4, "logprobs": true})).await;
    for choice in answer["choices"].as_array().unwrap() {
        let content = choice["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(content).unwrap();
        assert!(value["a"].is_i64() && value.as_object().unwrap().len() == 1, "{content}");
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!(tokens.iter().map(|t| t["token"].as_str().unwrap()).collect::<String>(), content);
        assert!(tokens.iter().all(|t| t["logprob"].as_f64().unwrap() <= 0.0));
    }
    let answer = ask("/v1/completions", json!({"prompt": "x", "guided_regex": "[ab]{3}"})).await;
    let text = answer["choices"][0]["text"].as_str().unwrap();
    assert!(text.len() == 3 && text.chars().all(|c| matches!(c, 'a' | 'b')), "{text}");
    let echo = json!({"prompt": "hello", "echo": true, "logprobs": 2, "max_tokens": 0});
    let answer = ask("/v1/completions", echo).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(
        (&answer["choices"][0]["text"], &logprobs["tokens"]),
        (&json!("hello"), &json!(["h", "e", "l", "l", "o"]))
    );
    let scores = logprobs["token_logprobs"].as_array().unwrap();
    assert!(scores[0].is_null() && scores[1..].iter().all(|s| s.as_f64().unwrap() < 0.0), "{scores:?}");
    let bad = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["x"], "properties": {"x": false}}}});
    let reply = post(&gateway.addr, CHAT, &[], &chat(&json!({ "response_format": bad }))).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["error"]["param"]), (400, &json!("response_format")));
}
