//! Attacks by messages: each refused, and each in the audit.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use bytes::Bytes;
use futures_util::StreamExt as _;
use pd_tests::agents::{AgentScene, exec, processes_with, refused, run, start, until};
use pd_tests::attack::{audited, audited_in, key, send, touch};
use pd_tests::nats::Nats;
use shared::bus::{
    Action, AskSpec, AuditLine, Bus, Credit, Exit, Frame, MAX_COMMAND_BYTES, NodeId, Operator, OperatorError,
    OperatorKey, RefusalCode, SignedCommand, UnsignedCommand, subjects, unix_now_ms,
};
use shared::hexbytes::Hex;
use std::time::{Duration, Instant};

const ANY: &str = "unrestricted = true\nmax_concurrent = 3";

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

#[tokio::test(flavor = "multi_thread")]
async fn a_command_of_one_node_is_nothing_on_another() {
    let scene = AgentScene::start(ANY);
    let _other = scene.neighbour("node-2", ANY);
    let operator = scene.operator().await;
    let bus = operator.bus();
    let there = NodeId::new("node-2").unwrap();
    let nothing = || Action::Cancel { command: Hex([0; 16]) };
    let ready = async || {
        let asked = operator.send(&there, nothing()).await;
        matches!(asked, Err(OperatorError::Refused { .. })).then_some(())
    };
    pd_tests::wait::until("the other agent", Duration::from_secs(30), ready).await;
    // Seen on the wire and sent to every other node that knows the same operator, before it arrives and after.
    let (command, file) = touch(&scene, "crossed");
    let message = command.sign(&key(&scene)).unwrap().encode().unwrap();
    for round in 0..2 {
        let refusal = send(bus, &there, message.clone()).await.unwrap();
        assert_eq!(refusal.code, RefusalCode::WrongNode, "round {round}");
        assert!(!file.exists());
        if round == 0 {
            bus.client.request(subjects::commands(&scene.node), message.clone()).await.unwrap();
            until("it ran where it belongs", || file.exists()).await;
            std::fs::remove_file(&file).unwrap();
        }
    }
    audited_in(&scene.neighbour_audit("node-2"), "wrong_node");
    // A signature of the operator's over the same bytes, for whatever else it may have been made.
    let text = serde_json::to_string(&touch(&scene, "crossed").0).unwrap();
    for domain in ["", "pd-bridge command v2\n", "pd-bridge command v1"] {
        use base64::Engine as _;
        let signature = key(&scene).sign(&[domain.as_bytes(), text.as_bytes()].concat()).unwrap();
        let signature = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(signature);
        let signed = SignedCommand { command: text.clone(), operator: key(&scene).public(), signature };
        let refusal = send(bus, &scene.node, signed.encode().unwrap()).await.unwrap();
        assert_eq!(refusal.code, RefusalCode::BadSignature, "{domain:?}");
    }
    audited(&scene, "bad_signature");
    assert!(!file.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn another_operator_of_the_node_can_not_take_a_command_over() {
    let dir = tempfile::tempdir().unwrap();
    let rival = OperatorKey::generate();
    let file = dir.path().join("operators.txt");
    std::fs::write(&file, format!("{} rival\n", rival.public())).unwrap();
    let scene = AgentScene::start(&format!("operators_file = \"{}\"\n{ANY}", file.display()));
    let operator = scene.operator().await;
    let client = &operator.bus().client;
    let rival_key = rival.seed().unwrap();
    let rival = Operator::new(scene.nats.connect().await, rival);
    let command =
        UnsignedCommand::new(scene.node.clone(), exec(&["sleep", "7114.5"], Duration::from_secs(60)));
    let message = command.sign(&key(&scene)).unwrap().encode().unwrap();
    client.request(subjects::commands(&scene.node), message).await.unwrap();
    until("it runs", || !processes_with("sleep\x007114.5").is_empty()).await;
    // The rival is known and may give commands; this one is not its own.
    let cancel = Action::Cancel { command: command.id };
    assert_eq!(refused(rival.send(&scene.node, cancel).await), RefusalCode::NotRunning);
    let line = audited(&scene, "not_running");
    assert!(line.verified && line.operator_name.as_deref() == Some("rival"), "{line:?}");
    // A command of the rival's own under the same name would get the first one's credits, cancels and output.
    let seed = dir.path().join("rival.nk");
    pd_tests::nats::write_private(&seed, &rival_key);
    let rival_key = OperatorKey::from_file(&seed).unwrap();
    for action in [exec(&["sleep", "7114.6"], Duration::from_secs(60)), Action::Drain {}] {
        let same = UnsignedCommand { id: command.id, ..UnsignedCommand::new(scene.node.clone(), action) };
        let refusal =
            send(operator.bus(), &scene.node, same.sign(&rival_key).unwrap().encode().unwrap()).await;
        assert_eq!(refusal.unwrap().code, RefusalCode::Replayed);
        audited(&scene, "replayed");
    }
    assert!(processes_with("sleep\x007114.6").is_empty() && !processes_with("sleep\x007114.5").is_empty());
    // Its owner still has it in hand.
    operator.send(&scene.node, Action::Cancel { command: command.id }).await.unwrap();
    until("it is gone", || processes_with("sleep\x007114.5").is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_carries_no_smuggled_headers() {
    let model = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let scene = AgentScene::start(&format!("ask = \"{}\"", model.local_addr().unwrap()));
    let operator = scene.operator().await;
    let ask = |name: &str, value: &str| {
        Action::Ask(AskSpec {
            headers: vec![("x-pd-bridge-route".into(), "native".into()), (name.into(), value.into())],
            body: "{}".into(),
            timeout_ms: 5000,
            window_bytes: 1 << 20,
        })
    };
    for (name, value) in [
        ("authorization", "Bearer stolen"),
        ("Host", "elsewhere"),
        ("cookie", "a=b"),
        ("content-length", "0"),
        ("transfer-encoding", "chunked"),
        ("x-forwarded-for", "127.0.0.1"),
        ("x-pd-bridge", "{}"),
        ("x-pd-bridge-a\r\nauthorization: x\r\nb", "c"),
        ("x-pd-bridge-a b", "c"),
        ("x-pd-bridge-route", "native\r\n\r\nGET /metrics HTTP/1.1\r\n"),
        ("x-pd-bridge-route", "a\0b"),
        ("", ""),
    ] {
        let refusal = operator.start(&scene.node, ask(name, value)).await;
        assert_eq!(refused(refusal.map(drop)), RefusalCode::NotAllowed, "{name:?}: {value:?}");
        let line = audited(&scene, "not_allowed");
        assert!(line.verified && line.kind.as_deref() == Some("ask"));
    }
    model.set_nonblocking(true).unwrap();
    assert!(model.accept().is_err(), "something reached the model");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_who_floods_credits_stops_nothing() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    let slow =
        scene.script("slow", "i=0; while [ $i -lt 40 ]; do echo line $i; i=$((i+1)); sleep 0.05; done");
    let command = UnsignedCommand::new(scene.node.clone(), exec(&[&slow], Duration::from_secs(60)));
    let client = operator.bus().client.clone();
    let mut output = client.subscribe(subjects::output(&scene.node, command.id)).await.unwrap();
    let message = command.sign(&key(&scene)).unwrap().encode().unwrap();
    client.request(subjects::commands(&scene.node), message).await.unwrap();
    let before = scene.agent.memory_bytes("VmRSS").unwrap();
    // To its name and to others, with wrong tokens, with garbage, and with what is too long.
    let stranger = scene.nats.connect().await;
    let forged = |granted_bytes| serde_json::to_vec(&Credit { token: Hex::random(), granted_bytes }).unwrap();
    for i in 0..10_000u64 {
        let (id, payload) = match i % 4 {
            0 => (command.id, forged(u64::MAX)),
            1 => (Hex::random(), forged(i)),
            2 => (command.id, vec![b'['; 5000]),
            _ => (command.id, forged(0)),
        };
        stranger.client.publish(subjects::credit(&scene.node, id), payload.into()).await.unwrap();
    }
    stranger.client.flush().await.unwrap();
    let mut lines = String::new();
    loop {
        let message = tokio::time::timeout(Duration::from_secs(30), output.next()).await.unwrap().unwrap();
        match Frame::decode(&message.payload).unwrap().1 {
            Frame::Stdout(bytes) => lines.push_str(std::str::from_utf8(&bytes).unwrap()),
            Frame::Stderr(bytes) => panic!("{bytes:?}"),
            Frame::End(end) => break assert_eq!(end.exit, Exit::Code { code: 0 }),
        }
    }
    assert_eq!(lines.lines().count(), 40, "output is whole: {lines}");
    audited(&scene, "bad_signature: a credit");
    let audit = scene.audit();
    assert!(audit.len() < 300, "{} lines", audit.len());
    assert!(scene.agent.memory_bytes("VmRSS").unwrap() < before + (32 << 20));
    assert_eq!(run(&operator, &scene, &["true"]).await.0, Exit::Code { code: 0 });
}
