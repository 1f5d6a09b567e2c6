//! Settings of the gateway: flags, then environment, then the `[gateway]` section of a file, then defaults.

use crate::access_log::Target;
use crate::dialect;
use crate::http::{Acceptor, Limits, Patience, cors};
use crate::keys::{self, ApiKey, KeyLimits};
use serde::Deserialize;
use shared::bus::{BusArgs, BusSettings, NodeId};
use shared::control::ClusterKey;
use shared::settings::{SettingsError, cluster_key, section};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tower_http::cors::CorsLayer;

/// What can be set, each as a flag, an environment variable or a key of `[gateway]`.
#[derive(Debug, Clone, Default, clap::Args, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct GatewayArgs {
    /// Where to serve the API [default: 127.0.0.1:8000]
    #[arg(long, env = "PD_BRIDGE_LISTEN")]
    pub(crate) listen: Option<SocketAddr>,
    /// Model whose tokenizer and chat template to use: a GGUF file or a directory
    #[arg(long, env = "PD_BRIDGE_MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Name of the model as clients see it [default: the model's own]
    #[arg(long, env = "PD_BRIDGE_MODEL_NAME")]
    pub(crate) model_name: Option<String>,
    /// Control addresses of decode workers, host:port, separated by commas
    #[arg(long, env = "PD_BRIDGE_DECODE", value_delimiter = ',')]
    pub(crate) decode: Option<Vec<String>>,
    /// Control addresses of prefill workers, host:port, separated by commas
    #[arg(long, env = "PD_BRIDGE_PREFILL", value_delimiter = ',')]
    pub(crate) prefill: Option<Vec<String>>,
    /// Where workers are found: `static`, the lists above alone, or `nats`, heartbeats on the bus besides
    /// [default: nats if a NATS server is named, else static]
    #[arg(long, env = "PD_BRIDGE_DISCOVERY", value_enum)]
    pub(crate) discovery: Option<DiscoveryKind>,
    /// Name of this gateway on the bus, as its key was made for [default: the host's]
    #[arg(long, env = "PD_BRIDGE_GATEWAY_NODE")]
    pub(crate) node: Option<String>,
    /// How to reach the bus.
    #[command(flatten)]
    pub(crate) bus: BusArgs,
    /// File with the fleet's shared secret
    #[arg(long, env = "PD_BRIDGE_CLUSTER_KEY_FILE")]
    pub(crate) cluster_key_file: Option<PathBuf>,
    /// TOML file of `name = "key"` lines; with it every /v1 request needs a key. Read again on SIGHUP or change
    #[arg(long, env = "PD_BRIDGE_API_KEYS_FILE")]
    pub(crate) api_keys_file: Option<PathBuf>,
    /// Requests per minute of each key that has no limit of its own [default: no limit]
    #[arg(long, env = "PD_BRIDGE_KEY_REQUESTS_PER_MIN")]
    pub(crate) key_requests_per_min: Option<u32>,
    /// Requests at once of each key that has no limit of its own [default: no limit]
    #[arg(long, env = "PD_BRIDGE_KEY_MAX_CONCURRENT")]
    pub(crate) key_max_concurrent: Option<u32>,
    /// Show /metrics to everyone even if there are API keys [default: only to keys with `admin = true`]
    #[arg(long, env = "PD_BRIDGE_PUBLIC_METRICS", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) public_metrics: Option<bool>,
    /// Serve the live page at / [default: true]
    #[arg(long, env = "PD_BRIDGE_LIVE_PAGE")]
    pub(crate) live_page: Option<bool>,
    /// Certificate chain (PEM); with it and --tls-key the API speaks HTTPS only
    #[arg(long, env = "PD_BRIDGE_TLS_CERT")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, env = "PD_BRIDGE_TLS_KEY")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Origins whose pages may call the API, `*` for all, separated by commas [default: none]
    #[arg(long, env = "PD_BRIDGE_CORS_ALLOW_ORIGINS", value_delimiter = ',')]
    pub(crate) cors_allow_origins: Option<Vec<String>>,
    /// Longest silence in a stream before a comment is sent [default: 15000]
    #[arg(long, env = "PD_BRIDGE_SSE_KEEP_ALIVE_MS")]
    pub(crate) sse_keep_alive_ms: Option<u64>,
    /// Where to log requests, one JSON object a line without any text of theirs: off, stdout, or a file
    /// [default: off]
    #[arg(long, env = "PD_BRIDGE_ACCESS_LOG")]
    pub(crate) access_log: Option<String>,
    /// Where to send traces, as OTLP over HTTP: http://host:4318 [default: nowhere]
    #[arg(long, env = "PD_BRIDGE_OTLP_ENDPOINT")]
    pub(crate) otlp_endpoint: Option<String>,
    /// Send response headers with a pending verdict after this time, unless the request requires a bridge
    /// [default: wait for the verdict]
    #[arg(long, env = "PD_BRIDGE_EARLY_HEADERS_AFTER_MS")]
    pub(crate) early_headers_after_ms: Option<u64>,
    /// Fewest tokens worth a transfer [default: 64]
    #[arg(long, env = "PD_BRIDGE_MIN_BRIDGE_TOKENS")]
    pub(crate) min_bridge_tokens: Option<u32>,
    /// Requests answered at once; more wait in the queue [default: 1024]
    #[arg(long, env = "PD_BRIDGE_MAX_IN_FLIGHT")]
    pub(crate) max_in_flight: Option<usize>,
    /// Requests that wait; more get 429 [default: 1024]
    #[arg(long, env = "PD_BRIDGE_MAX_QUEUE")]
    pub(crate) max_queue: Option<usize>,
    /// Longest wait in the queue before 429 [default: 30000]
    #[arg(long, env = "PD_BRIDGE_QUEUE_TIMEOUT_MS")]
    pub(crate) queue_timeout_ms: Option<u64>,
    /// Connections at once; idle ones give way to new ones, if all are busy new ones get 503 [default: 16384]
    #[arg(long, env = "PD_BRIDGE_MAX_CONNECTIONS")]
    pub(crate) max_connections: Option<usize>,
    /// Largest request body, in bytes [default: 16777216]
    #[arg(long, env = "PD_BRIDGE_MAX_BODY_BYTES")]
    pub(crate) max_body_bytes: Option<usize>,
    /// Memory for the bodies of all requests that are read, wait or run, in bytes; beyond it 429 [default: 268435456]
    #[arg(long, env = "PD_BRIDGE_MAX_BODIES_BYTES")]
    pub(crate) max_bodies_bytes: Option<usize>,
    /// Largest request head, in bytes [default: 65536]
    #[arg(long, env = "PD_BRIDGE_MAX_HEADER_BYTES")]
    pub(crate) max_header_bytes: Option<usize>,
    /// Longest time for a client to send a request head, or to shake hands for TLS [default: 30000]
    #[arg(long, env = "PD_BRIDGE_HEADER_READ_TIMEOUT_MS")]
    pub(crate) header_read_timeout_ms: Option<u64>,
    /// Longest time that a connection stays open without a request [default: 120000]
    #[arg(long, env = "PD_BRIDGE_IDLE_TIMEOUT_MS")]
    pub(crate) idle_timeout_ms: Option<u64>,
    /// Longest time that a client may take none of the bytes written to it [default: 90000]
    #[arg(long, env = "PD_BRIDGE_WRITE_TIMEOUT_MS")]
    pub(crate) write_timeout_ms: Option<u64>,
    /// Longest wait for a lost decode worker to come back before a request fails [default: 20000]
    #[arg(long, env = "PD_BRIDGE_RECONNECT_WAIT_MS")]
    pub(crate) reconnect_wait_ms: Option<u64>,
    /// After SIGTERM, how long running answers may take to finish [default: 30000]
    #[arg(long, env = "PD_BRIDGE_DRAIN_LIMIT_MS")]
    pub(crate) drain_limit_ms: Option<u64>,
    /// Format of the model's tool calls: auto, hermes, llama3, mistral … [default: auto, from the chat template]
    #[arg(long, env = "PD_BRIDGE_TOOL_PARSER")]
    pub(crate) tool_parser: Option<String>,
    /// Format of the model's thoughts: auto, none, qwen3, deepseek_r1 … [default: auto]
    #[arg(long, env = "PD_BRIDGE_REASONING_PARSER")]
    pub(crate) reasoning_parser: Option<String>,
    /// Log one JSON object per line
    #[arg(long, env = "PD_BRIDGE_LOG_JSON", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) log_json: Option<bool>,
}

