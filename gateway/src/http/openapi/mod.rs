//! `GET /openapi.json`: the description of the API, made from the types that the answers are written with.

mod requests;

use super::App;
use super::chat::wire::{ChatChunk, ChatCompletion};
use super::completions::voice::{Completion, CompletionChunk};
use super::tokens::{Detokenized, Tokenized};
use axum::Json;
use axum::extract::State;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The document.
pub(super) async fn document(State(app): State<Arc<App>>) -> Json<Value> {
    let model = &app.ctx.model;
    Json(describe(&model.name, model.spec.vocab_size))
}

/// For a model of some name whose token ids are below `vocab_size`.
fn describe(model: &str, vocab_size: usize) -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let settings = settings.with(|s| {
        s.definitions_path = "/components/schemas".into();
        s.meta_schema = None;
    });
    let mut types = settings.into_generator();
    let chat = answered::<ChatCompletion, ChatChunk>(&mut types);
    let completion = answered::<Completion, CompletionChunk>(&mut types);
    let event = json!({"type": "object", "required": ["type", "sequence_number"],
        "properties": {"type": {"type": "string"}, "sequence_number": {"type": "integer", "minimum": 0},
            "response": {"$ref": "#/components/schemas/Response"}}});
    let event = json!({"type": "string", "contentMediaType": "application/json", "contentSchema": event});
    let response = streamed(&json!({"$ref": "#/components/schemas/Response"}), &event);
    let paths = json!({
        "/v1/chat/completions": {"post": inference("createChatCompletion", &requests::chat(model, vocab_size), &chat)},
        "/v1/completions": {"post": inference("createCompletion", &requests::completion(model, vocab_size), &completion)},
        "/v1/responses": {"post": inference("createResponse", &requests::response(model), &response)},
        "/tokenize": {"post": posted("tokenize", &requests::tokenize(model), &one::<Tokenized>(&mut types))},
        "/detokenize": {"post": posted("detokenize", &requests::detokenize(model, vocab_size), &one::<Detokenized>(&mut types))},
        "/v1/models": {"get": got("listModels", &[], "Models")},
        "/v1/models/{id}": {"get": got("retrieveModel", &["id"], "Model")},
        "/v1/bridge/verdicts/{id}": {"get": got("retrieveVerdict", &["id"], "Verdict")},
        "/healthz": {"get": plain("healthz")},
        "/readyz": {"get": plain("readyz")},
        "/metrics": {"get": plain("metrics")},
        "/openapi.json": {"get": got("openapi", &[], "Document")},
    });
    let mut schemas = types.take_definitions(true);
    schemas.extend(by_hand());
    json!({
        "openapi": "3.2.0",
        "info": {"title": "pd-bridge", "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI's API, answered by a prefill worker and a decode worker together."},
        "paths": paths,
        "components": {"schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "headers": {"Verdict": {"description": "What happened to the request, as compact JSON.",
                "schema": {"type": "string"}}}},
        "security": [{}, {"key": []}],
    })
}

fn one<T: schemars::JsonSchema>(types: &mut SchemaGenerator) -> Value {
    json!({"application/json": {"schema": types.subschema_for::<T>()}})
}

fn answered<W: schemars::JsonSchema, C: schemars::JsonSchema>(types: &mut SchemaGenerator) -> Value {
    let whole = types.subschema_for::<W>().to_value();
    // The last event's data is no JSON, so that no schema can be demanded of all.
    let data = json!({"type": "string", "description": "JSON after `x-data-schema`, or `[DONE]` at the end.",
        "x-data-schema": types.subschema_for::<C>()});
    streamed(&whole, &data)
}

/// A whole object, or a stream of events.
fn streamed(whole: &Value, data: &Value) -> Value {
    let item = json!({"type": "object", "required": ["data"],
        "properties": {"data": data, "event": {"type": "string"}}});
    json!({"application/json": {"schema": whole}, "text/event-stream": {"itemSchema": item}})
}

fn inference(name: &str, request: &Value, content: &Value) -> Value {
    let mut operation = posted(name, request, content);
    let header = json!({"X-PD-Bridge": {"$ref": "#/components/headers/Verdict"}});
    operation["responses"]["200"]["headers"] = header.clone();
    operation["responses"]["default"]["headers"] = header;
    operation["parameters"] = json!([
        {"name": "X-PD-Bridge-Require", "in": "header", "schema": {"enum": ["any", "complete"]},
            "description": "503 instead of an answer that the bridge took no part in."},
        {"name": "X-PD-Bridge-Route", "in": "header", "schema": {"enum": ["native", "bridge", "auto"]},
            "description": "Forces the plan."}]);
    operation
}

