//! The files in `deploy/`: units, plists, Compose, and the guides' commands and settings, against the real programs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::nats;
use pd_tests::paths::{bin, root};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn deploy() -> PathBuf {
    root().join("deploy")
}

fn files(folder: &str, end: &str) -> Vec<PathBuf> {
    let all = std::fs::read_dir(deploy().join(folder)).unwrap().map(|e| e.unwrap().path());
    let mut found: Vec<PathBuf> = all.filter(|p| p.to_string_lossy().ends_with(end)).collect();
    found.sort();
    assert!(!found.is_empty(), "no {end} in {folder}");
    found
}

/// Reads plists and YAML with Python's own readers.
fn parsed(files: &[PathBuf]) -> Value {
    let clients = root().join("tests/clients");
    let mut command = Command::new(clients.join("python.sh"));
    let ran = command.arg(clients.join("deploy_files.py")).args(files).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    serde_json::from_slice(&ran.stdout).unwrap()
}

/// What a program says of its flags and environment variables; `None` for one that is not ours.
fn help(program: &str, subcommands: &[&str]) -> Option<String> {
    if !["pd-bridge", "pd-prefill", "pd-decode", "pd-agent"].contains(&program) {
        return None;
    }
    let ran = Command::new(bin(program)).args(subcommands).arg("--help").output().unwrap();
    assert!(ran.status.success(), "{program} {subcommands:?} does not exist");
    Some(String::from_utf8(ran.stdout).unwrap())
}

/// Fails unless the program has the subcommands and flags of a command line.
fn check_command_line(place: &str, words: &[&str]) {
    let program = Path::new(words[0]).file_name().unwrap().to_str().unwrap();
    // Whatever follows `--` belongs to another program.
    let words: Vec<&str> = words[1..].iter().copied().take_while(|w| *w != "--").collect();
    let is_name = |w: &&&str| w.bytes().all(|b| b.is_ascii_lowercase() || b == b'-') && !w.starts_with('-');
    let named = words.iter().take_while(is_name).copied().collect::<Vec<_>>();
    let depth = match (program, named.first()) {
        ("pd-bridge", Some(&"bus")) => 2,
        ("pd-bridge", Some(_)) => 1,
        _ => 0,
    };
    let Some(help) = help(program, &named[..depth.min(named.len())]) else { return };
    for flag in words.iter().filter(|w| w.starts_with("--")) {
        let flag = flag.split('=').next().unwrap();
        let known = help.split_whitespace().any(|w| w.trim_end_matches([',', ']', '.']) == flag);
        assert!(known, "{place}: {program} has no {flag}");
    }
}

#[test]
fn plists_start_what_exists() {
    let files = files("launchd", ".plist");
    let plists = parsed(&files);
    for file in &files {
        let name = file.file_stem().unwrap().to_str().unwrap();
        let plist = &plists[file.to_str().unwrap()];
        assert_eq!(plist["Label"], name, "launchd wants the label in the file's name");
        let words: Vec<&str> =
            plist["ProgramArguments"].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).collect();
        assert!(words[0].starts_with("/usr/local/bin/"), "{name}: launchd knows no PATH");
        assert!(words.iter().all(|w| !w.contains(['~', '$'])), "{name}: launchd expands nothing");
        check_command_line(name, &words);
        assert_eq!((&plist["KeepAlive"], &plist["RunAtLoad"]), (&true.into(), &true.into()), "{name}");
    }
}

/// Where systemd is: units that it accepts, hardened as it judges.
#[test]
#[cfg(target_os = "linux")]
fn units_are_valid_and_hardened() {
    let dir = tempfile::tempdir().unwrap();
    let mut units = vec![];
    for file in files("systemd", ".service") {
        let name = file.file_name().unwrap().to_str().unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        let start = text.lines().find_map(|l| l.strip_prefix("ExecStart=")).unwrap();
        let words: Vec<&str> = start.split_whitespace().collect();
        check_command_line(name, &words);
        let program = words[0].strip_prefix("/usr/local/bin/").unwrap();
        let real = if program == "nats-server" { nats::program().to_owned() } else { bin(program) };
        let text = text.replace(words[0], real.to_str().unwrap());
        assert!(text.contains("RestartPreventExitStatus=64") || program == "nats-server", "{name}");
        // A folder and a user that the guide has one make.
        let text = text.replace("WorkingDirectory=/etc/pd-bridge/nats", "WorkingDirectory=/");
        std::fs::write(dir.path().join(name), text.replace("User=pd-bridge-nats", "User=daemon")).unwrap();
        units.push(name.to_owned());
    }
    let analyze = |args: &[&str]| {
        let mut command = Command::new("systemd-analyze");
        command.args(args).args(&units).current_dir(dir.path()).env("SYSTEMD_PAGER", "");
        command.output().map(|ran| (ran.status.success(), [ran.stdout, ran.stderr].concat()))
    };
    let Ok(verified) = analyze(&["verify", "--man=no"]) else {
        panic!("systemd-analyze is missing (Debian: apt install systemd)");
    };
    let said = String::from_utf8_lossy(&verified.1);
    let complaints: Vec<&str> =
        said.lines().filter(|l| units.iter().any(|u| l.contains(u.as_str()))).collect();
    assert!(verified.0 && complaints.is_empty(), "{said}");
    // 0 is a sealed box, 10 an ordinary program; 2.0 is stricter than nearly all of a distribution's own units.
    let (ok, said) = analyze(&["security", "--offline=true", "--threshold=20", "--no-pager"]).unwrap();
    assert!(ok, "{}", String::from_utf8_lossy(&said));
}

