//! What OpenAI's endpoints promise, with a decode worker that follows a script: exact bytes where clients look at them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::fakes::{FakeDecode, Step};
use pd_tests::http::{Event, post};
use pd_tests::stack::Gateway;
use pd_tests::tiny::{self, ids};
use pd_tests::wait;
use serde_json::{Value, json};
use shared::control::FinishReason::{Length, Stop};
use std::time::Duration;

fn each(choice: u32, text: &str) -> Vec<Step> {
    ids(text).into_iter().map(|id| Step::TokensOf(choice, vec![id])).collect()
}

fn whole(text: &str) -> Vec<Step> {
    [vec![Step::Started], each(0, text), vec![Step::Finished(Stop)]].concat()
}

/// Two choices that take turns.
fn two() -> Vec<Step> {
    vec![
        Step::Started,
        Step::TokensOf(1, ids("x")),
        Step::TokensOf(0, ids("a")),
        Step::TokensOf(1, ids("yz")),
        Step::FinishedOf(1, Length),
        Step::TokensOf(0, ids("b")),
        Step::FinishedOf(0, Stop),
    ]
}

async fn alone(script: Vec<Step>) -> (FakeDecode, Gateway) {
    let decode = FakeDecode::start(tiny::model(), script).await;
    let gateway = Gateway::start(tiny::model(), &decode.server.addr, None, &[]).await;
    (decode, gateway)
}

async fn ask(gateway: &Gateway, path: &str, body: &Value) -> Value {
    let reply = post(&gateway.addr, path, &[], body).await;
    assert_eq!(reply.status, 200, "{body}: {}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

/// The stream's bytes, with the answer's name, time and model replaced by letters.
async fn stream(gateway: &Gateway, path: &str, body: &Value) -> String {
    let reply = post(&gateway.addr, path, &[("x-request-id", "R")], body).await;
    assert_eq!(reply.status, 200, "{body}: {}", String::from_utf8_lossy(&reply.body));
    let text = String::from_utf8(reply.body.to_vec()).unwrap();
    let first: Value =
        reply.events().into_iter().find_map(|e| if let Event::Data(v) = e { Some(v) } else { None }).unwrap();
    text.replace(&first["created"].to_string(), "T").replace(&first["model"].to_string(), "M")
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}), more)
}

fn text(more: Value) -> Value {
    with(json!({"prompt": "hi", "max_tokens": 16}), more)
}

#[allow(clippy::needless_pass_by_value, reason = "literals read better")]
fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn several_choices_each_have_their_text_and_end() {
    let (decode, gateway) = alone(two()).await;
    for path in [CHAT, TEXT] {
        let body =
            if path == CHAT { chat(json!({"n": 2, "seed": 5})) } else { text(json!({"n": 2, "seed": 5})) };
        let answer = ask(&gateway, path, &body).await;
        let choice = |i: usize| {
            let c = &answer["choices"][i];
            let text = c["text"].as_str().or(c["message"]["content"].as_str()).unwrap().to_owned();
            (c["index"].as_u64().unwrap(), text, c["finish_reason"].as_str().unwrap().to_owned())
        };
        assert_eq!(choice(0), (0, "ab".to_owned(), "stop".to_owned()));
        assert_eq!(choice(1), (1, "xyz".to_owned(), "length".to_owned()));
        assert_eq!(answer["usage"]["completion_tokens"], 5);
        let spec = decode.specs().pop().unwrap();
        assert_eq!((spec.choices, spec.sampling.seed), (2, 5));
    }
    let want = r#"data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":T,"model":M,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":T,"model":M,"choices":[{"index":1,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":T,"model":M,"choices":[{"index":1,"delta":{"content":"x"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":T,"model":M,"choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":T,"model":M,"choices":[{"index":1,"delta":{"content":"yz"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":T,"model":M,"choices":[{"index":1,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}

data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":T,"model":M,"choices":[{"index":0,"delta":{"content":"b"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":T,"model":M,"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}

data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":T,"model":M,"choices":[],"usage":{"prompt_tokens":P,"completion_tokens":5,"total_tokens":Q,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}}

data: [DONE]

"#;
    let prompt = decode.prompts().pop().map_or(0, |p| p.len());
    // The chat's prompt is longer than the text's.
    let chat_prompt = decode.prompts()[0].len();
    assert!(chat_prompt > prompt);
    let want =
        want.replace(":P,", &format!(":{chat_prompt},")).replace(":Q,", &format!(":{},", chat_prompt + 5));
    let body = chat(json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}}));
    assert_eq!(stream(&gateway, CHAT, &body).await, want);
    let body = text(json!({"n": 2, "stream": true}));
    let got = stream(&gateway, TEXT, &body).await;
    let line = r#"data: {"id":"cmpl-R","object":"text_completion","created":T,"model":M,"choices":[{"index":1,"text":"yz","logprobs":null,"finish_reason":null}]}"#;
    assert!(got.contains(line) && got.ends_with("data: [DONE]\n\n"), "{got}");
}

