//! The order of questions, and what came of them.

use super::file::{Checked, FieldTest};
use super::score::is_right;
use crate::bus_cli::ask::{Answer, AskError, Question, Route};
use serde_json::{Value, json};
use shared::bus::{NodeId, Operator};
use shared::hexbytes::Hex;
use std::collections::BTreeMap;
use tokio_util::sync::CancellationToken;

/// Said before every question, with a word that no other prompt begins with.
const RULES: &str = "Answer in one short sentence, from what you are told here and from nothing else. \
                     If it does not say, answer exactly: Not stated.";

/// One way to put all questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) with_passage: bool,
    pub(super) route: Route,
}

/// All of them, in the order in which they are used.
pub(super) const WAYS: [Way; 4] = [
    Way { with_passage: true, route: Route::Bridge },
    Way { with_passage: true, route: Route::Native },
    Way { with_passage: false, route: Route::Bridge },
    Way { with_passage: false, route: Route::Native },
];

/// One node's answers in one way, in the order of questions.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) way: Way,
    pub(super) cells: Vec<Cell>,
}

/// An answer and whether it is right.
#[derive(Debug)]
pub(super) struct Cell {
    pub(super) result: Result<(Answer, bool), AskError>,
}

/// What one node did.
#[derive(Debug)]
pub(super) struct NodeReport {
    pub(super) node: NodeId,
    pub(super) runs: Vec<Run>,
}

/// Asks one node everything, one question at a time; `told` hears of every answer.
pub(super) async fn run(
    test: &FieldTest,
    operator: &Operator,
    node: NodeId,
    cancel: &CancellationToken,
    told: impl Fn(&NodeId, Way, &Checked, &Cell),
) -> NodeReport {
    let mut runs = Vec::new();
    for way in WAYS {
        let mut cells = Vec::new();
        for checked in &test.questions {
            let question = question(test, checked, way, &Hex::<4>::random().to_string());
            let result = question.put(operator, &node, cancel).await;
            let result = result.map(|answer| {
                let right = is_right(&checked.expected, &checked.never, &answer.text);
                (answer, right)
            });
            let cell = Cell { result };
            told(&node, way, checked, &cell);
            cells.push(cell);
            if cancel.is_cancelled() {
                runs.push(Run { way, cells });
                return NodeReport { node, runs };
            }
        }
        runs.push(Run { way, cells });
    }
    NodeReport { node, runs }
}

/// The prompt. Its first words are its own, so that no prefix cache serves it.
fn question(test: &FieldTest, checked: &Checked, way: Way, salt: &str) -> Question {
    let asked = if way.with_passage {
        format!("{}\n\nQuestion: {}", test.passage.trim(), checked.ask)
    } else {
        format!("Question: {}", checked.ask)
    };
    Question {
        messages: vec![("system", format!("{salt}. {RULES}")), ("user", asked)],
        max_tokens: test.max_tokens,
        route: way.route,
        timeout: test.timeout,
    }
}

impl Run {
    /// How many are right.
    pub(super) fn right(&self) -> usize {
        self.cells.iter().filter(|c| matches!(c.result, Ok((_, true)))).count()
    }

    /// Median time to the first token, in milliseconds.
    pub(super) fn ttft_ms(&self) -> Option<f64> {
        let mut times: Vec<f64> =
            self.cells.iter().filter_map(|c| c.result.as_ref().ok()?.0.ttft_ms).collect();
        times.sort_by(f64::total_cmp);
        let middle = times.len() / 2;
        match times.len() {
            0 => None,
            n if n % 2 == 1 => times.get(middle).copied(),
            _ => Some(f64::midpoint(times[middle - 1], times[middle])),
        }
    }

    /// How often each verdict was given.
    pub(super) fn verdicts(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for (answer, _) in self.cells.iter().filter_map(|c| c.result.as_ref().ok()) {
            *counts.entry(answer.verdict.as_ref().map_or("none", |v| v.verdict.as_str())).or_default() += 1;
        }
        counts
    }

    fn json(&self, questions: &[Checked]) -> Value {
        let answers = questions.iter().zip(&self.cells).map(|(question, cell)| match &cell.result {
            Ok((answer, right)) => {
                json!({"question": question.id, "right": right, "answer": answer, "error": null})
            }
            Err(error) => {
                json!({"question": question.id, "right": null, "answer": null, "error": error.to_string()})
            }
        });
        json!({
            "with_passage": self.way.with_passage,
            "route": self.way.route,
            "right": self.right(),
            "ttft_ms": self.ttft_ms(),
            "verdicts": self.verdicts(),
            "answers": answers.collect::<Vec<_>>(),
        })
    }
}

impl NodeReport {
    /// Whether every question was answered in every way.
    pub(super) fn is_whole(&self) -> bool {
        self.runs.len() == WAYS.len() && self.runs.iter().flat_map(|r| &r.cells).all(|c| c.result.is_ok())
    }
}

/// All reports, for programs.
pub(super) fn json(test: &FieldTest, reports: &[NodeReport]) -> Value {
    let nodes = reports.iter().map(|report| {
        let runs: Vec<_> = report.runs.iter().map(|run| run.json(&test.questions)).collect();
        json!({"node": report.node, "runs": runs})
    });
    json!({"name": test.name, "questions": test.questions.len(), "nodes": nodes.collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus_cli::field_test::score::Expected;
    use std::time::Duration;

    fn test() -> FieldTest {
        let checked =
            Checked { id: "q".into(), ask: "Why?".into(), expected: Expected::NotStated, never: vec![] };
        FieldTest {
            name: "n".into(),
            passage: "Words.".into(),
            max_tokens: 9,
            timeout: Duration::from_secs(1),
            questions: vec![checked],
        }
    }

    #[test]
    fn prompts_differ_from_their_first_word_on() {
        let test = test();
        let [a, b] = ["aa", "bb"].map(|salt| question(&test, &test.questions[0], WAYS[0], salt));
        assert!(a.messages[0].1.starts_with("aa") && b.messages[0].1.starts_with("bb"));
        assert!(a.messages[1].1.contains("Words.") && a.messages[1].1.ends_with("Why?"));
        let bare = question(&test, &test.questions[0], WAYS[3], "aa");
        assert!(!bare.messages[1].1.contains("Words.") && bare.route == Route::Native);
    }

    #[test]
    fn a_median_is_in_the_middle() {
        let cell = |ttft_ms| Cell {
            result: Ok((
                Answer {
                    text: String::new(),
                    verdict: None,
                    ttft_ms,
                    total_ms: 0.0,
                    completion_tokens: None,
                    finish_reason: None,
                },
                true,
            )),
        };
        let run =
            |times: &[Option<f64>]| Run { way: WAYS[0], cells: times.iter().map(|t| cell(*t)).collect() };
        assert_eq!(run(&[Some(3.0), Some(1.0), Some(2.0)]).ttft_ms(), Some(2.0));
        assert_eq!(run(&[Some(3.0), Some(1.0), None]).ttft_ms(), Some(2.0));
        assert_eq!(run(&[None]).ttft_ms(), None);
        assert_eq!(run(&[None]).verdicts(), BTreeMap::from([("none", 1)]));
    }
}
