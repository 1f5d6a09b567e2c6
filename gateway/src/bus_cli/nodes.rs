//! `pd-bridge nodes`.

use super::{BusCliError, OperatorArgs};
use clap::Args;
use futures_util::StreamExt as _;
use shared::bus::{Bus, HEARTBEAT_INTERVAL, Heartbeat, Liveness, NodeId, NodeState, subjects};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _, stdout};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Every agent is heard within one interval; the rest is for its way here.
pub(super) const LISTEN: Duration = HEARTBEAT_INTERVAL.saturating_add(Duration::from_millis(700));
const REDRAW: Duration = Duration::from_secs(1);

/// How to show the nodes.
#[derive(Debug, Args)]
pub(crate) struct NodesArgs {
    /// Go on showing them as they change, until Ctrl-C
    #[arg(long)]
    watch: bool,
    /// Print JSON: one array, or with --watch one heartbeat per line as they come
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    operator: OperatorArgs,
}

/// Shows them.
///
/// # Errors
/// [`BusCliError`].
pub(super) async fn run(args: NodesArgs) -> Result<ExitCode, BusCliError> {
    let bus = args.operator.connect().await?;
    let showing = async {
        match (args.watch, args.json) {
            (false, _) => once(&bus, args.json).await,
            (true, true) => stream(&bus).await,
            (true, false) => watch(&bus).await,
        }
    };
    tokio::select! {
        shown = showing => shown,
        () = shared::settings::shutdown_signal(false) => Ok(()),
    }?;
    Ok(ExitCode::SUCCESS)
}

async fn once(bus: &Bus, json: bool) -> Result<(), BusCliError> {
    let heard = Heard::listen(bus, LISTEN).await?;
    let text = if json {
        let beats: Vec<_> = heard.0.values().map(|(_, beat)| beat).collect();
        serde_json::to_string_pretty(&beats).map_err(std::io::Error::other)? + "\n"
    } else {
        heard.table()
    };
    Ok(stdout().write_all(text.as_bytes())?)
}

async fn stream(bus: &Bus) -> Result<(), BusCliError> {
    let mut messages = bus.client.subscribe(subjects::heartbeats()).await?;
    while let Some(message) = messages.next().await {
        if let Ok(beat) = Heartbeat::decode(&message.subject, &message.payload) {
            let line = serde_json::to_string(&beat).map_err(std::io::Error::other)?;
            writeln!(stdout(), "{line}")?;
        }
    }
    Ok(())
}

async fn watch(bus: &Bus) -> Result<(), BusCliError> {
    let mut messages = bus.client.subscribe(subjects::heartbeats()).await?;
    let mut heard = Heard::default();
    let mut redraw = tokio::time::interval(REDRAW);
    loop {
        tokio::select! {
            Some(message) = messages.next() => heard.hear(&message),
            _ = redraw.tick() => {
                // Home, and clear to the end of the screen.
                let clear = if stdout().is_terminal() { "\x1b[H\x1b[J" } else { "" };
                stdout().write_all(format!("{clear}{}\n", heard.table()).as_bytes())?;
            }
            else => return Ok(()),
        }
    }
}

/// The latest heartbeat of each node, with its arrival by this machine's clock.
#[derive(Default)]
pub(super) struct Heard(BTreeMap<NodeId, (Instant, Heartbeat)>);

impl Heard {
    /// Listens for a while.
    ///
    /// # Errors
    /// [`BusCliError::Nobody`], [`BusCliError::Subscribe`].
    pub(super) async fn listen(bus: &Bus, time: Duration) -> Result<Self, BusCliError> {
        let mut messages = bus.client.subscribe(subjects::heartbeats()).await?;
        let mut heard = Self::default();
        let listening = async {
            while let Some(message) = messages.next().await {
                heard.hear(&message);
            }
        };
        let _ = tokio::time::timeout(time, listening).await;
        if heard.0.is_empty() { Err(BusCliError::Nobody(time)) } else { Ok(heard) }
    }

    /// Nodes that have not said that they leave.
    pub(super) fn alive(&self) -> Vec<NodeId> {
        let alive = self.0.values().filter(|(_, beat)| beat.state != NodeState::Leaving);
        alive.map(|(_, beat)| beat.node.clone()).collect()
    }

    fn hear(&mut self, message: &async_nats::Message) {
        match Heartbeat::decode(&message.subject, &message.payload) {
            Ok(beat) => drop(self.0.insert(beat.node.clone(), (Instant::now(), beat))),
            Err(error) => tracing::warn!(%error, "unreadable heartbeat"),
        }
    }

    fn table(&self) -> String {
        let head = ["NODE", "STATE", "SEEN", "OS", "CPU", "LOAD", "MEMORY", "GPU", "WORKERS", "VERSION"];
        let mut rows = vec![head.map(str::to_owned)];
        rows.extend(self.0.values().map(|(at, beat)| row(at.elapsed(), beat)));
        let width = |i: usize| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0);
        let widths: [usize; 10] = std::array::from_fn(width);
        let mut text = String::new();
        for row in &rows {
            let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
            let line = cells.collect::<Vec<_>>().join("  ");
            // Writing to a string can't fail.
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }
}

fn row(silent_for: Duration, beat: &Heartbeat) -> [String; 10] {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let state = match (beat.state, Liveness::after(silent_for)) {
        (NodeState::Leaving, _) => "left",
        (_, Liveness::Gone) => "gone",
        (_, Liveness::Suspect) => "suspect",
        (NodeState::Draining, _) => "draining",
        (NodeState::Alive, _) => "alive",
    };
    let gpu = beat.gpus.first().map_or("-".to_owned(), |gpu| {
        let busy = gpu.busy.map_or(String::new(), |busy| format!(" {:.0}%", busy * 100.0));
        let more = if beat.gpus.len() > 1 { format!(" ×{}", beat.gpus.len()) } else { String::new() };
        format!("{}{more}{busy}", gpu.name)
    });
    let workers = beat.workers.iter().map(|w| {
        let mark = if w.reachable { "" } else { "!" };
        format!("{mark}{}:{}({})", w.name, w.control_addr, w.queue)
    });
    let workers = workers.collect::<Vec<_>>().join(" ");
    [
        beat.node.to_string(),
        state.to_owned(),
        format!("{:.0}s", silent_for.as_secs_f64()),
        format!("{} {}", beat.os, beat.arch),
        format!("{}×{}", beat.cpu.cores, beat.cpu.model),
        format!("{:.1}", beat.cpu.load_1m),
        format!("{:.0}/{:.0}G", gib(beat.memory.used_bytes), gib(beat.memory.total_bytes)),
        gpu,
        if workers.is_empty() { "-".to_owned() } else { workers },
        beat.version.clone(),
    ]
    .map(|text| printable(&text))
}

/// A node's words must not steer this terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).take(60).collect()
}
