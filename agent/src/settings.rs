//! Settings of the agent: flags, then environment, then the `[agent]` section of a file, then defaults.

use crate::commands::{CommandRules, Rules};
use crate::workers::Program;
use clap::Args;
use serde::Deserialize;
use shared::bus::{BusArgs, BusSettings, NodeId};
use shared::control::{ClusterKey, Role};
use shared::settings::{SettingsError, cluster_key, section};
use std::path::{Path, PathBuf};

/// What can be set, each as a flag, an environment variable or a key of `[agent]`.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct AgentArgs {
    /// TOML file; this program reads its `[agent]` section
    #[arg(long, env = "PD_BRIDGE_CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    options: Options,
}

#[derive(Debug, Clone, Default, Args, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// Name of this machine on the bus: a-z, 0-9 and - [default: from the host name]
    #[arg(long, env = "PD_AGENT_NODE")]
    node: Option<String>,
    #[command(flatten)]
    bus: BusArgs,
    /// Control addresses of this machine's decode workers, host:port, separated by commas
    #[arg(long, env = "PD_AGENT_DECODE", value_delimiter = ',')]
    decode: Option<Vec<String>>,
    /// Control addresses of this machine's prefill workers, host:port, separated by commas
    #[arg(long, env = "PD_AGENT_PREFILL", value_delimiter = ',')]
    prefill: Option<Vec<String>>,
    /// Host name under which others reach workers that are named here by a loopback address
    #[arg(long, env = "PD_AGENT_ADVERTISE_HOST")]
    advertise_host: Option<String>,
    /// File with the fleet's shared secret
    #[arg(long, env = "PD_BRIDGE_CLUSTER_KEY_FILE")]
    cluster_key_file: Option<PathBuf>,
    /// Programs to keep running: decode, prefill, gateway. Each reads its section of the same file
    #[arg(skip)]
    supervise: Vec<Program>,
    /// Folder for what must survive a restart [default: /var/lib/pd-agent for root, else ~/.local/state/pd-agent]
    #[arg(long, env = "PD_AGENT_STATE_DIR")]
    state_dir: Option<PathBuf>,
    /// Log lines kept for `pd-bridge logs` [default: 5000]
    #[arg(long, env = "PD_AGENT_LOG_LINES")]
    log_lines: Option<usize>,
    /// Log one JSON object per line
    #[arg(long, env = "PD_AGENT_LOG_JSON", num_args = 0..=1, default_missing_value = "true")]
    log_json: Option<bool>,
    /// Who may run what; without it nobody may run anything. In the file only.
    #[arg(skip)]
    commands: Option<CommandRules>,
}

/// Settings after merging, checked.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) node: NodeId,
    pub(crate) bus: BusSettings,
    pub(crate) workers: Vec<(Role, String)>,
    pub(crate) advertise_host: Option<String>,
    pub(crate) cluster_key: ClusterKey,
    pub(crate) supervise: Vec<Program>,
    pub(crate) config: Option<PathBuf>,
    pub(crate) state_dir: PathBuf,
    pub(crate) log_lines: usize,
    pub(crate) log_json: bool,
    pub(crate) rules: Option<Rules>,
}

impl AgentArgs {
    /// Reads the file, applies defaults and checks every value.
    ///
    /// # Errors
    /// [`SettingsError`] naming the key.
    pub(crate) fn resolve(self) -> Result<Settings, SettingsError> {
        let Self { config, options } = self;
        let file = config.as_deref().map(|f| section::<Options>(f, "agent")).transpose()?.unwrap_or_default();
        let o = options.or(file);
        let bus = o.bus.resolve("agent.bus")?;
        let bus = bus.ok_or_else(|| SettingsError::value("agent.bus.servers", "is required"))?;
        let decode = addresses("agent.decode", Role::Decode, o.decode)?;
        let prefill = addresses("agent.prefill", Role::Prefill, o.prefill)?;
        let state_dir = match o.state_dir {
            Some(dir) => dir,
            None => default_state_dir()?,
        };
        Ok(Settings {
            node: node(o.node)?,
            bus,
            workers: [decode, prefill].concat(),
            advertise_host: o.advertise_host,
            cluster_key: cluster_key(o.cluster_key_file.as_deref(), &[])?,
            supervise: o.supervise,
            config,
            state_dir,
            log_lines: o.log_lines.unwrap_or(5000),
            log_json: o.log_json.unwrap_or(false),
            rules: o.commands.map(CommandRules::resolve).transpose()?,
        })
    }
}

