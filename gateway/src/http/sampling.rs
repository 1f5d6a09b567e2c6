//! The parameters that both inference endpoints share.

use super::error::ApiError;
use super::params::{Fields, wrong_type};
use serde_json::Value;
use shared::control::Sampling;

/// Most stop texts of a request.
const MAX_STOPS: usize = 4;
/// Longest stop text, in bytes; as much text may be held back.
const MAX_STOP_BYTES: usize = 1024;

/// How to answer and how to say it.
#[derive(Debug, Clone)]
pub(super) struct Common {
    pub(super) sampling: Sampling,
    pub(super) stops: Vec<String>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

impl Common {
    /// Reads and checks them.
    ///
    /// # Errors
    /// 400 naming the parameter.
    pub(super) fn read(f: &Fields) -> Result<Self, ApiError> {
        refuse_what_is_not_offered(f)?;
        let stream = f.boolean("stream")?;
        Ok(Self {
            sampling: sampling(f)?,
            stops: stops(f)?,
            stream,
            include_usage: include_usage(f, stream)?,
        })
    }
}

/// Largest answer that the client wants.
///
/// # Errors
/// 400 naming the parameter.
pub(super) fn max_tokens(f: &Fields, name: &str) -> Result<Option<u32>, ApiError> {
    let tokens = f.integer(name, 1, i64::from(u32::MAX))?;
    Ok(tokens.map(|n| u32::try_from(n).unwrap_or(u32::MAX)))
}

fn sampling(f: &Fields) -> Result<Sampling, ApiError> {
    let temperature = f.number("temperature", 0.0, 2.0)?.unwrap_or(1.0);
    let top_p = f.number("top_p", 0.0, 1.0)?.unwrap_or(1.0);
    // −1 is what other servers take for "all".
    let top_k = f.integer("top_k", -1, i64::from(u32::MAX))?.unwrap_or(0).max(0);
    let seed = match f.integer("seed", i64::MIN, i64::MAX)? {
        Some(seed) => u64::from_le_bytes(seed.to_le_bytes()),
        None => rand::random(),
    };
    Ok(Sampling {
        temperature: temperature as f32,
        top_p: top_p as f32,
        top_k: u32::try_from(top_k).unwrap_or(u32::MAX),
        seed,
        ..Sampling::default()
    })
}

fn stops(f: &Fields) -> Result<Vec<String>, ApiError> {
    let stops: Vec<String> = match f.value("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(list)) if list.len() <= MAX_STOPS => list
            .iter()
            .map(|v| v.as_str().map(str::to_owned).ok_or_else(|| wrong_type("stop", "a list of strings", v)))
            .collect::<Result<_, _>>()?,
        Some(Value::Array(_)) => {
            return Err(ApiError::invalid("stop", format!("`stop` has at most {MAX_STOPS} texts")));
        }
        Some(other) => return Err(wrong_type("stop", "a string or a list of strings", other)),
    };
    if stops.iter().any(|s| s.is_empty() || s.len() > MAX_STOP_BYTES) {
        return Err(ApiError::invalid("stop", format!("a stop text has 1 to {MAX_STOP_BYTES} bytes")));
    }
    Ok(stops)
}

fn include_usage(f: &Fields, stream: bool) -> Result<bool, ApiError> {
    match f.value("stream_options") {
        None => Ok(false),
        Some(_) if !stream => {
            Err(ApiError::invalid("stream_options", "`stream_options` is only allowed with `stream`"))
        }
        Some(Value::Object(options)) => match options.get("include_usage") {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(wanted)) => Ok(*wanted),
            Some(other) => Err(wrong_type("stream_options.include_usage", "a boolean", other)),
        },
        Some(other) => Err(wrong_type("stream_options", "an object", other)),
    }
}

/// What would change the answer and is not done here is refused, so that nobody trusts a wrong answer.
fn refuse_what_is_not_offered(f: &Fields) -> Result<(), ApiError> {
    let one = |v: &Value| v.as_f64() == Some(1.0);
    let zero = |v: &Value| v.as_f64() == Some(0.0);
    let off = |v: &Value| v.as_bool() == Some(false) || zero(v);
    let empty = |v: &Value| {
        v.as_array().is_some_and(Vec::is_empty) || v.as_object().is_some_and(serde_json::Map::is_empty)
    };
    f.refuse("n", one, "one answer per request is supported")?;
    f.refuse("best_of", one, "one answer per request is supported")?;
    f.refuse("logprobs", off, "log probabilities are not supported")?;
    f.refuse("top_logprobs", zero, "log probabilities are not supported")?;
    f.refuse("presence_penalty", zero, "penalties are not supported")?;
    f.refuse("frequency_penalty", zero, "penalties are not supported")?;
    f.refuse("repetition_penalty", one, "penalties are not supported")?;
    f.refuse("min_p", zero, "min_p sampling is not supported")?;
    f.refuse("logit_bias", empty, "biased sampling is not supported")?;
    f.refuse("tools", empty, "tools are not supported")?;
    f.refuse("functions", empty, "functions are not supported")?;
    f.refuse("response_format", |v| v["type"] == "text", "only `text` is supported")?;
    f.refuse(
        "modalities",
        |v| v.as_array().is_some_and(|m| m.iter().all(|m| m == "text")),
        "this is a text model",
    )?;
    f.refuse("audio", |_| false, "this is a text model")
}

#[cfg(test)]
mod tests {
    use super::super::params::fields;
    use super::*;
    use serde_json::json;

    fn param(value: Value) -> Option<String> {
        Common::read(&fields(value)).err().and_then(|e| Some(e.body()["error"]["param"].as_str()?.to_owned()))
    }

    #[test]
    fn defaults_are_the_field_s() {
        let c = Common::read(&fields(json!({}))).unwrap();
        assert_eq!((c.sampling.temperature, c.sampling.top_p, c.sampling.top_k), (1.0, 1.0, 0));
        assert!(!c.stream && c.stops.is_empty());
    }

    #[test]
    fn what_is_not_offered_is_refused_by_name() {
        for (body, name) in [
            (json!({"n": 2}), "n"),
            (json!({"logprobs": true}), "logprobs"),
            (json!({"tools": [{}]}), "tools"),
            (json!({"response_format": {"type": "json_object"}}), "response_format"),
            (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop"),
            (json!({"stop": [""]}), "stop"),
            (json!({"stop": [1]}), "stop"),
            (json!({"temperature": 2.1}), "temperature"),
            (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        ] {
            assert_eq!(param(body).as_deref(), Some(name));
        }
        let neutral = json!({"n": 1, "logprobs": false, "tools": [], "presence_penalty": 0, "logit_bias": {},
            "response_format": {"type": "text"}, "user": "u", "unknown": {"deep": 1}, "stop": null});
        assert_eq!(param(neutral), None);
    }
}
