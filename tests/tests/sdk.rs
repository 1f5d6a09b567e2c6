//! Foreign clients as judges of what the front door says, against the real model where its skill does not matter, and a
//! scripted decode worker where an answer must be a certain one. The scripts are in `clients/`.
#![allow(clippy::print_stderr, reason = "versions are shown")]

use pd_tests::clients::{Doors, Program};

async fn judged(program: Program, script: &str) {
    let doors = Doors::open().await;
    eprintln!("{}", doors.judged(program, script).await);
}

#[tokio::test]
async fn the_official_python_sdk_is_content() {
    judged(Program::Python, "openai_sdk.py").await;
}

#[tokio::test]
async fn the_official_node_sdk_is_content() {
    judged(Program::Node, "node/openai_sdk.mjs").await;
}

#[tokio::test]
async fn the_ai_sdk_is_content() {
    judged(Program::Node, "node/ai_sdk.mjs").await;
}

#[tokio::test]
async fn langchain_is_content() {
    judged(Program::Frameworks, "frameworks/langchain_client.py").await;
}

#[tokio::test]
async fn litellm_is_content() {
    judged(Program::Frameworks, "frameworks/litellm_client.py").await;
}
