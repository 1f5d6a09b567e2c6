//! Which programs may be run, with which arguments: decided on the argument list alone, with no shell in between.

use regex::Regex;
use serde::Deserialize;
use shared::bus::{Refusal, RefusalCode};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

const MAX_ARGS: usize = 256;
const MAX_ARG_BYTES: usize = 64 << 10;
/// Compiled size of one pattern.
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// One entry of the allow-list as written.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProgramRule {
    /// Absolute path.
    program: PathBuf,
    /// What operators call it.
    name: Option<String>,
    /// One pattern for each argument, which must match it whole.
    #[serde(default)]
    args: Vec<String>,
    /// How many of those must be there; all, unless said.
    min_args: Option<usize>,
    /// Pattern for further arguments; none are allowed without it.
    more_args: Option<String>,
    /// Most arguments in all, with `more_args`.
    max_args: Option<usize>,
}

/// What may be run.
#[derive(Debug)]
pub(crate) enum ExecRule {
    /// Nothing.
    Off,
    /// What is on the list.
    Allowed(Vec<AllowedProgram>),
    /// Anything.
    Unrestricted,
}

/// An entry of the allow-list.
#[derive(Debug)]
pub(crate) struct AllowedProgram {
    name: String,
    written: PathBuf,
    /// Where `written` led when the agent started.
    resolved: PathBuf,
    args: Vec<Regex>,
    min_args: usize,
    more: Option<Regex>,
    max_args: usize,
}

/// A program that may be run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Approved {
    /// File to start.
    pub(crate) program: PathBuf,
    /// What it sees as its own name: programs with many names look at it.
    pub(crate) arg0: PathBuf,
    pub(crate) args: Vec<String>,
}

impl ExecRule {
    /// Decides on an argument list.
    ///
    /// # Errors
    /// [`RefusalCode::Disabled`], [`RefusalCode::NotAllowed`].
    pub(crate) fn approve(&self, argv: &[String], path: &str) -> Result<Approved, Refusal> {
        let no = |message: String| Refusal::new(RefusalCode::NotAllowed, message);
        let Some((name, args)) = argv.split_first() else { return Err(no("names no program".into())) };
        let bytes: usize = argv.iter().map(String::len).sum();
        if args.len() > MAX_ARGS || bytes > MAX_ARG_BYTES || argv.iter().any(|a| a.contains('\0')) {
            return Err(no("too many or too long arguments, or a zero byte in one".into()));
        }
        match self {
            Self::Off => Err(Refusal::new(RefusalCode::Disabled, "this node runs no programs")),
            Self::Unrestricted => {
                let written = find(name, path).ok_or_else(|| no(format!("there is no program `{name}`")))?;
                let program =
                    written.canonicalize().map_err(|e| no(format!("{}: {e}", written.display())))?;
                Ok(Approved { program, arg0: written, args: args.to_vec() })
            }
            Self::Allowed(list) => {
                let named: Vec<_> = list.iter().filter(|a| a.is_called(name)).collect();
                if named.is_empty() {
                    return Err(no(format!("`{name}` is not on this node's list")));
                }
                let fits = named.iter().find(|a| a.takes(args));
                let fits = fits.ok_or_else(|| no(format!("these arguments of `{name}` are not allowed")))?;
                fits.unchanged().map_err(no)?;
                Ok(Approved {
                    program: fits.resolved.clone(),
                    arg0: fits.written.clone(),
                    args: args.to_vec(),
                })
            }
        }
    }
}

impl AllowedProgram {
    /// Checks an entry; the program must be there and nobody but its owner may be able to change it.
    ///
    /// # Errors
    /// What is wrong, for people.
    pub(crate) fn resolve(rule: ProgramRule) -> Result<Self, String> {
        let written = rule.program;
        if !is_plain(&written) {
            return Err(format!("`{}` is no absolute path without `.` and `..`", written.display()));
        }
        let resolved = written.canonicalize().map_err(|e| format!("{}: {e}", written.display()))?;
        check_program(&resolved)?;
        let file_name = written.file_name().and_then(|n| n.to_str()).map(str::to_owned);
        let name = rule.name.or(file_name).ok_or("needs a name")?;
        let args = rule.args.iter().map(|p| whole(p)).collect::<Result<Vec<_>, _>>()?;
        let min_args = rule.min_args.unwrap_or(args.len());
        if min_args > args.len() {
            return Err(format!("min_args is {min_args}, but there are {} patterns", args.len()));
        }
        let more = rule.more_args.as_deref().map(whole).transpose()?;
        if rule.max_args.is_some() && more.is_none() {
            return Err("max_args is for more_args".into());
        }
        let max_args = if more.is_some() { rule.max_args.unwrap_or(16) } else { args.len() };
        Ok(Self { name, written, resolved, args, min_args, more, max_args })
    }

    fn is_called(&self, name: &str) -> bool {
        name == self.name || Path::new(name).as_os_str() == self.written.as_os_str()
    }

    fn takes(&self, args: &[String]) -> bool {
        let fits = |(i, arg): (usize, &String)| match (self.args.get(i), &self.more) {
            (Some(pattern), _) | (None, Some(pattern)) => pattern.is_match(arg),
            (None, None) => false,
        };
        (self.min_args..=self.max_args).contains(&args.len()) && args.iter().enumerate().all(fits)
    }

    /// A link that leads elsewhere now, or a file that others can write, is not what was allowed.
    fn unchanged(&self) -> Result<(), String> {
        let now = self.written.canonicalize().map_err(|e| format!("{}: {e}", self.written.display()))?;
        if now != self.resolved {
            return Err(format!("{} leads elsewhere than when this agent started", self.written.display()));
        }
        check_program(&self.resolved)
    }
}

