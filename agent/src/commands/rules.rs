//! Who may ask this node for what: the `[agent.commands]` table, checked.

use super::allow::{AllowedProgram, ExecRule, ProgramRule};
use super::ask::Endpoint;
use nix::unistd::{User, geteuid};
use serde::Deserialize;
use shared::bus::PublicKey;
use shared::settings::SettingsError;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The table as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct CommandRules {
    /// Public keys of those who may give commands, each with a name for the audit.
    operators: BTreeMap<String, String>,
    /// The same in a file that `pd-bridge bus keys` writes: lines of a key and a name.
    operators_file: Option<PathBuf>,
    /// Programs that may be run.
    allow: Vec<ProgramRule>,
    /// Every program may be run with every argument.
    unrestricted: bool,
    /// Where a bare program name is looked for, and the `PATH` that programs get.
    path: Option<String>,
    /// User that programs run as.
    user: Option<String>,
    /// Folder that programs run in.
    working_dir: Option<PathBuf>,
    /// Whether the agent's log lines may be read.
    logs: Option<bool>,
    /// Whether the node may be told to drain and to resume.
    drain: Option<bool>,
    /// This node's own OpenAI endpoint, `host:port`, for questions; without it nobody may ask.
    ask: Option<String>,
    /// File with an API key of that endpoint, where it wants one.
    ask_key_file: Option<PathBuf>,
    clock_tolerance_ms: Option<u64>,
    max_concurrent: Option<usize>,
    max_timeout_ms: Option<u64>,
    max_output_bytes: Option<u64>,
    max_processes: Option<u64>,
    max_memory_bytes: Option<u64>,
    max_cpu_s: Option<u64>,
    max_file_bytes: Option<u64>,
}

/// Who may ask for what.
#[derive(Debug)]
pub(crate) struct Rules {
    /// Name and key.
    pub(crate) operators: Vec<(String, PublicKey)>,
    pub(crate) exec: ExecRule,
    pub(crate) user: Option<RunAs>,
    pub(crate) path: String,
    pub(crate) working_dir: PathBuf,
    pub(crate) logs: bool,
    pub(crate) drain: bool,
    pub(crate) ask: Option<Endpoint>,
    /// Largest difference between the operator's clock and this node's.
    pub(crate) clock_tolerance: Duration,
    pub(crate) limits: Limits,
}

/// Whom programs run as.
#[derive(Debug, Clone)]
pub(crate) struct RunAs {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) name: String,
    pub(crate) home: PathBuf,
}

/// Caps.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Commands with output at once.
    pub(crate) max_concurrent: usize,
    pub(crate) max_timeout: Duration,
    pub(crate) max_output_bytes: u64,
    pub(crate) max_processes: u64,
    pub(crate) max_memory_bytes: u64,
    pub(crate) max_cpu_s: u64,
    pub(crate) max_file_bytes: u64,
}

const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

impl CommandRules {
    /// Checks every value, and that every program is there.
    ///
    /// # Errors
    /// [`SettingsError`] naming the key.
    pub(crate) fn resolve(self) -> Result<Rules, SettingsError> {
        let bad = |key: &str, message: &dyn std::fmt::Display| {
            SettingsError::value(format!("agent.commands.{key}"), message)
        };
        let mut operators = self.operators;
        if let Some(file) = &self.operators_file {
            operators.extend(read_operators(file).map_err(|e| bad("operators_file", &e))?);
        }
        if operators.is_empty() {
            return Err(bad("operators", &"names nobody; leave the whole table out to take no commands"));
        }
        let operators = operators.iter().map(|(name, key)| match PublicKey::new(key) {
            Ok(key) => Ok((name.clone(), key)),
            Err(e) => Err(bad(&format!("operators.{name}"), &e)),
        });
        let operators = operators.collect::<Result<Vec<_>, _>>()?;
        let allowed = self
            .allow
            .into_iter()
            .enumerate()
            .map(|(i, rule)| AllowedProgram::resolve(rule).map_err(|e| bad(&format!("allow[{i}]"), &e)));
        let allowed = allowed.collect::<Result<Vec<_>, _>>()?;
        let path = self.path.unwrap_or_else(|| DEFAULT_PATH.to_owned());
        if path.split(':').any(|dir| !dir.starts_with('/')) {
            return Err(bad("path", &"every folder in it must be absolute"));
        }
        let exec = match (self.unrestricted, allowed.is_empty()) {
            (true, true) => ExecRule::Unrestricted,
            (true, false) => {
                return Err(bad("unrestricted", &"makes `allow` meaningless; remove one of them"));
            }
            (false, true) => ExecRule::Off,
            (false, false) => ExecRule::Allowed(allowed),
        };
        let user = match self.user {
            None if geteuid().is_root() && !matches!(exec, ExecRule::Off) => {
                return Err(bad("user", &"is required, since this agent runs as root"));
            }
            None => None,
            Some(name) => Some(run_as(&name).map_err(|e| bad("user", &e))?),
        };
        let working_dir = self.working_dir.unwrap_or_else(|| PathBuf::from("/"));
        if !working_dir.is_absolute() {
            return Err(bad("working_dir", &"must be absolute"));
        }
        let at_least_one = |key: &str, value: Option<u64>, default: u64| match value.unwrap_or(default) {
            0 => Err(bad(key, &"must be more than 0")),
            n => Ok(n),
        };
        let limits = Limits {
            max_concurrent: usize::try_from(at_least_one(
                "max_concurrent",
                self.max_concurrent.map(|n| n as u64),
                4,
            )?)
            .unwrap_or(usize::MAX),
            max_timeout: Duration::from_millis(at_least_one("max_timeout_ms", self.max_timeout_ms, 600_000)?),
            max_output_bytes: at_least_one("max_output_bytes", self.max_output_bytes, 256 << 20)?,
            max_processes: at_least_one("max_processes", self.max_processes, 256)?,
            max_memory_bytes: at_least_one("max_memory_bytes", self.max_memory_bytes, 8 << 30)?,
            max_cpu_s: at_least_one("max_cpu_s", self.max_cpu_s, 600)?,
            max_file_bytes: at_least_one("max_file_bytes", self.max_file_bytes, 1 << 30)?,
        };
        let ask = match (self.ask, &self.ask_key_file) {
            (None, Some(_)) => return Err(bad("ask_key_file", &"belongs to `ask`")),
            (addr, file) => addr.map(|addr| Endpoint::new(addr, file.as_deref())).transpose(),
        };
        let ask = ask.map_err(|e| bad("ask_key_file", &e))?;
        let tolerance_ms = self.clock_tolerance_ms.unwrap_or(30_000);
        if !(1000..=300_000).contains(&tolerance_ms) {
            return Err(bad("clock_tolerance_ms", &"must be 1000 to 300000"));
        }
        Ok(Rules {
            operators,
            exec,
            user,
            path,
            working_dir,
            logs: self.logs.unwrap_or(true),
            drain: self.drain.unwrap_or(true),
            ask,
            clock_tolerance: Duration::from_millis(tolerance_ms),
            limits,
        })
    }
}