impl Options {
    fn or(self, file: Self) -> Self {
        Self {
            node: self.node.or(file.node),
            bus: self.bus.or(file.bus),
            decode: self.decode.or(file.decode),
            prefill: self.prefill.or(file.prefill),
            advertise_host: self.advertise_host.or(file.advertise_host),
            cluster_key_file: self.cluster_key_file.or(file.cluster_key_file),
            supervise: file.supervise,
            state_dir: self.state_dir.or(file.state_dir),
            log_lines: self.log_lines.or(file.log_lines),
            log_json: self.log_json.or(file.log_json),
            commands: file.commands,
        }
    }
}

fn node(given: Option<String>) -> Result<NodeId, SettingsError> {
    let bad = |e: &dyn std::fmt::Display| SettingsError::value("agent.node", e);
    match given {
        Some(name) => NodeId::new(name).map_err(|e| bad(&e)),
        None => {
            let host = sysinfo::System::host_name().unwrap_or_default();
            NodeId::from_host(&host).map_err(|e| bad(&format!("no usable host name: {e}")))
        }
    }
}

fn addresses(
    key: &str,
    role: Role,
    given: Option<Vec<String>>,
) -> Result<Vec<(Role, String)>, SettingsError> {
    let given = given.unwrap_or_default();
    for addr in &given {
        let port =
            addr.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
        if !matches!(port, Some(Ok(port)) if port > 0) {
            return Err(SettingsError::value(key, format!("`{addr}` is not host:port")));
        }
    }
    Ok(given.into_iter().map(|addr| (role, addr)).collect())
}

fn default_state_dir() -> Result<PathBuf, SettingsError> {
    if nix::unistd::geteuid().is_root() {
        return Ok(Path::new("/var/lib/pd-agent").to_owned());
    }
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/state"));
    let base = state
        .or_else(home)
        .ok_or_else(|| SettingsError::value("agent.state_dir", "is required without a HOME"))?;
    Ok(base.join("pd-agent"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(text: &str) -> Result<Settings, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        std::fs::write(&file, text).unwrap();
        AgentArgs { config: Some(file), ..AgentArgs::default() }.resolve().map_err(|e| e.to_string())
    }

    #[test]
    fn a_bad_value_names_its_key() {
        let base = "[agent]\nbus.servers = [\"nats://a\"]\n";
        let good =
            resolve(&format!("{base}node = \"n\"\ndecode = [\"127.0.0.1:1\"]\nsupervise = [\"gateway\"]"))
                .unwrap();
        assert_eq!((good.node.as_str(), good.workers.len(), good.supervise.len()), ("n", 1, 1));
        assert!(good.rules.is_none(), "nothing is allowed unless the file says so");
        for (text, key) in [
            ("[agent]", "agent.bus.servers"),
            (&format!("{base}node = \"N\""), "agent.node"),
            (&format!("{base}prefill = [\"x\"]"), "agent.prefill"),
            (&format!("{base}bus.nkey_file = \"/no/such\""), "agent.bus.nkey_file"),
            (&format!("{base}supervise = [\"sshd\"]"), "agent.supervise"),
            (&format!("{base}[agent.commands]\nunrestrictd = true"), "agent.commands"),
        ] {
            let error = resolve(text).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}
