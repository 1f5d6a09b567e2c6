//! Mutual proof of the cluster key, and what a worker says of itself.
//!
//! 1. worker → client: `challenge { protocol, nonce }`
//! 2. client → worker: `proof { nonce, mac }` with `mac = BLAKE3-keyed(key, "client" ‖ worker nonce ‖ client nonce)`
//! 3. worker → client: `welcome { mac, hello }` with the same over `"worker" ‖ …`, or `refused { message }`
//!
//! Without a key (loopback only) the MACs are computed over a fixed all-zero key: the steps are the same.

use super::{Hello, PROTOCOL_VERSION};
use crate::hexbytes::Hex;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

/// Shared secret of a fleet.
#[derive(Clone)]
pub struct ClusterKey([u8; 32]);

/// Why a key file is unusable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterKeyError {
    /// The file can't be read.
    #[error("cluster key file: {0}")]
    Io(#[from] std::io::Error),
    /// Too easy to guess.
    #[error("a cluster key has at least 32 characters, this one has {0}")]
    TooShort(usize),
}

impl ClusterKey {
    /// Derives the key from a secret text of at least 32 characters.
    ///
    /// # Errors
    /// [`ClusterKeyError::TooShort`].
    pub fn from_secret(secret: &str) -> Result<Self, ClusterKeyError> {
        let secret = secret.trim();
        if secret.chars().count() < 32 {
            return Err(ClusterKeyError::TooShort(secret.chars().count()));
        }
        Ok(Self(blake3::derive_key("pd-bridge 2026 cluster key v1", secret.as_bytes())))
    }

    /// Reads the secret from a file.
    ///
    /// # Errors
    /// [`ClusterKeyError`].
    pub fn from_file(path: &std::path::Path) -> Result<Self, ClusterKeyError> {
        Self::from_secret(&std::fs::read_to_string(path)?)
    }

    /// The key used between processes of one machine over loopback.
    #[must_use]
    pub fn loopback() -> Self {
        Self([0; 32])
    }

    fn mac(&self, who: &str, worker_nonce: &Hex<32>, client_nonce: &Hex<32>) -> Hex<32> {
        let mut h = blake3::Hasher::new_keyed(&self.0);
        h.update(who.as_bytes());
        h.update(&worker_nonce.0);
        h.update(&client_nonce.0);
        Hex(*h.finalize().as_bytes())
    }
}

impl std::fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClusterKey(…)")
    }
}

/// Handshake messages.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Handshake {
    /// First message of the worker.
    Challenge { protocol: u32, nonce: Hex<32> },
    /// Answer of the client.
    Proof { protocol: u32, nonce: Hex<32>, mac: Hex<32> },
    /// The worker accepts and proves the key in turn.
    Welcome { mac: Hex<32>, hello: Box<Hello> },
    /// The worker refuses.
    Refused { message: String },
}

/// The worker's half.
pub(super) struct WorkerHandshake<'a> {
    key: &'a ClusterKey,
    nonce: Hex<32>,
}

impl<'a> WorkerHandshake<'a> {
    pub(super) fn start(key: &'a ClusterKey) -> (Self, Handshake) {
        let nonce = Hex::random();
        (Self { key, nonce }, Handshake::Challenge { protocol: PROTOCOL_VERSION, nonce })
    }

    pub(super) fn answer(&self, message: &Handshake, hello: Hello) -> Result<Handshake, String> {
        let Handshake::Proof { protocol, nonce, mac } = message else {
            return Err("expected a proof of the cluster key".to_owned());
        };
        if *protocol != PROTOCOL_VERSION {
            return Err(format!("control protocol {protocol}, this worker speaks {PROTOCOL_VERSION}"));
        }
        if !same(&self.key.mac("client", &self.nonce, nonce), mac) {
            return Err("wrong cluster key".to_owned());
        }
        let mac = self.key.mac("worker", &self.nonce, nonce);
        Ok(Handshake::Welcome { mac, hello: Box::new(hello) })
    }
}

/// The client's half.
pub(super) struct ClientHandshake<'a> {
    key: &'a ClusterKey,
    worker_nonce: Hex<32>,
    nonce: Hex<32>,
}

impl<'a> ClientHandshake<'a> {
    pub(super) fn answer(key: &'a ClusterKey, message: &Handshake) -> Result<(Self, Handshake), String> {
        let Handshake::Challenge { protocol, nonce: worker_nonce } = message else {
            return Err("expected a challenge".to_owned());
        };
        if *protocol != PROTOCOL_VERSION {
            return Err(format!("worker speaks control protocol {protocol}, this side {PROTOCOL_VERSION}"));
        }
        let nonce = Hex::random();
        let mac = key.mac("client", worker_nonce, &nonce);
        let proof = Handshake::Proof { protocol: PROTOCOL_VERSION, nonce, mac };
        Ok((Self { key, worker_nonce: *worker_nonce, nonce }, proof))
    }

    pub(super) fn finish(&self, message: Handshake) -> Result<Hello, String> {
        match message {
            Handshake::Welcome { mac, hello } => {
                if !same(&self.key.mac("worker", &self.worker_nonce, &self.nonce), &mac) {
                    return Err("the worker does not hold the cluster key".to_owned());
                }
                if hello.protocol != PROTOCOL_VERSION {
                    return Err(format!("worker speaks control protocol {}", hello.protocol));
                }
                Ok(*hello)
            }
            Handshake::Refused { message } => Err(format!("the worker refused: {message}")),
            _ => Err("expected a welcome".to_owned()),
        }
    }
}

fn same(a: &Hex<32>, b: &Hex<32>) -> bool {
    a.0.ct_eq(&b.0).into()
}
