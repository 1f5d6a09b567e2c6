//! What was asked and what came of it: a line in a file of this machine, and a message on the bus.

use super::rules::Rules;
use parking_lot::Mutex;
use shared::bus::{Action, AuditLine, Bus, End, NodeId, Refusal, SignedCommand, UnsignedCommand, subjects};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// The file is set aside (one old file is kept) when it is this long.
const MAX_FILE_BYTES: u64 = 32 << 20;
/// Refusals of commands that nobody signed are written down at most this often per second; the rest is counted.
/// Otherwise anybody on the bus could push the past out of the file.
const UNSIGNED_PER_S: u32 = 20;
/// Longest argument list in a line.
const MAX_ARGV_BYTES: usize = 4096;
/// Lines that may wait for the bus; the file has them anyway.
const BUS_BACKLOG: usize = 1024;

/// Writes lines; clones share the file.
#[derive(Debug, Clone)]
pub(crate) struct Audit(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    node: NodeId,
    log: Mutex<Log>,
    to_bus: mpsc::Sender<bytes::Bytes>,
}

#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: File,
    bytes: u64,
    second: Instant,
    unsigned: u32,
    suppressed: u64,
}

impl Audit {
    /// Opens `audit.log` in a folder that only its owner can enter.
    ///
    /// # Errors
    /// When either can't be made.
    pub(crate) fn open(dir: &Path, node: NodeId, bus: Bus) -> std::io::Result<Self> {
        let path = dir.join("audit.log");
        let (file, bytes) = open(&path)?;
        let log = Log { path, file, bytes, second: Instant::now(), unsigned: 0, suppressed: 0 };
        let (to_bus, mut lines) = mpsc::channel::<bytes::Bytes>(BUS_BACKLOG);
        let subject = subjects::audit(&node);
        tokio::spawn(async move {
            while let Some(line) = lines.recv().await {
                if let Err(error) = bus.client.publish(subject.clone(), line).await {
                    tracing::warn!(%error, "audit line not sent; it is in the file");
                }
            }
        });
        Ok(Self(Arc::new(Shared { node, log: Mutex::new(log), to_bus })))
    }

    /// A command that is taken.
    ///
    /// # Errors
    /// When it can't be written down: then it must not be run.
    pub(crate) fn accepted(
        &self,
        rules: &Rules,
        signed: &SignedCommand,
        command: &UnsignedCommand,
    ) -> std::io::Result<()> {
        self.write(self.line("accepted", Some(rules), Some(signed), Some(command)))
    }

    /// A message that is not taken. `command` is what a valid signature covers, if there was one.
    pub(crate) fn refused(
        &self,
        rules: Option<&Rules>,
        signed: Option<&SignedCommand>,
        command: Option<&UnsignedCommand>,
        refusal: &Refusal,
    ) {
        let mut line = self.line("refused", rules, signed, command);
        let code = serde_json::to_value(refusal.code).ok().and_then(|c| c.as_str().map(str::to_owned));
        line.reason = Some(format!("{}: {}", code.unwrap_or_default(), refusal.message));
        if command.is_none() {
            match self.0.log.lock().admit_unsigned() {
                Some(suppressed) => line.suppressed = suppressed,
                None => return,
            }
        }
        self.note(line);
    }

    /// A command that has ended.
    pub(crate) fn ended(&self, rules: &Rules, signed: &SignedCommand, command: &UnsignedCommand, end: &End) {
        let mut line = self.line("ended", Some(rules), Some(signed), Some(command));
        line.end = Some(end.clone());
        self.note(line);
    }

    fn line(
        &self,
        event: &str,
        rules: Option<&Rules>,
        signed: Option<&SignedCommand>,
        command: Option<&UnsignedCommand>,
    ) -> AuditLine {
        let operator = signed.map(|s| s.operator.chars().take(56).collect::<String>());
        let name =
            |key: &String| rules?.operators.iter().find(|(_, k)| k.as_str() == key).map(|(n, _)| n.clone());
        AuditLine {
            at: jiff::Timestamp::now().to_string(),
            node: self.0.node.clone(),
            event: event.to_owned(),
            operator_name: operator.as_ref().and_then(name),
            operator,
            verified: command.is_some(),
            command: command.map(|c| c.id),
            kind: command.map(|c| c.action.kind().to_owned()),
            argv: command.and_then(|c| argv(&c.action)),
            reason: None,
            end: None,
            suppressed: 0,
        }
    }

    /// Something that has happened: a full disk does not undo it.
    fn note(&self, line: AuditLine) {
        if let Err(error) = self.write(line) {
            tracing::error!(%error, "audit line not written");
        }
    }

    #[allow(clippy::needless_pass_by_value, reason = "a line is written once")]
    fn write(&self, line: AuditLine) -> std::io::Result<()> {
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        self.0.log.lock().append(&text)?;
        text.pop();
        // A bus that is away or slow loses lines that the file keeps.
        let _ = self.0.to_bus.try_send(text.into());
        Ok(())
    }
}

impl Log {
    fn append(&mut self, text: &[u8]) -> std::io::Result<()> {
        if self.bytes + text.len() as u64 > MAX_FILE_BYTES {
            std::fs::rename(&self.path, self.path.with_extension("log.old"))?;
            (self.file, self.bytes) = open(&self.path)?;
        }
        // One write for one line: lines of two agents that share a file by mistake stay whole.
        self.file.write_all(text)?;
        self.bytes += text.len() as u64;
        Ok(())
    }

    /// How many lines were left out before this one; `None` when this one is left out, too.
    fn admit_unsigned(&mut self) -> Option<u64> {
        if self.second.elapsed() >= Duration::from_secs(1) {
            (self.second, self.unsigned) = (Instant::now(), 0);
        }
        self.unsigned += 1;
        if self.unsigned > UNSIGNED_PER_S {
            self.suppressed += 1;
            return None;
        }
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Makes a folder that only its owner can enter; true if there was none.
///
/// # Errors
/// When it can't be made.
pub(crate) fn private_dir(dir: &Path) -> std::io::Result<bool> {
    let is_new = !dir.try_exists()?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    Ok(is_new)
}

fn open(path: &Path) -> std::io::Result<(File, u64)> {
    let no_follow = nix::fcntl::OFlag::O_NOFOLLOW.bits();
    let file = OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(no_follow).open(path)?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

fn argv(action: &Action) -> Option<Vec<String>> {
    let Action::Exec(spec) = action else { return None };
    let mut left = MAX_ARGV_BYTES;
    let mut kept = Vec::new();
    for arg in &spec.argv {
        let end = arg.floor_char_boundary(left.min(arg.len()));
        kept.push(arg[..end].to_owned());
        left -= end;
        if end < arg.len() {
            break;
        }
    }
    Some(kept)
}
