//! Puts the agent together and runs it.

use crate::beat::Beats;
use crate::commands::{Intake, IntakeError, private_dir};
use crate::logs::{self, LogRing};
use crate::machine::Machine;
use crate::process::Nursery;
use crate::settings::{AgentArgs, Settings};
use crate::state::State;
use crate::workers::{Supervisor, Workers};
use shared::bus::{Bus, BusError, HEARTBEAT_INTERVAL};
use shared::settings::{SettingsError, shutdown_signal};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// After SIGTERM, how long running commands may take to be ended and told about.
const END_LIMIT: Duration = Duration::from_secs(5);
/// After SIGTERM, how long supervised programs may take.
const PROGRAMS_LIMIT: Duration = Duration::from_secs(40);

/// Why the agent could not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// A bad setting.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// No async runtime.
    #[error("can't start: {0}")]
    Runtime(std::io::Error),
    /// The folder for what must survive can't be made.
    #[error("{dir}: {source}")]
    StateDir {
        /// The folder.
        dir: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The bus can't be used.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// Commands can't be taken.
    #[error(transparent)]
    Intake(#[from] IntakeError),
}

/// Runs until Ctrl-C or SIGTERM.
///
/// # Errors
/// [`RunError`].
pub(crate) fn run(args: AgentArgs) -> Result<(), RunError> {
    let settings = args.resolve()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(RunError::Runtime)?;
    let result = runtime.block_on(serve(settings));
    // The thread that looks at the machine may hang in a driver.
    runtime.shutdown_background();
    result
}

async fn serve(settings: Settings) -> Result<(), RunError> {
    let ring = LogRing::new(settings.log_lines);
    logs::init(settings.log_json, &ring);
    let dir = &settings.state_dir;
    let is_new = private_dir(dir).map_err(|source| RunError::StateDir { dir: dir.clone(), source })?;
    let nursery = Nursery::adopt_orphans();
    let state = State::load(dir);
    let stop = CancellationToken::new();
    let name = format!("pd-agent {}", settings.node);
    let bus = Bus::connect_in_background(&settings.bus, "agent", &name).await?;

    let workers = Workers::new(settings.cluster_key, settings.advertise_host);
    for (role, addr) in settings.workers {
        workers.follow(role, addr, stop.clone());
    }
    let programs: Vec<_> = settings
        .supervise
        .into_iter()
        .map(|program| Supervisor {
            program,
            config: settings.config.clone(),
            nursery: nursery.clone(),
            ring: ring.clone(),
            workers: workers.clone(),
            stop: stop.clone(),
        })
        .map(|supervisor| tokio::spawn(supervisor.run()))
        .collect();

    let commands_allowed = settings.rules.is_some();
    let intake = Intake::open(
        settings.node.clone(),
        bus.clone(),
        settings.rules,
        (dir, is_new),
        nursery.clone(),
        state.clone(),
        ring,
        stop.clone(),
    )?;
    let taking = tokio::spawn(intake.clone().run());
    let machine = Machine::watch().await;
    let beats = Beats {
        node: settings.node,
        bus: bus.clone(),
        state: state.clone(),
        machine,
        workers,
        commands_allowed,
    };
    let mut beating = tokio::spawn(beats.run());
    let sweeping = tokio::spawn(sweep(nursery));

    tokio::select! {
        () = shutdown_signal(false) => {}
        _ = &mut beating => {}
    }
    tracing::info!("leaving");
    state.leave();
    stop.cancel();
    sweeping.abort();
    let _ = tokio::time::timeout(END_LIMIT, intake.idle()).await;
    if !beating.is_finished() {
        let _ = tokio::time::timeout(END_LIMIT, beating).await;
    }
    let ending = async {
        for program in programs {
            let _ = program.await;
        }
    };
    let _ = tokio::time::timeout(PROGRAMS_LIMIT, ending).await;
    // The last frames and audit lines are on their way.
    let _ = tokio::time::timeout(Duration::from_secs(1), bus.client.flush()).await;
    match taking.await {
        Ok(result) => Ok(result?),
        Err(_) => Ok(()),
    }
}

/// Looks for processes that outlived their command, however they did it.
async fn sweep(nursery: Nursery) {
    loop {
        tokio::time::sleep(HEARTBEAT_INTERVAL).await;
        let nursery = nursery.clone();
        let _ = tokio::task::spawn_blocking(move || nursery.sweep_all()).await;
    }
}
