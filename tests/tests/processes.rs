//! Programs as programs: settings, exit codes, start, supervision, end.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use nix::sys::signal::Signal;
use pd_tests::http::{self, BRIDGE, completion, get, post};
use pd_tests::process::{Process, descendants, is_alive};
use pd_tests::scene::prompt;
use pd_tests::stack::free_port;
use pd_tests::{tiny, wait};
use shared::verdict::VerdictKind;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(|s| (*s).to_owned()).collect()
}

/// Runs to the end; gives exit code and stderr.
fn run(program: &str, args: &[&str]) -> (Option<i32>, String) {
    let mut process = Process::start(program, &strings(args));
    let status =
        process.wait(Duration::from_secs(20)).unwrap_or_else(|| panic!("{program} {args:?} does not end"));
    (status.code(), process.log())
}

#[test]
fn a_bad_setting_names_key_and_file_and_exits_64() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let model = tiny::model().to_str().unwrap();
    let unknown =
        file("unknown.toml", "[decode]\nstore_bites = 5\n[prefill]\nchunk = 1\n[gateway]\nport = 1\n");
    let wrong = file(
        "wrong.toml",
        "[decode]\nstore_bytes = \"much\"\n[prefill]\nmax_queue = -1\n[gateway]\nmax_in_flight = true\n",
    );
    let section = file("section.toml", "[decoder]\nstore_bytes = 5\n");
    let syntax = file("syntax.toml", "[decode\n");
    let cases: [(&str, &[&str], &[&str]); 13] = [
        ("pd-decode", &["--model", model, "--config", &unknown], &["store_bites", "unknown.toml"]),
        ("pd-decode", &["--model", model, "--config", &wrong], &["decode.store_bytes", "wrong.toml"]),
        ("pd-decode", &["--model", model, "--config", &section], &["decoder", "section.toml"]),
        ("pd-decode", &["--model", model, "--config", &syntax], &["syntax.toml"]),
        ("pd-decode", &["--model", model, "--config", "/no/such/file.toml"], &["/no/such/file.toml"]),
        ("pd-decode", &["--model", model, "--block-tokens", "0"], &["block"]),
        ("pd-decode", &["--model", model, "--listen", "0.0.0.0:0"], &["listen", "cluster_key_file"]),
        ("pd-decode", &["--model", model, "--cache-dtype", "f8"], &["cache-dtype"]),
        ("pd-prefill", &["--model", model, "--config", &unknown], &["chunk", "unknown.toml"]),
        ("pd-prefill", &["--model", model, "--config", &wrong], &["max_queue", "wrong.toml"]),
        (
            "pd-bridge",
            &["gateway", "--model", model, "--decode", "127.0.0.1:9", "--config", &unknown],
            &["port", "unknown.toml"],
        ),
        (
            "pd-bridge",
            &["gateway", "--model", "/no/such/model", "--decode", "127.0.0.1:9"],
            &["model", "/no/such/model"],
        ),
        ("pd-bridge", &["up", "--model", model, "--config", &wrong], &["max_in_flight", "wrong.toml"]),
    ];
    for (program, args, words) in cases {
        let (code, log) = run(program, args);
        assert_eq!(code, Some(64), "{program} {args:?}: {log}");
        for word in words {
            assert!(log.contains(word), "{program} {args:?} does not say `{word}`: {log}");
        }
    }
}

#[test]
fn a_model_that_is_not_whole_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        let to = dir.path().join(name);
        tiny::write(&to, tiny::NARROW, 7);
        to
    };
    let edit = |dir: &Path, file: &str, f: &dyn Fn(String) -> String| {
        let path = dir.join(file);
        std::fs::write(&path, f(std::fs::read_to_string(&path).unwrap())).unwrap();
    };
    let architecture = copy("architecture");
    edit(&architecture, "config.json", &|t| {
        t.replace("\"llama\"", "\"mamba\"").replace("LlamaForCausalLM", "MambaForCausalLM")
    });
    let layers = copy("layers");
    edit(&layers, "config.json", &|t| t.replace("\"num_hidden_layers\":4", "\"num_hidden_layers\":5"));
    let fewer = copy("fewer");
    edit(&fewer, "config.json", &|t| t.replace("\"num_hidden_layers\":4", "\"num_hidden_layers\":3"));
    let cut = copy("cut");
    let weights = cut.join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() - 1000]).unwrap();
    let cases = [
        (&architecture, "amba"),
        (&layers, "model.layers.4."),
        (&fewer, "model.layers.3."),
        (&cut, "is short"),
    ];
    for program in ["pd-decode", "pd-prefill"] {
        for (path, word) in cases {
            let mut process = Process::start(program, &strings(&["--model", path.to_str().unwrap()]));
            let status = process
                .wait(Duration::from_secs(20))
                .unwrap_or_else(|| panic!("{program} runs with {path:?}"));
            assert!(!status.success());
            assert!(process.log().contains(word), "{program} does not name `{word}`: {}", process.log());
            assert!(process.more_lines().is_empty(), "it said that it listens");
        }
    }
}

