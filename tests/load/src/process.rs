//! What a process and its children have used, from `/proc`.

use serde::Serialize;
use std::collections::BTreeMap;

/// Clock ticks per second of the times in `/proc/PID/stat`, which Linux fixes at 100 for programs.
const TICKS_PER_S: f64 = 100.0;

/// CPU time and memory of a process tree.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Usage {
    /// User and system time so far, of processes that still live and the children they have waited for.
    pub cpu_s: f64,
    /// Memory of the tree, pages shared by several processes counted once.
    pub memory_bytes: u64,
}

impl Usage {
    /// Reads it; zeros for a process that is gone.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        let mut sum = Self::default();
        for pid in tree(pid) {
            sum.cpu_s += cpu_s(pid).unwrap_or(0.0);
            sum.memory_bytes += proportional_bytes(pid).unwrap_or(0);
        }
        sum
    }
}

/// A process and everything below it.
fn tree(root: u32) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        if let Some(parent) = stat(pid).and_then(|s| s.get(1)?.parse().ok()) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut all = vec![root];
    let mut at = 0;
    while at < all.len() {
        all.extend(children.get(&all[at]).into_iter().flatten().copied());
        at += 1;
    }
    all
}

/// Fields of `/proc/PID/stat` from the state on.
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(text.rsplit_once(") ")?.1.split_whitespace().map(str::to_owned).collect())
}

fn cpu_s(pid: u32) -> Option<f64> {
    let stat = stat(pid)?;
    let ticks: f64 = stat.get(11..15)?.iter().filter_map(|t| t.parse::<f64>().ok()).sum();
    Some(ticks / TICKS_PER_S)
}

fn proportional_bytes(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("Pss:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_something() {
        let usage = Usage::of(std::process::id());
        assert!(usage.memory_bytes > 100_000, "{usage:?}");
        let until = std::time::Instant::now() + std::time::Duration::from_millis(60);
        while std::time::Instant::now() < until {}
        let later = Usage::of(std::process::id());
        assert!(later.cpu_s > usage.cpu_s, "{usage:?} {later:?}");
    }
}
