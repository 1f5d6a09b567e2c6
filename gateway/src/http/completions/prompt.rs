//! The prompts of a completion request: one or several, as texts or as token ids.

use crate::http::answer::Prompt;
use crate::http::error::ApiError;
use crate::http::params::{Fields, token_id, wrong_type};
use serde_json::Value;

/// Most prompts of a request.
const MAX_PROMPTS: usize = 128;

/// Reads them.
///
/// # Errors
/// 400 naming the parameter.
pub(super) fn read(f: &Fields) -> Result<Vec<Prompt>, ApiError> {
    let special = f.value("add_special_tokens").is_none() || f.boolean("add_special_tokens")?;
    match f.value("prompt") {
        None => Err(ApiError::invalid("prompt", "`prompt` is required")),
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text.clone(), special)]),
        Some(Value::Array(list)) => match list.as_slice() {
            [] => Err(ApiError::invalid("prompt", "`prompt` is empty")),
            [Value::String(_) | Value::Array(_), ..] if list.len() > MAX_PROMPTS => {
                Err(ApiError::invalid("prompt", format!("at most {MAX_PROMPTS} prompts per request")))
            }
            [Value::String(_) | Value::Array(_), ..] => {
                list.iter().enumerate().map(|(i, v)| one(i, v, special)).collect()
            }
            ids => Ok(vec![token_ids("prompt", ids)?]),
        },
        Some(other) => Err(wrong_type("prompt", "a string or a list of token ids", other)),
    }
}

fn one(i: usize, value: &Value, special: bool) -> Result<Prompt, ApiError> {
    let param = format!("prompt[{i}]");
    match value {
        Value::String(text) => Ok(Prompt::Text(text.clone(), special)),
        Value::Array(ids) => token_ids(&param, ids),
        other => Err(wrong_type(&param, "a string or a list of token ids", other)),
    }
}

fn token_ids(param: &str, ids: &[Value]) -> Result<Prompt, ApiError> {
    let id = |v: &Value| token_id(v).ok_or_else(|| wrong_type(param, "a list of token ids", v));
    ids.iter().map(id).collect::<Result<_, _>>().map(Prompt::Ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::params::fields;
    use serde_json::json;

    #[test]
    fn prompts_are_texts_or_ids() {
        let prompts = |v| read(&fields(json!({ "prompt": v })));
        let text = |t: &str| Prompt::Text(t.to_owned(), true);
        assert_eq!(prompts(json!("a")), Ok(vec![text("a")]));
        assert_eq!(prompts(json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
        assert_eq!(prompts(json!([1, 2])), Ok(vec![Prompt::Ids(vec![1, 2])]));
        assert_eq!(prompts(json!([[1, 2], [3]])), Ok(vec![Prompt::Ids(vec![1, 2]), Prompt::Ids(vec![3])]));
        assert_eq!(prompts(json!(["a", [3]])), Ok(vec![text("a"), Prompt::Ids(vec![3])]));
        for bad in [
            json!(null),
            json!([]),
            json!(["a", 1]),
            json!([1, "a"]),
            json!([-1]),
            json!([1.5]),
            json!({}),
            json!(vec!["x"; 129]),
        ] {
            assert!(prompts(bad).is_err());
        }
    }

    #[test]
    fn special_tokens_can_be_left_out() {
        let f = fields(json!({"prompt": "a", "add_special_tokens": false}));
        assert_eq!(read(&f), Ok(vec![Prompt::Text("a".to_owned(), false)]));
    }
}
