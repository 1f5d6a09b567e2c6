//! Says a response: items one after the other, each opened, filled and closed; every event numbered.

use super::object::{Status, Template, response, usage};
use crate::http::error::ApiError;
use crate::http::logprobs::{ChatLogprobs, TokenLogprob};
use crate::http::tools::reader::{Part, Reader, Reading};
use crate::http::usage::Usage;
use crate::http::voice::{Frames, Head, Voice};
use crate::model::TextModel;
use crate::pipeline::{Finish, Piece};
use serde_json::{Value, json};
use shared::control::TokenLogprobs;
use std::sync::Arc;

/// The voice of `/v1/responses`.
pub(super) struct ResponseVoice {
    model: Arc<TextModel>,
    head: Head,
    template: Template,
    reader: Reader,
    scored: bool,
    stream: bool,
    sequence: u64,
    /// Items that are complete.
    output: Vec<Value>,
    open: Option<Item>,
    /// Tokens that were not told yet.
    logprobs: Vec<TokenLogprob>,
    thought_tokens: u64,
    finish: Finish,
}

/// The item that is being written.
struct Item {
    id: String,
    kind: Kind,
    /// Its text, or a call's arguments.
    text: String,
    logprobs: Vec<TokenLogprob>,
}

#[derive(PartialEq)]
enum Kind {
    Thought,
    Message,
    Call { call_id: String, name: String },
}

impl ResponseVoice {
    pub(super) fn new(
        model: Arc<TextModel>,
        head: Head,
        template: Template,
        reading: &Reading,
        scored: bool,
        stream: bool,
    ) -> Self {
        Self {
            model,
            head: Head { id: format!("resp_{}", head.id), ..head },
            template,
            reader: Reader::new(reading),
            scored,
            stream,
            sequence: 0,
            output: Vec::new(),
            open: None,
            logprobs: Vec::new(),
            thought_tokens: 0,
            finish: Finish::Stop,
        }
    }

    fn part(&mut self, part: Part, out: &mut Frames) {
        match part {
            Part::Thought(text) => self.text(Kind::Thought, &text, out),
            Part::Text(text) => self.text(Kind::Message, &text, out),
            Part::Call { id, name, .. } => self.begin(Kind::Call { call_id: id, name }, out),
            Part::Arguments { json, .. } => {
                let index = self.output.len();
                let Some(item) = &mut self.open else { return };
                item.text.push_str(&json);
                let event = json!({"item_id": item.id, "output_index": index, "delta": json});
                self.event("response.function_call_arguments.delta", event, out);
            }
        }
    }

    fn text(&mut self, kind: Kind, text: &str, out: &mut Frames) {
        if self.open.as_ref().is_none_or(|item| item.kind != kind) {
            self.begin(kind, out);
        }
        let (index, logprobs) = (self.output.len(), std::mem::take(&mut self.logprobs));
        let Some(item) = &mut self.open else { return };
        item.text.push_str(text);
        let mut event = json!({"item_id": item.id, "output_index": index, "content_index": 0, "delta": text});
        let name = match item.kind {
            Kind::Thought => "response.reasoning_text.delta",
            Kind::Message | Kind::Call { .. } => {
                event["logprobs"] = json!(logprobs);
                "response.output_text.delta"
            }
        };
        item.logprobs.extend(logprobs);
        self.event(name, event, out);
    }

    fn begin(&mut self, kind: Kind, out: &mut Frames) {
        self.end(Status::Completed, out);
        let prefix = match kind {
            Kind::Thought => "rs",
            Kind::Message => "msg",
            Kind::Call { .. } => "fc",
        };
        let id = format!("{prefix}_{}", uuid::Uuid::new_v4().simple());
        let item = Item { id, kind, text: String::new(), logprobs: Vec::new() };
        let index = self.output.len();
        let mut opened = item.object(Status::InProgress);
        if opened.get("content").is_some() {
            opened["content"] = json!([]);
        }
        self.event("response.output_item.added", json!({"output_index": index, "item": opened}), out);
        if let Some(part) = item.content() {
            let event = json!({"item_id": item.id, "output_index": index, "content_index": 0, "part": part});
            self.event("response.content_part.added", event, out);
        }
        self.open = Some(item);
    }