fn is_plain(path: &Path) -> bool {
    let has_dots = || path.components().any(|c| matches!(c, Component::ParentDir | Component::CurDir));
    path.is_absolute()
        && !has_dots()
        && path.to_str().is_some_and(|p| !p.contains("/./") && !p.contains("//"))
}

fn check_program(file: &Path) -> Result<(), String> {
    let meta = std::fs::metadata(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let mode = meta.permissions().mode();
    if !meta.is_file() || mode & 0o111 == 0 {
        return Err(format!("{} is no program", file.display()));
    }
    if mode & 0o002 != 0 {
        return Err(format!("anybody can write {}", file.display()));
    }
    Ok(())
}

/// A pattern that matches the whole text or not at all; `.` and classes don't make it match half a line.
fn whole(pattern: &str) -> Result<Regex, String> {
    // On its own first: brackets that close ours would otherwise pass.
    let build = |p: &str| {
        regex::RegexBuilder::new(p).size_limit(MAX_PATTERN_BYTES).build().map_err(|e| e.to_string())
    };
    build(pattern)?;
    build(&format!(r"\A(?:{pattern})\z"))
}

/// An absolute path as it is, or a bare name in the folders of `path`.
fn find(name: &str, path: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(|p| is_plain(p) && check_program(p).is_ok());
    }
    if matches!(name, "" | "." | "..") {
        return None;
    }
    path.split(':').map(|dir| Path::new(dir).join(name)).find(|p| check_program(p).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(args: &[&str], min_args: Option<usize>, more: Option<&str>) -> ExecRule {
        let rule = ProgramRule {
            program: "/bin/ls".into(),
            name: None,
            args: args.iter().map(|a| (*a).to_owned()).collect(),
            min_args,
            more_args: more.map(str::to_owned),
            max_args: None,
        };
        ExecRule::Allowed(vec![AllowedProgram::resolve(rule).unwrap()])
    }

    fn takes(rule: &ExecRule, argv: &[&str]) -> bool {
        let argv: Vec<String> = argv.iter().map(|a| (*a).to_owned()).collect();
        rule.approve(&argv, "/usr/bin:/bin").is_ok()
    }

    #[test]
    fn a_pattern_matches_the_whole_argument() {
        let ls = rule(&["-l|-a", "/var/[a-z]+"], Some(1), None);
        assert!(takes(&ls, &["ls", "-l"]) && takes(&ls, &["/bin/ls", "-a", "/var/log"]));
        for bad in [
            &["ls"][..],
            &["ls", "-la"],
            &["ls", "-l", "/var/log", "x"],
            &["ls", "-l", "/var/log\n/etc"],
            &["ls", "-l", "x/var/log"],
            &["ls", "-l", "/var/log/../../etc"],
            &["ls", "-l", "/var/$(id)"],
            &["ls", "-l", "/var/log;id"],
            &["ls", "-l\n", "/var/log"],
        ] {
            assert!(!takes(&ls, bad), "{bad:?}");
        }
        let more = rule(&[], None, Some("[0-9]+"));
        assert!(takes(&more, &["ls"]) && takes(&more, &["ls", "1", "2"]) && !takes(&more, &["ls", "1", "x"]));
        assert!(!takes(&more, &[&["ls"][..], &["1"; 17]].concat()), "the number is bounded");
    }

    #[test]
    fn a_program_has_one_name_and_one_path() {
        let ls = rule(&[], None, None);
        for bad in [
            "./ls",
            "../bin/ls",
            "/bin/../bin/ls",
            "/bin/./ls",
            "/bin//ls",
            "/usr/bin/../bin/ls",
            "LS",
            "ls ",
            "bin/ls",
            "",
            "/bin/ls/",
        ] {
            assert!(!takes(&ls, &[bad]), "{bad}");
        }
    }

    #[test]
    fn unrestricted_still_takes_no_relative_path() {
        let any = ExecRule::Unrestricted;
        assert!(takes(&any, &["ls", "anything; $(at all)"]) && takes(&any, &["/bin/ls"]));
        for bad in [
            "./ls",
            "bin/ls",
            "../ls",
            "/bin/../bin/ls",
            "..",
            ".",
            "",
            "no-such-program",
            "/etc/passwd",
            "/bin",
        ] {
            assert!(!takes(&any, &[bad]), "{bad}");
        }
        assert!(!takes(&any, &["ls", "a\0b"]) && !takes(&any, &[]));
        assert!(!takes(&any, &[&["ls"][..], &["x"; MAX_ARGS + 1]].concat()));
    }

    #[test]
    fn a_swapped_link_or_a_writable_program_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("tool");
        std::os::unix::fs::symlink("/bin/ls", &link).unwrap();
        let rule = || ProgramRule {
            program: link.clone(),
            name: None,
            args: vec![],
            min_args: None,
            more_args: None,
            max_args: None,
        };
        let allowed = ExecRule::Allowed(vec![AllowedProgram::resolve(rule()).unwrap()]);
        assert!(takes(&allowed, &["tool"]));
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink("/bin/cat", &link).unwrap();
        assert!(!takes(&allowed, &["tool"]));
        std::fs::remove_file(&link).unwrap();
        std::fs::write(&link, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&link, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(AllowedProgram::resolve(rule()).is_err());
    }

    #[test]
    fn brackets_in_a_pattern_can_not_open_it() {
        assert!(whole("a)|(?:.*").is_err());
        assert!(!whole("a|b").unwrap().is_match("ab"));
    }
}
