//! `pd-agent` and the operator's commands, on a real nats-server.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use nix::sys::signal::Signal;
use pd_tests::agents::{AgentScene, exec, processes_with, refused, run, start, until};
use pd_tests::{stack, tiny};
use shared::bus::{Action, Exit, Frame, NodeState, RefusalCode};
use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

const ANY: &str = "unrestricted = true";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_known_by_its_heartbeats() {
    let mut worker = stack::Worker::decode(tiny::model(), &["--node", "tiny-decoder"]);
    let control = worker.addresses.control.clone();
    let scene =
        AgentScene::start_with(&format!("decode = [\"{control}\"]\nadvertise_host = \"box.lan\""), ANY, "");
    let bus = scene.nats.connect().await;
    let beat = scene.beat(&bus, |b| b.workers.iter().any(|w| w.reachable)).await;
    assert!(
        beat.cpu.cores >= 1 && beat.memory.total_bytes > 0 && !beat.os.is_empty() && beat.commands_allowed
    );
    let seen = &beat.workers[0];
    let port = control.rsplit_once(':').unwrap().1;
    assert_eq!(
        (seen.name.as_str(), seen.control_addr.as_str()),
        ("tiny-decoder", &*format!("box.lan:{port}"))
    );
    assert_eq!(seen.bulk_addr, worker.addresses.bulk);
    assert!(seen.fingerprint.is_some() && seen.layout_digest.is_some() && seen.tokenizer_digest.is_some());
    assert!(seen.max_tokens > 0 && seen.resident_memory_bytes > 0);
    // A worker's end is told at once, and so is its return.
    worker.kill();
    let killed = Instant::now();
    scene.beat(&bus, |b| b.workers.iter().all(|w| !w.reachable)).await;
    assert!(killed.elapsed() < Duration::from_secs(3), "{:?}", killed.elapsed());
    worker.restart();
    scene.beat(&bus, |b| b.workers.iter().any(|w| w.reachable)).await;
    scene.agent.signal(Signal::SIGTERM);
    scene.beat(&bus, |b| b.state == NodeState::Leaving).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_survives_restarts_of_the_server() {
    let rounds = std::env::var("PD_TEST_BUS_ROUNDS").map_or(1, |n| n.parse().unwrap());
    let down = std::env::var("PD_TEST_BUS_DOWN_MS").map_or(3000, |n| n.parse().unwrap());
    let mut scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    let mut last = scene.beat(operator.bus(), |_| true).await;
    for round in 0..rounds {
        scene.nats.kill();
        tokio::time::sleep(Duration::from_millis(down)).await;
        scene.nats.restart();
        let back = Instant::now();
        let beat = scene.beat(operator.bus(), |_| true).await;
        // Two clients come back, each after at most four seconds of waiting, and a heartbeat takes five.
        assert!(back.elapsed() < Duration::from_secs(15), "round {round}: {:?}", back.elapsed());
        assert_eq!(beat.boot_id, last.boot_id, "the same agent");
        assert!(beat.sequence > last.sequence);
        scene.ready(&operator).await;
        assert_eq!(run(&operator, &scene, &["true"]).await.0, Exit::Code { code: 0 });
        last = beat;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_killed_takes_its_programs_along_and_comes_back_with_its_memory() {
    let rounds = std::env::var("PD_TEST_BUS_ROUNDS").map_or(1, |n| n.parse().unwrap());
    let mut scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    for _ in 0..rounds {
        operator.send(&scene.node, Action::Drain {}).await.unwrap();
        let running = start(&operator, &scene, &["sleep", "7001.5"]).await.unwrap();
        until("the program runs", || !processes_with("sleep\x007001.5").is_empty()).await;
        scene.kill_agent();
        until("nothing of it is left", || processes_with("7001.5").is_empty()).await;
        drop(running);
        scene.restart_agent();
        let started = Instant::now();
        scene.ready(&operator).await;
        assert!(started.elapsed() < Duration::from_secs(10), "it remembers, so it need not wait");
        scene.beat(operator.bus(), |b| b.state == NodeState::Draining).await;
        operator.send(&scene.node, Action::Resume {}).await.unwrap();
        scene.beat(operator.bus(), |b| b.state == NodeState::Alive).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_agent_is_there_again_when_it_goes_on() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    scene.agent.signal(Signal::SIGSTOP);
    tokio::time::sleep(Duration::from_secs(17)).await;
    scene.agent.signal(Signal::SIGCONT);
    scene.beat(operator.bus(), |_| true).await;
    scene.ready(&operator).await;
    until("it noticed", || scene.agent.log().contains("this machine slept")).await;
    assert_eq!(run(&operator, &scene, &["true"]).await.0, Exit::Code { code: 0 });
}

#[tokio::test(flavor = "multi_thread")]
async fn supervised_workers_are_kept_running() {
    let model = tiny::model().display();
    let sections = format!("[decode]\nmodel = \"{model}\"\nlisten = \"127.0.0.1:0\"\nnode = \"kept\"");
    let scene = AgentScene::start_with("supervise = [\"decode\"]", ANY, &sections);
    let operator = scene.operator().await;
    let kept = |b: &shared::bus::Heartbeat| b.workers.iter().any(|w| w.reachable && w.name == "kept");
    let beat = scene.beat(operator.bus(), kept).await;
    let worker = processes_with("pd-decode")
        .into_iter()
        .find(|pid| pd_tests::process::descendants(scene.agent.pid()).contains(pid));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker.unwrap() as i32), Signal::SIGKILL).unwrap();
    let address = |b: &shared::bus::Heartbeat| b.workers[0].control_addr.clone();
    let old = address(&beat);
    scene.beat(operator.bus(), |b| kept(b) && address(b) != old).await;
    let log = text(&scene.run_cli(&["logs", "node-1", "-n", "1000"]).stdout);
    assert!(log.contains("ended; starting it again") && log.contains("[decode] "), "{log}");
    scene.agent.signal(Signal::SIGTERM);
    until("its worker ends with it", || pd_tests::process::descendants(scene.agent.pid()).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_runs_a_program_as_if_it_were_here() {
    let scene = AgentScene::start(ANY);
    scene.operator().await;
    let both = scene.script("both", "echo out; echo err >&2; printf half; exit 7");
    let output = scene.run_cli(&["exec", "node-1", "--", &both]);
    assert_eq!((text(&output.stdout), text(&output.stderr)), ("out\nhalf".into(), "err\n".into()));
    assert_eq!(output.status.code(), Some(7));
    let args = scene.run_cli(&["exec", "node-1", "--", "printf", "%s|", "a b", "$HOME", "*", "--", "-x"]);
    assert_eq!(text(&args.stdout), "a b|$HOME|*|--|-x|", "no shell, no expansion");
    let late = scene.run_cli(&["exec", "node-1", "--timeout", "300ms", "--", "sleep", "60"]);
    assert_eq!(late.status.code(), Some(124));
    let killed = scene.script("killed", "kill -9 $$");
    assert_eq!(scene.run_cli(&["exec", "node-1", "--", &killed]).status.code(), Some(137));
    let nobody = scene.run_cli(&["exec", "node-2", "--", "true"]);
    assert_eq!(nobody.status.code(), Some(125));
    assert!(text(&nobody.stderr).contains("no agent of the name `node-2`"), "{}", text(&nobody.stderr));
    assert_eq!(scene.run_cli(&["exec", "Node 2", "--", "true"]).status.code(), Some(64));
}

#[tokio::test(flavor = "multi_thread")]
async fn output_is_live_and_ctrl_c_ends_the_program_over_there() {
    let scene = AgentScene::start(ANY);
    scene.operator().await;
    let script = scene.script("talk", "echo ready; sleep 7002.5; echo never");
    let mut cli = scene
        .cli(&["exec", "node-1", "--timeout", "10m", "--", &script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(cli.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    until("the program sleeps", || !processes_with("7002.5").is_empty()).await;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(cli.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(cli.wait().unwrap().code(), Some(130));
    assert!(processes_with("7002.5").is_empty());
    let end = scene.audit().into_iter().rev().find(|l| l.event == "ended").unwrap().end.unwrap();
    assert_eq!(end.exit, Exit::Cancelled {});
}

#[tokio::test(flavor = "multi_thread")]
async fn all_nodes_answer_under_their_names_and_the_worst_code_counts() {
    let first = AgentScene::start(ANY);
    let script = first.script("three", "echo one; echo two >&2; exit 3");
    let mut other = std::fs::read_to_string(first.config()).unwrap();
    other = other.replace("node = \"node-1\"", "node = \"node-2\"").replace("/state\"", "/state-2\"");
    let config = first.dir().join("other.toml");
    std::fs::write(&config, other).unwrap();
    let second =
        pd_tests::process::Process::start("pd-agent", &["--config".into(), config.display().to_string()]);
    first.operator().await;
    let output = first.run_cli(&["exec", "--all", "--", &script]);
    let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["node-1: one", "node-2: one"], "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("node-2: two\n"));
    assert_eq!(output.status.code(), Some(3));
    let nodes: serde_json::Value =
        serde_json::from_slice(&first.run_cli(&["nodes", "--json"]).stdout).unwrap();
    let names: Vec<&str> = nodes.as_array().unwrap().iter().map(|n| n["node"].as_str().unwrap()).collect();
    assert_eq!(names, ["node-1", "node-2"]);
    let table = text(&first.run_cli(&["nodes"]).stdout);
    assert!(table.contains("node-2") && table.contains("alive"), "{table}");
    drop(second);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_drains_and_resumes_and_shows_its_log() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    assert!(scene.run_cli(&["drain", "node-1"]).status.success());
    scene.beat(operator.bus(), |b| b.state == NodeState::Draining).await;
    assert!(scene.run_cli(&["resume", "node-1"]).status.success());
    scene.beat(operator.bus(), |b| b.state == NodeState::Alive).await;
    let log = text(&scene.run_cli(&["logs", "node-1", "-n", "50"]).stdout);
    assert!(log.contains("bus connected"), "{log}");
    let mut cli = scene.cli(&["logs", "node-1", "-f", "-n", "1"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(cli.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    // Something that the agent logs: an orphan that it has to end.
    let orphan = scene.script("orphan", "setsid sleep 7003.5 & kill -9 $PPID");
    let _ = run(&operator, &scene, &[&orphan]).await;
    assert!(lines.next().unwrap().unwrap().contains("outlived"));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(cli.id() as i32), Signal::SIGINT).unwrap();
    assert!(cli.wait().unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stops_holds_the_program_up_and_nothing_grows() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    let mut running = start(&operator, &scene, &["head", "-c", "100000000", "/dev/zero"]).await.unwrap();
    let before = scene.agent.memory_bytes("VmRSS").unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut got = 0;
    let end = loop {
        match running.next().await.unwrap() {
            Frame::Stdout(bytes) => got += bytes.len(),
            Frame::Stderr(bytes) => panic!("{}", text(&bytes)),
            Frame::End(end) => break end,
        }
    };
    assert_eq!((got, end.stdout_bytes, end.exit), (100_000_000, 100_000_000, Exit::Code { code: 0 }));
    let peak = scene.agent.memory_bytes("VmHWM").unwrap();
    assert!(peak < before + (48 << 20), "agent grew from {before} to {peak}");
    // The same into a file, through the command line, whose memory is bounded, too.
    let file = scene.dir().join("out");
    let mut cli = scene.cli(&["exec", "node-1", "--", "head", "-c", "100000000", "/dev/zero"]);
    let mut cli = cli.stdout(std::fs::File::create(&file).unwrap()).spawn().unwrap();
    let mut peak = 0;
    let status = loop {
        peak = pd_tests::process::memory_bytes(cli.id(), "VmHWM").unwrap_or(peak).max(peak);
        if let Some(status) = cli.try_wait().unwrap() {
            break status;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success() && std::fs::metadata(&file).unwrap().len() == 100_000_000);
    assert!(peak < 64 << 20, "the operator's end took {peak} bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_the_table_takes_nothing() {
    let scene = AgentScene::start("logs = false\ndrain = false");
    let operator = scene.operator().await;
    assert_eq!(refused(start(&operator, &scene, &["true"]).await), RefusalCode::Disabled);
    for action in [Action::Drain {}, Action::Resume {}] {
        assert_eq!(refused(operator.send(&scene.node, action).await), RefusalCode::Disabled);
    }
    assert_eq!(scene.run_cli(&["logs", "node-1"]).status.code(), Some(1));
    assert_eq!(
        refused(operator.send(&scene.node, exec(&["true"], Duration::from_secs(1))).await),
        RefusalCode::Disabled
    );
}
