//! Attacks by programs and through them: each refused or contained, and each in the audit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::agents::{AgentScene, exec, processes_with, refused, run, start, until};
use pd_tests::attack::audited;
use shared::bus::{AuditLine, Exit, Frame, RefusalCode};
use std::time::{Duration, Instant};

const ANY: &str = "unrestricted = true\nmax_concurrent = 3";
const LISTED: &str = "allow = [ { program = \"/bin/echo\", args = [\"-n|hello\", \"[a-z]+\"], min_args = 1 }, \
                      { program = \"/usr/bin/env\" } ]";

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
    assert_eq!(end.exit, Exit::TimedOut {}, "it was put out by something else, with {most} processes");
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
async fn a_listed_program_that_became_another_is_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let tool = dir.path().join("tool");
    std::os::unix::fs::symlink("/bin/echo", &tool).unwrap();
    let copy = dir.path().join("copy");
    std::fs::copy("/bin/echo", &copy).unwrap();
    let listed = format!(
        "allow = [ {{ program = \"{}\", args = [\".*\"] }}, {{ program = \"{}\", args = [\".*\"] }} ]",
        tool.display(),
        copy.display()
    );
    for path in [dir.path(), &copy] {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let scene = AgentScene::start(&listed);
    let operator = scene.operator().await;
    assert_eq!(run(&operator, &scene, &["tool", "7111"]).await.1, "7111\n");
    assert_eq!(run(&operator, &scene, &["copy", "7111"]).await.1, "7111\n");
    // The link is turned to a program that takes the same argument quite differently.
    std::fs::remove_file(&tool).unwrap();
    std::os::unix::fs::symlink("/usr/bin/touch", &tool).unwrap();
    // The other becomes writable for everybody.
    std::fs::set_permissions(&copy, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let target = scene.dir().join("made-by-another");
    for name in ["tool", tool.to_str().unwrap(), "copy", copy.to_str().unwrap()] {
        let argv = [name, target.to_str().unwrap()];
        assert_eq!(refused(start(&operator, &scene, &argv).await), RefusalCode::NotAllowed, "{name}");
        let line = audited(&scene, "not_allowed");
        assert_eq!(line.argv.unwrap(), argv);
    }
    assert!(!target.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_agent_knows_is_out_of_reach() {
    let mut scene = AgentScene::start(ANY);
    scene.restart_agent_with_env("PD_SECRET_OF_THE_AGENT", "s7112s");
    let operator = scene.operator().await;
    let agent = scene.agent.pid();
    let spy = scene.script(
        "spy",
        &format!(
            "env; for p in {agent} $PPID; do tr '\\0' '\\n' < /proc/$p/environ; ls -l /proc/$p/fd; \
             dd if=/proc/$p/mem bs=1 count=1; done"
        ),
    );
    let (_, out, err) = run(&operator, &scene, &[&spy]).await;
    assert!(out.contains("PATH=") && !out.contains("s7112s"), "{out}");
    if nix::unistd::geteuid().is_root() {
        // Neither of the agent nor of the process around the command, which became the same user.
        assert!(!out.contains("audit.log") && !out.contains("socket:"), "{out}");
        assert!(err.matches("Permission denied").count() >= 4, "{err}");
    }
    // Written down as every command is.
    assert!(
        scene
            .audit()
            .iter()
            .any(|l| l.event == "ended" && l.argv.as_deref() == Some(std::slice::from_ref(&spy)))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_can_not_reach_the_container_of_the_next_one() {
    let scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    // One after the other, and several at once: each container carries out one command, its own.
    let ids = scene.script("ids", "echo $PPID");
    let mut seen = std::collections::HashSet::new();
    for _ in 0..5 {
        assert!(seen.insert(run(&operator, &scene, &[&ids]).await.1), "a container served twice");
    }
    let ask = [ids.as_str()];
    let both = tokio::join!(run(&operator, &scene, &ask), run(&operator, &scene, &ask));
    assert!(seen.insert(both.0.1) && seen.insert(both.1.1), "a container served two");
    if !nix::unistd::geteuid().is_root() {
        // Without another user to run as, a command is as strong as the agent itself.
        return;
    }
    let spares =
        || processes_with("contain-command").into_iter().filter(|pid| parent(*pid) == scene.agent.pid());
    until("a spare waits", || spares().count() == 1).await;
    let order = "{\"program\":\"/usr/bin/touch\"}";
    // Of this agent alone: other tests' busy containers are the same user and could be killed.
    let agent = scene.agent.pid();
    let hijack = scene.script(
        "hijack",
        &format!(
            "sleep 0.3; for d in /proc/[0-9]*; do p=${{d#/proc/}}\n\
             if [ $p != $PPID ] && grep -q 'contain-comman[d]' $d/cmdline 2>/dev/null &&\n\
             grep -q '^PPid:[[:space:]]{agent}$' $d/status 2>/dev/null; then\n\
             echo found $p; kill -9 $p; kill -STOP $p; (echo '{order}' > $d/fd/0); ls $d/fd; cat $d/environ\n\
             fi; done"
        ),
    );
    let (_, found, errors) = run(&operator, &scene, &[&hijack]).await;
    let spare = spares().next().expect("the spare that it found is alive");
    assert!(found.contains(&format!("found {spare}\n")), "{found}");
    assert!(errors.matches("ermission denied").count() >= 3 && errors.contains("not permitted"), "{errors}");
    let state = std::fs::read_to_string(format!("/proc/{spare}/stat")).unwrap();
    assert!(!state.contains(") T "), "the spare was stopped: {state}");
    for _ in 0..3 {
        assert_eq!(run(&operator, &scene, &["echo", "7113"]).await.1, "7113\n");
    }
    // Kills the agent's own way, from outside: the next command gets a new one.
    until("a spare waits", || spares().count() == 1).await;
    let spare = spares().next().unwrap();
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(i32::try_from(spare).unwrap()),
        nix::sys::signal::SIGKILL,
    )
    .unwrap();
    until("it is dead", || !spares().any(|pid| pid == spare)).await;
    for _ in 0..3 {
        assert_eq!(run(&operator, &scene, &["echo", "7113"]).await.1, "7113\n");
    }
}

fn parent(pid: u32) -> u32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
    parent.unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_audit_that_leads_elsewhere_is_not_written() {
    let mut scene = AgentScene::start(ANY);
    let operator = scene.operator().await;
    assert_eq!(run(&operator, &scene, &["true"]).await.0, Exit::Code { code: 0 });
    scene.kill_agent();
    // Somebody put a link where the audit was, to have another file written with the agent's rights.
    let victim = scene.dir().join("victim");
    std::fs::write(&victim, "precious\n").unwrap();
    let audit = scene.state_dir().join("audit.log");
    std::fs::rename(&audit, scene.dir().join("kept.log")).unwrap();
    std::os::unix::fs::symlink(&victim, &audit).unwrap();
    scene.restart_agent();
    let status = scene.agent.wait(Duration::from_secs(20)).expect("an agent without an audit runs");
    assert_eq!(status.code(), Some(1));
    assert!(scene.agent.log().contains("state"), "{}", scene.agent.log());
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious\n");
    // Put back, it goes on where it was.
    std::fs::remove_file(&audit).unwrap();
    std::fs::rename(scene.dir().join("kept.log"), &audit).unwrap();
    scene.restart_agent();
    scene.ready(&operator).await;
    assert_eq!(run(&operator, &scene, &["true"]).await.0, Exit::Code { code: 0 });
    assert!(scene.audit().iter().filter(|l| l.event == "ended").count() >= 2);
}
