//! Log lines for an operator.

use super::session::Outlet;
use crate::logs::LogRing;
use shared::bus::{Exit, Frame, LogsSpec, MAX_CHUNK_BYTES};

/// Sends the last lines, then new ones if asked to.
pub(super) async fn run(ring: &LogRing, spec: &LogsSpec, outlet: &mut Outlet) -> Exit {
    let end = ring.last(0);
    let mut at = ring.last(usize::try_from(spec.lines).unwrap_or(usize::MAX));
    loop {
        let room = outlet.room().await;
        let (text, dropped, next) = ring.read(at, room.min(MAX_CHUNK_BYTES));
        at = next;
        let note = match dropped {
            0 => String::new(),
            n => format!("… {n} lines were dropped\n"),
        };
        if !text.is_empty() && !outlet.send(Frame::Stdout((note + &text).into())).await {
            return Exit::OutputLimit {};
        }
        if !spec.follow && at >= end {
            return Exit::Code { code: 0 };
        }
        if spec.follow {
            ring.wait_for(at).await;
        }
    }
}
