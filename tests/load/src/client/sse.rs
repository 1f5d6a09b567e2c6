//! Event streams, cut at whatever places the network cuts them.

/// One event of a chat stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SseEvent {
    /// Text of the answer.
    Content(String),
    /// A chunk with a finish reason.
    Finish,
    /// Any other chunk: role, usage.
    Other,
    /// `[DONE]`
    Done,
    /// An error in the stream.
    Error(String),
}

/// Finds events in pieces of bytes.
#[derive(Debug, Default)]
pub struct SseParser {
    pending: Vec<u8>,
}

impl SseParser {
    /// Takes a piece and gives the events that it completes.
    pub fn push(&mut self, piece: &[u8], mut take: impl FnMut(SseEvent)) {
        self.pending.extend_from_slice(piece);
        let mut used = 0;
        while let Some(end) = self.pending[used..].iter().position(|b| *b == b'\n') {
            if let Ok(line) = std::str::from_utf8(&self.pending[used..used + end])
                && let Some(data) = line.trim_end().strip_prefix("data:")
            {
                take(event(data.trim_start()));
            }
            used += end + 1;
        }
        self.pending.drain(..used);
    }

    /// Whether the stream ended inside a line.
    #[must_use]
    pub fn is_inside_a_line(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// Reads what matters by hand: parsing JSON for every token would make this client the bottleneck. A text with a quote or
/// a backslash in it, which the source never sends, takes the long way.
fn event(data: &str) -> SseEvent {
    if data == "[DONE]" {
        return SseEvent::Done;
    }
    if let Some((_, rest)) = data.split_once(r#""content":""#)
        && let Some((text, _)) = rest.split_once('"')
        && !text.is_empty()
        && !text.contains('\\')
    {
        return SseEvent::Content(text.to_owned());
    }
    let Ok(value) = serde_json::from_str::<serde_json::Value>(data) else {
        return SseEvent::Error(data.to_owned());
    };
    if !value["error"].is_null() {
        return SseEvent::Error(value["error"].to_string());
    }
    let choice = &value["choices"][0];
    match choice["delta"]["content"].as_str() {
        Some(text) if !text.is_empty() => SseEvent::Content(text.to_owned()),
        _ if !choice["finish_reason"].is_null() => SseEvent::Finish,
        _ => SseEvent::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_wherever_the_pieces_end() {
        let text = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n: ping\n\n\
                    data: {\"choices\":[{\"delta\":{\"content\":\" a\"},\"finish_reason\":null}]}\r\n\r\n\
                    data: {\"choices\":[{\"delta\": {\"content\": \"q\\\"\"}}]}\n\n\
                    data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}]}\n\n\
                    data: {\"error\":{\"message\":\"x\"}}\n\ndata: [DONE]\n\n";
        for cut in 1..20 {
            let (mut parser, mut events) = (SseParser::default(), vec![]);
            text.as_bytes().chunks(cut).for_each(|piece| parser.push(piece, |e| events.push(e)));
            let content = |s: &str| SseEvent::Content(s.into());
            let error = SseEvent::Error("{\"message\":\"x\"}".into());
            let want =
                [SseEvent::Other, content(" a"), content("q\""), SseEvent::Finish, error, SseEvent::Done];
            assert_eq!(events, want, "{cut}");
            assert!(!parser.is_inside_a_line());
        }
    }
}
