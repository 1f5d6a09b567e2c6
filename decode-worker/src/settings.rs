//! Options of `pd-decode`: flags, then environment, then one section of a TOML file, then defaults.

use crate::mlx::Quantized;
use clap::{Args, Parser, ValueEnum};
use serde::Deserialize;
use shared::control::ClusterKey;
use shared::layout::{DEFAULT_BLOCK_TOKENS, Dtype};
use shared::settings::{SettingsError, cluster_key, section};
use std::net::SocketAddr;
use std::path::PathBuf;

const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);
const DEFAULT_STORE_BYTES: u64 = 4 << 30;
const DEFAULT_SEQUENCE_BYTES: u64 = 8 << 30;
const DEFAULT_MAX_REQUESTS: usize = 16;

/// The decode worker of pd-bridge: MLX inference with a prefix cache that a prefill worker can fill.
#[derive(Debug, Parser)]
#[command(name = "pd-decode", version)]
pub struct CommandLine {
    /// TOML file; its section [decode] has the same names as these flags, with underscores
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
    #[arg(long, env = "PD_BRIDGE_DECODE_LISTEN", value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Address of the port that receives cache frames [default: 127.0.0.1:0]
    #[arg(long, env = "PD_BRIDGE_DECODE_BULK_LISTEN", value_name = "ADDR")]
    bulk_listen: Option<SocketAddr>,
    /// Name or address under which prefill workers reach the bulk port [default: its own address]
    #[arg(long, env = "PD_BRIDGE_DECODE_ADVERTISE_HOST", value_name = "HOST")]
    advertise_host: Option<String>,
    /// Element type of the cache: f32, f16 or bf16 [default: f32 on a CPU, the weights' own on a GPU]
    #[arg(long, env = "PD_BRIDGE_DECODE_CACHE_DTYPE", value_name = "DTYPE")]
    #[serde(deserialize_with = "dtype")]
    cache_dtype: Option<Dtype>,
    /// Whether quantized weights stay packed in memory [default: auto]
    #[arg(long, env = "PD_BRIDGE_DECODE_WEIGHTS", value_enum)]
    weights: Option<Weights>,
    /// Byte budget of the prefix store [default: 4294967296]
    #[arg(long, env = "PD_BRIDGE_DECODE_STORE_BYTES", value_name = "BYTES")]
    store_bytes: Option<u64>,
    /// Tokens per block of the prefix store [default: 256]
    #[arg(long, env = "PD_BRIDGE_DECODE_BLOCK_TOKENS", value_name = "TOKENS")]
    block_tokens: Option<u32>,
    /// Bytes that the caches of running requests may take; more requests wait [default: 8589934592]
    #[arg(long, env = "PD_BRIDGE_DECODE_SEQUENCE_BYTES", value_name = "BYTES")]
    sequence_bytes: Option<u64>,
    /// Longest prompt plus answer [default: the model's context length]
    #[arg(long, env = "PD_BRIDGE_DECODE_MAX_TOKENS", value_name = "TOKENS")]
    max_tokens: Option<u32>,
    /// Requests accepted at once [default: 16]
    #[arg(long, env = "PD_BRIDGE_DECODE_MAX_REQUESTS", value_name = "N")]
    max_requests: Option<usize>,
    /// File with the secret that the fleet shares; required for any address that is not loopback
    #[arg(long, env = "PD_BRIDGE_CLUSTER_KEY_FILE", value_name = "FILE")]
    cluster_key_file: Option<PathBuf>,
    /// Name of this worker in verdicts and logs [default: decode]
    #[arg(long, env = "PD_BRIDGE_DECODE_NODE", value_name = "NAME")]
    node: Option<String>,
    /// Where to send traces, as OTLP over HTTP: http://host:4318 [default: nowhere]
    #[arg(long, env = "PD_BRIDGE_OTLP_ENDPOINT", value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Folder for `pd-bridge verify`; without it inspections are refused
    #[arg(long, env = "PD_BRIDGE_DECODE_INSPECT_DIR", value_name = "DIR")]
    inspect_dir: Option<PathBuf>,
}

/// What becomes of quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Weights {
    /// Packed where MLX runs that well (GPU), expanded on a CPU.
    #[default]
    Auto,
    /// Packed.
    Packed,
    /// Expanded when loaded.
    Dense,
}

/// Settings that passed every check that needs no model.
#[derive(Debug)]
pub struct Settings {
    /// The model.
    pub model: PathBuf,
    /// Control port.
    pub listen: SocketAddr,
    /// Bulk port.
    pub bulk_listen: SocketAddr,
    /// Host that prefill workers connect to.
    pub advertise_host: String,
    /// Element type of the cache, if chosen.
    pub cache_dtype: Option<Dtype>,
    /// What becomes of quantized weights.
    pub weights: Quantized,
    /// Budget of the prefix store.
    pub store_bytes: u64,
    /// Budget of running requests' caches.
    pub sequence_bytes: u64,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Longest prompt plus answer, if limited.
    pub max_tokens: Option<u32>,
    /// Requests at once.
    pub max_requests: usize,
    /// Proof of belonging to the fleet.
    pub cluster_key: ClusterKey,
    /// Name of this worker.
    pub node: String,
    /// Where inspections are written.
    pub inspect_dir: Option<PathBuf>,
    /// Where traces go, if anywhere.
    pub otlp_endpoint: Option<String>,
    /// End with standard input.
    pub exit_with_stdin: bool,
}