    /// Closes the open item.
    fn end(&mut self, status: Status, out: &mut Frames) {
        let Some(item) = self.open.take() else { return };
        let index = self.output.len();
        let place = json!({"item_id": item.id, "output_index": index});
        let with = |more: Value| {
            let mut event = place.clone();
            if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
                event.extend(more);
            }
            event
        };
        match &item.kind {
            Kind::Thought => {
                let event = with(json!({"content_index": 0, "text": item.text}));
                self.event("response.reasoning_text.done", event, out);
            }
            Kind::Message => {
                let event = with(json!({"content_index": 0, "text": item.text, "logprobs": item.logprobs}));
                self.event("response.output_text.done", event, out);
            }
            Kind::Call { name, .. } => {
                let event = with(json!({"name": name, "arguments": item.text}));
                self.event("response.function_call_arguments.done", event, out);
            }
        }
        if let Some(part) = item.content() {
            let event = with(json!({"content_index": 0, "part": part}));
            self.event("response.content_part.done", event, out);
        }
        let object = item.object(status);
        self.event("response.output_item.done", json!({"output_index": index, "item": object}), out);
        self.output.push(object);
    }

    fn event(&mut self, name: &str, fields: Value, out: &mut Frames) {
        if !self.stream {
            return;
        }
        let mut event = json!({"type": name, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Value::Object(event), Value::Object(fields)) = (&mut event, fields) {
            event.extend(fields);
        }
        out.framed(format!("event: {name}\ndata: ").as_bytes(), &event, b"\n\n");
    }

    fn whole(&self, status: Status, usage: Option<Value>, error: Option<Value>) -> Value {
        response(&self.head, &self.template, status, &self.output, usage, error)
    }
}

impl Item {
    fn content(&self) -> Option<Value> {
        match self.kind {
            Kind::Thought => Some(json!({"type": "reasoning_text", "text": self.text})),
            Kind::Message => Some(json!({"type": "output_text", "text": self.text, "annotations": [],
                "logprobs": self.logprobs})),
            Kind::Call { .. } => None,
        }
    }

    fn object(&self, status: Status) -> Value {
        let (id, status, content) = (&self.id, status.as_str(), self.content());
        match &self.kind {
            Kind::Thought => json!({"id": id, "type": "reasoning", "status": status, "summary": [],
                "content": [content]}),
            Kind::Message => json!({"id": id, "type": "message", "status": status, "role": "assistant",
                "content": [content]}),
            Kind::Call { call_id, name } => json!({"id": id, "type": "function_call", "status": status,
                "call_id": call_id, "name": name, "arguments": self.text}),
        }
    }
}

impl Voice for ResponseVoice {
    fn started(&mut self, _: usize, out: &mut Frames) {
        let response = self.whole(Status::InProgress, None, None);
        self.event("response.created", json!({ "response": response.clone() }), out);
        self.event("response.in_progress", json!({ "response": response }), out);
    }

    fn prompt(&mut self, _: usize, _: Vec<TokenLogprobs>, _: &mut Frames) {}

    fn said(&mut self, _: usize, piece: Piece, out: &mut Frames) {
        if self.scored {
            let mut logprobs = ChatLogprobs::default();
            logprobs.extend(&self.model.tokenizer, &piece.tokens);
            self.logprobs.extend(logprobs.content);
        }
        let parts = self.reader.push(&piece.text);
        if self.reader.is_thinking() {
            self.thought_tokens += u64::from(piece.used);
        }
        parts.into_iter().for_each(|part| self.part(part, out));
    }

    fn finished(&mut self, _: usize, finish: Finish, out: &mut Frames) {
        self.finish = finish;
        let parts = self.reader.finish();
        parts.into_iter().for_each(|part| self.part(part, out));
        let status = match finish {
            Finish::Stop => Status::Completed,
            Finish::Length => Status::Incomplete,
        };
        self.end(status, out);
    }

    fn ended(&mut self, counted: &Usage, out: &mut Frames) {
        let (status, name) = match self.finish {
            Finish::Stop => (Status::Completed, "response.completed"),
            Finish::Length => (Status::Incomplete, "response.incomplete"),
        };
        let response = self.whole(status, Some(usage(counted, self.thought_tokens)), None);
        if self.stream {
            self.event(name, json!({ "response": response }), out);
        } else {
            out.body(&response);
        }
    }

    fn failed(&mut self, error: &ApiError, out: &mut Frames) {
        let body = error.body();
        let error = json!({"code": "server_error", "message": body["error"]["message"]});
        let response = self.whole(Status::Failed, None, Some(error));
        self.event("response.failed", json!({ "response": response }), out);
    }
}
