//! The file of a field test: a passage and questions with checkable answers.

use super::score::{Expected, normalise};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest name of a question: it heads a column.
const MAX_ID_CHARS: usize = 12;

/// A field test that can be run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FieldTest {
    pub(super) name: String,
    pub(super) passage: String,
    pub(super) max_tokens: u32,
    pub(super) timeout: Duration,
    pub(super) questions: Vec<Checked>,
}

/// A question whose answer can be checked.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Checked {
    pub(super) id: String,
    pub(super) ask: String,
    pub(super) expected: Expected,
    pub(super) never: Vec<String>,
}

/// Why a file is no field test.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    /// It can't be read.
    #[error("{file}: {source}")]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no TOML, or a key in it is missing, unknown or has the wrong type; the message shows the line.
    #[error("{file}: {message}")]
    Toml {
        /// The file.
        file: PathBuf,
        /// With line and column.
        message: String,
    },
    /// A value makes no sense.
    #[error("{file}: `{key}`: {message}")]
    Value {
        /// The file.
        file: PathBuf,
        /// Path of the key.
        key: String,
        /// What is wrong.
        message: String,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: String,
    passage: Option<String>,
    /// Relative to this file.
    passage_file: Option<PathBuf>,
    #[serde(default = "default_max_tokens")]
    max_tokens: u32,
    #[serde(default = "default_timeout_s")]
    timeout_s: u64,
    questions: Vec<WrittenQuestion>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenQuestion {
    id: String,
    ask: String,
    text: Option<Vec<String>>,
    number: Option<f64>,
    tolerance: Option<f64>,
    not_stated: Option<bool>,
    #[serde(default)]
    never: Vec<String>,
}

fn default_max_tokens() -> u32 {
    64
}

fn default_timeout_s() -> u64 {
    600
}

impl FieldTest {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`FileError`], naming the line or the key.
    pub(super) fn read(file: &Path) -> Result<Self, FileError> {
        let unreadable = |file: &Path, source| FileError::Unreadable { file: file.to_owned(), source };
        let text = std::fs::read_to_string(file).map_err(|e| unreadable(file, e))?;
        let written: Written = toml::from_str(&text).map_err(|e| FileError::Toml {
            file: file.to_owned(),
            message: e.to_string().trim_end().to_owned(),
        })?;
        let bad = |key: &str, message: &str| FileError::Value {
            file: file.to_owned(),
            key: key.to_owned(),
            message: message.to_owned(),
        };
        let passage = match (written.passage, written.passage_file) {
            (Some(passage), None) => passage,
            (None, Some(name)) => {
                let name = file.parent().unwrap_or(Path::new(".")).join(name);
                std::fs::read_to_string(&name).map_err(|e| unreadable(&name, e))?
            }
            (Some(_), Some(_)) => return Err(bad("passage_file", "give it or `passage`, not both")),
            (None, None) => return Err(bad("passage", "is required, or `passage_file`")),
        };
        if normalise(&passage).is_empty() {
            return Err(bad("passage", "has no words"));
        }
        if written.name.trim().is_empty() {
            return Err(bad("name", "is empty"));
        }
        if written.max_tokens == 0 {
            return Err(bad("max_tokens", "must be more than 0"));
        }
        if written.timeout_s == 0 {
            return Err(bad("timeout_s", "must be more than 0"));
        }
        let mut questions: Vec<Checked> = Vec::new();
        for (i, question) in written.questions.into_iter().enumerate() {
            let question =
                check(question).map_err(|(key, message)| bad(&format!("questions[{i}].{key}"), message))?;
            if questions.iter().any(|q| q.id == question.id) {
                return Err(bad(&format!("questions[{i}].id"), "is the name of another question, too"));
            }
            questions.push(question);
        }
        if !questions.iter().any(|q| q.expected == Expected::NotStated) {
            let message = "at least one must ask for a fact that isn't there: `not_stated = true`";
            return Err(bad("questions", message));
        }
        let timeout = Duration::from_secs(written.timeout_s);
        Ok(Self { name: written.name, passage, max_tokens: written.max_tokens, timeout, questions })
    }
}

