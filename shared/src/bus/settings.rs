//! How to reach the bus, the same in every program: the `bus` table of its section, flags, environment.

use super::keys::read_seed;
use crate::settings::SettingsError;
use serde::Deserialize;
use std::path::PathBuf;

/// What can be set, each as a flag, an environment variable or a key of the program's `bus` table.
#[derive(Debug, Clone, Default, clap::Args, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BusArgs {
    /// NATS servers, nats://host:port or tls://host:port, separated by commas
    #[arg(long = "nats", env = "PD_BRIDGE_NATS", value_delimiter = ',')]
    pub servers: Option<Vec<String>>,
    /// File with the nkey seed that this program logs in with
    #[arg(long = "nats-nkey-file", env = "PD_BRIDGE_NATS_NKEY_FILE")]
    pub nkey_file: Option<PathBuf>,
    /// PEM file with the certificate authority of the servers [default: the system's]
    #[arg(long = "nats-ca-file", env = "PD_BRIDGE_NATS_CA_FILE")]
    pub ca_file: Option<PathBuf>,
    /// PEM file with this program's own certificate, for servers that demand one
    #[arg(long = "nats-cert-file", env = "PD_BRIDGE_NATS_CERT_FILE")]
    pub cert_file: Option<PathBuf>,
    /// PEM file with the private key of that certificate
    #[arg(long = "nats-cert-key-file", env = "PD_BRIDGE_NATS_CERT_KEY_FILE")]
    pub cert_key_file: Option<PathBuf>,
}

/// How to reach the bus, checked.
#[derive(Clone)]
pub struct BusSettings {
    /// Where the servers are.
    pub(super) servers: Vec<async_nats::ServerAddr>,
    /// Secret to log in with.
    pub(super) seed: Option<String>,
    /// Who signs the servers' certificates.
    pub(super) ca_file: Option<PathBuf>,
    /// Own certificate and its key.
    pub(super) certificate: Option<(PathBuf, PathBuf)>,
}

impl BusArgs {
    /// Fills what is open from another source.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            servers: self.servers.or(other.servers),
            nkey_file: self.nkey_file.or(other.nkey_file),
            ca_file: self.ca_file.or(other.ca_file),
            cert_file: self.cert_file.or(other.cert_file),
            cert_key_file: self.cert_key_file.or(other.cert_key_file),
        }
    }

    /// Checks every value and reads the seed. `None` when no server is named: this program runs without a bus.
    /// `table` is where the keys are, for messages.
    ///
    /// # Errors
    /// [`SettingsError`] naming the key.
    pub fn resolve(self, table: &str) -> Result<Option<BusSettings>, SettingsError> {
        let named = self.servers.unwrap_or_default();
        if named.is_empty() {
            let beside = [self.nkey_file, self.ca_file, self.cert_file, self.cert_key_file];
            return match beside.iter().all(Option::is_none) {
                true => Ok(None),
                false => Err(SettingsError::value(
                    format!("{table}.servers"),
                    "is required beside a key, CA or certificate file",
                )),
            };
        }
        let server = |text: &String| {
            let bad = |e: String| SettingsError::value(format!("{table}.servers"), format!("`{text}`: {e}"));
            text.parse::<async_nats::ServerAddr>().map_err(|e| bad(e.to_string()))
        };
        let servers = named.iter().map(server).collect::<Result<Vec<_>, _>>()?;
        let seed = self.nkey_file.as_deref().map(read_seed).transpose();
        let seed = seed.map_err(|e| SettingsError::value(format!("{table}.nkey_file"), e))?;
        for (key, file) in [
            ("ca_file", &self.ca_file),
            ("cert_file", &self.cert_file),
            ("cert_key_file", &self.cert_key_file),
        ] {
            if let Some(file) = file
                && let Err(source) = std::fs::metadata(file)
            {
                let message = format!("{}: {source}", file.display());
                return Err(SettingsError::value(format!("{table}.{key}"), message));
            }
        }
        let certificate = match (self.cert_file, self.cert_key_file) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some((cert, key)),
            _ => {
                let message = "and cert_key_file go together";
                return Err(SettingsError::value(format!("{table}.cert_file"), message));
            }
        };
        Ok(Some(BusSettings { servers, seed, ca_file: self.ca_file, certificate }))
    }
}

impl std::fmt::Debug for BusSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // URLs may hold passwords, the seed is a secret.
        let hosts: Vec<String> = self.servers.iter().map(|s| format!("{}:{}", s.host(), s.port())).collect();
        f.debug_struct("BusSettings").field("servers", &hosts).field("nkey", &self.seed.is_some()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_value_names_its_key() {
        let resolve = |args: BusArgs| args.resolve("agent.bus").map_err(|e| e.to_string());
        assert!(resolve(BusArgs::default()).unwrap().is_none());
        let servers = Some(vec!["nats://a:4222".to_owned(), "tls://b".to_owned()]);
        assert!(resolve(BusArgs { servers: servers.clone(), ..BusArgs::default() }).unwrap().is_some());
        let bad = BusArgs { servers: Some(vec!["nats://:x".into()]), ..BusArgs::default() };
        assert!(resolve(bad).unwrap_err().contains("agent.bus.servers"));
        let with = BusArgs { servers, ..BusArgs::default() };
        let no_key = BusArgs { nkey_file: Some("/no/such".into()), ..with.clone() };
        assert!(resolve(no_key).unwrap_err().contains("agent.bus.nkey_file"));
        let no_ca = BusArgs { ca_file: Some("/no/such".into()), ..with.clone() };
        assert!(resolve(no_ca).unwrap_err().contains("agent.bus.ca_file"));
        let half = BusArgs { cert_file: Some("/".into()), ..with };
        assert!(resolve(half).unwrap_err().contains("agent.bus.cert_file"));
        let alone = BusArgs { nkey_file: Some("x".into()), ..BusArgs::default() };
        assert!(resolve(alone).unwrap_err().contains("agent.bus.servers"));
    }

    #[test]
    fn secrets_are_not_shown() {
        let args = BusArgs { servers: Some(vec!["nats://me:hush@host:4222".into()]), ..BusArgs::default() };
        let shown = format!("{:?}", args.resolve("x").unwrap().unwrap());
        assert!(shown.contains("host:4222") && !shown.contains("hush"), "{shown}");
    }
}