/// Where workers are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DiscoveryKind {
    /// The lists in the settings.
    Static,
    /// Heartbeats on the bus, and the lists.
    Nats,
}

/// Settings after merging, checked.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) listen: SocketAddr,
    pub(crate) model: PathBuf,
    pub(crate) model_name: Option<String>,
    pub(crate) decode: Vec<String>,
    pub(crate) prefill: Vec<String>,
    /// With a bus: who we are on it and how to reach it.
    pub(crate) bus: Option<(NodeId, BusSettings)>,
    pub(crate) cluster_key: ClusterKey,
    pub(crate) api_keys: Vec<ApiKey>,
    pub(crate) api_keys_file: Option<PathBuf>,
    /// Of keys without limits of their own.
    pub(crate) key_limits: KeyLimits,
    pub(crate) public_metrics: bool,
    pub(crate) live_page: bool,
    pub(crate) tls: Option<Acceptor>,
    pub(crate) cors: Option<CorsLayer>,
    pub(crate) sse_keep_alive: Duration,
    pub(crate) access_log: Option<Target>,
    pub(crate) early_headers_after: Option<Duration>,
    pub(crate) min_bridge_tokens: u32,
    pub(crate) limits: Limits,
    pub(crate) max_connections: usize,
    pub(crate) max_body_bytes: usize,
    pub(crate) max_bodies_bytes: usize,
    pub(crate) max_header_bytes: usize,
    pub(crate) patience: Patience,
    pub(crate) reconnect_wait: Duration,
    pub(crate) drain_limit: Duration,
    pub(crate) tool_parser: Option<String>,
    pub(crate) reasoning_parser: Option<String>,
}

