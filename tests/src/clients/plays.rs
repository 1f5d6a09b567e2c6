//! What the scripted decode worker says to foreign clients: the last `play: NAME` in the prompt decides.

use crate::fakes::Step;
use crate::tiny;
use shared::control::FinishReason;
use std::time::Duration;

/// Two calls at once, after a word of explanation.
const CALLS: &str = "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\", \"days\": 2}}\n</tool_call>\n\
                     <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\", \"days\": 1}}\n</tool_call>";
/// A call of a tool that llm-comply offers.
const FOREIGN_CALL: &str = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"location\": \"San Francisco\"}}\n</tool_call>";
/// A thought and an answer.
const THOUGHT: &str = "<think>6 × 7, let me count\n</think>\n\n42";
/// An object that the schema of the clients' scripts allows.
const OBJECT: &str = r#"{"city": "Köln", "degrees": -3, "tags": ["wet", "cold"]}"#;
const GREETING: &str = "Grüße aus Köln! 🌧 Bis bald.";
/// Tokens of the answer that clients leave in the middle of, and the time between two.
const LONG_TOKENS: usize = 3000;
const LONG_PAUSE: Duration = Duration::from_millis(10);

/// The script of a prompt.
#[must_use]
pub(super) fn script(prompt: &[u32]) -> Vec<Step> {
    let text = tiny::text(prompt);
    let Some((_, asked)) = text.rsplit_once("play: ") else {
        // Judges with prompts of their own ask for a greeting, or for the weather with a tool.
        return says(if text.contains("get_weather") { FOREIGN_CALL } else { "Hello, dear friend." });
    };
    let name: String = asked.chars().take_while(|c| c.is_ascii_lowercase()).collect();
    match name.as_str() {
        "weather" if asked.contains("<tool_response>") => says(&told(asked)),
        "weather" => says(CALLS),
        "think" => says(THOUGHT),
        "object" => says(OBJECT),
        "greet" => says(GREETING),
        "long" => {
            let token = || [Step::Tokens(tiny::ids("x")), Step::Pause(LONG_PAUSE)];
            [Step::Started].into_iter().chain((0..LONG_TOKENS).flat_map(|_| token())).collect()
        }
        _ => says("no such play"),
    }
}

/// Repeats what the tools said, so that clients see that it arrived, and in which order.
fn told(asked: &str) -> String {
    let results = asked.split("<tool_response>").skip(1).filter_map(|r| r.split("</tool_response>").next());
    format!("I was told: {}", results.map(str::trim).collect::<Vec<_>>().join(", "))
}

/// One byte per message, as slowly growing as a real answer.
fn says(text: &str) -> Vec<Step> {
    let tokens = tiny::ids(text).into_iter().map(|id| Step::Tokens(vec![id]));
    [vec![Step::Started], tokens.collect(), vec![Step::Finished(FinishReason::Stop)]].concat()
}
