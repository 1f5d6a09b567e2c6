//! Reading a request body: every wrong type or range is a 400 that names the parameter; unknown fields are
//! ignored; what is not offered is refused rather than silently left out.

use super::bodies::{Held, Share};
use super::error::ApiError;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::Value;

/// The fields of a request body.
pub(super) struct Fields {
    object: Object,
    /// They are about as large as the body they come from.
    _share: Option<Share>,
}

impl Fields {
    /// Parses a body.
    ///
    /// # Errors
    /// 400 when it is no JSON object.
    pub(super) fn parse(body: Held) -> Result<Self, ApiError> {
        Ok(Self { object: object(&body)?, _share: Some(body.into_share()) })
    }

    /// A field that is there and not null.
    pub(super) fn value(&self, name: &str) -> Option<&Value> {
        self.object.get(name).filter(|v| !v.is_null())
    }

    /// A string.
    pub(super) fn string(&self, name: &str) -> Result<Option<&str>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| wrong_type(name, "a string", value))
    }

    /// A boolean, false when absent.
    pub(super) fn boolean(&self, name: &str) -> Result<bool, ApiError> {
        let Some(value) = self.value(name) else { return Ok(false) };
        value.as_bool().ok_or_else(|| wrong_type(name, "a boolean", value))
    }

    /// A number within a range.
    pub(super) fn number(&self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| wrong_type(name, "a number", value))?;
        if !(least..=most).contains(&number) {
            return Err(ApiError::invalid(
                name,
                format!("`{name}` is {number}, allowed is {least} to {most}"),
            ));
        }
        Ok(Some(number))
    }

    /// An integer within a range.
    pub(super) fn integer(&self, name: &str, least: i64, most: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let whole = |f: f64| (f.fract() == 0.0 && f.abs() < 9e15).then_some(f as i64);
        let number = value
            .as_i64()
            .or_else(|| value.as_f64().and_then(whole))
            .ok_or_else(|| wrong_type(name, "an integer", value))?;
        if !(least..=most).contains(&number) {
            return Err(ApiError::invalid(
                name,
                format!("`{name}` is {number}, allowed is {least} to {most}"),
            ));
        }
        Ok(Some(number))
    }

    /// Refuses a feature unless it is absent or set to what means "off".
    pub(super) fn refuse(&self, name: &str, off: impl Fn(&Value) -> bool, why: &str) -> Result<(), ApiError> {
        match self.value(name) {
            Some(value) if !off(value) => Err(ApiError::unsupported(name, format!("`{name}`: {why}"))),
            _ => Ok(()),
        }
    }
}

fn object(bytes: &[u8]) -> Result<Object, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| {
        ApiError::bad_body(match error.classify() {
            serde_json::error::Category::Data => {
                format!("the body must be a JSON object of at most {MAX_MEMBERS} members")
            }
            _ => format!("the body is not valid JSON: {error}"),
        })
    })
}

/// More than any client has a use for.
const MAX_MEMBERS: usize = 4096;

/// Members in their order. A request has few, and is asked for many that it has not: looking through them takes less time
/// than hashing every name.
#[derive(Default)]
struct Object(Vec<(String, Value)>);

impl Object {
    /// The last member of that name, as everywhere else.
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().rev().find(|(n, _)| n == name).map(|(_, value)| value)
    }
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Object;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                let mut object = Object::default();
                while let Some(member) = map.next_entry()? {
                    if object.0.len() == MAX_MEMBERS {
                        return Err(A::Error::custom("too many members"));
                    }
                    object.0.push(member);
                }
                Ok(object)
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// A token id, or what JSON takes for the same number: `7.0`.
pub(super) fn token_id(value: &Value) -> Option<u32> {
    let whole = |f: f64| (f.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&f)).then_some(f as u32);
    match value.as_u64() {
        Some(id) => u32::try_from(id).ok(),
        None => value.as_f64().and_then(whole),
    }
}

/// 400 for a value of another type than wanted.
pub(super) fn wrong_type(param: &str, wanted: &str, got: &Value) -> ApiError {
    let got = match got {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    ApiError::invalid(param, format!("`{param}` must be {wanted}, not {got}"))
}

#[cfg(test)]
pub(super) fn fields(value: Value) -> Fields {
    match value {
        Value::Object(map) => Fields { object: Object(map.into_iter().collect()), _share: None },
        other => panic!("{other} is not an object"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn wrong_values_name_the_parameter() {
        let f = fields(
            json!({"temperature": "hot", "n": 1.5, "top_p": 3, "stream": 1, "model": [], "seed": 2.0, "x": null}),
        );
        let message = |error: ApiError| error.body()["error"]["param"].as_str().map(str::to_owned);
        assert_eq!(message(f.number("temperature", 0.0, 2.0).unwrap_err()).as_deref(), Some("temperature"));
        assert_eq!(message(f.number("top_p", 0.0, 1.0).unwrap_err()).as_deref(), Some("top_p"));
        assert_eq!(message(f.integer("n", 1, 9).unwrap_err()).as_deref(), Some("n"));
        assert!(f.boolean("stream").is_err() && f.string("model").is_err());
        assert_eq!(f.integer("seed", 0, 9).unwrap(), Some(2));
        let ids = [json!(7), json!(7.0), json!(7.5), json!(-1), json!(4294967296u64), json!("7")];
        assert_eq!(ids.each_ref().map(token_id), [Some(7), Some(7), None, None, None, None]);
        assert!(f.value("x").is_none() && f.string("absent").unwrap().is_none());
    }

    #[test]
    fn hostile_bodies_are_400() {
        let deep = "[".repeat(100_000);
        for body in ["", "[]", "{", "\u{0}", "{\"a\": \"\\ud800\"}", &deep] {
            assert!(object(body.as_bytes()).is_err(), "{:.20}", body);
        }
        let many = |n: usize| format!("{{{}}}", vec!["\"a\": 1"; n].join(","));
        assert!(
            object(many(MAX_MEMBERS).as_bytes()).is_ok() && object(many(MAX_MEMBERS + 1).as_bytes()).is_err()
        );
    }

    #[test]
    fn the_last_of_equal_names_counts() {
        let object = object(br#"{"n": 1, "m": null, "n": 2}"#).unwrap();
        assert_eq!(
            (object.get("n"), object.get("m"), object.get("x")),
            (Some(&json!(2)), Some(&Value::Null), None)
        );
    }
}
