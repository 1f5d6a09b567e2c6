//! Attacks on the agent, each refused or contained, and each in the audit.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use bytes::Bytes;
use futures_util::StreamExt as _;
use pd_tests::agents::{AgentScene, exec, processes_with, refused, run, start, until};
use pd_tests::nats::Nats;
use shared::bus::{
    Action, AuditLine, Bus, Credit, Exit, Frame, MAX_COMMAND_BYTES, NodeId, Operator, OperatorKey, Refusal,
    RefusalCode, Reply, SignedCommand, UnsignedCommand, subjects, unix_now_ms,
};
use shared::hexbytes::Hex;
use std::time::{Duration, Instant};

const ANY: &str = "unrestricted = true\nmax_concurrent = 3";
const LISTED: &str = "allow = [ { program = \"/bin/echo\", args = [\"-n|hello\", \"[a-z]+\"], min_args = 1 }, \
                      { program = \"/usr/bin/env\" } ]";

/// Sends bytes as a command; `None` when there is no reply.
async fn send(bus: &Bus, node: &NodeId, message: impl Into<Bytes>) -> Option<Refusal> {
    let request = async_nats::Request::new().payload(message.into()).timeout(Some(Duration::from_secs(3)));
    let reply = bus.client.send_request(subjects::commands(node), request).await.ok()?;
    match serde_json::from_slice(&reply.payload).unwrap() {
        Reply::Refused(refusal) => Some(refusal),
        Reply::Accepted {} => panic!("accepted"),
    }
}

fn key(scene: &AgentScene) -> OperatorKey {
    OperatorKey::from_file(&scene.key_file).unwrap()
}

fn touch(scene: &AgentScene, name: &str) -> (UnsignedCommand, std::path::PathBuf) {
    let open = scene.dir().join("open");
    std::fs::create_dir_all(&open).unwrap();
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let file = open.join(name);
    let action = exec(&["/usr/bin/touch", file.to_str().unwrap()], Duration::from_secs(5));
    (UnsignedCommand::new(scene.node.clone(), action), file)
}

