//! The official OpenAI SDK as a judge of what the front door says.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test fails by panicking; versions are shown")]

use pd_tests::stack::Stack;
use pd_tests::{paths, tiny};
use std::process::Command;

#[tokio::test]
async fn the_official_openai_sdk_is_content() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no python3");
        return;
    }
    let stack = Stack::start(tiny::model(), &["--block-tokens", "16"], &[], &[]).await;
    let clients = paths::root().join("tests/clients");
    let url = format!("http://{}", stack.gateway.addr);
    let output =
        Command::new(clients.join("python.sh")).arg(clients.join("openai_sdk.py")).arg(url).output().unwrap();
    let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    eprintln!("{}", text(&output.stdout));
}
