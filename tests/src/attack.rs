//! What attacks on an agent have in common.

use crate::agents::{AgentScene, exec};
use bytes::Bytes;
use shared::bus::{AuditLine, Bus, NodeId, OperatorKey, Refusal, Reply, UnsignedCommand, subjects};
use std::time::Duration;

/// Sends bytes as a command; `None` when there is no reply.
pub async fn send(bus: &Bus, node: &NodeId, message: impl Into<Bytes>) -> Option<Refusal> {
    let request = async_nats::Request::new().payload(message.into()).timeout(Some(Duration::from_secs(3)));
    let reply = bus.client.send_request(subjects::commands(node), request).await.ok()?;
    match serde_json::from_slice(&reply.payload).unwrap() {
        Reply::Refused(refusal) => Some(refusal),
        Reply::Accepted {} => panic!("accepted"),
    }
}

/// The signing key of the operator that the scene's agent knows.
#[must_use]
pub fn key(scene: &AgentScene) -> OperatorKey {
    OperatorKey::from_file(&scene.key_file).unwrap()
}

/// A command that makes a file, and the file: it is there when the command ran.
#[must_use]
pub fn touch(scene: &AgentScene, name: &str) -> (UnsignedCommand, std::path::PathBuf) {
    let open = scene.dir().join("open");
    std::fs::create_dir_all(&open).unwrap();
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let file = open.join(name);
    let action = exec(&["/usr/bin/touch", file.to_str().unwrap()], Duration::from_secs(5));
    (UnsignedCommand::new(scene.node.clone(), action), file)
}

/// The last refusal in the audit that has this code.
pub fn audited(scene: &AgentScene, code: &str) -> AuditLine {
    audited_in(&scene.audit(), code)
}

/// The same in lines that were read already.
pub fn audited_in(audit: &[AuditLine], code: &str) -> AuditLine {
    let is_it =
        |l: &&AuditLine| l.event == "refused" && l.reason.as_ref().is_some_and(|r| r.starts_with(code));
    audit.iter().rev().find(is_it).unwrap_or_else(|| panic!("no refusal `{code}` in {audit:#?}")).clone()
}
