//! The live page in a real browser over the real stack and the start model, and who may see it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use pd_tests::stack::{Gateway, Stack};
use pd_tests::{browser, http, paths, tiny};
use std::process::Command;

#[tokio::test]
async fn a_request_can_be_watched_from_prefill_to_complete() {
    let chromium = browser::chromium();
    let stack = Stack::start(&paths::model(), &[], &[], &[]).await;
    let clients = paths::root().join("tests/clients");
    let dir = tempfile::tempdir().unwrap();
    let prompt = dir.path().join("prompt.txt");
    let text = std::fs::read_to_string(paths::root().join("shared/docs/ARCHITECTURE.md")).unwrap();
    std::fs::write(&prompt, text.chars().take(5000).collect::<String>()).unwrap();
    let output = Command::new(clients.join("python.sh"))
        .arg(clients.join("live_page.py"))
        .arg(&stack.gateway.addr)
        .arg(paths::root().join("target/test-output/live-page"))
        .arg(&prompt)
        .env("PD_TEST_CHROMIUM", &chromium.program)
        .env("LD_LIBRARY_PATH", &chromium.library_path)
        .output()
        .unwrap();
    let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

const ADMIN: &str = "sk-admin-0123456789abcdef";
const USER: &str = "sk-user-0123456789abcdef";

/// Status of a WebSocket handshake, 101 when it was accepted.
async fn socket(addr: &str, headers: &[(&str, &str)]) -> u16 {
    let mut all = vec![
        ("connection", "upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];
    all.extend_from_slice(headers);
    http::send(addr, "GET", "/v1/bridge/events", &all, None).await.unwrap().status.as_u16()
}

#[tokio::test]
async fn with_keys_only_an_administrator_may_look() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys.toml");
    let text = format!("user = \"{USER}\"\nroot = {{ key = \"{ADMIN}\", admin = true }}\n");
    std::fs::write(&keys, text).unwrap();
    let keys = keys.to_str().unwrap();
    let gateway = Gateway::start_unready(tiny::model(), "127.0.0.1:1", None, &["--api-keys-file", keys]);
    gateway.listening().await;
    let addr = gateway.addr.as_str();
    let page = |value: Option<String>| async move {
        let header = value.as_deref().map(|v| ("authorization", v));
        let header: Vec<_> = header.into_iter().collect();
        http::send(addr, "GET", "/", &header, None).await.unwrap()
    };
    let basic = |secret: &str| format!("Basic {}", BASE64.encode(format!("anyone:{secret}")));

    let refused = page(None).await;
    assert_eq!(refused.status, 401);
    assert!(refused.headers["www-authenticate"].to_str().unwrap().starts_with("Basic"));
    assert_eq!(page(Some(format!("Bearer {USER}"))).await.status, 403);
    assert_eq!(page(Some(basic("sk-wrong-0123456789abcdef"))).await.status, 401);
    assert_eq!(page(Some(format!("Bearer {ADMIN}"))).await.status, 200);
    let shown = page(Some(basic(ADMIN))).await;
    assert_eq!(shown.status, 200);
    assert!(shown.headers["content-security-policy"].to_str().unwrap().starts_with("default-src 'none'"));
    let cookie = shown.headers["set-cookie"].to_str().unwrap().to_owned();
    assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap();

    let own = format!("http://{}", gateway.addr);
    assert_eq!(socket(&gateway.addr, &[]).await, 401);
    assert_eq!(socket(&gateway.addr, &[("authorization", &format!("Bearer {USER}"))]).await, 403);
    assert_eq!(socket(&gateway.addr, &[("cookie", "pd_bridge_live=ffffffffff.00")]).await, 401);
    assert_eq!(socket(&gateway.addr, &[("cookie", cookie), ("origin", "http://evil.example")]).await, 403);
    assert_eq!(socket(&gateway.addr, &[("cookie", cookie), ("origin", &own)]).await, 101);
    assert_eq!(socket(&gateway.addr, &[("authorization", &format!("Bearer {ADMIN}"))]).await, 101);
}

#[tokio::test]
async fn one_setting_turns_it_off() {
    let gateway = Gateway::start_unready(tiny::model(), "127.0.0.1:1", None, &["--live-page", "false"]);
    gateway.listening().await;
    for path in ["/", "/live/live.js", "/v1/bridge/events"] {
        assert_eq!(http::get(&gateway.addr, path).await.status, 404, "{path}");
    }
}