#[tokio::test]
async fn a_stop_text_ends_its_choice_alone_and_never_leaks() {
    let script = vec![
        Step::Started,
        Step::TokensOf(0, ids("one E")),
        Step::TokensOf(1, ids("two ")),
        Step::TokensOf(0, ids("ND never")),
        Step::Pause(Duration::from_millis(100)),
        Step::TokensOf(0, ids("too late")),
        Step::FinishedOf(0, Stop),
        Step::TokensOf(1, ids("more")),
        Step::FinishedOf(1, Stop),
    ];
    let (decode, gateway) = alone(script).await;
    let body = chat(json!({"n": 2, "stop": ["END", "zzz"], "logprobs": true}));
    let answer = ask(&gateway, CHAT, &body).await;
    let contents: Vec<&Value> = (0..2).map(|i| &answer["choices"][i]["message"]["content"]).collect();
    assert_eq!(contents, [&json!("one "), &json!("two more")]);
    let tokens: String = answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["token"].as_str().unwrap())
        .collect();
    assert_eq!(tokens, "one ");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    // Seven tokens up to the end of the stop text, and eight of the other choice.
    assert_eq!(answer["usage"]["completion_tokens"], 15);
    assert_eq!(decode.stopped(), [0]);
    assert!(decode.cancelled().is_empty());
    // The last open choice is stopped by ending the request.
    let endless = [vec![Step::Started], each(0, "a🦀b"), vec![Step::Silence]].concat();
    decode.play(endless);
    let got = stream(&gateway, CHAT, &chat(json!({"stop": "🦀b", "stream": true}))).await;
    assert!(got.contains(r#""content":"a""#) && !got.contains('🦀') && got.contains(r#""stop""#), "{got}");
    wait::until("a cancel", Duration::from_secs(5), || async { decode.cancelled().pop() }).await;
}

#[tokio::test]
async fn chat_logprobs_have_tokens_bytes_and_alternatives() {
    let (decode, gateway) = alone(whole("a🦀")).await;
    let answer = ask(&gateway, CHAT, &chat(json!({"logprobs": true, "top_logprobs": 2}))).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(
        content[0],
        json!({"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}]})
    );
    let bytes: Vec<u8> =
        content.iter().map(|t| u8::try_from(t["bytes"][0].as_u64().unwrap()).unwrap()).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), "a🦀");
    assert_eq!(decode.specs()[0].logprobs, Some(2));
    // In a stream the tokens of a character come with it.
    let got = stream(&gateway, CHAT, &chat(json!({"logprobs": true, "stream": true}))).await;
    let line = got.lines().find(|l| l.contains("\"content\":\"🦀\"")).unwrap();
    assert_eq!(line.matches("\"logprob\":").count(), 4, "{line}");
    let plain = ask(&gateway, CHAT, &chat(json!({}))).await;
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
    assert_eq!(decode.specs().pop().unwrap().logprobs, None);
}

#[tokio::test]
async fn completions_echo_with_offsets() {
    let (decode, gateway) = alone(whole("bc")).await;
    let answer = ask(&gateway, TEXT, &text(json!({"prompt": "né", "echo": true, "logprobs": 1}))).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "nébc");
    let l = &choice["logprobs"];
    assert_eq!(l["text_offset"], json!([0, 1, 1, 2, 3]));
    assert_eq!(l["tokens"], json!(["n", "\u{fffd}", "\u{fffd}", "b", "c"]));
    assert_eq!(l["token_logprobs"], json!([null, -0.5, -0.5, -0.5, -0.5]));
    assert_eq!(l["top_logprobs"][0], Value::Null);
    assert_eq!(l["top_logprobs"][3], json!({"b": -0.5}));
    let spec = decode.specs().pop().unwrap();
    assert_eq!((spec.logprobs, spec.prompt_logprobs), (Some(1), Some(1)));
    // Only the prompt is wanted.
    let only = text(json!({"prompt": "né", "echo": true, "logprobs": 0, "max_tokens": 0}));
    let answer = ask(&gateway, TEXT, &only).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("né"), &json!("length")));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -0.5, -0.5]));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    // Without log probabilities, streamed, as token ids.
    let body = text(json!({"prompt": ids("hey"), "echo": true, "stream": true, "n": 1}));
    let got = stream(&gateway, TEXT, &body).await;
    let texts: Vec<&str> = got.split("\"text\":\"").skip(1).map(|t| t.split('"').next().unwrap()).collect();
    assert_eq!(texts, ["hey", "b", "c", ""]);
    assert_eq!(decode.specs().pop().unwrap().prompt_logprobs, None);
}

