//! The table of a field test.

use super::file::FieldTest;
use super::runs::{Cell, NodeReport, Run};
use crate::bus_cli::ask::{Route, time};
use crate::bus_cli::output::printable_lines;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Answers are shown up to here.
const MAX_ANSWER_CHARS: usize = 160;

/// Nodes and ways down, questions across; then what the questions were, and why answers are missing.
pub(super) fn render(test: &FieldTest, reports: &[NodeReport], with_answers: bool) -> String {
    let mut rows = vec![head(test)];
    rows.extend(reports.iter().flat_map(|report| report.runs.iter().map(|run| row(test, report, run))));
    let columns = rows[0].len();
    let widths: Vec<usize> =
        (0..columns).map(|i| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0)).collect();
    let mut text = format!(
        "{}: {} questions, a passage of {} words; + right, - wrong, ! no answer\n\n",
        printable_lines(&test.name),
        test.questions.len(),
        test.passage.split_whitespace().count()
    );
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        // Writing to a string can't fail.
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text.push('\n');
    text.push_str(&failures(reports));
    if with_answers {
        text.push_str(&answers(test, reports));
    }
    text
}

fn head(test: &FieldTest) -> Vec<String> {
    let ids = test.questions.iter().map(|q| q.id.clone());
    let ends = ["RIGHT", "TTFT", "VERDICTS"].map(str::to_owned);
    ["NODE", "PASSAGE", "ROUTE"].map(str::to_owned).into_iter().chain(ids).chain(ends).collect()
}

fn row(test: &FieldTest, report: &NodeReport, run: &Run) -> Vec<String> {
    let mut row = vec![report.node.to_string(), passage(run).to_owned(), route(run).to_owned()];
    let mark = |cell: Option<&Cell>| match cell.map(|c| &c.result) {
        Some(Ok((_, true))) => "+",
        Some(Ok((_, false))) => "-",
        Some(Err(_)) => "!",
        None => "",
    };
    row.extend((0..test.questions.len()).map(|i| mark(run.cells.get(i)).to_owned()));
    row.push(format!("{}/{}", run.right(), test.questions.len()));
    row.push(run.ttft_ms().map_or("-".to_owned(), time));
    let verdicts = run.verdicts().into_iter().map(|(kind, n)| format!("{n} {kind}"));
    row.push(verdicts.collect::<Vec<_>>().join(", "));
    row
}

fn passage(run: &Run) -> &'static str {
    if run.way.with_passage { "yes" } else { "no" }
}

fn route(run: &Run) -> &'static str {
    match run.way.route {
        Route::Auto => "auto",
        Route::Bridge => "bridge",
        Route::Native => "native",
    }
}

/// Each node's reasons, with how often.
fn failures(reports: &[NodeReport]) -> String {
    let mut text = String::new();
    for report in reports {
        let mut reasons = BTreeMap::<String, usize>::new();
        for cell in report.runs.iter().flat_map(|r| &r.cells) {
            if let Err(error) = &cell.result {
                *reasons.entry(error.to_string()).or_default() += 1;
            }
        }
        for (reason, n) in reasons {
            let _ = writeln!(text, "! {}, {n} times: {}", report.node, printable_lines(&reason));
        }
    }
    text
}

fn answers(test: &FieldTest, reports: &[NodeReport]) -> String {
    let mut text = String::new();
    for (i, question) in test.questions.iter().enumerate() {
        let _ = writeln!(text, "\n{}: {}", question.id, printable_lines(&question.ask));
        for report in reports {
            for run in &report.runs {
                let Some(Ok((answer, right))) = run.cells.get(i).map(|c| &c.result) else { continue };
                let words = printable_lines(&answer.text).split_whitespace().collect::<Vec<_>>().join(" ");
                let words: String = words.chars().take(MAX_ANSWER_CHARS).collect();
                let mark = if *right { '+' } else { '-' };
                let way = format!("passage {}, {}", passage(run), route(run));
                let _ = writeln!(text, "  {mark} {} ({way}): {words}", report.node);
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus_cli::ask::{Answer, AskError};
    use crate::bus_cli::field_test::file::Checked;
    use crate::bus_cli::field_test::runs::WAYS;
    use crate::bus_cli::field_test::score::Expected;
    use shared::bus::{Exit, NodeId};
    use std::time::Duration;

    #[test]
    fn every_mark_has_its_column() {
        let question = |id: &str| Checked {
            id: id.to_owned(),
            ask: "Why?".to_owned(),
            expected: Expected::NotStated,
            never: vec![],
        };
        let test = FieldTest {
            name: "T".to_owned(),
            passage: "one two".to_owned(),
            max_tokens: 1,
            timeout: Duration::from_secs(1),
            questions: vec![question("first"), question("second"), question("third")],
        };
        let answer = Answer {
            text: "No\nidea.\u{1b}".to_owned(),
            verdict: None,
            ttft_ms: Some(1500.0),
            total_ms: 1.0,
            completion_tokens: None,
            finish_reason: None,
        };
        let cells = vec![
            Cell { result: Ok((answer.clone(), true)) },
            Cell { result: Ok((answer, false)) },
            Cell { result: Err(AskError::Ended(Exit::TimedOut {})) },
        ];
        let report =
            NodeReport { node: NodeId::new("spark").unwrap(), runs: vec![Run { way: WAYS[0], cells }] };
        assert!(!report.is_whole());
        let text = render(&test, &[report], true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[2], "NODE   PASSAGE  ROUTE   first  second  third  RIGHT  TTFT   VERDICTS");
        assert_eq!(lines[3], "spark  yes      bridge  +      -       !      1/3    1.5 s  2 none");
        assert_eq!(lines[5], "! spark, 1 times: killed: its time was over");
        assert!(text.contains("  + spark (passage yes, bridge): No idea.?"), "{text}");
    }
}
