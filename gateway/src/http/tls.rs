//! TLS on the front door, when a certificate is set.

use shared::settings::SettingsError;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// Makes encrypted streams of connections.
#[derive(Clone)]
pub(crate) struct Acceptor(TlsAcceptor);

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Acceptor")
    }
}

impl Acceptor {
    /// Reads a certificate chain and its key, both PEM.
    ///
    /// # Errors
    /// [`SettingsError`] naming the setting and the file.
    pub(crate) fn open(cert: &Path, key: &Path) -> Result<Self, SettingsError> {
        let bad = |setting: &str, file: &Path, why: String| {
            SettingsError::value(format!("gateway.{setting}"), format!("{}: {why}", file.display()))
        };
        let chain = CertificateDer::pem_file_iter(cert)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|e| bad("tls_cert", cert, e.to_string()))?;
        if chain.is_empty() {
            return Err(bad("tls_cert", cert, "holds no certificate".to_owned()));
        }
        let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| bad("tls_key", key, e.to_string()))?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret))
            .map_err(|e| bad("tls_key", key, e.to_string()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// Shakes hands within `limit`.
    ///
    /// # Errors
    /// What the client did wrong, or that it took too long.
    pub(super) async fn accept(
        &self,
        stream: TcpStream,
        limit: Duration,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        match tokio::time::timeout(limit, self.0.accept(stream)).await {
            Ok(shaken) => shaken,
            Err(_) => Err(std::io::ErrorKind::TimedOut.into()),
        }
    }
}