/// The last refusal in the audit has this code.
fn audited(scene: &AgentScene, code: &str) -> AuditLine {
    let audit = scene.audit();
    let line = audit
        .iter()
        .rev()
        .find(|l| l.event == "refused" && l.reason.as_ref().is_some_and(|r| r.starts_with(code)));
    line.unwrap_or_else(|| panic!("no refusal `{code}` in {audit:#?}")).clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_and_altered_commands_are_refused() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    let bus = operator.bus();
    let mut audit = bus.client.subscribe(subjects::audits()).await.unwrap();
    bus.client.flush().await.unwrap();
    let (command, file) = touch(&scene, "forged");
    let good = command.sign(&key(&scene)).unwrap();

    // 1. A key that nobody introduced: a stolen NATS login alone.
    let stranger = command.sign(&OperatorKey::generate()).unwrap();
    let refusal = send(bus, &scene.node, stranger.encode().unwrap()).await.unwrap();
    assert_eq!(refusal.code, RefusalCode::UnknownKey);
    assert!(!audited(&scene, "unknown_key").verified);
    // 2. The same, claiming to be the operator.
    let claimed = SignedCommand { operator: good.operator.clone(), ..stranger };
    assert_eq!(
        send(bus, &scene.node, claimed.encode().unwrap()).await.unwrap().code,
        RefusalCode::BadSignature
    );
    // 3. One character of a good command changed.
    let altered = SignedCommand { command: good.command.replace("forged", "forget"), ..good.clone() };
    assert_eq!(
        send(bus, &scene.node, altered.encode().unwrap()).await.unwrap().code,
        RefusalCode::BadSignature
    );
    // 4. No signature at all.
    let bare = SignedCommand { signature: String::new(), ..good.clone() };
    assert_eq!(send(bus, &scene.node, bare.encode().unwrap()).await.unwrap().code, RefusalCode::BadSignature);
    audited(&scene, "bad_signature");
    // 5. A command for another node.
    let elsewhere = UnsignedCommand { node: NodeId::new("node-2").unwrap(), ..command.clone() };
    let elsewhere = elsewhere.sign(&key(&scene)).unwrap();
    assert_eq!(
        send(bus, &scene.node, elsewhere.encode().unwrap()).await.unwrap().code,
        RefusalCode::WrongNode
    );
    audited(&scene, "wrong_node");
    // 6. Old, and from the future.
    for (issued_at_ms, code, name) in [
        (unix_now_ms() - 31_000, RefusalCode::Stale, "stale"),
        (unix_now_ms() + 31_000, RefusalCode::FromTheFuture, "from_the_future"),
        (0, RefusalCode::Stale, "stale"),
        (u64::MAX, RefusalCode::FromTheFuture, "from_the_future"),
    ] {
        let command = UnsignedCommand { issued_at_ms, nonce: Hex::random(), ..command.clone() };
        let message = command.sign(&key(&scene)).unwrap().encode().unwrap();
        assert_eq!(send(bus, &scene.node, message).await.unwrap().code, code);
        audited(&scene, name);
    }
    assert!(!file.exists() && !file.with_file_name("forget").exists(), "something ran");
    // All of it was told on the bus, too.
    let mut told = 0;
    while let Ok(Some(line)) = tokio::time::timeout(Duration::from_millis(500), audit.next()).await {
        let line: AuditLine = serde_json::from_slice(&line.payload).unwrap();
        told += usize::from(line.event == "refused");
    }
    assert!(told >= 9, "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_is_refused_also_by_a_restarted_agent() {
    let mut scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    let (command, file) = touch(&scene, "replayed");
    let message = command.sign(&key(&scene)).unwrap().encode().unwrap();
    let subject = subjects::commands(&scene.node);
    operator.bus().client.request(subject, message.clone()).await.unwrap();
    until("it ran once", || file.exists()).await;
    std::fs::remove_file(&file).unwrap();
    assert_eq!(send(operator.bus(), &scene.node, message.clone()).await.unwrap().code, RefusalCode::Replayed);
    audited(&scene, "replayed");
    // Killed and started again within the window.
    scene.restart_agent();
    scene.ready(&operator).await;
    assert_eq!(send(operator.bus(), &scene.node, message.clone()).await.unwrap().code, RefusalCode::Replayed);
    // With its memory gone it takes nothing from before.
    scene.kill_agent();
    std::fs::remove_file(scene.state_dir().join("taken")).unwrap();
    scene.restart_agent();
    let start = Instant::now();
    let refusal = loop {
        match send(operator.bus(), &scene.node, message.clone()).await {
            Some(refusal) => break refusal,
            None => assert!(start.elapsed() < Duration::from_secs(20)),
        }
    };
    assert_eq!(refusal.code, RefusalCode::Stale);
    assert!(!file.exists(), "it ran again");
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_and_giants_are_refused_and_a_flood_of_them_is_counted() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    let bus = operator.bus();
    let good = touch(&scene, "x").0.sign(&key(&scene)).unwrap();
    let mut extra = serde_json::to_value(&good).unwrap();
    extra["admin"] = true.into();
    let twice = format!(
        "{{\"command\":\"a\",\"command\":\"b\",\"operator\":\"{}\",\"signature\":\"\"}}",
        good.operator
    );
    let deep = "[".repeat(100_000);
    let giant = "x".repeat(MAX_COMMAND_BYTES + 1);
    for garbage in ["", "{", "null", "\u{0}\u{1}\u{2}", &extra.to_string(), &twice, &deep, &giant] {
        let refusal = send(bus, &scene.node, garbage.to_owned()).await.unwrap();
        assert_eq!(refusal.code, RefusalCode::Malformed, "{:.40}", garbage);
    }
    assert_eq!(send(bus, &scene.node, vec![0xff, 0xfe]).await.unwrap().code, RefusalCode::Malformed);
    audited(&scene, "malformed");
    // A signed command of an unknown kind, and one with an unknown key inside.
    for inner in ["\"kind\":\"shell\"", "\"kind\":\"drain\",\"x\":1"] {
        let action = "\"kind\":\"drain\"";
        let text =
            serde_json::to_string(&UnsignedCommand::new(scene.node.clone(), Action::Drain {})).unwrap();
        let command = text.replace(action, inner);
        assert_ne!(command, text);
        let bytes = [b"pd-bridge command v1\n", command.as_bytes()].concat();
        use base64::Engine as _;
        let signature =
            base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(key(&scene).sign(&bytes).unwrap());
        let signed = SignedCommand { command, operator: key(&scene).public(), signature };
        assert_eq!(
            send(bus, &scene.node, signed.encode().unwrap()).await.unwrap().code,
            RefusalCode::Malformed
        );
    }
    // Ten thousand at once: the audit is not flushed out, memory does not grow, the operator still gets through.
    let before = scene.agent.memory_bytes("VmRSS").unwrap();
    for _ in 0..10_000 {
        bus.client.publish(subjects::commands(&scene.node), Bytes::from_static(b"{}")).await.unwrap();
    }
    bus.client.flush().await.unwrap();
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!(run(&operator, &scene, &["true"]).await.0, Exit::Code { code: 0 });
    send(bus, &scene.node, "one more").await.unwrap();
    let audit = scene.audit();
    assert!(audit.len() < 300, "{} lines", audit.len());
    assert!(audit.iter().any(|l| l.suppressed > 0), "nothing says that lines are missing");
    assert!(scene.agent.memory_bytes("VmRSS").unwrap() < before + (32 << 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_is_listed_runs_and_only_with_what_is_listed() {
    let scene = AgentScene::start(LISTED);
    let operator = scene.operator().await;
    assert_eq!(run(&operator, &scene, &["echo", "hello", "world"]).await.1, "hello world\n");
    let link = scene.dir().join("echo");
    std::os::unix::fs::symlink("/bin/sh", &link).unwrap();
    let link = link.to_str().unwrap().to_owned();
    for argv in [
        // Other programs, and ways to spell them.
        &["sh", "-c", "id"][..],
        &["/bin/sh"],
        &["/bin/../bin/echo", "hello"],
        &["/bin/./echo", "hello"],
        &["//bin/echo", "hello"],
        &["./echo", "hello"],
        &["../../bin/echo", "hello"],
        &["bin/echo", "hello"],
        &["ECHO", "hello"],
        &["echo\0sh", "hello"],
        &[&link, "hello"],
        &["", "hello"],
        // Arguments: too few, too many, beside the pattern, smuggled.
        &["echo"],
        &["echo", "hello", "world", "more"],
        &["echo", "-e"],
        &["echo", "-n", "--help"],
        &["echo", "hello\n"],
        &["echo", "hello", "a\nb"],
        &["echo", "hello", "a b"],
        &["echo", "hello hello"],
        &["echo", "xhello"],
        // A shell would make something of these.
        &["echo", "hello", "$(id)"],
        &["echo", "hello", "`id`"],
        &["echo", "hello", "a;id"],
        &["echo", "hello", "a|id"],
        &["echo", "hello", "a&&id"],
        &["echo", "hello", "a>/tmp/x"],
        &["echo", "hello", "*"],
        &["echo", "hello", "~"],
        // A program that starts others is listed without arguments only.
        &["env", "sh"],
        &["env", "-i", "sh"],
        &["PATH=/tmp", "echo", "hello"],
    ] {
        assert_eq!(refused(start(&operator, &scene, argv).await), RefusalCode::NotAllowed, "{argv:?}");
        let line = audited(&scene, "not_allowed");
        assert!(line.verified && line.operator_name.as_deref() == Some("tester"));
        assert_eq!(line.argv.unwrap(), argv, "what was asked is written down");
    }
    let many: Vec<&str> = std::iter::once("echo").chain(std::iter::repeat_n("hello", 5000)).collect();
    assert_eq!(refused(start(&operator, &scene, &many).await), RefusalCode::NotAllowed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_gets_a_clean_environment_and_no_privileges() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    let (_, env, _) = run(&operator, &scene, &["env"]).await;
    for line in env.lines() {
        let name = line.split('=').next().unwrap();
        assert!(["PATH", "LANG", "HOME", "USER", "LOGNAME", "PWD"].contains(&name), "{line}");
    }
    let (_, status, _) = run(&operator, &scene, &["cat", "/proc/self/status"]).await;
    let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim().to_owned();
    assert_eq!(field("NoNewPrivs:"), "1");
    if nix::unistd::geteuid().is_root() {
        let uids = field("Uid:");
        assert!(uids.split_whitespace().all(|uid| uid != "0"), "{uids}");
        assert_eq!(field("CapEff:").trim_start_matches('0'), "");
        assert!(field("Groups:").split_whitespace().all(|gid| gid != "0"));
        // The agent's own files are out of reach.
        let audit = scene.state_dir().join("audit.log");
        assert_ne!(run(&operator, &scene, &["cat", audit.to_str().unwrap()]).await.0, Exit::Code { code: 0 });
        assert_ne!(
            run(&operator, &scene, &["cat", scene.key_file.to_str().unwrap()]).await.0,
            Exit::Code { code: 0 }
        );
    }
    // Nothing of the agent's is open in it: input is empty, output are two pipes.
    let (_, fds, _) = run(&operator, &scene, &["ls", "-l", "/proc/self/fd"]).await;
    assert!(!fds.contains("socket:") && !fds.contains("audit"), "{fds}");
    assert_eq!(run(&operator, &scene, &["cat"]).await.1, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_output_is_cut_off() {
    let scene = AgentScene::start(&format!("{ANY}\nmax_output_bytes = 5000000"));
    let operator = scene.operator().await;
    let (out, _, end) = start(&operator, &scene, &["yes", "7101"]).await.unwrap().collect().await.unwrap();
    assert_eq!(end.exit, Exit::OutputLimit {});
    assert!(out.len() <= 5_000_000);
    until("it is gone", || processes_with("yes\x007101").is_empty()).await;
    let line = scene.audit().into_iter().rev().find(|l| l.event == "ended").unwrap();
    assert_eq!(line.end.unwrap().exit, Exit::OutputLimit {});
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_bomb_stays_within_its_caps_and_is_put_out() {
    let scene = AgentScene::start(&format!("{ANY}\nmax_processes = 60"));
    let operator = scene.operator().await;
    // A shell gives up when it can't fork; this doesn't.
    let text = "exec /usr/bin/perl -e 'while (1) { fork }' bomb7102";
    let bomb = scene.script("bomb", text);
    let mut running = operator.start(&scene.node, exec(&[&bomb], Duration::from_secs(2))).await.unwrap();
    let mut most = 0;
    let watch = async {
        loop {
            most = most.max(processes_with("bomb7102").len());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let end = async {
        loop {
            if let Frame::End(end) = running.next().await.unwrap() {
                return end;
            }
        }
    };
    let end = tokio::select! { end = end => end, () = watch => unreachable!() };
    assert!(matches!(end.exit, Exit::TimedOut {} | Exit::Code { .. } | Exit::Signal { .. }), "{end:?}");
    assert!(most > 3, "it never burned: {most}");
    assert!(most <= 60, "{most} processes");
    until("it is out", || processes_with("bomb7102").is_empty()).await;
    assert_eq!(run(&operator, &scene, &["true"]).await.0, Exit::Code { code: 0 });
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_escapes_the_end_of_a_command() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    // By a session of one's own, by a double fork, by ignoring signals.
    let escape = scene.script(
        "escape",
        "setsid sh -c '(sleep 7103.1 &) ; sleep 7103.2' &\n\
         (setsid setsid sleep 7103.3 &)\n\
         trap '' TERM INT HUP; sleep 7103.4",
    );
    let mut running = operator.start(&scene.node, exec(&[&escape], Duration::from_secs(4))).await.unwrap();
    until("all have started", || processes_with("sleep\x007103.").len() >= 4).await;
    loop {
        if let Frame::End(end) = running.next().await.unwrap() {
            assert_eq!(end.exit, Exit::TimedOut {});
            break;
        }
    }
    until("none is left after the timeout", || processes_with("7103.").is_empty()).await;
    // By outliving a program that ends by itself.
    let outlive = scene.script("outlive", "setsid sleep 7104.1 & (sleep 7104.2 &) ; sleep 0.2; exit 0");
    assert_eq!(run(&operator, &scene, &[&outlive]).await.0, Exit::Code { code: 0 });
    until("none is left after the exit", || processes_with("7104.").is_empty()).await;
    // By killing the process around it.
    let murder = scene
        .script("murder", "setsid sleep 7105.1 & (sleep 7105.2 &) ; sleep 0.2; kill -9 $PPID; sleep 7105.3");
    let exit = run(&operator, &scene, &[&murder]).await.0;
    assert_eq!(exit, Exit::Signal { signal: 9 });
    until("none is left after the murder", || processes_with("7105.").is_empty()).await;
    // By stopping the process around it.
    let freeze = scene.script("freeze", "kill -STOP $PPID; setsid sleep 7106.1 & sleep 7106.2");
    let mut frozen = operator.start(&scene.node, exec(&[&freeze], Duration::from_millis(800))).await.unwrap();
    loop {
        if let Frame::End(end) = frozen.next().await.unwrap() {
            assert_eq!(end.exit, Exit::TimedOut {});
            break;
        }
    }
    until("none is left after the frost", || processes_with("7106.").is_empty()).await;
    // By the operator's going away without a word.
    let (bus, lonely) = (scene.nats.connect().await, scene.script("lonely", "sleep 7107.1"));
    let other = scene.operator_on(bus).await;
    let running = other.start(&scene.node, exec(&[&lonely], Duration::from_secs(60))).await.unwrap();
    std::mem::forget(running);
    other.bus().client.drain().await.unwrap();
    drop(other);
    until("none is left after the operator", || processes_with("7107.").is_empty()).await;
    let is_gone = |line: AuditLine| line.end.is_some_and(|end| end.exit == Exit::OperatorGone {});
    until("that is written down", || scene.audit().into_iter().any(is_gone)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_files_and_processor_time_are_capped() {
    let caps = "max_memory_bytes = 200000000\nmax_file_bytes = 1000000\nmax_cpu_s = 1";
    let scene = AgentScene::start(&format!("{ANY}\n{caps}"));
    let operator = scene.operator().await;
    let hog = scene.script("hog", "x=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#x}");
    let (exit, out, _) = run(&operator, &scene, &[&hog]).await;
    assert_ne!(exit, Exit::Code { code: 0 }, "{out}");
    let open = scene.dir().join("open");
    std::fs::create_dir_all(&open).unwrap();
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let file = open.join("big");
    let big = scene.script("big", &format!("head -c 9000000 /dev/zero > {}", file.display()));
    assert_ne!(run(&operator, &scene, &[&big]).await.0, Exit::Code { code: 0 });
    assert!(std::fs::metadata(&file).unwrap().len() <= 1_000_000);
    let spin = scene.script("spin", "while :; do :; done");
    let started = Instant::now();
    assert!(matches!(run(&operator, &scene, &[&spin]).await.0, Exit::Signal { .. }));
    assert!(started.elapsed() < Duration::from_secs(30));
    // The caps can't be lifted from inside.
    let lift = scene.script("lift", "ulimit -t unlimited || exit 9");
    assert_ne!(run(&operator, &scene, &[&lift]).await.0, Exit::Code { code: 0 });
}

#[tokio::test(flavor = "multi_thread")]
async fn more_commands_than_allowed_are_refused() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    let mut running = Vec::new();
    for _ in 0..3 {
        running.push(start(&operator, &scene, &["sleep", "7108.5"]).await.unwrap());
    }
    for _ in 0..20 {
        assert_eq!(refused(start(&operator, &scene, &["sleep", "7108.5"]).await), RefusalCode::Busy);
    }
    audited(&scene, "busy");
    assert!(processes_with("sleep\x007108.5").len() <= 3);
    for one in &running {
        one.cancel().await.unwrap();
    }
    let start_again = async || {
        let started = start(&operator, &scene, &["true"]).await;
        started.ok()
    };
    pd_tests::wait::until("there is room again", Duration::from_secs(20), start_again).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn credits_of_others_and_endless_credits_change_nothing() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    let client = &operator.bus().client;
    let mut command =
        UnsignedCommand::new(scene.node.clone(), exec(&["yes", "7109"], Duration::from_secs(20)));
    if let Action::Exec(spec) = &mut command.action {
        spec.window_bytes = u64::MAX;
    }
    let mut output = client.subscribe(subjects::output(&scene.node, command.id)).await.unwrap();
    let message = command.sign(&key(&scene)).unwrap().encode().unwrap();
    client.request(subjects::commands(&scene.node), message).await.unwrap();
    let mut got = 0;
    while let Ok(Some(message)) = tokio::time::timeout(Duration::from_secs(1), output.next()).await {
        got += message.payload.len();
    }
    assert!(got < 8 << 20, "a window has a limit, whatever was asked for: {got}");
    // Somebody who doesn't know the token.
    let subject = subjects::credit(&scene.node, command.id);
    let forged = Credit { token: Hex::random(), granted_bytes: u64::MAX };
    client.publish(subject.clone(), serde_json::to_vec(&forged).unwrap().into()).await.unwrap();
    client.publish(subject.clone(), Bytes::from_static(b"garbage")).await.unwrap();
    let more = tokio::time::timeout(Duration::from_secs(1), output.next()).await;
    assert!(more.is_err(), "a forged credit was honoured");
    audited(&scene, "bad_signature: a credit");
    // The operator itself can't open the window wider than it is, either.
    let endless = Credit { token: command.nonce, granted_bytes: u64::MAX };
    client.publish(subject, serde_json::to_vec(&endless).unwrap().into()).await.unwrap();
    let mut got = 0;
    while let Ok(Some(message)) = tokio::time::timeout(Duration::from_secs(1), output.next()).await {
        got += message.payload.len();
    }
    assert!(got > 0 && got < 8 << 20, "{got}");
    operator.send(&scene.node, Action::Cancel { command: command.id }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_of_another_operator_can_not_be_cancelled_and_replies_go_to_inboxes_only() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    let running = start(&operator, &scene, &["sleep", "7110.5"]).await.unwrap();
    // Another operator of the same node does not exist here: a stranger's cancel is not even believed.
    let stranger = Operator::new(scene.nats.connect().await, OperatorKey::generate());
    let cancel = Action::Cancel { command: Hex::random() };
    assert_eq!(refused(stranger.send(&scene.node, cancel).await), RefusalCode::UnknownKey);
    assert_eq!(
        refused(operator.send(&scene.node, Action::Cancel { command: Hex::random() }).await),
        RefusalCode::NotRunning
    );
    running.cancel().await.unwrap();
    // A reply subject that is somebody's heartbeat: the agent says nothing there.
    let client = &operator.bus().client;
    let mut victim = client.subscribe("pd.v1.heartbeat.victim").await.unwrap();
    client.flush().await.unwrap();
    client
        .publish_with_reply(subjects::commands(&scene.node), "pd.v1.heartbeat.victim", "{}".into())
        .await
        .unwrap();
    assert!(tokio::time::timeout(Duration::from_secs(1), victim.next()).await.is_err());
    audited(&scene, "malformed");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_operators_role_no_command_even_arrives() {
    let keys = Nats::start();
    let names = ["agent", "operator", "viewer"];
    let users = names.map(|name| keys.new_key(name));
    let allow = |publish: &str, subscribe: &str, more: &str| {
        format!("permissions {{ publish: {publish}, subscribe: {subscribe} {more} }}")
    };
    let rights = [
        allow(
            "[\"pd.v1.heartbeat.node-1\", \"pd.v1.out.node-1.>\", \"pd.v1.audit.node-1\"]",
            "[\"pd.v1.cmd.node-1\", \"pd.v1.credit.node-1.>\"]",
            ", allow_responses: { max: 1, expires: \"30s\" }",
        ),
        allow(
            "[\"pd.v1.cmd.>\", \"pd.v1.credit.>\"]",
            "[\"pd.v1.heartbeat.>\", \"pd.v1.out.>\", \"pd.v1.audit.>\", \"_INBOX.pd.operator.>\"]",
            "",
        ),
        allow("{ deny: [\">\"] }", "[\"pd.v1.heartbeat.>\", \"pd.v1.audit.>\"]", ""),
    ];
    let users_conf: Vec<String> =
        users.iter().zip(&rights).map(|((_, key), rights)| format!("{{ nkey: {key}, {rights} }}")).collect();
    let nats = Nats::with_config(&format!("authorization {{ users = [ {} ] }}", users_conf.join(", ")));
    let login = |i: usize| nats.settings_with(Some(&users[i].0), None);
    let (as_agent, as_operator, as_viewer) = (login(0), login(1), login(2));
    let agent = format!("bus.nkey_file = \"{}\"", users[0].0.display());
    let scene = AgentScene::on(nats, "node-1", &agent, ANY, "");
    let bus = Bus::connect(&as_operator, "operator", "test").await.unwrap();
    let operator = scene.operator_on(bus).await;
    assert_eq!(run(&operator, &scene, &["true"]).await.0, Exit::Code { code: 0 }, "the right role works");
    // A viewer and another agent with the operator's very signing key.
    let (command, file) = touch(&scene, "roles");
    let message = command.sign(&key(&scene)).unwrap().encode().unwrap();
    for (settings, role) in [(as_viewer, "viewer"), (as_agent, "agent")] {
        let bus = Bus::connect(&settings, role, "test").await.unwrap();
        bus.client.publish(subjects::commands(&scene.node), message.clone()).await.unwrap();
        bus.client.flush().await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!file.exists(), "the server let a command pass");
    // Nobody without a login.
    assert!(Bus::connect(&scene.nats.settings(), "operator", "test").await.is_err());
}