#[tokio::test]
async fn several_prompts_are_answered_as_numbered_choices() {
    let (decode, gateway) = alone(two()).await;
    let prompts = [json!(["ab", "cde"]), json!([ids("ab"), ids("cde")])];
    for prompt in prompts {
        let body = text(json!({"prompt": prompt, "n": 2, "echo": true}));
        let reply = post(&gateway.addr, TEXT, &[], &body).await;
        let answer = reply.json();
        let texts: Vec<&Value> = (0..4).map(|i| &answer["choices"][i]["text"]).collect();
        assert_eq!(texts, [&json!("abab"), &json!("abxyz"), &json!("cdeab"), &json!("cdexyz")]);
        assert_eq!(answer["usage"]["prompt_tokens"], 5);
        assert_eq!(answer["usage"]["completion_tokens"], 10);
        let v = reply.verdict();
        assert_eq!(v.prompt_tokens, 5);
        let again =
            pd_tests::http::get(&gateway.addr, &format!("/v1/bridge/verdicts/{}", v.request_id)).await;
        assert_eq!(again.json()["prompt_tokens"], 5);
    }
    let body = text(
        json!({"prompt": ["ab", "cde"], "n": 2, "stream": true, "stream_options": {"include_usage": true}}),
    );
    let reply = post(&gateway.addr, TEXT, &[], &body).await;
    let mut texts = vec![String::new(); 4];
    let mut ends = [0; 4];
    let events = reply.events();
    for event in &events {
        let Event::Data(v) = event else { continue };
        let Some(choice) = v["choices"].get(0) else { continue };
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        texts[index].push_str(choice["text"].as_str().unwrap());
        ends[index] += usize::from(choice["finish_reason"].is_string());
    }
    assert_eq!((texts, ends), (vec!["ab".into(), "xyz".into(), "ab".into(), "xyz".into()], [1; 4]));
    assert_eq!(events.iter().filter(|e| **e == Event::Done).count(), 1);
    assert_eq!(events.last(), Some(&Event::Done));
    let verdict = events.iter().any(|e| matches!(e, Event::Comment(c) if c.contains("\"prompt_tokens\":5")));
    assert!(verdict, "{events:?}");
    assert_eq!(decode.prompts().len(), 6);
}

