//! `pd-decode`: reads its settings, loads the model, serves.

use clap::Parser as _;
use decode_worker::constraint::Compiler;
use decode_worker::engine::{EngineError, EngineHandle};
use decode_worker::identity::{fingerprint, projection_digests};
use decode_worker::ingest::{Expected, Transfers, serve_bulk};
use decode_worker::mlx::{LoadOptions, MlxModel};
use decode_worker::server::{Decoder, Parts};
use decode_worker::settings::{CommandLine, Settings};
use decode_worker::store::PrefixStore;
use shared::angles::SinCos;
use shared::control::{CacheIdentity, Hello, KvRecipe, PROTOCOL_VERSION, Rates, Role, RopeRecipe, serve};
use shared::hexbytes::Hex;
use shared::keys::BlockKey;
use shared::layout::CacheLayout;
use shared::model::{Model, ModelDigests};
use shared::settings::{EXIT_BAD_SETTING, SettingsError, init_logging, shutdown_signal};
use shared::spec::ModelSpec;
use shared::trace;
use shared::weights::TensorSource;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Control connections that may wait to be accepted.
const BACKLOG: u32 = 256;

fn main() -> ExitCode {
    let settings = match CommandLine::try_parse() {
        Ok(line) => line.settings(),
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_BAD_SETTING) } else { ExitCode::SUCCESS };
        }
    };
    init_logging(false);
    let run = settings.map_err(Failure::from).and_then(|settings| {
        let traces = trace::start("decode.otlp_endpoint", "pd-decode", settings.otlp_endpoint.as_deref())?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let done = runtime.block_on(run(settings));
        traces.finish();
        runtime.shutdown_background();
        done
    });
    match run {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            let bad_setting = error.downcast_ref::<SettingsError>().is_some();
            ExitCode::from(if bad_setting { EXIT_BAD_SETTING } else { 1 })
        }
    }
}

async fn run(settings: Settings) -> Result<(), Failure> {
    // Ports are taken before the long load, so that a conflict shows at once, and opened after it.
    let control = bind("decode.listen", settings.listen)?;
    let bulk = bind("decode.bulk_listen", settings.bulk_listen)?;
    let stop = shutdown_signal(settings.exit_with_stdin);
    tokio::pin!(stop);
    let loaded = tokio::select! {
        loaded = load(&settings) => loaded?,
        () = &mut stop => return Ok(()),
    };
    let (control, bulk) = (control.listen(BACKLOG)?, bulk.listen(BACKLOG)?);
    let (control_addr, bulk_addr) = (control.local_addr()?, bulk.local_addr()?);
    let shutdown = CancellationToken::new();
    let engine = loaded.engine.clone();
    let (decoder, transfers) = assemble(&settings, loaded, bulk_addr);
    let serving = start(&settings, control, bulk, &decoder, transfers, &shutdown);
    announce(control_addr, bulk_addr)?;
    let ended: Result<(), Failure> = tokio::select! {
        () = &mut stop => Ok(()),
        () = engine.gone() => Err("the engine thread ended".into()),
        served = serving => served?.map_err(Failure::from),
    };
    shutdown.cancel();
    engine.stop();
    engine.gone().await;
    ended
}

/// The model and everything derived from it.
struct Loaded {
    spec: ModelSpec,
    digests: ModelDigests,
    source: Arc<dyn TensorSource>,
    projections: Vec<Hex<32>>,
    constraints: Option<Compiler>,
    engine: EngineHandle,
    about: About,
}

/// What the engine says about itself.
struct About {
    layout: CacheLayout,
    inv_freq: Vec<f32>,
    sin_cos: SinCos,
    summation_runs: Vec<u32>,
    device: &'static str,
}