#[test]
fn compose_mounts_what_exists_and_sets_what_is_known() {
    let file = deploy().join("compose.yaml");
    let compose = &parsed(std::slice::from_ref(&file))[file.to_str().unwrap()];
    let services = compose["services"].as_object().unwrap();
    let names: BTreeSet<&str> = services.keys().map(String::as_str).collect();
    assert_eq!(names, BTreeSet::from(["gateway", "grafana", "nats", "prometheus"]));
    let example = std::fs::read_to_string(deploy().join("compose.env.example")).unwrap();
    for (name, service) in services {
        for volume in service["volumes"].as_array().into_iter().flatten() {
            let volume = volume.as_str().unwrap();
            if let Some(rest) = volume.strip_prefix("./") {
                let source = rest.split(':').next().unwrap();
                assert!(deploy().join(source).exists(), "{name} mounts {source}");
            }
        }
        let image = service["image"].as_str().unwrap();
        assert!(
            name == "gateway"
                || image.rsplit(':').next().unwrap().starts_with(|c: char| c.is_ascii_digit() || c == 'v'),
            "{image} is not pinned"
        );
        for variable in service.to_string().split("${").skip(1) {
            let variable: String =
                variable.chars().take_while(|c| c.is_ascii_uppercase() || *c == '_').collect();
            assert!(example.contains(&format!("{variable}=")), "{variable} is not in compose.env.example");
        }
    }
    let help = help("pd-bridge", &["gateway"]).unwrap();
    for variable in services["gateway"]["environment"].as_object().unwrap().keys() {
        assert!(help.contains(&format!("[env: {variable}=")), "pd-bridge gateway knows no {variable}");
    }
    let dockerfile = std::fs::read_to_string(deploy().join("Dockerfile")).unwrap();
    let target = services["gateway"]["build"]["target"].as_str().unwrap();
    assert!(dockerfile.contains(&format!(" AS {target}\n")), "no stage {target}");
}

/// Code blocks of a guide, with their language.
fn blocks(text: &str) -> Vec<(String, String)> {
    let parts: Vec<&str> = text.split("```").collect();
    let block = |b: &&str| b.split_once('\n').map(|(l, c)| (l.to_owned(), c.to_owned())).unwrap();
    parts.iter().skip(1).step_by(2).map(block).collect()
}

#[test]
fn every_command_and_setting_of_the_guides_exists() {
    let makefile = std::fs::read_to_string(root().join("Makefile")).unwrap();
    let mut commands = 0;
    for guide in ["deploy/README.md", "deploy/nats/README.md"] {
        let text = std::fs::read_to_string(root().join(guide)).unwrap();
        for (language, code) in blocks(&text) {
            if language == "toml" {
                check_settings(guide, &code);
            }
            // A line that ends in a backslash goes on.
            for line in code.replace("\\\n", " ").lines().filter(|_| language == "sh") {
                let line = line.split(" #").next().unwrap();
                let words: Vec<&str> =
                    line.split_whitespace().skip_while(|w| *w == "sudo" || w.contains("$ ")).collect();
                match words.first() {
                    Some(&"make") => {
                        assert!(makefile.contains(&format!("\n{}:", words[1])), "{guide}: make {}", words[1]);
                    }
                    Some(program) if program.starts_with("pd-") || program.contains("/pd-") => {
                        check_command_line(guide, &words);
                    }
                    _ => continue,
                }
                commands += 1;
            }
        }
        for path in text.split('`').filter(|p| p.starts_with("deploy/") && !p.contains([' ', '<'])) {
            assert!(root().join(path).exists(), "{guide} speaks of {path}");
        }
    }
    assert!(commands > 10, "only {commands} commands found");
}

/// Every section is read by its program, which then stops at the model, not before.
fn check_settings(guide: &str, text: &str) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("settings.toml");
    std::fs::write(&file, text).unwrap();
    for (section, program) in [
        ("[gateway", "pd-bridge"),
        ("[prefill", "pd-prefill"),
        ("[decode", "pd-decode"),
        ("[agent", "pd-agent"),
    ] {
        if !text.contains(section) {
            continue;
        }
        let mut command = Command::new(bin(program));
        if program == "pd-bridge" {
            command.arg("gateway");
        }
        let ran = command.arg("--config").arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        let read = !said.contains("settings.toml") && ran.status.code() == Some(64);
        assert!(read, "{guide}: {program} does not take\n{text}\n{said}");
    }
}