impl GatewayArgs {
    /// Fills what flags and environment left open from the file.
    ///
    /// # Errors
    /// [`SettingsError`] naming the file and the key.
    pub(crate) fn with_file(self, file: Option<&Path>) -> Result<Self, SettingsError> {
        let Some(file) = file else { return Ok(self) };
        let f: Self = section(file, "gateway")?;
        Ok(Self {
            listen: self.listen.or(f.listen),
            model: self.model.or(f.model),
            model_name: self.model_name.or(f.model_name),
            decode: self.decode.or(f.decode),
            prefill: self.prefill.or(f.prefill),
            discovery: self.discovery.or(f.discovery),
            node: self.node.or(f.node),
            bus: self.bus.or(f.bus),
            cluster_key_file: self.cluster_key_file.or(f.cluster_key_file),
            api_keys_file: self.api_keys_file.or(f.api_keys_file),
            key_requests_per_min: self.key_requests_per_min.or(f.key_requests_per_min),
            key_max_concurrent: self.key_max_concurrent.or(f.key_max_concurrent),
            public_metrics: self.public_metrics.or(f.public_metrics),
            live_page: self.live_page.or(f.live_page),
            tls_cert: self.tls_cert.or(f.tls_cert),
            tls_key: self.tls_key.or(f.tls_key),
            cors_allow_origins: self.cors_allow_origins.or(f.cors_allow_origins),
            sse_keep_alive_ms: self.sse_keep_alive_ms.or(f.sse_keep_alive_ms),
            access_log: self.access_log.or(f.access_log),
            otlp_endpoint: self.otlp_endpoint.or(f.otlp_endpoint),
            early_headers_after_ms: self.early_headers_after_ms.or(f.early_headers_after_ms),
            min_bridge_tokens: self.min_bridge_tokens.or(f.min_bridge_tokens),
            max_in_flight: self.max_in_flight.or(f.max_in_flight),
            max_queue: self.max_queue.or(f.max_queue),
            queue_timeout_ms: self.queue_timeout_ms.or(f.queue_timeout_ms),
            max_connections: self.max_connections.or(f.max_connections),
            max_body_bytes: self.max_body_bytes.or(f.max_body_bytes),
            max_bodies_bytes: self.max_bodies_bytes.or(f.max_bodies_bytes),
            max_header_bytes: self.max_header_bytes.or(f.max_header_bytes),
            header_read_timeout_ms: self.header_read_timeout_ms.or(f.header_read_timeout_ms),
            idle_timeout_ms: self.idle_timeout_ms.or(f.idle_timeout_ms),
            write_timeout_ms: self.write_timeout_ms.or(f.write_timeout_ms),
            reconnect_wait_ms: self.reconnect_wait_ms.or(f.reconnect_wait_ms),
            drain_limit_ms: self.drain_limit_ms.or(f.drain_limit_ms),
            tool_parser: self.tool_parser.or(f.tool_parser),
            reasoning_parser: self.reasoning_parser.or(f.reasoning_parser),
            log_json: self.log_json.or(f.log_json),
        })
    }

