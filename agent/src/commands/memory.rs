//! The replay window on disk: a restarted agent remembers what it took.

use shared::bus::{NotFresh, ReplayWindow};
use shared::hexbytes::Hex;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Commands that can be remembered within the window.
const CAPACITY: usize = 16_384;
/// The file is written anew, without what is forgotten, when it is this long.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// What was taken, in memory and in a file. The file survives the process, not a crash of the machine: its first line
/// names the boot of the system, and after another boot (or without a usable file) nothing is taken that an earlier
/// life could have taken. Only in a folder that is new there was no earlier life.
#[derive(Debug)]
pub(super) struct Memory {
    window: ReplayWindow,
    path: PathBuf,
    file: File,
    bytes: u64,
}

/// Why a command was not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotTaken {
    #[error(transparent)]
    NotFresh(#[from] NotFresh),
    /// It could not be written down, so a restart would take it again.
    #[error("this node can't write down what it takes: {0}")]
    Io(#[from] std::io::Error),
}

impl Memory {
    /// Reads what an earlier life left.
    ///
    /// # Errors
    /// When the file can't be written.
    pub(super) fn open(dir: &Path, is_new: bool, tolerance_ms: u64, now_ms: u64) -> std::io::Result<Self> {
        let path = dir.join("taken");
        let mut window = ReplayWindow::new(tolerance_ms, CAPACITY);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        if recall(&mut window, &text, &boot()).is_none() && !is_new {
            window = ReplayWindow::new(tolerance_ms, CAPACITY);
            window.forget_the_past(now_ms);
        }
        let (file, bytes) = rewrite(&path, &window)?;
        Ok(Self { window, path, file, bytes })
    }

    /// Takes a command once.
    ///
    /// # Errors
    /// [`NotTaken`]; it must not be run then.
    pub(super) fn take(&mut self, now_ms: u64, issued_at_ms: u64, nonce: Hex<16>) -> Result<(), NotTaken> {
        self.window.take(now_ms, issued_at_ms, nonce)?;
        let line = format!("{issued_at_ms} {nonce}\n");
        if self.bytes + line.len() as u64 > MAX_FILE_BYTES {
            (self.file, self.bytes) = rewrite(&self.path, &self.window)?;
            return Ok(());
        }
        self.file.write_all(line.as_bytes())?;
        self.bytes += line.len() as u64;
        Ok(())
    }
}

/// `None` when the text is of another boot or broken.
fn recall(window: &mut ReplayWindow, text: &str, boot: &str) -> Option<()> {
    let mut lines = text.split_inclusive('\n');
    let head = lines.next()?.strip_suffix('\n')?;
    let (horizon_ms, of) = head.split_once(' ')?;
    if of != boot {
        return None;
    }
    window.raise_horizon(horizon_ms.parse().ok()?);
    for line in lines {
        let (issued_at_ms, nonce) = line.strip_suffix('\n')?.split_once(' ')?;
        let mut bytes = [0; 16];
        hex_decode(nonce, &mut bytes)?;
        window.recall(issued_at_ms.parse().ok()?, Hex(bytes));
    }
    Some(())
}

fn hex_decode(text: &str, bytes: &mut [u8; 16]) -> Option<()> {
    (text.len() == 32 && text.is_ascii()).then_some(())?;
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(())
}

fn rewrite(path: &Path, window: &ReplayWindow) -> std::io::Result<(File, u64)> {
    let mut text = format!("{} {}\n", window.horizon_ms(), boot());
    for (issued_at_ms, nonce) in window.remembered() {
        text.push_str(&format!("{issued_at_ms} {nonce}\n"));
    }
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(text.as_bytes())?;
    // The old file is whole until the new one is.
    std::fs::rename(&new, path)?;
    Ok((file, text.len() as u64))
}

/// Names this boot of the system; a random name, which equals no other, where the system has none.
fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned());
    let time = || sysinfo::System::boot_time().map(|s| s.to_string());
    id.or_else(|_| time()).unwrap_or_else(|_| Hex::<16>::random().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_remembers() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = Memory::open(dir.path(), false, 1000, 10_000).unwrap();
        assert!(first.take(10_500, 10_500, Hex([1; 16])).is_err(), "a lost memory waits");
        first.take(11_500, 11_500, Hex([2; 16])).unwrap();
        drop(first);
        let mut second = Memory::open(dir.path(), false, 1000, 11_600).unwrap();
        assert!(second.take(11_600, 11_500, Hex([2; 16])).is_err());
        second.take(11_600, 11_550, Hex([3; 16])).unwrap();
    }

    #[test]
    fn a_broken_or_foreign_file_is_a_lost_memory() {
        let dir = tempfile::tempdir().unwrap();
        for text in
            ["", "0 another-boot\n", &format!("0 {}\n11500 zz\n", boot()), &format!("0 {}\n115", boot())]
        {
            std::fs::write(dir.path().join("taken"), text).unwrap();
            let mut memory = Memory::open(dir.path(), false, 1000, 10_000).unwrap();
            assert!(memory.take(10_900, 10_900, Hex([1; 16])).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_file_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut memory = Memory::open(dir.path(), true, 1000, 0).unwrap();
        for i in 0..60_000u64 {
            let mut nonce = [0; 16];
            nonce[..8].copy_from_slice(&i.to_le_bytes());
            memory.take(2000 + i, 2000 + i, Hex(nonce)).unwrap();
        }
        assert!(std::fs::metadata(dir.path().join("taken")).unwrap().len() <= MAX_FILE_BYTES);
    }
}
