//! Who the operator is: flags, then environment, then the `[operator]` section of a file.

use super::BusCliError;
use serde::Deserialize;
use shared::bus::{Bus, BusArgs, Operator, OperatorKey};
use shared::settings::{SettingsError, section};
use std::path::PathBuf;

/// How to reach the bus, and the key that signs commands.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct OperatorArgs {
    /// TOML file; these commands read its `[operator]` section
    #[arg(long, env = "PD_BRIDGE_CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    options: Options,
}

#[derive(Debug, Clone, Default, clap::Args, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    #[command(flatten)]
    bus: BusArgs,
    /// File with the nkey seed that signs commands; nobody else may read it
    #[arg(long = "operator-key-file", env = "PD_BRIDGE_OPERATOR_KEY_FILE")]
    key_file: Option<PathBuf>,
}

impl OperatorArgs {
    /// Connects with the operator's login; enough to listen.
    ///
    /// # Errors
    /// [`BusCliError::Settings`], [`BusCliError::Bus`].
    pub(crate) async fn connect(self) -> Result<Bus, BusCliError> {
        self.merged()?.connect().await
    }

    /// Connects and reads the signing key.
    ///
    /// # Errors
    /// [`BusCliError::Settings`], [`BusCliError::Bus`].
    pub(crate) async fn operator(self) -> Result<Operator, BusCliError> {
        let options = self.merged()?;
        let file = options.key_file.as_deref();
        let file =
            file.ok_or_else(|| SettingsError::value("operator.key_file", "is required to sign commands"))?;
        let key = OperatorKey::from_file(file).map_err(|e| SettingsError::value("operator.key_file", e))?;
        Ok(Operator::new(options.connect().await?, key))
    }

    fn merged(self) -> Result<Options, SettingsError> {
        let file: Options = match &self.config {
            Some(file) => section(file, "operator")?,
            None => Options::default(),
        };
        let Options { bus, key_file } = self.options;
        Ok(Options { bus: bus.or(file.bus), key_file: key_file.or(file.key_file) })
    }
}

impl Options {
    async fn connect(self) -> Result<Bus, BusCliError> {
        let settings = self.bus.resolve("operator.bus")?;
        let settings =
            settings.ok_or_else(|| SettingsError::value("operator.bus.servers", "is required (--nats)"))?;
        Ok(Bus::connect(&settings, "operator", "pd-bridge operator").await?)
    }
}
