//! Things every long-running process here does.

use tokio::io::AsyncReadExt as _;

/// Resolves on Ctrl-C or SIGTERM, and, with `exit_with_stdin`, when standard input closes: a supervisor
/// holds the other end of that pipe, so its children end with it however it ends.
pub async fn shutdown_signal(exit_with_stdin: bool) {
    let terminate = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => {
                signal.recv().await;
            }
            Err(error) => {
                tracing::warn!(%error, "SIGTERM can't be caught");
                std::future::pending().await
            }
        }
    };
    let parent_gone = async {
        if !exit_with_stdin {
            std::future::pending::<()>().await;
        }
        let mut sink = [0; 64];
        let mut stdin = tokio::io::stdin();
        while stdin.read(&mut sink).await.is_ok_and(|n| n > 0) {}
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        () = terminate => {}
        () = parent_gone => {}
    }
}

/// Resident memory of this process in bytes, 0 where the system does not say.
#[must_use]
pub fn resident_memory_bytes() -> u64 {
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        let kib =
            status.lines().find_map(|l| l.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
        return kib.map_or(0, |kib: u64| kib * 1024);
    }
    let ps =
        std::process::Command::new("ps").args(["-o", "rss=", "-p", &std::process::id().to_string()]).output();
    ps.ok()
        .and_then(|out| String::from_utf8(out.stdout).ok()?.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}
