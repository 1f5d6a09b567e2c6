//! Who has which key: public halves only, kept in `users.toml`.

use super::BusKeysError;
use super::files::Folder;
use nkeys::KeyPair;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

const FILE: &str = "users.toml";

/// All users of the bus.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Registry {
    /// Whether clients need a certificate.
    #[serde(default)]
    pub(super) client_certs: bool,
    #[serde(default)]
    pub(super) users: Vec<User>,
}

/// One user of the bus.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct User {
    pub(super) role: Role,
    /// Node, gateway or person.
    pub(super) name: String,
    /// Public key that it logs in with, `U…`.
    pub(super) key: String,
    /// Operators: public key of what they sign commands with. Another one than the login's, so that whoever steals
    /// the login can't command anybody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) signing_key: Option<String>,
}

/// What a user may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    Gateway,
    Operator,
    Viewer,
    Agent,
    Worker,
}

impl Role {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Operator => "operator",
            Self::Viewer => "viewer",
            Self::Agent => "agent",
            Self::Worker => "worker",
        }
    }
}

/// Who keys are handed to: one folder each.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Holder {
    Gateway(String),
    Operator(String),
    Viewer(String),
    /// A machine: its agent and its workers.
    Node(String),
}

impl Holder {
    fn parts(&self) -> (&'static str, &str) {
        match self {
            Self::Gateway(name) => ("gateway", name),
            Self::Operator(name) => ("operator", name),
            Self::Viewer(name) => ("viewer", name),
            Self::Node(name) => ("node", name),
        }
    }

    fn roles(&self) -> &'static [Role] {
        match self {
            Self::Gateway(_) => &[Role::Gateway],
            Self::Operator(_) => &[Role::Operator],
            Self::Viewer(_) => &[Role::Viewer],
            Self::Node(_) => &[Role::Agent, Role::Worker],
        }
    }

    /// Name of its folder.
    pub(super) fn folder(&self) -> String {
        let (kind, name) = self.parts();
        format!("{kind}-{name}")
    }

    /// Where the folder goes, in words.
    pub(super) fn place(&self) -> String {
        match self {
            Self::Gateway(name) => format!("the machine that runs gateway `{name}`"),
            Self::Operator(name) => {
                format!("wherever operator `{name}` types commands; guard it like an SSH key")
            }
            Self::Viewer(name) => format!("wherever `{name}` looks on"),
            Self::Node(name) => format!("machine `{name}`, for its agent"),
        }
    }

    /// Refuses a name that would not be one token of a subject.
    pub(super) fn check(&self) -> Result<(), BusKeysError> {
        let (what, name) = self.parts();
        let is_good = (1..=63).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        if is_good { Ok(()) } else { Err(BusKeysError::BadName { what, name: name.to_owned() }) }
    }
}

impl User {
    fn holder(&self) -> Holder {
        let name = self.name.clone();
        match self.role {
            Role::Gateway => Holder::Gateway(name),
            Role::Operator => Holder::Operator(name),
            Role::Viewer => Holder::Viewer(name),
            Role::Agent | Role::Worker => Holder::Node(name),
        }
    }
}

impl Registry {
    /// Reads it; empty where there is none yet.
    pub(super) fn load(root: &Folder) -> Result<Self, BusKeysError> {
        let Some(text) = root.read(FILE)? else { return Ok(Self::default()) };
        let wrong = |message: String| BusKeysError::Registry { file: root.path(FILE), message };
        let read: Self = toml::from_str(&text).map_err(|e| wrong(e.message().to_owned()))?;
        for user in &read.users {
            user.holder().check().map_err(|e| wrong(e.to_string()))?;
            for key in [Some(&user.key), user.signing_key.as_ref()].into_iter().flatten() {
                KeyPair::from_public_key(key).map_err(|e| wrong(format!("key of {}: {e}", user.name)))?;
            }
        }
        Ok(read)
    }

    /// Writes it.
    pub(super) fn save(&self, root: &Folder) -> Result<(), BusKeysError> {
        let text = toml::to_string(self)
            .map_err(|e| BusKeysError::Registry { file: root.path(FILE), message: e.to_string() })?;
        root.write(
            FILE,
            &format!("# Written by `pd-bridge bus keys`: public keys of everybody on the bus.\n{text}"),
        )
    }

    pub(super) fn is_empty(&self) -> bool {
        self.users.is_empty()
    }

    /// Makes the keys that `holder` lacks. The seed is on disk before the key is listed.
    pub(super) fn add(&mut self, root: &Folder, holder: &Holder) -> Result<(), BusKeysError> {
        let (_, name) = holder.parts();
        for &role in holder.roles() {
            if self.users.iter().any(|u| u.role == role && u.name == name) {
                continue;
            }
            let folder = root.sub(&holder.folder())?;
            let key = new_key(&folder, &format!("{}.nk", role.as_str()))?;
            let signing_key = match role {
                Role::Operator => Some(new_key(&folder, "signing.nk")?),
                _ => None,
            };
            self.users.push(User { role, name: name.to_owned(), key, signing_key });
        }
        Ok(())
    }

    /// Forgets everybody whose keys are in `folder`.
    pub(super) fn remove(&mut self, folder: &str) -> Result<(), BusKeysError> {
        let before = self.users.len();
        self.users.retain(|u| u.holder().folder() != folder);
        if self.users.len() == before {
            return Err(BusKeysError::Unknown { name: folder.to_owned() });
        }
        Ok(())
    }

    /// Everybody, each once, in order.
    pub(super) fn holders(&self) -> BTreeSet<Holder> {
        self.users.iter().map(User::holder).collect()
    }

    /// Public keys of the operators, one a line: what an agent checks signatures with.
    pub(super) fn operators(&self) -> String {
        let line = |u: &User| Some(format!("{} {}\n", u.signing_key.as_ref()?, u.name));
        self.users.iter().filter_map(line).collect()
    }
}

/// Writes a seed and gives the public key.
fn new_key(folder: &Folder, file: &str) -> Result<String, BusKeysError> {
    let pair = KeyPair::new_user();
    folder.write_secret(file, &format!("{}\n", pair.seed()?))?;
    Ok(pair.public_key())
}