fn check(written: WrittenQuestion) -> Result<Checked, (&'static str, &'static str)> {
    let WrittenQuestion { id, ask, text, number, tolerance, not_stated, never } = written;
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if id.is_empty() || id.len() > MAX_ID_CHARS || !id.chars().all(is_name) {
        return Err(("id", "must be 1 to 12 of a-z, 0-9 and -"));
    }
    if normalise(&ask).is_empty() {
        return Err(("ask", "has no words"));
    }
    if never.iter().any(|t| normalise(t).is_empty()) {
        return Err(("never", "has a text without words"));
    }
    if tolerance.is_some() && number.is_none() {
        return Err(("tolerance", "belongs to `number`"));
    }
    let expected = match (text, number, not_stated) {
        (Some(any), None, None) => {
            if any.is_empty() || any.iter().any(|t| normalise(t).is_empty()) {
                return Err(("text", "must be one or more texts with words"));
            }
            Expected::Text(any)
        }
        (None, Some(value), None) => {
            let tolerance = tolerance.unwrap_or(0.0);
            if !value.is_finite() || !(0.0..f64::INFINITY).contains(&tolerance) {
                return Err(("number", "and its tolerance must be finite, the tolerance not negative"));
            }
            Expected::Number { value, tolerance }
        }
        (None, None, Some(true)) => Expected::NotStated,
        (None, None, Some(false)) => return Err(("not_stated", "is true or left out")),
        _ => return Err(("text", "give exactly one of `text`, `number` and `not_stated`")),
    };
    Ok(Checked { id, ask, expected, never })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<FieldTest, String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("p.txt"), "Words.").unwrap();
        let file = dir.path().join("t.toml");
        std::fs::write(&file, text).unwrap();
        FieldTest::read(&file).map_err(|e| e.to_string())
    }

    const ABSENT: &str = "[[questions]]\nid = \"hat\"\nask = \"Which hat?\"\nnot_stated = true\n";

    #[test]
    fn the_shipped_example_is_one() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/field-test/example.toml");
        let test = FieldTest::read(&file).unwrap();
        assert!(test.passage.split_whitespace().count() > 950, "too short for a bridge to be worth it");
        assert!(test.questions.len() >= 6);
        // Every stated text is in the passage: nobody is asked for what isn't there by mistake.
        for question in &test.questions {
            if let Expected::Text(any) = &question.expected {
                let passage = normalise(&test.passage);
                assert!(any.iter().any(|t| passage.contains(&normalise(t))), "{}", question.id);
            }
        }
    }

    #[test]
    fn a_passage_may_stand_in_a_file_beside_it() {
        let test = read(&format!("name = \"n\"\npassage_file = \"p.txt\"\n{ABSENT}")).unwrap();
        assert_eq!((test.passage.as_str(), test.max_tokens), ("Words.", 64));
    }

    #[test]
    fn a_bad_file_names_line_or_key() {
        let head = "name = \"n\"\npassage = \"Words.\"\n";
        let question =
            |rest: &str| format!("{head}{ABSENT}[[questions]]\nid = \"a\"\nask = \"What?\"\n{rest}\n");
        for (text, wanted) in [
            ("name = ".to_owned(), "line 1"),
            (format!("{head}passages = 1\n{ABSENT}"), "passages"),
            (format!("name = \"n\"\n{ABSENT}"), "`passage`"),
            (format!("{head}passage_file = \"p.txt\"\n{ABSENT}"), "`passage_file`"),
            (format!("name = \"n\"\npassage_file = \"none.txt\"\n{ABSENT}"), "none.txt"),
            (format!("name = \"n\"\npassage = \"...\"\n{ABSENT}"), "`passage`"),
            (format!("name = \" \"\npassage = \"x\"\n{ABSENT}"), "`name`"),
            (format!("{head}max_tokens = 0\n{ABSENT}"), "`max_tokens`"),
            (format!("{head}max_tokens = \"many\"\n{ABSENT}"), "line 3"),
            (head.to_owned(), "questions"),
            (format!("{head}questions = []\n"), "isn't there"),
            (question("text = [\"x\"]\nnumber = 1"), "`questions[1].text`"),
            (question(""), "`questions[1].text`"),
            (question("text = []"), "`questions[1].text`"),
            (question("text = [\"!\"]"), "`questions[1].text`"),
            (question("number = nan"), "`questions[1].number`"),
            (question("number = 1\ntolerance = -1"), "`questions[1].number`"),
            (question("text = [\"x\"]\ntolerance = 1"), "`questions[1].tolerance`"),
            (question("not_stated = false"), "`questions[1].not_stated`"),
            (question("number = 1\nanswer = 2"), "answer"),
            (question("number = 1").replace("id = \"a\"", "id = \"hat\""), "`questions[1].id`"),
            (question("number = 1").replace("id = \"a\"", "id = \"A B\""), "`questions[1].id`"),
            (question("number = 1").replace("What?", "?"), "`questions[1].ask`"),
        ] {
            let error = read(&text).unwrap_err();
            assert!(
                error.contains(wanted) && error.contains("t.toml") | error.contains("none.txt"),
                "{text}\n{error}"
            );
        }
    }
}
