//! The lab's own certificate authority, in two files.

use super::BusKeysError;
use super::files::Folder;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use std::time::{SystemTime, UNIX_EPOCH};

const CERT: &str = "ca.pem";
const KEY: &str = "ca-key.pem";
/// Years that an authority is good for.
const CA_YEARS: i32 = 20;
/// Years that a certificate is good for. Nobody renews certificates at home, and removing a user needs none.
const LEAF_YEARS: i32 = 10;

/// Signs certificates.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    cert_pem: String,
}

/// A certificate and its private key.
pub(super) struct Made {
    pub(super) cert_pem: String,
    pub(super) key_pem: String,
}

impl Authority {
    /// Reads it, or makes it the first time.
    pub(super) fn open(root: &Folder) -> Result<Self, BusKeysError> {
        if let (Some(cert_pem), Some(key_pem)) = (root.read(CERT)?, root.read(KEY)?) {
            let issuer = Issuer::new(ca_params()?, KeyPair::from_pem(&key_pem)?);
            return Ok(Self { issuer, cert_pem });
        }
        let (params, key) = (ca_params()?, KeyPair::generate()?);
        let cert_pem = params.self_signed(&key)?.pem();
        root.write_secret(KEY, &key.serialize_pem())?;
        root.write(CERT, &cert_pem)?;
        Ok(Self { issuer: Issuer::new(params, key), cert_pem })
    }

    /// What everybody has to trust.
    pub(super) fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    /// For the machine that runs the server, under all its names, as localhost, and as the service `nats` of
    /// deploy/compose.yaml.
    pub(super) fn server(&self, names: &[String]) -> Result<Made, BusKeysError> {
        if let Some(bad) = names.iter().find(|n| !is_host(n)) {
            return Err(BusKeysError::BadServer { name: bad.clone() });
        }
        let local = ["localhost", "127.0.0.1", "::1", "nats"].map(str::to_owned);
        let names = names.iter().cloned().chain(local).collect();
        self.leaf(names, "pd-bridge bus", ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// For whoever connects.
    pub(super) fn client(&self, name: &str) -> Result<Made, BusKeysError> {
        self.leaf(vec![], name, ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn leaf(
        &self,
        names: Vec<String>,
        common_name: &str,
        usage: ExtendedKeyUsagePurpose,
    ) -> Result<Made, BusKeysError> {
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.use_authority_key_identifier_extension = true;
        params.key_usages.push(KeyUsagePurpose::DigitalSignature);
        params.extended_key_usages.push(usage);
        valid_for(&mut params, LEAF_YEARS);
        let key = KeyPair::generate()?;
        Ok(Made { cert_pem: params.signed_by(&key, &self.issuer)?.pem(), key_pem: key.serialize_pem() })
    }
}

/// The same every time, so that the key alone is enough to sign again.
fn ca_params() -> Result<CertificateParams, BusKeysError> {
    let mut params = CertificateParams::new(Vec::<String>::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.distinguished_name.push(DnType::CommonName, "pd-bridge bus authority");
    params.key_usages.extend([KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign]);
    valid_for(&mut params, CA_YEARS);
    Ok(params)
}

/// From long ago: a machine whose clock is behind must be able to connect.
fn valid_for(params: &mut CertificateParams, years: i32) {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let year = 1970 + i32::try_from(seconds / 31_556_952).unwrap_or(0);
    params.not_before = date_time_ymd(2025, 1, 1);
    params.not_after = date_time_ymd(year + years, 12, 31);
}

fn is_host(name: &str) -> bool {
    let is_label = |l: &str| {
        (1..=63).contains(&l.len()) && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    name.parse::<std::net::IpAddr>().is_ok() || (name.len() <= 253 && name.split('.').all(is_label))
}
