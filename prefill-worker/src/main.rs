//! `pd-prefill`: reads its settings, loads the model, serves; or runs a tool.

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use prefill_worker::backend::{self, BackendOptions};
use prefill_worker::bench::{ToolCommand, run_tool};
use prefill_worker::cuda::CudaOptions;
use prefill_worker::engine::{Engine, EngineOptions};
use prefill_worker::model::inverse_frequencies;
use prefill_worker::server::{Parts, Server};
use prefill_worker::settings::{ServeArgs, Settings};
use shared::control::{Hello, PROTOCOL_VERSION, Rates, Role, serve};
use shared::hexbytes::Hex;
use shared::model::Model;
use shared::settings::{EXIT_BAD_SETTING, SettingsError, init_logging, shutdown_signal};
use shared::trace;
use shared::weights::{TensorSource, WeightsError, kv_projection_digest};
use tokio::net::TcpSocket;
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Control connections that may wait to be accepted.
const BACKLOG: u32 = 256;

/// The prefill worker of pd-bridge: reads prompts and streams the decoder's finished cache to it.
#[derive(Debug, Parser)]
#[command(name = "pd-prefill", version, args_conflicts_with_subcommands = true)]
struct CommandLine {
    #[command(subcommand)]
    tool: Option<ToolCommand>,
    #[command(flatten)]
    serve: ServeArgs,
}

fn main() -> ExitCode {
    let line = match CommandLine::try_parse() {
        Ok(line) => line,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_BAD_SETTING) } else { ExitCode::SUCCESS };
        }
    };
    init_logging(false);
    let done = match line.tool {
        Some(tool) => run_tool(tool).map_err(Failure::from),
        None => line.serve.settings().map_err(Failure::from).and_then(|settings| {
            let traces =
                trace::start("prefill.otlp_endpoint", "pd-prefill", settings.otlp_endpoint.as_deref())?;
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            let done = runtime.block_on(run(settings));
            traces.finish();
            runtime.shutdown_background();
            done
        }),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            let bad_setting = error.downcast_ref::<SettingsError>().is_some();
            ExitCode::from(if bad_setting { EXIT_BAD_SETTING } else { 1 })
        }
    }
}

async fn run(settings: Settings) -> Result<(), Failure> {
    // The port is taken before the long load, so that a conflict shows at once, and opened after it.
    let socket = bind(settings.listen)?;
    let stop = shutdown_signal(settings.exit_with_stdin);
    tokio::pin!(stop);
    let parts = tokio::select! {
        loaded = load(&settings) => loaded?,
        () = &mut stop => return Ok(()),
    };
    let engine = parts.engine.clone();
    let listener = socket.listen(BACKLOG)?;
    let addr = listener.local_addr()?;
    let shutdown = CancellationToken::new();
    let server = Arc::new(Server::new(parts));
    let serving = tokio::spawn(serve(listener, settings.cluster_key.clone(), server, shutdown.clone()));
    announce(addr)?;
    let ended: Result<(), Failure> = tokio::select! {
        () = &mut stop => Ok(()),
        () = engine.gone() => Err("the engine thread ended".into()),
        served = serving => served?.map_err(Failure::from),
    };
    shutdown.cancel();
    engine.stop();
    ended
}

async fn load(settings: &Settings) -> Result<Parts, Failure> {
    let path = settings.model.clone();
    let opened = tokio::task::spawn_blocking(move || -> Result<_, Failure> {
        let model = Model::open(&path)
            .map_err(|e| SettingsError::value("prefill.model", format!("{}: {e}", path.display())))?;
        let digests =
            (0..model.spec.n_layers).map(|layer| kv_projection_digest(model.source.as_ref(), layer));
        let digests = digests.collect::<Result<Vec<_>, WeightsError>>()?;
        Ok((model.digests(), model, digests))
    });
    let (digests, Model { spec, source, .. }, own_projections) = opened.await??;
    let source: Arc<dyn TensorSource> = source.into();
    let weights = source.clone();
    let options = EngineOptions {
        prefix_cache_bytes: settings.prefix_cache_bytes,
        own_projections: own_projections.clone(),
        max_decoders: settings.max_decoders,
        inv_freq: inverse_frequencies(&spec.rope, spec.head_dim),
    };
    let backend = BackendOptions {
        choice: settings.backend,
        threads: settings.threads,
        chunk_tokens: settings.chunk_tokens,
        cuda: CudaOptions { precision: settings.precision, ..CudaOptions::default() },
    };
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let mut hello = Hello {
        protocol: PROTOCOL_VERSION,
        role: Role::Prefill,
        node: settings.node.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        engine: String::new(),
        model: spec.name.clone(),
        tokenizer_digest: Hex(digests.tokenizer),
        vocab_size: number(spec.vocab_size),
        max_tokens: number(spec.max_positions),
        capacity_tokens: 0,
        rates: Rates::default(),
        cache: None,
    };
    let (engine, about) = Engine::start(spec, options, move |spec| {
        backend::load(&backend, spec, weights.as_ref()).map_err(Failure::from)
    })
    .await?;
    hello.engine = about;
    tracing::info!(
        model = %hello.model,
        engine = %hello.engine,
        tokens_per_s = engine.prefill_tokens_per_s().round(),
        "loaded"
    );
    Ok(Parts {
        hello,
        engine,
        own_projections,
        source,
        cluster_key: settings.cluster_key.clone(),
        max_requests: settings.max_queue + 1,
        inspect_dir: settings.inspect_dir.clone(),
    })
}

/// Holds the port; nobody can connect before `listen`.
fn bind(addr: SocketAddr) -> Result<TcpSocket, Failure> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr).map_err(|e| SettingsError::value("prefill.listen", format!("{addr}: {e}")))?;
    Ok(socket)
}

/// The one line on standard output, which a supervisor waits for.
fn announce(control: SocketAddr) -> std::io::Result<()> {
    let line = serde_json::json!({ "control": control.to_string() });
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}
