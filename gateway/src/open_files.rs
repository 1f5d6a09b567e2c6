//! The system's limit on open files, which is a limit on connections.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Descriptors for everything that is no client: workers, files, the runtime, connections that are being turned away.
const RESERVE: u64 = 512;

/// Raises this process's limit as far as it may go and as is useful for `wanted` connections.
/// Returns how many connections fit.
pub(crate) fn make_room(wanted: usize) -> usize {
    let needed = (wanted as u64).saturating_add(RESERVE);
    let limit = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) if soft >= needed => soft,
        Ok((soft, hard)) => match setrlimit(Resource::RLIMIT_NOFILE, needed.min(hard), hard) {
            Ok(()) => needed.min(hard),
            Err(error) => {
                tracing::warn!(%error, "the limit on open files can't be raised");
                soft
            }
        },
        Err(error) => {
            tracing::warn!(%error, "the limit on open files is not known");
            return wanted;
        }
    };
    let room = fit(wanted, limit);
    if room < wanted {
        tracing::warn!(wanted, room, open_files = limit, "the limit on open files allows fewer connections");
    }
    room
}

/// At least half of the limit is for clients, however low it is.
fn fit(wanted: usize, limit: u64) -> usize {
    let room = limit.saturating_sub(RESERVE).max(limit / 2);
    wanted.min(usize::try_from(room).unwrap_or(usize::MAX)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_follows_from_the_limit() {
        assert_eq!(fit(16_384, 20_000), 16_384);
        assert_eq!(fit(16_384, 4096), 3584);
        assert_eq!(fit(16_384, 256), 128);
    }
}
