//! `GET /v1/bridge/nodes`: machines and workers, as this gateway sees them.

use super::App;
use crate::discovery::{Entry, member_id, state};
use crate::fleet::WorkerView;
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use shared::bus::unix_now_ms;
use std::sync::Arc;
use std::time::Duration;

/// The answer. `nodes` are the machines on the bus, each with its workers; `workers` are those that no machine on the
/// bus speaks for (from a static list, or of a machine that is forgotten).
pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let mut workers = app.ctx.fleet.view();
    let Some(directory) = &app.directory else {
        return Json(json!({"discovery": "static", "bus": null, "nodes": [], "workers": workers}));
    };
    let nodes: Vec<Value> =
        directory.nodes().iter().map(|(entry, age)| node(entry, *age, &mut workers)).collect();
    let bus = json!({"connected": directory.is_bus_up()});
    Json(json!({"discovery": "nats", "bus": bus, "nodes": nodes, "workers": workers}))
}

/// One machine; takes its workers out of `fleet`.
fn node(entry: &Entry, age: Duration, fleet: &mut Vec<WorkerView>) -> Value {
    let beat = &entry.beat;
    let workers: Vec<Value> = beat
        .workers
        .iter()
        .map(|worker| {
            let id = member_id(&beat.node, worker);
            let mine = fleet.iter().position(|w| w.role == worker.role && w.id == id);
            let mine = mine.map(|at| fleet.swap_remove(at));
            let mut value = json!(worker);
            if let (Some(value), Some(Value::Object(mine))) = (value.as_object_mut(), mine.map(|w| json!(w)))
            {
                value.extend(mine);
            }
            value
        })
        .collect();
    let mut value = json!(beat);
    value["workers"] = workers.into();
    value["state"] = state(entry).into();
    value["age_ms"] = millis(age).into();
    value["duplicate"] = entry.is_duplicate().into();
    value["unsteady"] = entry.is_unsteady().into();
    // For people who look for a wrong clock; nothing here depends on it.
    let ahead = i128::from(beat.sent_at_ms) - i128::from(unix_now_ms()) + i128::from(millis(age));
    value["clock_ahead_ms"] = i64::try_from(ahead).unwrap_or(i64::MAX).into();
    value
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