/// Lines of a public key and a name; empty ones and those that start with `#` don't count.
fn read_operators(file: &Path) -> Result<Vec<(String, String)>, String> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
    let entry = |line: &str| {
        let (key, name) = line.split_once(char::is_whitespace).ok_or("a line is no key and name")?;
        Ok((name.trim().to_owned(), key.to_owned()))
    };
    lines.map(entry).collect()
}

fn run_as(name: &str) -> Result<RunAs, String> {
    let user = User::from_name(name)
        .map_err(|e| e.to_string())?
        .ok_or_else(|| format!("there is no user `{name}`"))?;
    let me = geteuid();
    if !me.is_root() && me != user.uid {
        return Err(format!("only root can become `{name}`"));
    }
    Ok(RunAs { uid: user.uid.as_raw(), gid: user.gid.as_raw(), name: user.name, home: user.dir })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::bus::OperatorKey;

    fn resolve(text: &str) -> Result<Rules, String> {
        let key = OperatorKey::generate().public();
        let rules: CommandRules = toml_from(&text.replace("KEY", &key));
        rules.resolve().map_err(|e| e.to_string())
    }

    fn toml_from(text: &str) -> CommandRules {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        std::fs::write(&file, format!("[agent]\n{text}")).unwrap();
        shared::settings::section(&file, "agent").unwrap()
    }

    fn me() -> String {
        User::from_uid(geteuid()).unwrap().unwrap().name
    }

    #[test]
    fn a_bad_value_names_its_key() {
        let me = me();
        for (text, key) in [
            (String::new(), "operators"),
            ("operators = { a = \"Uxx\" }".into(), "operators.a"),
            ("operators = { a = \"KEY\" }\nunrestricted = true\nuser = \"no-such-user\"".into(), "user"),
            ("operators = { a = \"KEY\" }\nmax_cpu_s = 0".into(), "max_cpu_s"),
            ("operators = { a = \"KEY\" }\nask_key_file = \"k\"".into(), "ask_key_file"),
            ("operators = { a = \"KEY\" }\nask = \"a:1\"\nask_key_file = \"/none\"".into(), "ask_key_file"),
            ("operators = { a = \"KEY\" }\nclock_tolerance_ms = 1".into(), "clock_tolerance_ms"),
            ("operators = { a = \"KEY\" }\npath = \"/bin:.\"".into(), "path"),
            ("operators = { a = \"KEY\" }\nworking_dir = \"tmp\"".into(), "working_dir"),
            (
                format!(
                    "operators = {{ a = \"KEY\" }}\nuser = \"{me}\"\nunrestricted = true\nallow = [ {{ program = \"/bin/ls\" }} ]"
                ),
                "unrestricted",
            ),
            (
                format!("operators = {{ a = \"KEY\" }}\nuser = \"{me}\"\nallow = [ {{ program = \"ls\" }} ]"),
                "allow[0]",
            ),
        ] {
            let error = resolve(&text).unwrap_err();
            assert!(error.contains(&format!("agent.commands.{key}")), "{text}: {error}");
        }
    }

    #[test]
    fn operators_may_stand_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("operators.txt");
        let (a, b) = (OperatorKey::generate().public(), OperatorKey::generate().public());
        std::fs::write(&file, format!("# keys\n{a} alice\n\n{b} bob\n")).unwrap();
        let rules = resolve(&format!("operators_file = \"{}\"", file.display())).unwrap();
        assert_eq!(rules.operators.iter().map(|(n, _)| n.as_str()).collect::<Vec<_>>(), ["alice", "bob"]);
        std::fs::write(&file, "nonsense").unwrap();
        assert!(
            resolve(&format!("operators_file = \"{}\"", file.display()))
                .unwrap_err()
                .contains("operators_file")
        );
    }

    #[test]
    fn an_operator_alone_may_run_nothing() {
        let rules = resolve("operators = { a = \"KEY\" }").unwrap();
        assert!(matches!(rules.exec, ExecRule::Off) && rules.logs && rules.drain && rules.ask.is_none());
    }
}