    /// Applies defaults and checks every value.
    ///
    /// # Errors
    /// [`SettingsError`] naming the key.
    pub(crate) fn resolve(self) -> Result<Settings, SettingsError> {
        let model = self.model.ok_or_else(|| SettingsError::value("gateway.model", "is required"))?;
        if !model.exists() {
            return Err(SettingsError::value("gateway.model", format!("{} does not exist", model.display())));
        }
        let decode = addresses("gateway.decode", self.decode)?;
        let prefill = addresses("gateway.prefill", self.prefill)?;
        let bus = bus(self.discovery, self.node, self.bus)?;
        let max_header_bytes =
            at_least("gateway.max_header_bytes", self.max_header_bytes.unwrap_or(64 << 10), 8192)?;
        let key_limits = KeyLimits {
            requests_per_min: self.key_requests_per_min.and_then(NonZeroU32::new),
            max_concurrent: self.key_max_concurrent.and_then(NonZeroU32::new),
        };
        let keys = self.api_keys_file.as_deref().map(|file| keys::read(file, key_limits)).transpose()?;
        let limits = Limits {
            max_in_flight: at_least("gateway.max_in_flight", self.max_in_flight.unwrap_or(1024), 1)?,
            max_queue: self.max_queue.unwrap_or(1024),
            queue_timeout: positive_ms("gateway.queue_timeout_ms", self.queue_timeout_ms, 30_000)?,
        };
        let patience = Patience {
            head: positive_ms("gateway.header_read_timeout_ms", self.header_read_timeout_ms, 30_000)?,
            idle: positive_ms("gateway.idle_timeout_ms", self.idle_timeout_ms, 120_000)?,
            write: positive_ms("gateway.write_timeout_ms", self.write_timeout_ms, 90_000)?,
        };
        Ok(Settings {
            listen: self.listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 8000))),
            model,
            model_name: self.model_name,
            decode,
            prefill,
            bus,
            cluster_key: cluster_key(self.cluster_key_file.as_deref(), &[])?,
            api_keys: keys.unwrap_or_default(),
            api_keys_file: self.api_keys_file,
            key_limits,
            public_metrics: self.public_metrics.unwrap_or(false),
            live_page: self.live_page.unwrap_or(true),
            tls: tls(self.tls_cert.as_deref(), self.tls_key.as_deref())?,
            cors: cors(&self.cors_allow_origins.unwrap_or_default())?,
            sse_keep_alive: positive_ms("gateway.sse_keep_alive_ms", self.sse_keep_alive_ms, 15_000)?,
            access_log: self.access_log.and_then(access_log),
            early_headers_after: self.early_headers_after_ms.map(Duration::from_millis),
            min_bridge_tokens: self.min_bridge_tokens.unwrap_or(64),
            limits,
            max_connections: at_least("gateway.max_connections", self.max_connections.unwrap_or(16_384), 1)?,
            max_body_bytes: at_least(
                "gateway.max_body_bytes",
                self.max_body_bytes.unwrap_or(16 << 20),
                1024,
            )?,
            max_bodies_bytes: at_least(
                "gateway.max_bodies_bytes",
                self.max_bodies_bytes.unwrap_or(256 << 20),
                1024,
            )?,
            max_header_bytes,
            patience,
            reconnect_wait: Duration::from_millis(self.reconnect_wait_ms.unwrap_or(20_000)),
            drain_limit: Duration::from_millis(self.drain_limit_ms.unwrap_or(30_000)),
            tool_parser: one_of("gateway.tool_parser", self.tool_parser, &dialect::tool_formats())?,
            reasoning_parser: one_of(
                "gateway.reasoning_parser",
                self.reasoning_parser,
                &dialect::reasoning_formats(),
            )?,
        })
    }
}

fn bus(
    kind: Option<DiscoveryKind>,
    node: Option<String>,
    args: BusArgs,
) -> Result<Option<(NodeId, BusSettings)>, SettingsError> {
    let settings = args.resolve("gateway.bus")?;
    let settings = match (kind, settings) {
        (Some(DiscoveryKind::Nats), None) => {
            return Err(SettingsError::value("gateway.bus.servers", "is required for discovery = \"nats\""));
        }
        (Some(DiscoveryKind::Static), _) | (None, None) => return Ok(None),
        (_, Some(settings)) => settings,
    };
    let node = match node {
        Some(node) => NodeId::new(node),
        None => NodeId::from_host(&nix::unistd::gethostname().unwrap_or_default().to_string_lossy()),
    };
    Ok(Some((node.map_err(|e| SettingsError::value("gateway.node", e))?, settings)))
}

