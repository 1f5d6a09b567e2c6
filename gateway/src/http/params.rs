//! Reading a request body: every wrong type or range is a 400 that names the parameter; unknown fields are
//! ignored; what is not offered is refused rather than silently left out.

use super::error::ApiError;
use axum::body::Body;
use http_body_util::BodyExt as _;
use serde_json::{Map, Value};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Time that a client gets to finish sending a body that is too large.
const DISCARD_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for the next piece of a body.
const STALL_LIMIT: Duration = Duration::from_secs(30);
/// Longest time that a whole body may take.
const BODY_LIMIT: Duration = Duration::from_secs(120);

/// The fields of a request body.
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads a body of at most `limit_bytes`.
    ///
    /// # Errors
    /// 413, 408 when it stalls or takes too long, or 400 when it is no JSON object.
    pub(super) async fn read(body: Body, limit_bytes: usize) -> Result<Self, ApiError> {
        Self::read_within(body, limit_bytes, STALL_LIMIT, BODY_LIMIT).await
    }

    async fn read_within(
        mut body: Body,
        limit_bytes: usize,
        stall: Duration,
        total: Duration,
    ) -> Result<Self, ApiError> {
        let mut bytes = Vec::new();
        let end = Instant::now() + total;
        loop {
            let limit = end.min(Instant::now() + stall);
            let next = timeout_at(limit, body.frame()).await.map_err(|_| ApiError::body_too_slow())?;
            let Some(frame) = next else { break };
            let frame = frame.map_err(|e| ApiError::bad_body(format!("the body could not be read: {e}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > limit_bytes {
                let _ = tokio::time::timeout(DISCARD_LIMIT, discard(body, limit_bytes)).await;
                return Err(ApiError::body_too_large(limit_bytes));
            }
            bytes.extend_from_slice(&data);
        }
        Self::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::bad_body("the body must be a JSON object")),
            Err(error) => Err(ApiError::bad_body(format!("the body is not valid JSON: {error}"))),
        }
    }

    /// A field that is there and not null.
    pub(super) fn value(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|v| !v.is_null())
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

/// Reads on without keeping anything: a connection closed on unread bytes is reset, and the client would
/// never see why.
async fn discard(mut body: Body, limit_bytes: usize) {
    let mut seen = 0;
    while let Some(Ok(frame)) = body.frame().await {
        seen += frame.data_ref().map_or(0, |d| d.len());
        if seen > limit_bytes {
            return;
        }
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
        Value::Object(map) => Fields(map),
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
        assert!(f.value("x").is_none() && f.string("absent").unwrap().is_none());
    }

    #[tokio::test]
    async fn a_body_that_stalls_or_trickles_is_given_up() {
        use futures_util::StreamExt as _;
        let ms = Duration::from_millis;
        let piece = || Ok::<_, std::convert::Infallible>(bytes::Bytes::from_static(b" "));
        let stalled =
            Body::from_stream(futures_util::stream::iter([piece()]).chain(futures_util::stream::pending()));
        let got = Fields::read_within(stalled, 4096, ms(20), ms(60_000)).await;
        assert_eq!(got.err(), Some(ApiError::body_too_slow()));
        let trickle = Body::from_stream(futures_util::stream::repeat(()).then(move |()| async move {
            tokio::time::sleep(ms(5)).await;
            piece()
        }));
        let got = Fields::read_within(trickle, 4096, ms(60_000), ms(40)).await;
        assert_eq!(got.err(), Some(ApiError::body_too_slow()));
    }

    #[test]
    fn hostile_bodies_are_400() {
        let deep = "[".repeat(100_000);
        for body in ["", "[]", "{", "\u{0}", "{\"a\": \"\\ud800\"}", &deep] {
            assert!(Fields::parse(body.as_bytes()).is_err(), "{:.20}", body);
        }
    }
}