/// `pd-bridge up` on a free port, ready.
fn up(extra: &[&str]) -> (Process, String) {
    let port = free_port().to_string();
    let args =
        ["up", "--model", tiny::model().to_str().unwrap(), "--port", &port, "--prefill-backend", "cpu"];
    let process = Process::start("pd-bridge", &strings(&[&args, extra].concat()));
    let line = process.line();
    assert_eq!(line, format!("ready http://127.0.0.1:{port}"));
    (process, format!("127.0.0.1:{port}"))
}

#[tokio::test]
#[cfg_attr(not(target_os = "linux"), ignore = "finds children through /proc")]
async fn up_is_ready_when_it_says_so_and_leaves_nothing_when_stopped() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let (mut process, addr) = up(&[]);
        // At once, with no patience: it said ready.
        let reply = post(&addr, "/v1/completions", &[BRIDGE], &completion(&prompt(300), 4)).await;
        assert_eq!((reply.status.as_u16(), reply.verdict().verdict), (200, VerdictKind::Complete));
        for path in ["/healthz", "/readyz", "/metrics", "/v1/models"] {
            assert_eq!(get(&addr, path).await.status, 200, "{path}");
        }
        let children = descendants(process.pid());
        assert!(children.len() >= 2, "{children:?}");
        process.signal(signal);
        let status = process.wait(Duration::from_secs(15)).unwrap();
        assert!(status.success(), "{signal}: {status:?}");
        assert!(process.more_lines().is_empty(), "more than the ready line on stdout");
        wait::until("children end", Duration::from_secs(5), || async {
            children.iter().all(|c| !is_alive(*c)).then_some(())
        })
        .await;
    }
}

#[tokio::test]
#[cfg_attr(not(target_os = "linux"), ignore = "finds children through /proc")]
async fn up_leaves_no_orphans_when_it_is_killed() {
    let (mut process, _) = up(&[]);
    let children = descendants(process.pid());
    assert!(children.len() >= 2, "{children:?}");
    process.kill();
    wait::until("children end", Duration::from_secs(10), || async {
        children.iter().all(|c| !is_alive(*c)).then_some(())
    })
    .await;
}

#[tokio::test]
#[cfg_attr(not(target_os = "linux"), ignore = "finds children through /proc")]
async fn up_restarts_a_worker_that_dies() {
    let (process, addr) = up(&[]);
    for _ in 0..2 {
        for child in descendants(process.pid()) {
            if !is_alive(child) {
                continue;
            }
            nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(i32::try_from(child).unwrap()),
                Signal::SIGKILL,
            )
            .unwrap();
            let begun = Instant::now();
            let reply = post(&addr, "/v1/completions", &[BRIDGE], &completion(&prompt(300), 4)).await;
            assert_eq!(
                reply.status,
                200,
                "after {:?}: {}",
                begun.elapsed(),
                String::from_utf8_lossy(&reply.body)
            );
            wait::until("bridging again", Duration::from_secs(60), || async {
                let reply = post(&addr, "/v1/completions", &[BRIDGE], &completion(&prompt(300), 1)).await;
                (reply.status == 200 && reply.verdict().verdict == VerdictKind::Complete).then_some(())
            })
            .await;
        }
    }
}

#[tokio::test]
async fn a_taken_port_is_said_before_anything_starts() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let begun = Instant::now();
    let (code, log) = run("pd-bridge", &["up", "--model", tiny::model().to_str().unwrap(), "--port", &port]);
    assert!(code.is_some_and(|c| c != 0) && log.contains(&port), "{code:?} {log}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    // A worker's port, too.
    let addr = format!("127.0.0.1:{port}");
    let (code, log) = run("pd-decode", &["--model", tiny::model().to_str().unwrap(), "--listen", &addr]);
    assert!(code.is_some_and(|c| c != 0) && log.contains(&port), "{code:?} {log}");
}

#[tokio::test]
async fn field_24_slow_and_giant_requests_are_cut_off() {
    let limits =
        ["--max-body-bytes", "20000", "--max-header-bytes", "8192", "--header-read-timeout-ms", "500"];
    let (process, addr) = up(&limits);
    let reply = post(&addr, "/v1/completions", &[], &completion(&"x".repeat(30_000), 1)).await;
    assert_eq!(reply.status, 413);
    let long = "y".repeat(20_000);
    let reply =
        http::send(&addr, "POST", "/v1/completions", &[("x-long", &long)], Some(&completion("x", 1))).await;
    assert_eq!(reply.unwrap().status, 431);
    let mut slow = vec![];
    for _ in 0..50 {
        let mut stream = tokio::net::TcpStream::connect(&addr).await.unwrap();
        stream.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-drip: ").await.unwrap();
        slow.push(stream);
    }
    assert_eq!(get(&addr, "/healthz").await.status, 200);
    for mut stream in slow {
        let mut rest = vec![];
        let closed = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "still open");
    }
    // A body that is announced and never sent holds its connection only.
    let mut stream = tokio::net::TcpStream::connect(&addr).await.unwrap();
    stream
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n{")
        .await
        .unwrap();
    assert_eq!(get(&addr, "/healthz").await.status, 200);
    drop((stream, process));
}
