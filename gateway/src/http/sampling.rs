//! The parameters that all inference endpoints share.

use super::error::ApiError;
use super::params::{Fields, token_id, wrong_type};
use super::{metadata, refused};
use crate::pipeline::AnswerSpec;
use serde_json::Value;
use shared::control::Sampling;

/// Most stop texts of a request.
const MAX_STOPS: usize = 4;
/// Longest stop text, in bytes; as much text may be held back.
const MAX_STOP_BYTES: usize = 1024;
/// Most stop token ids of a request.
const MAX_STOP_TOKENS: usize = 64;
/// Most answers to one prompt.
const MAX_CHOICES: i64 = 16;
/// Most biased tokens of a request.
pub(super) const MAX_BIASES: usize = 1024;
/// Most alternatives of a token whose log probabilities are told.
pub(super) const MAX_TOP_LOGPROBS: i64 = 20;

/// How to answer and how to say it.
#[derive(Debug, Clone)]
pub(super) struct Common {
    /// Without what only one endpoint knows: log probabilities, constraint, limit.
    pub(super) spec: AnswerSpec,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

impl Common {
    /// Reads and checks them; token ids must be below `vocab_size`.
    ///
    /// # Errors
    /// 400 naming the parameter.
    pub(super) fn read(f: &Fields, vocab_size: usize) -> Result<Self, ApiError> {
        refused::check(f)?;
        f.string("user")?;
        metadata::check(f)?;
        let stream = f.boolean("stream")?;
        let spec = AnswerSpec {
            choices: choices(f)?,
            max_new_tokens: None,
            sampling: sampling(f, vocab_size)?,
            stops: stops(f)?,
            stop_token_ids: stop_token_ids(f, vocab_size)?,
            ignore_eos: f.boolean("ignore_eos")?,
            keep_special: f.value("skip_special_tokens").is_some() && !f.boolean("skip_special_tokens")?,
            logprobs: None,
            prompt_logprobs: None,
            constraint: None,
        };
        Ok(Self { spec, stream, include_usage: include_usage(f, stream)? })
    }
}

/// Largest answer that the client wants.
///
/// # Errors
/// 400 naming the parameter.
pub(super) fn max_tokens(f: &Fields, name: &str, least: i64) -> Result<Option<u32>, ApiError> {
    let tokens = f.integer(name, least, i64::from(u32::MAX))?;
    Ok(tokens.map(|n| u32::try_from(n).unwrap_or(u32::MAX)))
}

fn choices(f: &Fields) -> Result<u32, ApiError> {
    let n = f.integer("n", 1, MAX_CHOICES)?.unwrap_or(1);
    f.refuse("best_of", |v| v.as_f64() == Some(n as f64), "only as many as `n` can be produced")?;
    Ok(u32::try_from(n).unwrap_or(1))
}

fn sampling(f: &Fields, vocab_size: usize) -> Result<Sampling, ApiError> {
    let temperature = f.number("temperature", 0.0, 2.0)?.unwrap_or(1.0);
    let top_p = f.number("top_p", 0.0, 1.0)?.unwrap_or(1.0);
    // −1 is what other servers take for "all".
    let top_k = f.integer("top_k", -1, i64::from(u32::MAX))?.unwrap_or(0).max(0);
    let seed = match f.integer("seed", i64::MIN, i64::MAX)? {
        Some(seed) => u64::from_le_bytes(seed.to_le_bytes()),
        None => rand::random(),
    };
    let penalty = |name| Ok::<_, ApiError>(f.number(name, -2.0, 2.0)?.unwrap_or(0.0) as f32);
    Ok(Sampling {
        temperature: temperature as f32,
        top_p: top_p as f32,
        top_k: u32::try_from(top_k).unwrap_or(u32::MAX),
        seed,
        min_p: f.number("min_p", 0.0, 1.0)?.unwrap_or(0.0) as f32,
        presence_penalty: penalty("presence_penalty")?,
        frequency_penalty: penalty("frequency_penalty")?,
        repetition_penalty: f.number("repetition_penalty", 0.01, 10.0)?.unwrap_or(1.0) as f32,
        logit_bias: logit_bias(f, vocab_size)?,
    })
}

fn logit_bias(f: &Fields, vocab_size: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let map = match f.value("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) if map.len() <= MAX_BIASES => map,
        Some(Value::Object(_)) => {
            return Err(ApiError::invalid("logit_bias", format!("at most {MAX_BIASES} tokens")));
        }
        Some(other) => return Err(wrong_type("logit_bias", "an object", other)),
    };
    let entry = |(id, bias): (&String, &Value)| {
        let param = format!("logit_bias.{id:.20}");
        let id = id.parse::<u32>().ok().filter(|id| (*id as usize) < vocab_size);
        let id = id.ok_or_else(|| ApiError::invalid(&*param, "is not the id of a token"))?;
        match bias.as_f64() {
            Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((id, bias as f32)),
            Some(_) => Err(ApiError::invalid(param, "a bias is -100 to 100")),
            None => Err(wrong_type(&param, "a number", bias)),
        }
    };
    map.iter().map(entry).collect()
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

fn stop_token_ids(f: &Fields, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    let param = "stop_token_ids";
    let list = match f.value(param) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= MAX_STOP_TOKENS => list,
        Some(Value::Array(_)) => {
            return Err(ApiError::invalid(param, format!("at most {MAX_STOP_TOKENS} ids")));
        }
        Some(other) => return Err(wrong_type(param, "a list of token ids", other)),
    };
    let id = |v: &Value| {
        token_id(v)
            .filter(|id| (*id as usize) < vocab_size)
            .ok_or_else(|| ApiError::invalid(param, format!("{v} is not the id of a token")))
    };
    list.iter().map(id).collect()
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

#[cfg(test)]
mod tests {
    use super::super::params::fields;
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<Common, ApiError> {
        Common::read(&fields(value), 100)
    }

    #[test]
    fn defaults_are_the_field_s() {
        let c = read(json!({})).unwrap();
        let s = Sampling { seed: c.spec.sampling.seed, ..Sampling::default() };
        assert_eq!((c.spec.sampling, c.spec.choices), (s, 1));
        assert!(!c.stream && c.spec.stops.is_empty());
    }

    #[test]
    fn every_field_reaches_the_decoder() {
        let c = read(json!({"n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": -1, "min_p": 0.1,
            "presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.2,
            "logit_bias": {"5": -100, "99": 1.5}, "stop": ["a", "b", "c", "d"], "stop_token_ids": [3],
            "ignore_eos": true, "skip_special_tokens": false}))
        .unwrap();
        let want = Sampling {
            temperature: 0.5,
            top_p: 0.9,
            top_k: 7,
            seed: u64::MAX,
            min_p: 0.1,
            presence_penalty: 1.0,
            frequency_penalty: -1.5,
            repetition_penalty: 1.2,
            logit_bias: vec![(5, -100.0), (99, 1.5)],
        };
        assert_eq!((c.spec.sampling, c.spec.choices), (want, 3));
        assert_eq!((c.spec.stops.len(), c.spec.stop_token_ids), (4, vec![3]));
        assert!(c.spec.ignore_eos && c.spec.keep_special);
    }

    #[test]
    fn bad_values_are_refused_by_name() {
        for (body, name) in [
            (json!({"n": 0}), "n"),
            (json!({"n": 17}), "n"),
            (json!({"best_of": 2}), "best_of"),
            (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop"),
            (json!({"stop": [""]}), "stop"),
            (json!({"stop": [1]}), "stop"),
            (json!({"temperature": 2.1}), "temperature"),
            (json!({"min_p": -0.1}), "min_p"),
            (json!({"presence_penalty": 2.5}), "presence_penalty"),
            (json!({"frequency_penalty": "x"}), "frequency_penalty"),
            (json!({"repetition_penalty": 0}), "repetition_penalty"),
            (json!({"logit_bias": [1]}), "logit_bias"),
            (json!({"logit_bias": {"100": 1}}), "logit_bias.100"),
            (json!({"logit_bias": {"x": 1}}), "logit_bias.x"),
            (json!({"logit_bias": {"5": 101}}), "logit_bias.5"),
            (json!({"stop_token_ids": [100]}), "stop_token_ids"),
            (json!({"user": 1}), "user"),
            (json!({"metadata": {"a": 1}}), "metadata.a"),
            (json!({"modalities": ["audio"]}), "modalities"),
            (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        ] {
            let error = read(body).unwrap_err();
            assert_eq!(error.body()["error"]["param"], name);
        }
        let neutral = json!({"n": 1, "best_of": 1, "presence_penalty": 0, "logit_bias": {}, "user": "u",
            "metadata": {"a": "b"}, "unknown": {"deep": 1}, "stop": null});
        assert!(read(neutral).is_ok());
    }
}
