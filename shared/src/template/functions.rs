//! Functions and filters that transformers gives to chat templates.

use super::error::Raised;
use super::json::{Style, to_json};
use jiff::Zoned;
use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, Error, ErrorKind, Value};

pub(super) fn register(environment: &mut Environment<'_>) {
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(Raised(message)))
}

/// The local time in C's `strftime` notation.
fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &Zoned::now()).map_err(|e| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?})")).with_source(e)
    })
}

/// JSON as Python's `json.dumps` writes it: spaced separators, no HTML escapes, non-ASCII kept unless asked.
#[allow(clippy::needless_pass_by_value, reason = "minijinja passes these arguments by value")]
fn tojson(value: &Value, positional: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = match positional.first().cloned() {
        Some(indent) if !indent.is_none() => Some(usize::try_from(indent)?),
        _ => options.get::<Option<usize>>("indent")?,
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair")),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let json = serde_json::to_value(value)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, "tojson").with_source(e))?;
    Ok(Value::from(to_json(json, &Style { item, key, indent, ensure_ascii, sort_keys })))
}

/// `{% generation %}` marks what an assistant said, for training masks; it does not change the text. Here the pair
/// becomes a block of the same white-space control.
pub(super) fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let tag = &rest[start + 2..start + len];
        let replacement = match tag.trim_matches(['-', '+']).trim() {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(&rest[..start + 2]);
        match replacement {
            Some(new) => {
                let word = tag.trim_matches(['-', '+']).trim();
                out.push_str(&tag.replacen(word, new, 1));
            }
            None => out.push_str(tag),
        }
        out.push_str("%}");
        rest = &rest[start + len + 2..];
    }
    out.push_str(rest);
    out
}