impl CommandLine {
    /// Adds the file and the defaults, and checks.
    ///
    /// # Errors
    /// [`SettingsError`] naming the key and, where it has one, the file.
    pub fn settings(self) -> Result<Settings, SettingsError> {
        let file: Options =
            self.config.as_deref().map(|f| section(f, "decode")).transpose()?.unwrap_or_default();
        let flags = self.options;
        let listen = flags.listen.or(file.listen).unwrap_or(LOOPBACK);
        let bulk_listen = flags.bulk_listen.or(file.bulk_listen).unwrap_or(LOOPBACK);
        let key_file = flags.cluster_key_file.or(file.cluster_key_file);
        let addrs = [("decode.listen", listen), ("decode.bulk_listen", bulk_listen)];
        let model = flags.model.or(file.model);
        let model = model.ok_or_else(|| SettingsError::value("decode.model", "is required"))?;
        let advertised = flags.advertise_host.or(file.advertise_host);
        let inspect_dir = flags.inspect_dir.or(file.inspect_dir);
        if let Some(dir) = &inspect_dir
            && !dir.is_dir()
        {
            return Err(SettingsError::value(
                "decode.inspect_dir",
                format!("{} is no folder", dir.display()),
            ));
        }
        Ok(Settings {
            otlp_endpoint: flags.otlp_endpoint.or(file.otlp_endpoint),
            advertise_host: advertise_host(advertised, bulk_listen)?,
            cluster_key: cluster_key(key_file.as_deref(), &addrs)?,
            block_tokens: positive(
                "decode.block_tokens",
                flags.block_tokens.or(file.block_tokens).unwrap_or(DEFAULT_BLOCK_TOKENS),
            )?,
            max_requests: positive(
                "decode.max_requests",
                flags.max_requests.or(file.max_requests).unwrap_or(DEFAULT_MAX_REQUESTS),
            )?,
            max_tokens: flags
                .max_tokens
                .or(file.max_tokens)
                .map(|n| positive("decode.max_tokens", n))
                .transpose()?,
            weights: match flags.weights.or(file.weights).unwrap_or_default() {
                Weights::Auto => Quantized::Auto,
                Weights::Packed => Quantized::Always,
                Weights::Dense => Quantized::Never,
            },
            sequence_bytes: flags.sequence_bytes.or(file.sequence_bytes).unwrap_or(DEFAULT_SEQUENCE_BYTES),
            store_bytes: flags.store_bytes.or(file.store_bytes).unwrap_or(DEFAULT_STORE_BYTES),
            cache_dtype: flags.cache_dtype.or(file.cache_dtype),
            node: flags.node.or(file.node).unwrap_or_else(|| "decode".to_owned()),
            exit_with_stdin: self.exit_with_stdin,
            inspect_dir,
            model,
            listen,
            bulk_listen,
        })
    }
}

fn positive<T: Default + PartialEq>(key: &str, value: T) -> Result<T, SettingsError> {
    if value == T::default() { Err(SettingsError::value(key, "must be above 0")) } else { Ok(value) }
}

/// An address that listens everywhere tells nobody where to connect.
fn advertise_host(given: Option<String>, bulk: SocketAddr) -> Result<String, SettingsError> {
    match given {
        Some(host) if !host.is_empty() => Ok(host),
        _ if bulk.ip().is_unspecified() => Err(SettingsError::value(
            "decode.advertise_host",
            format!("is required, because bulk_listen {bulk} names no host"),
        )),
        _ => Ok(bulk.ip().to_string()),
    }
}

fn dtype<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Dtype>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(args: &[&str]) -> Result<Settings, String> {
        let args = [&["pd-decode", "--model", "m"], args].concat();
        CommandLine::try_parse_from(args).unwrap().settings().map_err(|e| e.to_string())
    }

    fn with_file(text: &str, args: &[&str]) -> Result<Settings, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        std::fs::write(&file, text).unwrap();
        settings(&[args, &["--config", file.to_str().unwrap()]].concat())
    }

    #[test]
    fn flags_go_before_the_file_and_the_file_before_defaults() {
        let s = with_file("[decode]\nblock_tokens = 64\nnode = \"a\"", &["--node", "b"]).unwrap();
        assert_eq!((s.block_tokens, s.node.as_str(), s.max_requests), (64, "b", DEFAULT_MAX_REQUESTS));
        assert_eq!(with_file("[decode]\ncache_dtype = \"f16\"", &[]).unwrap().cache_dtype, Some(Dtype::F16));
    }

    #[test]
    fn bad_settings_name_their_key() {
        let zero = settings(&["--block-tokens", "0"]).unwrap_err();
        assert!(zero.contains("decode.block_tokens"), "{zero}");
        let open = settings(&["--bulk-listen", "0.0.0.0:1", "--advertise-host", "h"]).unwrap_err();
        assert!(open.contains("decode.bulk_listen"), "{open}");
        let nowhere = settings(&["--bulk-listen", "0.0.0.0:1"]).unwrap_err();
        assert!(nowhere.contains("decode.advertise_host"), "{nowhere}");
        for (text, key) in
            [("x = 1", "x"), ("cache_dtype = \"f8\"", "cache_dtype"), ("weights = \"thin\"", "weights")]
        {
            let error = with_file(&format!("[decode]\n{text}"), &[]).unwrap_err();
            assert!(error.contains(key) && error.contains("c.toml"), "{error}");
        }
        let dir = settings(&["--inspect-dir", "/nonexistent"]).unwrap_err();
        assert!(dir.contains("decode.inspect_dir"), "{dir}");
    }
}
