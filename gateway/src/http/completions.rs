//! `POST /v1/completions`

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
use serde_json::Value;
use std::sync::Arc;

/// What OpenAI's endpoint produces when nothing is said.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Completes a text or a list of token ids.
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
        let request = read(&fields)?;
        Box::pin(answer(&app, &exchange, asked, request)).await
    };
    match answered.await {
        Ok(response) => response,
        Err(error) => exchange.refuse(&app, error),
    }
}

fn read(f: &Fields) -> Result<Request, ApiError> {
    f.refuse("echo", |v| v == false, "repeating the prompt is not supported")?;
    f.refuse("suffix", |v| v == "", "inserting text is not supported")?;
    Ok(Request {
        kind: Kind::Completion,
        prompt: prompt(f)?,
        common: Common::read(f)?,
        max_new_tokens: Some(max_tokens(f, "max_tokens")?.unwrap_or(DEFAULT_MAX_TOKENS)),
    })
}

fn prompt(f: &Fields) -> Result<Prompt, ApiError> {
    match f.value("prompt") {
        None => Err(ApiError::invalid("prompt", "`prompt` is required")),
        Some(Value::String(text)) => Ok(Prompt::Text(text.clone(), true)),
        Some(Value::Array(list)) => match list.as_slice() {
            [] => Err(ApiError::invalid("prompt", "`prompt` is empty")),
            [Value::String(text)] => Ok(Prompt::Text(text.clone(), true)),
            [Value::Array(ids)] => token_ids(ids),
            [Value::String(_) | Value::Array(_), ..] => {
                Err(ApiError::unsupported("prompt", "one prompt per request is supported"))
            }
            ids => token_ids(ids),
        },
        Some(other) => Err(wrong_type("prompt", "a string or a list of token ids", other)),
    }
}

fn token_ids(ids: &[Value]) -> Result<Prompt, ApiError> {
    let id = |v: &Value| {
        v.as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| wrong_type("prompt", "a list of token ids", v))
    };
    ids.iter().map(id).collect::<Result<_, _>>().map(Prompt::Ids)
}

#[cfg(test)]
mod tests {
    use super::super::params::fields;
    use super::*;
    use serde_json::json;

    #[test]
    fn prompts_are_text_or_ids() {
        let read = |v| prompt(&fields(json!({ "prompt": v })));
        assert!(matches!(read(json!("a")), Ok(Prompt::Text(t, true)) if t == "a"));
        assert!(matches!(read(json!(["a"])), Ok(Prompt::Text(..))));
        assert!(matches!(read(json!([1, 2])), Ok(Prompt::Ids(ids)) if ids == [1, 2]));
        assert!(matches!(read(json!([[1, 2]])), Ok(Prompt::Ids(ids)) if ids == [1, 2]));
        for bad in [
            json!(null),
            json!([]),
            json!(["a", "b"]),
            json!([[1], [2]]),
            json!([-1]),
            json!([1.5]),
            json!({}),
        ] {
            assert!(read(bad).is_err());
        }
    }
}
