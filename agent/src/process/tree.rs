//! Everything below a process, and the end of it.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::HashSet;

/// Rounds of stopping and killing before giving up. Each leaves nobody who could start anybody, so the second one
/// finds nothing unless the system hides processes.
const ROUNDS: u32 = 50;

/// Kills every descendant of a process; true when none is left. They are stopped first: whoever is stopped starts
/// nobody, so a fork bomb can't outrun this.
pub(crate) fn end_descendants(root: u32) -> bool {
    end_below(root, &HashSet::new())
}

/// The same, sparing `spared` and what is below them.
pub(super) fn end_below(root: u32, spared: &HashSet<u32>) -> bool {
    if spared.is_empty() && direct_children(root).is_empty() {
        return true;
    }
    for _ in 0..ROUNDS {
        let mut stopped = HashSet::new();
        loop {
            let found = descendants(root, spared);
            let new: Vec<u32> = found.into_iter().filter(|pid| !stopped.contains(pid)).collect();
            if new.is_empty() {
                break;
            }
            for pid in new {
                signal(pid, Signal::SIGSTOP);
                stopped.insert(pid);
            }
        }
        if stopped.is_empty() {
            return true;
        }
        stopped.iter().for_each(|pid| signal(*pid, Signal::SIGKILL));
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    false
}

/// Sends a signal to every descendant.
pub(crate) fn signal_descendants(root: u32, which: Signal) {
    descendants(root, &HashSet::new()).into_iter().for_each(|pid| signal(pid, which));
}

pub(super) fn signal(pid: u32, signal: Signal) {
    if let Ok(pid) = i32::try_from(pid)
        && pid > 1
    {
        // It may be gone already, which is what is wanted.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

/// Living descendants.
fn descendants(root: u32, spared: &HashSet<u32>) -> Vec<u32> {
    let mut found = Vec::new();
    let children = system::Children::read();
    let mut next = vec![root];
    while let Some(parent) = next.pop() {
        for child in children.of(parent) {
            if !spared.contains(&child.pid) {
                next.push(child.pid);
                if !child.is_dead {
                    found.push(child.pid);
                }
            }
        }
    }
    found
}

/// Direct children, dead ones that wait to be reaped included. Cheap; one that comes or goes meanwhile may be missed.
pub(super) fn direct_children(root: u32) -> Vec<u32> {
    system::direct(root).unwrap_or_else(|| all_direct_children(root))
}

/// Direct children, from a look at every process.
pub(super) fn all_direct_children(root: u32) -> Vec<u32> {
    system::Children::read().of(root).map(|c| c.pid).collect()
}

#[derive(Debug, Clone, Copy)]
struct Child {
    pid: u32,
    is_dead: bool,
}

#[cfg(target_os = "linux")]
mod system {
    use super::Child;
    use std::collections::HashMap;

    /// What the kernel lists for each thread, where it was built to.
    pub(super) fn direct(parent: u32) -> Option<Vec<u32>> {
        let mut children = Vec::new();
        for thread in std::fs::read_dir(format!("/proc/{parent}/task")).ok()?.filter_map(Result::ok) {
            let list = std::fs::read_to_string(thread.path().join("children")).ok()?;
            children.extend(list.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        Some(children)
    }

    /// Who is whose child, from one look at `/proc`.
    pub(super) struct Children(HashMap<u32, Vec<Child>>);

    impl Children {
        pub(super) fn read() -> Self {
            let mut children: HashMap<u32, Vec<Child>> = HashMap::new();
            let entries = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
            for pid in entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok()) {
                let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
                // The name, in brackets, may hold anything; what follows its last bracket is fixed.
                let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
                let mut fields = rest.split(' ');
                let is_dead = matches!(fields.next(), Some("Z" | "X"));
                if let Some(parent) = fields.next().and_then(|p| p.parse().ok()) {
                    children.entry(parent).or_default().push(Child { pid, is_dead });
                }
            }
            Self(children)
        }

        pub(super) fn of(&self, parent: u32) -> impl Iterator<Item = Child> + '_ {
            self.0.get(&parent).into_iter().flatten().copied()
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::Child;
    use std::collections::HashMap;

    pub(super) fn direct(_: u32) -> Option<Vec<u32>> {
        None
    }

    /// Who is whose child, as `ps` tells.
    pub(super) struct Children(HashMap<u32, Vec<Child>>);

    impl Children {
        pub(super) fn read() -> Self {
            let mut command = std::process::Command::new("/bin/ps");
            command.args(["-axo", "pid=,ppid=,stat="]).stdout(std::process::Stdio::piped());
            let Ok(ps) = command.spawn() else { return Self(HashMap::new()) };
            let asked = ps.id();
            let out = ps.wait_with_output();
            let text = out.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
            let mut children: HashMap<u32, Vec<Child>> = HashMap::new();
            for line in text.lines() {
                let mut fields = line.split_whitespace();
                let (pid, parent) = (fields.next(), fields.next());
                let is_dead = fields.next().is_some_and(|s| s.starts_with('Z'));
                if let (Some(Ok(pid)), Some(Ok(parent))) = (pid.map(str::parse), parent.map(str::parse))
                    && pid != asked
                {
                    children.entry(parent).or_default().push(Child { pid, is_dead });
                }
            }
            Self(children)
        }

        pub(super) fn of(&self, parent: u32) -> impl Iterator<Item = Child> + '_ {
            self.0.get(&parent).into_iter().flatten().copied()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn children_of_children_are_ended() {
        let mut shell = Command::new("/bin/sh")
            .args(["-c", "sleep 100 & sh -c 'sleep 100 & wait' & wait"])
            .spawn()
            .unwrap();
        let start = std::time::Instant::now();
        while descendants(shell.id(), &HashSet::new()).len() < 3 {
            assert!(start.elapsed().as_secs() < 20, "the shell started nothing");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(end_descendants(shell.id()));
        assert!(descendants(shell.id(), &HashSet::new()).is_empty());
        shell.kill().unwrap();
        shell.wait().unwrap();
    }
}
