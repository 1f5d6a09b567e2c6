//! `pd-bridge bus keys`: keys, certificates and the NATS server's configuration for a home lab, made on one machine.
//!
//! The folder it fills has one sub-folder per place that something must be copied to. Running it again keeps every
//! key that exists, adds what is new, and writes the server's list of users afresh.

mod accounts;
mod certs;
mod error;
mod files;
mod registry;

pub(crate) use error::BusKeysError;

use accounts::accounts_conf;
use certs::Authority;
use clap::Args;
use files::Folder;
use registry::{Holder, Registry};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// What an operator of a home lab edits by hand, if anything.
const SERVER_CONF: &str = include_str!("../../../deploy/nats/nats-server.conf");

/// Make the bus's keys, certificates and server configuration, or add to them.
#[derive(Debug, Args)]
pub(crate) struct BusKeysArgs {
    /// Folder to keep everything in; never put it under version control
    #[arg(long, default_value = "bus-keys")]
    dir: PathBuf,
    /// Names and addresses of the machine that runs nats-server, as the others reach it, separated by commas; needed
    /// the first time, and again when they change
    #[arg(long, value_delimiter = ',')]
    server: Vec<String>,
    /// Machines that run an agent, separated by commas
    #[arg(long, value_delimiter = ',')]
    node: Vec<String>,
    /// Ids of gateways, separated by commas [default: main]
    #[arg(long, value_delimiter = ',')]
    gateway: Vec<String>,
    /// People who may send commands, separated by commas [default: main]
    #[arg(long, value_delimiter = ',')]
    operator: Vec<String>,
    /// People or programs who may only look on, separated by commas [default: main]
    #[arg(long, value_delimiter = ',')]
    viewer: Vec<String>,
    /// Withdraw what a sub-folder holds, for example `node-spark`, and delete the sub-folder; separated by commas
    #[arg(long, value_delimiter = ',')]
    remove: Vec<String>,
    /// Give everybody a client certificate too, and let the server demand one; kept once chosen
    #[arg(long)]
    client_certs: bool,
}

/// Makes or adds, and prints what goes where.
///
/// # Errors
/// [`BusKeysError`]; nothing that existed before is lost.
pub(crate) fn run(args: &BusKeysArgs) -> Result<(), BusKeysError> {
    let report = make(args)?;
    print_report(&report);
    Ok(())
}

#[allow(clippy::print_stdout, reason = "the report is what the command is asked for")]
fn print_report(report: &str) {
    print!("{report}");
}

fn make(args: &BusKeysArgs) -> Result<String, BusKeysError> {
    let root = Folder::open(&args.dir)?;
    root.write(".gitignore", "*\n")?;
    let mut registry = Registry::load(&root)?;
    let wanted = wanted(args, &registry)?;
    if args.server.is_empty() && !root.has("nats/server.pem") {
        return Err(BusKeysError::NoServer);
    }
    registry.client_certs |= args.client_certs;
    for name in &args.remove {
        registry.remove(name)?;
        root.delete(name)?;
    }
    let authority = Authority::open(&root)?;
    let server = root.sub("nats")?;
    if !args.server.is_empty() {
        let made = authority.server(&args.server)?;
        server.write("server.pem", &made.cert_pem)?;
        server.write_secret("server-key.pem", &made.key_pem)?;
    }
    server.write("ca.pem", authority.cert_pem())?;
    for holder in wanted {
        registry.add(&root, &holder)?;
    }
    for holder in registry.holders() {
        let folder = root.sub(&holder.folder())?;
        folder.write("ca.pem", authority.cert_pem())?;
        if registry.client_certs && !folder.has("client.pem") {
            let made = authority.client(&holder.folder())?;
            folder.write("client.pem", &made.cert_pem)?;
            folder.write_secret("client-key.pem", &made.key_pem)?;
        }
        if let Holder::Node(_) = holder {
            folder.write("operators.txt", &registry.operators())?;
        }
    }
    if !server.has("nats-server.conf") {
        server.write("nats-server.conf", SERVER_CONF)?;
    }
    server.write("tls.conf", &tls_conf(registry.client_certs))?;
    server.write_secret("accounts.conf", &accounts_conf(&registry))?;
    registry.save(&root)?;
    Ok(report(&args.dir, &registry))
}

/// Who shall have keys after this run and may lack them now.
fn wanted(args: &BusKeysArgs, registry: &Registry) -> Result<Vec<Holder>, BusKeysError> {
    let first = registry.is_empty();
    let or_main = |names: &[String]| match names {
        [] if first => vec!["main".to_owned()],
        names => names.to_vec(),
    };
    let mut holders = vec![];
    holders.extend(or_main(&args.gateway).into_iter().map(Holder::Gateway));
    holders.extend(or_main(&args.operator).into_iter().map(Holder::Operator));
    holders.extend(or_main(&args.viewer).into_iter().map(Holder::Viewer));
    holders.extend(args.node.iter().cloned().map(Holder::Node));
    holders.iter().try_for_each(Holder::check)?;
    Ok(holders)
}

