//! Answers on a terminal: side by side where there is room, else one below the other.

use super::answer::{Answer, AskError};
use crate::bus_cli::output::printable_lines;
use serde_json::{Value, json};
use shared::bus::NodeId;

/// Below this, a column is no pleasure to read.
const MIN_COLUMN: usize = 30;
const GAP: &str = "   ";
/// Lines of plain blocks are broken here, where nobody said how wide the terminal is.
const PLAIN_WIDTH: usize = 100;

/// A node and what it said.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) node: NodeId,
    pub(crate) result: Result<Answer, AskError>,
}

impl Row {
    /// For programs.
    pub(crate) fn json(&self) -> Value {
        match &self.result {
            Ok(answer) => {
                let mut value = json!({"node": self.node, "error": null});
                if let (Value::Object(row), Ok(Value::Object(answer))) =
                    (&mut value, serde_json::to_value(answer))
                {
                    row.extend(answer);
                }
                value
            }
            Err(error) => json!({"node": self.node, "error": error.to_string()}),
        }
    }

    /// What is known about it, in a few words.
    fn head(&self) -> String {
        let Ok(answer) = &self.result else { return "no answer".to_owned() };
        let verdict = answer.verdict.as_ref().map(|v| {
            let reason = v.reason.as_ref().map(|r| format!(" ({r})")).unwrap_or_default();
            format!("{}{reason}", v.verdict.as_str())
        });
        let first = answer.ttft_ms.map(|t| format!("first token {}", time(t)));
        let tokens = answer.completion_tokens.map(|n| format!("{n} tokens"));
        let total = Some(format!("all {}", time(answer.total_ms)));
        [verdict, first, total, tokens].into_iter().flatten().collect::<Vec<_>>().join(" · ")
    }

    fn lines(&self, width: usize) -> Vec<String> {
        let body = match &self.result {
            Ok(answer) if answer.text.trim().is_empty() => "(it said nothing)".to_owned(),
            Ok(answer) => answer.text.trim().to_owned(),
            Err(error) => error.to_string(),
        };
        let texts = [self.node.to_string(), self.head(), String::new(), body];
        let wrap = |text: &String| {
            textwrap::wrap(&printable_lines(text), width).into_iter().map(String::from).collect()
        };
        texts.iter().flat_map::<Vec<String>, _>(wrap).collect()
    }
}

/// Milliseconds or seconds, for people.
pub(crate) fn time(ms: f64) -> String {
    if ms < 1000.0 { format!("{ms:.0} ms") } else { format!("{:.1} s", ms / 1e3) }
}

/// All rows; `width` is the terminal's, or none where there is no terminal.
pub(crate) fn render(rows: &[Row], width: Option<usize>) -> String {
    let fit = width.map_or(0, |w| (w + GAP.len()) / (MIN_COLUMN + GAP.len())).min(rows.len());
    if fit < 2 {
        let width = width.unwrap_or(PLAIN_WIDTH).max(20);
        let blocks = rows.iter().map(|row| row.lines(width).join("\n") + "\n");
        return blocks.collect::<Vec<_>>().join("\n");
    }
    let column = (width.unwrap_or(PLAIN_WIDTH) + GAP.len()) / fit - GAP.len();
    let bands = rows.chunks(fit).map(|band| side_by_side(band, column));
    bands.collect::<Vec<_>>().join("\n")
}

fn side_by_side(rows: &[Row], width: usize) -> String {
    let columns: Vec<Vec<String>> = rows.iter().map(|row| row.lines(width)).collect();
    let height = columns.iter().map(Vec::len).max().unwrap_or(0);
    let mut text = String::new();
    for i in 0..height {
        let cell = |column: &Vec<String>| {
            let cell = column.get(i).map_or("", String::as_str);
            let pad = width.saturating_sub(textwrap::core::display_width(cell));
            format!("{cell}{}", " ".repeat(pad))
        };
        let line = columns.iter().map(cell).collect::<Vec<_>>().join(GAP);
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::bus::Exit;

    fn rows() -> Vec<Row> {
        let answer = |text: &str| Answer {
            text: text.to_owned(),
            verdict: None,
            ttft_ms: Some(812.0),
            total_ms: 2100.0,
            completion_tokens: Some(9),
            finish_reason: None,
        };
        let long = "Paris is the capital of France, and has been for most of its long history.";
        let row = |node: &str, result| Row { node: NodeId::new(node).unwrap(), result };
        vec![
            row("mac", Ok(answer(long))),
            row("nas", Err(AskError::Ended(Exit::Failed { message: "no model".to_owned() }))),
            row("spark", Ok(answer("Paris.\u{1b}[2J"))),
        ]
    }

    #[test]
    fn columns_where_there_is_room() {
        let text = render(&rows(), Some(110));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("mac ") && lines[0].contains("nas ") && lines[0].ends_with("spark"));
        assert!(
            lines[1].contains("first token 812 ms · all 2.1 s") && lines[1].contains("no answer"),
            "{text}"
        );
        assert!(text.contains("no model") && !text.contains('\u{1b}'), "{text}");
        assert!(lines.iter().all(|l| l.chars().count() <= 110), "{text}");
        // Two fit, the third comes below.
        let text = render(&rows(), Some(70));
        assert!(
            text.lines().next().unwrap().contains("nas") && !text.lines().next().unwrap().contains("spark")
        );
        assert!(text.lines().any(|l| l == "spark"));
        assert!(text.lines().all(|l| l.chars().count() <= 70), "{text}");
    }

    #[test]
    fn blocks_where_there_is_none() {
        for width in [None, Some(40), Some(1)] {
            let text = render(&rows(), width);
            let at = |name| text.lines().position(|l| l == name).unwrap();
            assert!(at("mac") < at("nas") && at("nas") < at("spark"), "{text}");
        }
    }

    #[test]
    fn json_has_the_same_keys_for_all() {
        let rows = rows();
        assert_eq!(rows[1].json()["error"], "no model");
        assert!(rows[0].json()["error"].is_null());
        assert_eq!(rows[0].json()["ttft_ms"], 812.0);
    }
}
