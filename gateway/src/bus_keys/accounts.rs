//! The server's list of users and what each may do: nothing but its job.

use super::registry::{Registry, Role, User};
use std::fmt::Write as _;

/// What a user may publish and subscribe.
struct Permissions {
    publish: Vec<String>,
    subscribe: Vec<String>,
    /// May answer what it received, once, within a short while.
    may_answer: bool,
}

/// Renders `accounts.conf`.
pub(super) fn accounts_conf(registry: &Registry) -> String {
    let mut out = String::from(
        "# Written by `pd-bridge bus keys`: who may do what. Public keys only.\n\
         # Nobody else gets in: there is no password, no token and no user without a key.\naccounts {\n  \
         PD {\n    users = [\n",
    );
    for user in &registry.users {
        out.push_str(&user_conf(user));
    }
    // The server's own events, for nobody: without an account of its own they would be in reach of a default one.
    out.push_str("    ]\n  }\n  SYS { users = [] }\n}\nsystem_account: SYS\n");
    out
}

fn user_conf(user: &User) -> String {
    let p = permissions(user);
    let mut out =
        format!("      # {} {}\n      {{\n        nkey: {}\n", user.role.as_str(), user.name, user.key);
    out.push_str("        allowed_connection_types: [\"STANDARD\"]\n        permissions {\n");
    let _ = writeln!(out, "          publish: {}", rule(&p.publish));
    let _ = writeln!(out, "          subscribe: {}", rule(&p.subscribe));
    if p.may_answer {
        out.push_str("          allow_responses: { max: 1, expires: \"30s\" }\n");
    }
    out.push_str("        }\n      }\n");
    out
}

fn rule(allow: &[String]) -> String {
    if allow.is_empty() {
        return "{ deny: [\">\"] }".to_owned();
    }
    let list: Vec<String> = allow.iter().map(|s| format!("\"{s}\"")).collect();
    format!("{{ allow: [{}] }}", list.join(", "))
}

fn permissions(user: &User) -> Permissions {
    let own = &user.name;
    let list = |subjects: &[&str]| subjects.iter().map(|s| format!("pd.v1.{s}")).collect::<Vec<_>>();
    let owned = |subjects: &[&str]| {
        subjects.iter().map(|s| format!("pd.v1.{}", s.replace('@', own))).collect::<Vec<_>>()
    };
    match user.role {
        Role::Gateway => Permissions {
            publish: owned(&["gateway.@"]),
            subscribe: list(&["heartbeat.>"]),
            may_answer: false,
        },
        Role::Agent => Permissions {
            publish: owned(&["heartbeat.@", "out.@.>", "audit.@"]),
            subscribe: owned(&["cmd.@", "credit.@.>"]),
            may_answer: true,
        },
        Role::Worker => Permissions { publish: owned(&["worker.@.>"]), subscribe: vec![], may_answer: false },
        Role::Operator => Permissions {
            publish: list(&["cmd.>", "credit.>"]),
            subscribe: [
                list(&["heartbeat.>", "out.>", "audit.>", "gateway.>"]),
                vec!["_INBOX.pd.operator.>".to_owned()],
            ]
            .concat(),
            may_answer: false,
        },
        Role::Viewer => Permissions {
            publish: vec![],
            subscribe: list(&["heartbeat.>", "audit.>", "gateway.>"]),
            may_answer: false,
        },
    }
}
