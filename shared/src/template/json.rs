//! Python's way of writing JSON.

use serde_json::Value;
use std::fmt::Write as _;

/// Options of Python's `json.dumps`.
pub(super) struct Style {
    /// Between items.
    pub(super) item: String,
    /// Between a key and its value.
    pub(super) key: String,
    /// Spaces per level; `None` for a single line.
    pub(super) indent: Option<usize>,
    /// Escape everything outside ASCII.
    pub(super) ensure_ascii: bool,
    /// Sort the keys of every object.
    pub(super) sort_keys: bool,
}

pub(super) fn to_json(mut value: Value, style: &Style) -> String {
    if style.sort_keys {
        value.sort_all_objects();
    }
    let mut out = String::new();
    write_value(&mut out, &value, style, 0);
    out
}

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Value::Number(n) => out.push_str(&n.to_string()),
        Value::String(s) => write_string(out, s, style.ensure_ascii),
        Value::Array(items) => {
            write_items(out, ('[', ']'), items, style, depth, |out, item| {
                write_value(out, item, style, depth + 1);
            });
        }
        Value::Object(entries) => {
            write_items(out, ('{', '}'), entries, style, depth, |out, (key, item)| {
                write_string(out, key, style.ensure_ascii);
                out.push_str(&style.key);
                write_value(out, item, style, depth + 1);
            });
        }
    }
}

fn write_items<T>(
    out: &mut String,
    (open, close): (char, char),
    items: impl IntoIterator<Item = T>,
    style: &Style,
    depth: usize,
    write: impl Fn(&mut String, T),
) {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    out.push(open);
    let mut empty = true;
    for item in items {
        if !empty {
            out.push_str(&style.item);
        }
        empty = false;
        line(out, depth + 1);
        write(out, item);
    }
    if !empty {
        line(out, depth);
    }
    out.push(close);
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20
                || (ensure_ascii && !c.is_ascii())
                || (ensure_ascii && c == '\u{7f}') =>
            {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn style(indent: Option<usize>) -> Style {
        let item = if indent.is_some() { "," } else { ", " };
        Style { item: item.into(), key: ": ".into(), indent, ensure_ascii: false, sort_keys: false }
    }

    #[test]
    fn one_line_has_spaced_separators() {
        let value = json!({"b": [1, 2.5, null, true], "a": {"é": "<\"\\\n\u{1}>"}, "e": [], "f": {}});
        let want = r#"{"b": [1, 2.5, null, true], "a": {"é": "<\"\\\n\u0001>"}, "e": [], "f": {}}"#;
        assert_eq!(to_json(value, &style(None)), want);
    }

    #[test]
    fn indented() {
        let got = to_json(json!({"a": [1, {}], "b": 2}), &style(Some(2)));
        assert_eq!(got, "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": 2\n}");
    }

    #[test]
    fn sorted_and_ascii() {
        let style = Style { ensure_ascii: true, sort_keys: true, ..style(None) };
        assert_eq!(to_json(json!({"b": "é😀", "a": 1}), &style), r#"{"a": 1, "b": "\u00e9\ud83d\ude00"}"#);
    }
}