async fn load(settings: &Settings) -> Result<Loaded, Failure> {
    let path = settings.model.clone();
    let opened = tokio::task::spawn_blocking(move || -> Result<_, Failure> {
        let model = Model::open(&path).map_err(|e| SettingsError::value("decode.model", e))?;
        let projections = projection_digests(&model)?;
        let constraints = Compiler::new(&model.tokenizer, model.spec.vocab_size, &model.spec.eos_token_ids)
            .inspect_err(|error| tracing::warn!(%error, "constrained output is not available"))
            .ok();
        Ok((model.digests(), model, projections, constraints))
    });
    let (digests, Model { spec, source, .. }, projections, constraints) = opened.await??;
    let source: Arc<dyn TensorSource> = source.into();
    let options = LoadOptions { compute: None, quantized: settings.weights, cache: settings.cache_dtype };
    let block_tokens = settings.block_tokens;
    let weights = (spec.clone(), source.clone());
    let (engine, about) = EngineHandle::start(settings.sequence_bytes, move || {
        let mlx = MlxModel::load(&weights.0, &*weights.1, &options).map_err(EngineError::from)?;
        let (layout, inv_freq, device) = (mlx.layout(block_tokens), mlx.rope_inv_freq(), mlx.device());
        let summation_runs = mlx.summation_runs().map_err(EngineError::from)?;
        let sin_cos = mlx.sin_cos().map_err(EngineError::from)?;
        Ok((mlx, About { layout, inv_freq, sin_cos, summation_runs, device }))
    })
    .await?;
    about.layout.validate().map_err(|e| SettingsError::value("decode.block_tokens", e))?;
    Ok(Loaded { spec, digests, source, projections, constraints, engine, about })
}

fn assemble(settings: &Settings, loaded: Loaded, bulk: SocketAddr) -> (Decoder, Transfers) {
    let Loaded { spec, digests, source, projections, constraints, engine, about } = loaded;
    let layout_digest = about.layout.digest();
    let recipe = KvRecipe {
        rope: RopeRecipe { inv_freq: about.inv_freq, sin_cos: about.sin_cos },
        projection_digests: projections,
        summation_runs: about.summation_runs,
    };
    let fingerprint = fingerprint(&digests, &layout_digest, &recipe);
    let bytes_per_token = about.layout.bytes_per_token();
    let bulk_addr = host_and_port(&settings.advertise_host, bulk.port());
    let expected =
        Expected { fingerprint, layout: Arc::new(about.layout.clone()), layout_digest: Hex(layout_digest) };
    let transfers = Transfers::new(expected, bulk_addr.clone());
    let context = u32::try_from(spec.max_positions).unwrap_or(u32::MAX);
    let hello = Hello {
        protocol: PROTOCOL_VERSION,
        role: Role::Decode,
        node: settings.node.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        engine: format!("mlx {}", about.device),
        model: spec.name,
        tokenizer_digest: Hex(digests.tokenizer),
        vocab_size: u32::try_from(spec.vocab_size).unwrap_or(u32::MAX),
        max_tokens: settings.max_tokens.map_or(context, |n| n.min(context)),
        capacity_tokens: settings.store_bytes / bytes_per_token,
        rates: Rates::default(),
        cache: Some(CacheIdentity { fingerprint, layout: about.layout, recipe, bulk_addr }),
    };
    tracing::info!(model = %hello.model, engine = %hello.engine, %fingerprint, max_tokens = hello.max_tokens, "loaded");
    let parts = Parts {
        hello,
        engine,
        store: PrefixStore::new(settings.store_bytes),
        transfers: transfers.clone(),
        max_requests: settings.max_requests,
        inspect_dir: settings.inspect_dir.clone(),
        constraints,
        block_tokens: settings.block_tokens as usize,
        bytes_per_token,
        n_layers: spec.n_layers,
        source,
    };
    (Decoder::new(parts, BlockKey::root(&fingerprint.0, &layout_digest)), transfers)
}

type Serving = tokio::task::JoinHandle<std::io::Result<()>>;

fn start(
    settings: &Settings,
    control: TcpListener,
    bulk: TcpListener,
    decoder: &Decoder,
    transfers: Transfers,
    shutdown: &CancellationToken,
) -> Serving {
    tokio::spawn(serve_bulk(bulk, transfers, shutdown.clone()));
    tokio::spawn(decoder.clone().sweep(shutdown.clone()));
    let key = settings.cluster_key.clone();
    tokio::spawn(serve(control, key, Arc::new(decoder.clone()), shutdown.clone()))
}

/// Holds the port; nobody can connect before `listen`.
fn bind(key: &str, addr: SocketAddr) -> Result<TcpSocket, Failure> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr).map_err(|e| SettingsError::value(key, format!("{addr}: {e}")))?;
    Ok(socket)
}

/// The one line on standard output, which a supervisor waits for.
fn announce(control: SocketAddr, bulk: SocketAddr) -> std::io::Result<()> {
    let line = serde_json::json!({ "control": control.to_string(), "bulk": bulk.to_string() });
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

fn host_and_port(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}