fn tls_conf(client_certs: bool) -> String {
    format!(
        "# Written by `pd-bridge bus keys`. Paths are relative to the folder that nats-server is started in.\n\
         tls {{\n  cert_file: \"server.pem\"\n  key_file: \"server-key.pem\"\n  ca_file: \"ca.pem\"\n  \
         # true: nobody gets as far as showing a key without a certificate of this lab's own authority.\n  \
         verify: {client_certs}\n  min_version: \"1.3\"\n  timeout: 5\n}}\n"
    )
}

fn report(dir: &Path, registry: &Registry) -> String {
    let dir = dir.display();
    let mut out = format!(
        "Keys are in {dir}. Each folder goes to one place; files with secrets are readable by you alone.\n\n\
         {:<24} the machine that runs nats-server: start it in that folder, or after a change send it SIGHUP\n",
        format!("{dir}/nats")
    );
    for holder in registry.holders() {
        let _ = writeln!(out, "{:<24} {}", format!("{dir}/{}", holder.folder()), holder.place());
    }
    let _ = writeln!(
        out,
        "\n{dir}/ca-key.pem and {dir}/users.toml stay here: they are needed to add a machine later:\n  \
         pd-bridge bus keys --dir {dir} --node NAME"
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;
    use std::os::unix::fs::PermissionsExt as _;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        keys: BusKeysArgs,
    }

    fn keys(dir: &Path, args: &[&str]) -> Result<String, BusKeysError> {
        let head = ["x", "--dir", dir.to_str().unwrap()];
        make(&Line::try_parse_from([&head[..], args].concat()).unwrap().keys)
    }

    fn read(dir: &Path, file: &str) -> String {
        std::fs::read_to_string(dir.join(file)).unwrap()
    }

    #[test]
    fn a_node_is_added_with_one_command_and_nobody_else_changes() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        keys(dir, &["--server", "nas.local,192.168.1.5", "--node", "spark,mac"]).unwrap();
        let before = ["gateway-main/gateway.nk", "node-mac/agent.nk", "nats/server.pem", "ca-key.pem"];
        let before: Vec<_> = before.iter().map(|f| (f, read(dir, f))).collect();
        let report = keys(dir, &["--node", "third"]).unwrap();
        assert!(report.contains("node-third") && report.contains("node-mac"), "{report}");
        for (file, text) in before {
            assert_eq!(read(dir, file), text, "{file}");
        }
        let accounts = read(dir, "nats/accounts.conf");
        assert!(accounts.contains("pd.v1.heartbeat.third") && accounts.contains("pd.v1.heartbeat.mac"));
        assert_eq!(read(dir, ".gitignore"), "*\n");
    }

    #[test]
    fn secrets_are_for_the_owner_only_and_stay_out_of_the_servers_folder() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("keys");
        keys(&dir, &["--server", "nas.local", "--node", "spark", "--client-certs"]).unwrap();
        let mode = |file: &str| std::fs::metadata(dir.join(file)).unwrap().permissions().mode() & 0o777;
        for secret in [
            "ca-key.pem",
            "nats/server-key.pem",
            "node-spark/agent.nk",
            "node-spark/worker.nk",
            "node-spark/client-key.pem",
            "operator-main/operator.nk",
            "operator-main/signing.nk",
        ] {
            assert_eq!(mode(secret), 0o600, "{secret}");
        }
        assert_eq!(mode("."), 0o700);
        let seeds = ["node-spark/agent.nk", "operator-main/operator.nk", "operator-main/signing.nk"]
            .map(|f| read(&dir, f));
        for file in ["nats/accounts.conf", "nats/tls.conf", "users.toml", "node-spark/operators.txt"] {
            let text = read(&dir, file);
            assert!(seeds.iter().all(|s| !text.contains(s.trim())), "{file} holds a seed");
        }
        assert!(read(&dir, "nats/tls.conf").contains("verify: true"));
    }

    #[test]
    fn a_removed_machine_is_unknown_to_the_server() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        keys(dir, &["--server", "nas.local", "--node", "spark,mac"]).unwrap();
        keys(dir, &["--remove", "node-mac"]).unwrap();
        let accounts = read(dir, "nats/accounts.conf");
        assert!(!accounts.contains(".mac\"") && accounts.contains(".spark\""), "{accounts}");
        assert!(!dir.join("node-mac").exists());
        assert!(keys(dir, &["--remove", "node-mac"]).unwrap_err().to_string().contains("node-mac"));
        assert!(keys(dir, &["--remove", "nats"]).unwrap_err().to_string().contains("nats"));
    }

    #[test]
    fn bad_names_and_a_missing_server_are_refused_before_anything_is_made() {
        let dir = tempfile::tempdir().unwrap();
        for bad in ["Spark", "a.b", "a*", "", "../x", &"x".repeat(64)] {
            let error = keys(dir.path(), &["--server", "nas.local", "--node", bad]).unwrap_err();
            assert!(error.is_bad_setting() && error.to_string().contains("node"), "{error}");
        }
        assert!(keys(dir.path(), &["--node", "spark"]).unwrap_err().to_string().contains("--server"));
        assert!(!dir.path().join("nats").exists() && !dir.path().join("node-spark").exists());
    }
}
