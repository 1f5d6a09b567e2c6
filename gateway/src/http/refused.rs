//! Fields of other servers that would change the answer and are not offered: refused rather than silently left
//! out, so that nobody trusts a wrong answer. Values that mean "off" pass.

use super::error::ApiError;
use super::params::Fields;
use serde_json::Value;

/// When a field's value changes nothing.
enum Off {
    Never,
    False,
    Zero,
    One,
    Empty,
    Text(&'static [&'static str]),
}

impl Off {
    fn is(&self, value: &Value) -> bool {
        match self {
            Self::Never => false,
            Self::False => value == false,
            Self::Zero => value.as_f64() == Some(0.0) || value == false,
            Self::One => value.as_f64() == Some(1.0),
            Self::Empty => match value {
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::String(text) => text.is_empty(),
                _ => false,
            },
            Self::Text(words) => match value {
                Value::String(word) => words.contains(&word.as_str()),
                Value::Array(list) => list.iter().all(|w| w.as_str().is_some_and(|w| words.contains(&w))),
                _ => false,
            },
        }
    }
}

const TEXT_ONLY: &str = "this is a text model";
const NOT_OFFERED: &str = "is not offered here";

/// Fields of every inference endpoint.
const FIELDS: &[(&str, Off, &str)] = &[
    ("modalities", Off::Text(&["text"]), TEXT_ONLY),
    ("audio", Off::Never, TEXT_ONLY),
    ("prediction", Off::Never, "predicted output is not offered here"),
    ("web_search_options", Off::Never, "nothing is fetched from the web here"),
    ("verbosity", Off::Text(&["medium"]), "the model has no such control; say it in the prompt"),
    ("functions", Off::Empty, "use `tools`"),
    ("function_call", Off::Text(&["none", "auto"]), "use `tool_choice`"),
    ("suffix", Off::Empty, "inserting text is not offered"),
    ("use_beam_search", Off::False, NOT_OFFERED),
    ("length_penalty", Off::One, NOT_OFFERED),
    ("min_tokens", Off::Zero, NOT_OFFERED),
    ("bad_words", Off::Empty, NOT_OFFERED),
    ("allowed_token_ids", Off::Empty, NOT_OFFERED),
    ("logits_processors", Off::Empty, NOT_OFFERED),
    ("truncate_prompt_tokens", Off::Never, NOT_OFFERED),
    ("include_stop_str_in_output", Off::False, NOT_OFFERED),
    ("prompt_logprobs", Off::Never, "use `echo` with `logprobs` on /v1/completions"),
    ("prompt_embeds", Off::Never, "prompts are text or token ids"),
    ("chat_template", Off::Never, "the model's own template is used"),
    ("continue_final_message", Off::False, NOT_OFFERED),
    ("kv_transfer_params", Off::Never, "transfers are planned by the gateway"),
];

/// Refuses what is not offered.
///
/// # Errors
/// 400 naming the parameter.
pub(super) fn check(f: &Fields) -> Result<(), ApiError> {
    FIELDS.iter().try_for_each(|(name, off, why)| f.refuse(name, |v| off.is(v), why))
}

#[cfg(test)]
mod tests {
    use super::super::params::fields;
    use super::*;
    use serde_json::json;

    #[test]
    fn only_values_that_mean_off_pass() {
        let off = json!({"modalities": ["text"], "audio": null, "functions": [], "suffix": "", "min_tokens": 0,
            "use_beam_search": false, "length_penalty": 1.0, "unknown": 7});
        assert_eq!(check(&fields(off)), Ok(()));
        for on in [
            json!({"modalities": ["text", "audio"]}),
            json!({"audio": {"voice": "x"}}),
            json!({"prediction": {"type": "content", "content": "x"}}),
            json!({"functions": [{}]}),
            json!({"suffix": "x"}),
            json!({"min_tokens": 5}),
            json!({"use_beam_search": true}),
            json!({"chat_template": "{{ x }}"}),
        ] {
            let name = on.as_object().unwrap().keys().next().unwrap().clone();
            assert_eq!(check(&fields(on)).unwrap_err().body()["error"]["param"], name.as_str());
        }
    }
}
