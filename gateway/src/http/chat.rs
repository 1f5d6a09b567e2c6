//! `POST /v1/chat/completions`

use super::App;
use super::answer::{Exchange, Prompt, Request, answer};
use super::bridge_headers::Asked;
use super::error::ApiError;
use super::ops::check_model;
use super::params::{Fields, wrong_type};
use super::sampling::{Common, max_tokens};
use super::shape::Kind;
use super::write_clock::WriteClock;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Roles that templates know.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Answers a conversation.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(clock): Extension<WriteClock>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let exchange = Exchange::new(&headers, clock);
    let answered = async {
        let asked = Asked::read(&headers)?;
        let fields = Fields::read(body, app.settings.max_body_bytes).await?;
        check_model(&app, &fields)?;
        let request = read(&app, &fields)?;
        Box::pin(answer(&app, &exchange, asked, request)).await
    };
    match answered.await {
        Ok(response) => response,
        Err(error) => exchange.refuse(&app, error),
    }
}

fn read(app: &App, f: &Fields) -> Result<Request, ApiError> {
    let common = Common::read(f)?;
    let max_new_tokens = match max_tokens(f, "max_completion_tokens")? {
        Some(tokens) => Some(tokens),
        None => max_tokens(f, "max_tokens")?,
    };
    let messages = messages(f)?;
    let template = app.ctx.model.template.as_ref().ok_or_else(|| {
        ApiError::unsupported("messages", "this model has no chat template; use /v1/completions")
    })?;
    let extra = match f.value("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(extra)) => extra.clone(),
        Some(other) => return Err(wrong_type("chat_template_kwargs", "an object", other)),
    };
    let text = template
        .render(&messages, None, true, &extra)
        .map_err(|e| ApiError::invalid("messages", format!("the chat template refused: {e}")))?;
    // A template writes its own start token.
    Ok(Request { kind: Kind::Chat, prompt: Prompt::Text(text, false), common, max_new_tokens })
}

/// Checks the messages and makes every content a string, which is what templates expect.
fn messages(f: &Fields) -> Result<Value, ApiError> {
    let list = match f.value("messages") {
        None => return Err(ApiError::invalid("messages", "`messages` is required")),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err(ApiError::invalid("messages", "`messages` is empty")),
        Some(other) => return Err(wrong_type("messages", "a list", other)),
    };
    list.iter().enumerate().map(|(i, m)| message(i, m)).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

fn message(i: usize, message: &Value) -> Result<Value, ApiError> {
    let Value::Object(message) = message else {
        return Err(wrong_type(&format!("messages[{i}]"), "an object", message));
    };
    let param = |name: &str| format!("messages[{i}].{name}");
    let role = match message.get("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => role.as_str(),
        Some(Value::String(role)) => {
            return Err(ApiError::invalid(
                param("role"),
                format!("`{role}` is not one of {}", ROLES.join(", ")),
            ));
        }
        Some(other) => return Err(wrong_type(&param("role"), "a string", other)),
        None => return Err(ApiError::invalid(param("role"), "a message needs a role")),
    };
    let content = match message.get("content") {
        Some(Value::String(text)) => Value::String(text.clone()),
        Some(Value::Array(parts)) => Value::String(text_of(&param("content"), parts)?),
        None | Some(Value::Null) if role == "assistant" => Value::String(String::new()),
        None | Some(Value::Null) => {
            return Err(ApiError::invalid(param("content"), format!("a {role} message needs content")));
        }
        Some(other) => return Err(wrong_type(&param("content"), "a string or a list of parts", other)),
    };
    let mut out = message.clone();
    // `developer` is the newer name of the same role, which templates of open models do not know.
    out.insert("role".to_owned(), Value::from(if role == "developer" { "system" } else { role }));
    out.insert("content".to_owned(), content);
    Ok(Value::Object(out))
}

fn text_of(param: &str, parts: &[Value]) -> Result<String, ApiError> {
    let mut text = String::new();
    for (i, part) in parts.iter().enumerate() {
        let param = format!("{param}[{i}]");
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(piece)) => text.push_str(piece),
            (Some("text"), None) => {
                return Err(wrong_type(&format!("{param}.text"), "a string", &part["text"]));
            }
            (Some(kind), _) => {
                return Err(ApiError::unsupported(
                    param,
                    format!("this is a text model, it can't take `{kind}` parts"),
                ));
            }
            (None, _) => return Err(ApiError::invalid(param, "a part needs a type")),
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::super::params::fields;
    use super::*;
    use serde_json::json;

    fn param(list: &Value) -> Option<String> {
        messages(&fields(json!({ "messages": list })))
            .err()
            .and_then(|e| Some(e.body()["error"]["param"].as_str()?.to_owned()))
    }

    #[test]
    fn parts_become_text() {
        let f = fields(json!({"messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "name": "x"}]}));
        let got = messages(&f).unwrap();
        assert_eq!(
            got,
            json!([{"role": "system", "content": "ab"}, {"role": "assistant", "content": "", "name": "x"}])
        );
    }

    #[test]
    fn bad_messages_are_named() {
        for (list, name) in [
            (json!([]), "messages"),
            (json!("x"), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "king", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
                "messages[0].content[0]",
            ),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        ] {
            assert_eq!(param(&list).as_deref(), Some(name));
        }
    }
}
