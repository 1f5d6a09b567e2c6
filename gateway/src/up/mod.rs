//! `pd-bridge up`: both workers as supervised children on loopback, and the gateway before them.

mod child;
mod supervisor;

pub(crate) use child::{ChildError, ChildSpec, Running};

use crate::fleet::{self, Fleet};
use crate::serve::{Gateway, ServeError, bind, print_ready};
use crate::settings::{GatewayArgs, Settings};
use clap::Args;
use shared::control::Role;
use shared::settings::{init_logging, shutdown_signal};
use shared::trace;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use supervisor::Supervisor;
use tokio_util::sync::CancellationToken;

/// After the decoder is there, how long to hold the ready line back for a prefill worker that still loads.
const PAIRING_WAIT: Duration = Duration::from_secs(180);

/// Arguments of `pd-bridge up`; what is not here goes into the file's `[prefill]` and `[decode]` sections.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Port of the API on 127.0.0.1; goes before --listen
    #[arg(long)]
    port: Option<u16>,
    /// TOML file with [gateway], [prefill] and [decode] sections
    #[arg(long, env = "PD_BRIDGE_CONFIG")]
    config: Option<PathBuf>,
    /// Element type of the decoder's cache: f32, f16, bf16
    #[arg(long)]
    cache_dtype: Option<String>,
    /// How the decoder keeps its weights: auto, packed, dense
    #[arg(long)]
    decode_weights: Option<String>,
    /// Engine of the prefill worker: auto, cuda, cpu
    #[arg(long)]
    prefill_backend: Option<String>,
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// Runs until Ctrl-C or SIGTERM; then drains, and ends both children.
///
/// # Errors
/// [`ServeError`]; a taken port is reported before any child is started.
pub(crate) async fn run(args: UpArgs) -> Result<(), ServeError> {
    let UpArgs { port, config, cache_dtype, decode_weights, prefill_backend, mut gateway } = args;
    if let Some(port) = port {
        gateway.listen = Some(SocketAddr::from(([127, 0, 0, 1], port)));
    }
    let gateway = gateway.with_file(config.as_deref())?;
    init_logging(gateway.log_json.unwrap_or(false));
    let key_file = gateway.cluster_key_file.clone();
    let otlp = gateway.otlp_endpoint.clone();
    let traces = trace::start("gateway.otlp_endpoint", "pd-bridge", otlp.as_deref())?;
    let settings = gateway.resolve()?;
    let spec = |program: &'static str, name: &'static str| {
        let mut spec = ChildSpec::beside_this_program(program, name)?;
        spec.option("--model", Some(&settings.model)).option("--config", config.as_ref());
        spec.option("--cluster-key-file", key_file.as_ref()).option("--otlp-endpoint", otlp.as_ref());
        Ok::<_, ChildError>(spec)
    };
    let mut decode = spec("pd-decode", "decode")?;
    decode.option("--cache-dtype", cache_dtype.as_ref()).option("--weights", decode_weights.as_ref());
    let mut prefill = spec("pd-prefill", "prefill")?;
    prefill.option("--backend", prefill_backend.as_ref());
    let served = Box::pin(supervise(settings, decode, prefill)).await;
    traces.finish_outside().await;
    served
}

async fn supervise(settings: Settings, decode: ChildSpec, prefill: ChildSpec) -> Result<(), ServeError> {
    let listener = bind(settings.listen)?;
    let addr = listener.local_addr().map_err(|source| ServeError::Bind { addr: settings.listen, source })?;
    let stop_children = CancellationToken::new();
    // A worker that the settings name runs elsewhere; the other kind is started here.
    let decode = Supervisor::new(decode, settings.decode.is_empty());
    let prefill = Supervisor::new(prefill, settings.prefill.is_empty());
    let own = [(Role::Decode, "decode", decode.address()), (Role::Prefill, "prefill", prefill.address())];
    let own = own.into_iter().filter_map(|(role, name, address)| Some((role, name, address?))).collect();
    let members = fleet::both(fleet::fixed(&settings.decode, &settings.prefill), fleet::supervised(own));
    let gateway = Gateway::start(settings, listener, members).await?;
    let fleet = gateway.app.ctx.fleet.clone();
    let drain = gateway.shutdown_token();

    let mut decode_task = decode.start(&stop_children);
    let mut prefill_task = prefill.start(&stop_children);
    let serving = tokio::spawn(gateway.run());
    let ready = async {
        wait_until_ready(&fleet, &prefill).await;
        print_ready(addr);
        std::future::pending::<()>().await;
    };
    let failed = tokio::select! {
        () = shutdown_signal(false) => None,
        () = ready => None,
        error = &mut decode_task => Some(error),
        error = &mut prefill_task => Some(error),
    };
    drain.cancel();
    // A second signal ends the wait for running answers; the pipes to the children close with this process.
    tokio::select! {
        _ = serving => {}
        () = shutdown_signal(false) => tracing::warn!("stopping at once"),
    }
    stop_children.cancel();
    for task in [decode_task, prefill_task] {
        if !task.is_finished() {
            let _ = task.await;
        }
    }
    match failed {
        Some(Ok(Err(error))) => Err(error.into()),
        _ => Ok(()),
    }
}

/// A decoder is there, and so is a prefill worker that it can bridge with, unless that one has failed.
async fn wait_until_ready(fleet: &Fleet, prefill: &Supervisor) {
    fleet.any_decoder().await;
    tokio::select! {
        _ = fleet.bridge_within(PAIRING_WAIT) => {}
        () = prefill.first_failure() => {}
    }
}
