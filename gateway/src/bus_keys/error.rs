//! What can go wrong while keys are made.

use std::path::PathBuf;

/// Why no keys were made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BusKeysError {
    /// The first run has to know what the server's certificate is for.
    #[error("--server is needed the first time: names and addresses of the machine that runs nats-server")]
    NoServer,
    /// A name that can't be part of a subject.
    #[error("{what} `{name}`: use 1 to 63 of a-z, 0-9 and -")]
    BadName {
        /// Whose name.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A name or address that no certificate can hold.
    #[error("--server `{name}` is neither a host name nor an address")]
    BadServer {
        /// The name.
        name: String,
    },
    /// Nothing of that name to remove.
    #[error("--remove `{name}`: there is no such folder of keys (it is one of those listed by users.toml)")]
    Unknown {
        /// The folder.
        name: String,
    },
    /// A file can't be read or written.
    #[error("{}: {source}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// `users.toml` is not what this program wrote.
    #[error("{}: {message}", file.display())]
    Registry {
        /// The file.
        file: PathBuf,
        /// Why.
        message: String,
    },
    /// A certificate can't be made.
    #[error("certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// A key can't be made.
    #[error("key: {0}")]
    Key(#[from] nkeys::error::Error),
}

impl BusKeysError {
    /// Whether the command line is to blame.
    pub(crate) fn is_bad_setting(&self) -> bool {
        matches!(self, Self::NoServer | Self::BadName { .. } | Self::BadServer { .. } | Self::Unknown { .. })
    }
}
