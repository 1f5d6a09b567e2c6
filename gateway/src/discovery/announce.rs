//! What this gateway says of itself on the bus.

use crate::http::App;
use shared::bus::{Bus, GatewayBeat, HEARTBEAT_INTERVAL, NodeId, subjects};
use shared::hexbytes::Hex;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Publishes until `shutdown`. While the bus is away nothing is queued up for it.
pub(crate) async fn announce(bus: Bus, id: NodeId, addr: String, app: Arc<App>, shutdown: CancellationToken) {
    let boot_id = Hex::random();
    let subject = subjects::gateway(&id);
    let mut connects = bus.connects();
    let mut tick = tokio::time::interval(HEARTBEAT_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for sequence in 1.. {
        tokio::select! {
            () = shutdown.cancelled() => return,
            _ = tick.tick() => {}
            // A new server knows nothing of us.
            Ok(()) = connects.changed() => {}
        }
        if !bus.is_connected() {
            continue;
        }
        let (prefill_workers, decode_workers) = app.ctx.fleet.connected();
        let beat = GatewayBeat {
            id: id.clone(),
            boot_id,
            sequence,
            addr: addr.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: app.ctx.model.name.clone(),
            in_flight: u32::try_from(app.ctx.metrics.in_flight.get()).unwrap_or(0),
            prefill_workers,
            decode_workers,
        };
        let Ok(message) = serde_json::to_vec(&beat) else { continue };
        if let Err(error) = bus.client.publish(subject.clone(), message.into()).await {
            tracing::debug!(%error, "gateway heartbeat");
        }
    }
}