fn at_least(key: &str, value: usize, least: usize) -> Result<usize, SettingsError> {
    if value < least || value > usize::MAX / 2 {
        return Err(SettingsError::value(key, format!("{value} is too small, at least {least}")));
    }
    Ok(value)
}

fn one_of(key: &str, value: Option<String>, known: &[String]) -> Result<Option<String>, SettingsError> {
    match value {
        Some(name) if !known.contains(&name) => {
            Err(SettingsError::value(key, format!("`{name}` is not one of {}", known.join(", "))))
        }
        value => Ok(value),
    }
}

fn positive_ms(key: &str, value: Option<u64>, default: u64) -> Result<Duration, SettingsError> {
    match value.unwrap_or(default) {
        0 => Err(SettingsError::value(key, "must be more than 0")),
        ms => Ok(Duration::from_millis(ms)),
    }
}

fn addresses(key: &str, given: Option<Vec<String>>) -> Result<Vec<String>, SettingsError> {
    let given = given.unwrap_or_default();
    for addr in &given {
        let port =
            addr.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
        if !matches!(port, Some(Ok(port)) if port > 0) {
            return Err(SettingsError::value(key, format!("`{addr}` is not host:port")));
        }
    }
    Ok(given)
}

fn tls(cert: Option<&Path>, key: Option<&Path>) -> Result<Option<Acceptor>, SettingsError> {
    match (cert, key) {
        (None, None) => Ok(None),
        (Some(cert), Some(key)) => Acceptor::open(cert, key).map(Some),
        (Some(_), None) => Err(SettingsError::value("gateway.tls_key", "is needed with tls_cert")),
        (None, Some(_)) => Err(SettingsError::value("gateway.tls_cert", "is needed with tls_key")),
    }
}

fn access_log(setting: String) -> Option<Target> {
    match setting.as_str() {
        "" | "off" => None,
        "stdout" => Some(Target::Stdout),
        _ => Some(Target::File(setting.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(change: impl FnOnce(&mut GatewayArgs)) -> Result<Settings, String> {
        let mut args = GatewayArgs { model: Some("/".into()), ..GatewayArgs::default() };
        change(&mut args);
        args.resolve().map_err(|e| e.to_string())
    }

    #[test]
    fn a_bad_value_names_its_key() {
        assert!(resolve(|_| {}).is_ok());
        assert!(resolve(|a| a.model = None).unwrap_err().contains("gateway.model"));
        assert!(resolve(|a| a.model = Some("/no/such".into())).unwrap_err().contains("gateway.model"));
        assert!(resolve(|a| a.decode = Some(vec!["host".into()])).unwrap_err().contains("gateway.decode"));
        assert!(resolve(|a| a.prefill = Some(vec!["h:0".into()])).unwrap_err().contains("gateway.prefill"));
        let nats = Some(DiscoveryKind::Nats);
        assert!(resolve(|a| a.discovery = nats).unwrap_err().contains("gateway.bus.servers"));
        let named = |a: &mut GatewayArgs| a.bus.servers = Some(vec!["nats://h:1".into()]);
        assert!(resolve(named).unwrap().bus.is_some());
        let unused = |a: &mut GatewayArgs| {
            named(a);
            a.discovery = Some(DiscoveryKind::Static);
        };
        assert!(resolve(unused).unwrap().bus.is_none());
        let misnamed = |a: &mut GatewayArgs| {
            named(a);
            a.node = Some("A.b".into());
        };
        assert!(resolve(misnamed).unwrap_err().contains("gateway.node"));
        assert!(resolve(|a| a.tool_parser = Some("x".into())).unwrap_err().contains("hermes"));
        assert!(resolve(|a| a.max_in_flight = Some(0)).unwrap_err().contains("gateway.max_in_flight"));
    }

    #[test]
    fn flags_win_over_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        std::fs::write(&file, "[gateway]\nmin_bridge_tokens = 7\nmax_in_flight = 9\n").unwrap();
        let args = GatewayArgs { max_in_flight: Some(3), ..GatewayArgs::default() };
        let merged = args.with_file(Some(&file)).unwrap();
        assert_eq!((merged.min_bridge_tokens, merged.max_in_flight), (Some(7), Some(3)));
    }
}