fn posted(name: &str, request: &Value, content: &Value) -> Value {
    json!({"operationId": name,
        "requestBody": {"required": true, "content": {"application/json": {"schema": request}}},
        "responses": {"200": {"description": "The answer.", "content": content}, "default": error()}})
}

fn got(name: &str, parameters: &[&str], schema: &str) -> Value {
    let parameter =
        |name: &&str| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}});
    let reference = json!({"$ref": format!("#/components/schemas/{schema}")});
    json!({"operationId": name, "parameters": parameters.iter().map(parameter).collect::<Vec<_>>(),
        "responses": {"200": {"description": "What was asked for.", "content": {"application/json": {"schema": reference}}},
            "default": error()}})
}

fn plain(name: &str) -> Value {
    let text = json!({"description": "Text.", "content": {"text/plain": {"schema": {"type": "string"}}}});
    json!({"operationId": name, "security": [], "responses": {"200": text, "503": text, "default": error()}})
}

fn error() -> Value {
    json!({"description": "An error.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}})
}

/// Objects that are written without a type of their own.
fn by_hand() -> Map<String, Value> {
    let nullable = |kind: &str| json!({"type": [kind, "null"]});
    let count = json!({"type": "integer", "minimum": 0});
    let model = json!({"type": "object", "required": ["id", "object", "created", "owned_by"],
        "properties": {"id": {"type": "string"}, "object": {"const": "model"}, "created": {"type": "integer"},
            "owned_by": {"type": "string"}, "max_model_len": nullable("integer")}});
    let error = json!({"type": "object", "required": ["error"], "properties": {"error": {"type": "object",
        "required": ["message", "type", "param", "code"], "properties": {"message": {"type": "string"},
            "type": {"type": "string"}, "param": nullable("string"), "code": nullable("string")}}}});
    let verdict = json!({"type": "object",
        "required": ["verdict", "prompt_tokens", "cached_tokens", "bridged_tokens", "native_tokens", "request_id"],
        "properties": {"verdict": {"enum": ["complete", "partial", "warm", "native", "failed", "refused", "pending"]},
            "reason": {"type": "string"}, "prompt_tokens": count, "cached_tokens": count, "bridged_tokens": count,
            "native_tokens": count, "request_id": {"type": "string"}}});
    let usage = json!({"type": "object",
        "required": ["input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"],
        "properties": {"input_tokens": count, "output_tokens": count, "total_tokens": count,
            "input_tokens_details": {"type": "object", "required": ["cached_tokens"], "properties": {"cached_tokens": count}},
            "output_tokens_details": {"type": "object", "required": ["reasoning_tokens"], "properties": {"reasoning_tokens": count}}}});
    let response = json!({"type": "object",
        "required": ["id", "object", "created_at", "status", "error", "incomplete_details", "instructions", "model",
            "output", "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p", "usage", "metadata"],
        "properties": {"id": {"type": "string"}, "object": {"const": "response"}, "created_at": {"type": "integer"},
            "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]}, "model": {"type": "string"},
            "output": {"type": "array", "items": {"type": "object", "required": ["id", "type", "status"],
                "properties": {"type": {"enum": ["message", "reasoning", "function_call"]}}}},
            "parallel_tool_calls": {"type": "boolean"}, "usage": {"anyOf": [usage, {"type": "null"}]}}});
    let models = json!({"type": "object", "required": ["object", "data"], "properties": {"object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}});
    [
        ("Error", error),
        ("Model", model),
        ("Models", models),
        ("Verdict", verdict),
        ("Response", response),
        ("Document", json!({"type": "object", "required": ["openapi", "paths"]})),
    ]
    .into_iter()
    .map(|(name, schema)| (name.to_owned(), schema))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(key, value)| match value.as_str() {
                Some(path) if key == "$ref" => found.push(path.to_owned()),
                _ => references(value, found),
            }),
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let document = describe("m", 9);
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 20, "{found:?}");
        for path in found {
            let pointer = path.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{path}");
        }
        let chat = &document["components"]["schemas"]["ChatCompletion"];
        assert_eq!(chat["required"], json!(["id", "object", "created", "model", "choices", "usage"]));
        let message = &document["components"]["schemas"]["ChatMessage"];
        assert_eq!(message["required"], json!(["role", "content", "refusal"]));
    }
}