#[tokio::test]
async fn every_sampling_field_reaches_the_decoder() {
    let (decode, gateway) = alone(whole("ok")).await;
    let fields = json!({"temperature": 0.25, "top_p": 0.5, "top_k": 40, "min_p": 0.125, "presence_penalty": 1.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.25, "logit_bias": {"7": -100}, "seed": 11, "user": "u",
        "metadata": {"k": "v"}, "stop_token_ids": [9], "unknown_field": {"deep": [1]}});
    for path in [CHAT, TEXT] {
        let body = if path == CHAT { chat(fields.clone()) } else { text(fields.clone()) };
        ask(&gateway, path, &body).await;
        let spec = decode.specs().pop().unwrap();
        let s = spec.sampling;
        assert_eq!((s.temperature, s.top_p, s.top_k, s.min_p), (0.25, 0.5, 40, 0.125));
        assert_eq!((s.presence_penalty, s.frequency_penalty, s.repetition_penalty), (1.5, -0.5, 1.25));
        assert_eq!((s.logit_bias, s.seed, spec.max_new_tokens), (vec![(7, -100.0)], 11, 16));
        assert!(spec.stop_token_ids.contains(&9) && spec.stop_token_ids.contains(&2));
    }
}

#[tokio::test]
async fn wrong_values_are_400_and_name_the_parameter() {
    let (decode, gateway) = alone(whole("ok")).await;
    let bad = [
        (CHAT, json!({"n": 99}), "n"),
        (CHAT, json!({"top_logprobs": 3}), "top_logprobs"),
        (CHAT, json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (CHAT, json!({"logprobs": 3}), "logprobs"),
        (CHAT, json!({"logit_bias": {"999999": 1}}), "logit_bias.999999"),
        (CHAT, json!({"metadata": {"k": 1}}), "metadata.k"),
        (CHAT, json!({"audio": {"voice": "x", "format": "wav"}}), "audio"),
        (CHAT, json!({"modalities": ["text", "audio"]}), "modalities"),
        (CHAT, json!({"prediction": {"type": "content", "content": "x"}}), "prediction"),
        (TEXT, json!({"logprobs": 21}), "logprobs"),
        (TEXT, json!({"logprobs": true}), "logprobs"),
        (TEXT, json!({"max_tokens": 0}), "max_tokens"),
        (TEXT, json!({"echo": 1}), "echo"),
        (TEXT, json!({"suffix": "x"}), "suffix"),
        (TEXT, json!({"prompt": ["a", 1]}), "prompt[1]"),
        (TEXT, json!({"prompt": vec!["x"; 200]}), "prompt"),
        (TEXT, json!({"best_of": 3}), "best_of"),
    ];
    for (path, more, param) in bad {
        let body = if path == CHAT { chat(more) } else { text(more) };
        let reply = post(&gateway.addr, path, &[], &body).await;
        assert_eq!(reply.status, 400, "{body:.120}");
        assert_eq!(reply.json()["error"]["param"], param, "{body:.120}");
    }
    assert!(decode.specs().is_empty());
}

#[tokio::test]
async fn texts_become_tokens_and_back() {
    let (_decode, gateway) = alone(whole("ok")).await;
    let post = async |path: &'static str, body: Value| {
        let reply = post(&gateway.addr, path, &[], &body).await;
        (reply.status.as_u16(), reply.json())
    };
    let want =
        json!({"count": 3, "max_model_len": tiny::MAX_TOKENS, "tokens": ids("né"), "token_strs": null});
    assert_eq!(post("/tokenize", json!({"prompt": "né"})).await, (200, want));
    let (status, strs) = post("/tokenize", json!({"prompt": "a b", "return_token_strs": true})).await;
    assert_eq!((status, &strs["token_strs"]), (200, &json!(["a", "Ġ", "b"])));
    let (_, chat) = post("/tokenize", json!({"messages": [{"role": "user", "content": "hi"}]})).await;
    let (status, back) = post("/detokenize", json!({"tokens": chat["tokens"]})).await;
    assert_eq!(
        (status, &back["prompt"]),
        (200, &json!("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    );
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 1}), "prompt"),
        ("/tokenize", json!({"prompt": "x", "messages": []}), "prompt"),
        ("/tokenize", json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [1, "x"]}), "tokens[1]"),
        ("/detokenize", json!({"tokens": [999_999]}), "tokens[0]"),
    ] {
        let (status, reply) = post(path, body).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)), "{path}");
    }
}
