//! Options of `pd-prefill`: flags, then environment, then one section of a TOML file, then defaults.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Deserialize;
use shared::control::ClusterKey;
use shared::settings::{SettingsError, cluster_key, section};

use crate::cuda::Precision;

const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
const DEFAULT_PREFIX_CACHE_BYTES: u64 = 2 << 30;
const DEFAULT_MAX_QUEUE: usize = 16;
const DEFAULT_MAX_DECODERS: usize = 8;

/// What the worker serves with.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// TOML file; its section [prefill] has the same names as these flags, with underscores
    #[arg(long, env = "PD_BRIDGE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// End when standard input closes
    #[arg(long)]
    exit_with_stdin: bool,
    #[command(flatten)]
    options: Options,
}

/// What can be set anywhere.
#[derive(Debug, Default, Args, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// Model: GGUF file, Hugging Face directory or MLX-quantized directory
    #[arg(long, env = "PD_BRIDGE_MODEL", value_name = "PATH")]
    model: Option<PathBuf>,
    /// Address of the control port [default: 127.0.0.1:0]
    #[arg(long, env = "PD_BRIDGE_PREFILL_LISTEN", value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// What computes; auto takes a usable GPU, else the CPU [default: auto]
    #[arg(long, env = "PD_BRIDGE_PREFILL_BACKEND", value_enum)]
    backend: Option<BackendChoice>,
    /// Element type on the GPU; fp8 trades accuracy for speed [default: bf16]
    #[arg(long, env = "PD_BRIDGE_PREFILL_PRECISION", value_enum)]
    precision: Option<Precision>,
    /// Threads of the CPU backend [default: one per core]
    #[arg(long, env = "PD_BRIDGE_PREFILL_THREADS", value_name = "N")]
    threads: Option<usize>,
    /// Tokens per chunk [default: what the backend likes best]
    #[arg(long, env = "PD_BRIDGE_PREFILL_CHUNK_TOKENS", value_name = "TOKENS")]
    chunk_tokens: Option<usize>,
    /// Byte budget of the prefix cache, in the memory of the device that computes [default: 2147483648]
    #[arg(long, env = "PD_BRIDGE_PREFILL_PREFIX_CACHE_BYTES", value_name = "BYTES")]
    prefix_cache_bytes: Option<u64>,
    /// Requests that may wait behind the running one [default: 16]
    #[arg(long, env = "PD_BRIDGE_PREFILL_MAX_QUEUE", value_name = "N")]
    max_queue: Option<usize>,
    /// Decoders (by fingerprint) kept paired at once; more push out the longest unused [default: 8]
    #[arg(long, env = "PD_BRIDGE_PREFILL_MAX_DECODERS", value_name = "N")]
    max_decoders: Option<usize>,
    /// File with the secret that the fleet shares; required for any address that is not loopback
    #[arg(long, env = "PD_BRIDGE_CLUSTER_KEY_FILE", value_name = "FILE")]
    cluster_key_file: Option<PathBuf>,
    /// Name of this worker in verdicts and logs [default: prefill]
    #[arg(long, env = "PD_BRIDGE_PREFILL_NODE", value_name = "NAME")]
    node: Option<String>,
    /// Where to send traces, as OTLP over HTTP: http://host:4318 [default: nowhere]
    #[arg(long, env = "PD_BRIDGE_OTLP_ENDPOINT", value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Folder for `pd-bridge verify`; without it reconstructions from files are refused
    #[arg(long, env = "PD_BRIDGE_PREFILL_INSPECT_DIR", value_name = "DIR")]
    inspect_dir: Option<PathBuf>,
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendChoice {
    /// A usable GPU, else the CPU.
    #[default]
    Auto,
    /// An NVIDIA GPU.
    Cuda,
    /// The CPU.
    Cpu,
}

/// Settings that passed every check that needs no model.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The model.
    pub model: PathBuf,
    /// Control port.
    pub listen: SocketAddr,
    /// What computes.
    pub backend: BackendChoice,
    /// Element type on the GPU.
    pub precision: Precision,
    /// Threads of the CPU backend; 0 is one per core.
    pub threads: usize,
    /// Tokens per chunk, if chosen.
    pub chunk_tokens: Option<usize>,
    /// Budget of the prefix cache.
    pub prefix_cache_bytes: usize,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Decoders kept paired at once.
    pub max_decoders: usize,
    /// Proof of belonging to the fleet.
    pub cluster_key: ClusterKey,
    /// Name of this worker.
    pub node: String,
    /// Where inspection files are.
    pub inspect_dir: Option<PathBuf>,
    /// Where traces go, if anywhere.
    pub otlp_endpoint: Option<String>,
    /// End with standard input.
    pub exit_with_stdin: bool,
}

