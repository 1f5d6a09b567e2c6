//! A real nats-server on a free port, with any configuration, that can be killed and started again where it was.

use crate::paths;
use crate::stack::free_port;
use shared::bus::{Bus, BusArgs, BusSettings, OperatorKey};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A server process that ends with this value.
#[derive(Debug)]
pub struct Nats {
    child: Option<Child>,
    config: PathBuf,
    host: String,
    port: u16,
    scheme: &'static str,
    dir: tempfile::TempDir,
}

impl Nats {
    /// A server on loopback that lets anyone in.
    #[must_use]
    pub fn start() -> Self {
        Self::with_config("")
    }

    /// A server with this configuration besides its address: accounts, permissions, limits, TLS.
    #[must_use]
    pub fn with_config(config: &str) -> Self {
        Self::listening_on("127.0.0.1", config)
    }

    /// The same at another address of this machine.
    #[must_use]
    pub fn listening_on(host: &str, config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let file = dir.path().join("nats.conf");
        std::fs::write(&file, format!("listen: \"{host}:{port}\"\n{config}\n")).unwrap();
        let scheme = if config.contains("tls") { "tls" } else { "nats" };
        let mut nats = Self { child: None, config: file, host: host.to_owned(), port, scheme, dir };
        nats.restart();
        nats
    }

    /// `nats://127.0.0.1:port`; `tls://localhost:port` where the configuration speaks of TLS.
    #[must_use]
    pub fn url(&self) -> String {
        let host = if self.scheme == "tls" { "localhost" } else { &self.host };
        format!("{}://{host}:{}", self.scheme, self.port)
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Process id; `None` while it is down.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// A folder that ends with the server, for keys and such.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Kills it, as a power cut would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts it (again) at the same address and waits until it listens.
    pub fn restart(&mut self) {
        self.kill();
        let log = std::fs::File::create(self.dir.path().join("nats.log")).unwrap();
        let mut command = Command::new(program());
        command.arg("-c").arg(&self.config).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.child = Some(command.spawn().unwrap());
        let start = Instant::now();
        while std::net::TcpStream::connect((self.host.as_str(), self.port)).is_err() {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "nats-server does not listen:\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Everything it said since its last start.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("nats.log")).unwrap_or_default()
    }

    /// How to reach it without a login.
    #[must_use]
    pub fn settings(&self) -> BusSettings {
        self.settings_with(None, None)
    }

    /// How to reach it with a login and a certificate authority.
    #[must_use]
    pub fn settings_with(&self, nkey_file: Option<&Path>, ca_file: Option<&Path>) -> BusSettings {
        let (nkey_file, ca_file) = (nkey_file.map(Path::to_owned), ca_file.map(Path::to_owned));
        let args = BusArgs { servers: Some(vec![self.url()]), nkey_file, ca_file, ..BusArgs::default() };
        args.resolve("test").unwrap().unwrap()
    }

    /// A connection of the test's own.
    pub async fn connect(&self) -> Bus {
        Bus::connect(&self.settings(), "test", "test").await.unwrap()
    }

    /// Writes a new key's seed to a private file in [`Self::dir`]; returns the file and the public key.
    #[must_use]
    pub fn new_key(&self, name: &str) -> (PathBuf, String) {
        let key = OperatorKey::generate();
        let file = self.dir.path().join(format!("{name}.nk"));
        write_private(&file, &key.seed().unwrap());
        (file, key.public())
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Writes a file that its owner alone can read.
pub fn write_private(file: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::write(file, text).unwrap();
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// The pinned server, fetched on first use (`PD_TEST_NATS_SERVER` names another).
#[must_use]
pub fn program() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        if let Some(path) = std::env::var_os("PD_TEST_NATS_SERVER") {
            return path.into();
        }
        let out = Command::new(paths::root().join("tests/clients/nats_server.sh")).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap().trim().into()
    })
}
