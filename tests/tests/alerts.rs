//! The alert rules, played by promtool.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use pd_tests::prometheus::promtool;

#[test]
fn every_alert_fires_when_it_should_and_only_then() {
    let (ok, said) = promtool(&["check", "config", "prometheus.yml"]);
    assert!(ok, "{said}");
    let (ok, said) = promtool(&["test", "rules", "alerts_test.yml"]);
    assert!(ok, "{said}");
}

/// A rule that no test names is a rule that may never fire.
#[test]
fn every_alert_is_played() {
    let read =
        |name: &str| std::fs::read_to_string(pd_tests::paths::root().join("deploy/prometheus").join(name));
    let (Ok(rules), Ok(tests)) = (read("alerts.yml"), read("alerts_test.yml")) else { unreachable!() };
    let names: Vec<&str> = rules.lines().filter_map(|l| l.trim().strip_prefix("- alert: ")).collect();
    assert!(names.len() >= 7, "{names:?}");
    for name in names {
        let line = format!("alertname: {name}\n");
        let fires = tests.split(&line).skip(1).any(|rest| rest.trim_start().starts_with("exp_alerts:\n"));
        assert!(fires, "no test makes {name} fire");
    }
}