impl ServeArgs {
    /// Adds the file and the defaults, and checks.
    ///
    /// # Errors
    /// [`SettingsError`] naming the key and, where it has one, the file.
    pub fn settings(self) -> Result<Settings, SettingsError> {
        let file: Options =
            self.config.as_deref().map(|f| section(f, "prefill")).transpose()?.unwrap_or_default();
        let flags = self.options;
        let listen = flags.listen.or(file.listen).unwrap_or(LOOPBACK);
        let key_file = flags.cluster_key_file.or(file.cluster_key_file);
        let model = flags.model.or(file.model);
        let chunk_tokens = flags.chunk_tokens.or(file.chunk_tokens);
        if chunk_tokens == Some(0) {
            return Err(SettingsError::value("prefill.chunk_tokens", "must be above 0"));
        }
        let max_decoders = flags.max_decoders.or(file.max_decoders).unwrap_or(DEFAULT_MAX_DECODERS);
        if max_decoders == 0 {
            return Err(SettingsError::value("prefill.max_decoders", "must be above 0"));
        }
        let inspect_dir = flags.inspect_dir.or(file.inspect_dir);
        if let Some(dir) = inspect_dir.as_deref().filter(|dir| !dir.is_dir()) {
            return Err(SettingsError::value(
                "prefill.inspect_dir",
                format!("{} is no folder", dir.display()),
            ));
        }
        let budget =
            flags.prefix_cache_bytes.or(file.prefix_cache_bytes).unwrap_or(DEFAULT_PREFIX_CACHE_BYTES);
        Ok(Settings {
            otlp_endpoint: flags.otlp_endpoint.or(file.otlp_endpoint),
            model: model.ok_or_else(|| SettingsError::value("prefill.model", "is required"))?,
            backend: flags.backend.or(file.backend).unwrap_or_default(),
            precision: flags.precision.or(file.precision).unwrap_or_default(),
            threads: flags.threads.or(file.threads).unwrap_or(0),
            prefix_cache_bytes: usize::try_from(budget)
                .map_err(|e| SettingsError::value("prefill.prefix_cache_bytes", e))?,
            max_queue: flags.max_queue.or(file.max_queue).unwrap_or(DEFAULT_MAX_QUEUE),
            cluster_key: cluster_key(key_file.as_deref(), &[("prefill.listen", listen)])?,
            node: flags.node.or(file.node).unwrap_or_else(|| "prefill".to_owned()),
            exit_with_stdin: self.exit_with_stdin,
            chunk_tokens,
            max_decoders,
            inspect_dir,
            listen,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn settings(args: &[&str]) -> Result<Settings, String> {
        let args = [&["pd-prefill", "--model", "m"], args].concat();
        Line::try_parse_from(args).unwrap().args.settings().map_err(|e| e.to_string())
    }

    fn with_file(text: &str, args: &[&str]) -> Result<Settings, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        std::fs::write(&file, text).unwrap();
        settings(&[args, &["--config", file.to_str().unwrap()]].concat())
    }

    #[test]
    fn flags_go_before_the_file_and_the_file_before_defaults() {
        let s = with_file("[prefill]\nbackend = \"cpu\"\nnode = \"a\"", &["--node", "b"]).unwrap();
        assert_eq!((s.backend, s.node.as_str(), s.max_queue), (BackendChoice::Cpu, "b", DEFAULT_MAX_QUEUE));
    }

    #[test]
    fn bad_settings_name_their_key() {
        for (text, key) in [("x = 1", "x"), ("backend = \"tpu\"", "backend"), ("threads = -1", "threads")] {
            let error = with_file(&format!("[prefill]\n{text}"), &[]).unwrap_err();
            assert!(error.contains(key) && error.contains("c.toml"), "{error}");
        }
        for (args, key) in [
            (["--chunk-tokens", "0"], "prefill.chunk_tokens"),
            (["--max-decoders", "0"], "prefill.max_decoders"),
            (["--listen", "0.0.0.0:1"], "prefill.listen"),
            (["--inspect-dir", "/nonexistent"], "prefill.inspect_dir"),
        ] {
            let error = settings(&args).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}
