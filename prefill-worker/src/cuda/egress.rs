//! From the device to the host, beside computing.
//!
//! The compute stream lays a layer's pieces out in the staging ring, in the decoder's dtype, right after it made them;
//! that costs one small kernel per layer. From there on only copy engines, two threads and the network work: a copier
//! thread copies each piece to a pinned slot on the egress stream, a deliverer thread waits for each copy and hands the
//! piece to the sink, in order. A slow network fills the pinned slots, then the ring, and only then holds up
//! [`Egress::reserve`].

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use cudarc::driver::sys::CUevent_flags_enum;
use cudarc::driver::{CudaEvent, CudaStream, result};
use parking_lot::{Condvar, Mutex};

use super::device::{Device, device_error};
use super::pinned::{PinnedPool, Slot};
use super::profile::StageTimes;
use super::staging::{Staged, StagingRing};
use crate::ops::{Emit, OpsError, Piece, Sink, SinkClosed, pieces};

/// Pieces are copied together up to this size. Small models have small pieces, and every call into the driver takes a
/// lock that the computing thread needs too.
const COPY_BYTES: usize = 2 << 20;

/// The way out of the device.
pub(super) struct Egress {
    device: Arc<Device>,
    ring: Arc<StagingRing>,
    jobs: Option<mpsc::Sender<Job>>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    current: Option<(Arc<dyn Sink>, Arc<AtomicBool>)>,
}

/// Pieces of one layer, laid out one after another in a staging region once `ready` has happened.
struct Job {
    staged: Staged,
    what: Emit,
    token_bytes: usize,
    ready: CudaEvent,
    sink: Arc<dyn Sink>,
    closed: Arc<AtomicBool>,
}

/// Neighbouring pieces on their way to their slot. The last of a job gives the staging region back.
struct Flight {
    slot: Slot,
    copied: Mark,
    /// Before the copy, while profiling.
    started: Option<Mark>,
    layer: usize,
    pieces: Vec<Range<usize>>,
    token_bytes: usize,
    sink: Arc<dyn Sink>,
    closed: Arc<AtomicBool>,
    last_of_job: bool,
    _staged: Arc<Staged>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    copied_bytes: AtomicU64,
    profiling: AtomicBool,
    times: Mutex<StageTimes>,
}

#[derive(Default)]
struct State {
    pending_jobs: usize,
    failure: Option<String>,
    sink_closed: bool,
}

/// One half of a slot, as `Bytes` wants its owner.
struct Part {
    slot: Arc<Slot>,
    range: Range<usize>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.slot.bytes(self.range.end)[self.range.clone()]
    }
}

impl Egress {
    pub(super) fn new(
        device: &Arc<Device>,
        pool: Arc<PinnedPool>,
        ring: Arc<StagingRing>,
    ) -> Result<Self, OpsError> {
        let shared = Arc::new(Shared::default());
        let (jobs, job_queue) = mpsc::channel::<Job>();
        let (flights, flight_queue) = mpsc::channel::<Flight>();
        let copier = Copier { device: device.clone(), pool, shared: shared.clone(), flights };
        let deliverer_shared = shared.clone();
        let threads = vec![
            spawn("pd-copier", move || copier.run(job_queue))?,
            spawn("pd-deliverer", move || deliver_all(&flight_queue, &deliverer_shared))?,
        ];
        Ok(Self { device: device.clone(), ring, jobs: Some(jobs), shared, threads, current: None })
    }

    /// Cuts a range so that each portion fits the ring with room for another, at block borders where it can.
    pub(super) fn portions(&self, what: &Emit, token_bytes: usize) -> Vec<Range<usize>> {
        let most_tokens = (self.ring.portion_bytes() / token_bytes.max(1)).max(1);
        let whole_blocks = most_tokens / what.block_tokens * what.block_tokens;
        let cut = if whole_blocks > 0 { whole_blocks } else { most_tokens };
        pieces(what.tokens.clone(), cut).collect()
    }

    /// Takes staging memory; waits while the network is so far behind that the ring is full.
    pub(super) fn reserve(&self, bytes: usize) -> Result<Staged, OpsError> {
        self.ring.take(bytes)
    }

    /// Sends out what the compute stream has been asked to lay out in `staged`.
    pub(super) fn send(
        &mut self,
        staged: Staged,
        what: Emit,
        token_bytes: usize,
        sink: &Arc<dyn Sink>,
    ) -> Result<(), OpsError> {
        let closed = match &self.current {
            Some((current, closed)) if Arc::ptr_eq(current, sink) => closed.clone(),
            _ => {
                let closed = Arc::new(AtomicBool::new(false));
                self.current = Some((sink.clone(), closed.clone()));
                closed
            }
        };
        if closed.load(Ordering::Relaxed) {
            return Err(SinkClosed.into());
        }
        let ready = self.device.compute.record_event(None).map_err(device_error)?;
        self.shared.state.lock().pending_jobs += 1;
        let job = Job { staged, what, token_bytes, ready, sink: sink.clone(), closed };
        match self.jobs.as_ref().map(|jobs| jobs.send(job)) {
            Some(Ok(())) => Ok(()),
            _ => Err(OpsError::Device("the copier thread has ended".into())),
        }
    }

    /// Waits until every piece was delivered or dropped; reports what failed since the last call.
    pub(super) fn drain(&mut self) -> Result<(), OpsError> {
        let mut state = self.shared.state.lock();
        while state.pending_jobs > 0 {
            self.shared.changed.wait(&mut state);
        }
        self.current = None;
        let (failure, closed) = (state.failure.take(), std::mem::take(&mut state.sink_closed));
        drop(state);
        match failure {
            Some(text) => Err(OpsError::Device(text)),
            None if closed => Err(SinkClosed.into()),
            None => Ok(()),
        }
    }

    /// Bytes copied to the host so far.
    pub(super) fn copied_bytes(&self) -> u64 {
        self.shared.copied_bytes.load(Ordering::Relaxed)
    }

    /// Turns timing of copies on or off.
    pub(super) fn profile(&mut self, on: bool) {
        self.shared.profiling.store(on, Ordering::Relaxed);
        *self.shared.times.lock() = StageTimes::default();
    }

    /// Times since the last call.
    pub(super) fn take_times(&mut self) -> StageTimes {
        std::mem::take(&mut *self.shared.times.lock())
    }
}

impl Drop for Egress {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

struct Copier {
    device: Arc<Device>,
    pool: Arc<PinnedPool>,
    shared: Arc<Shared>,
    flights: mpsc::Sender<Flight>,
}

impl Copier {
    fn run(self, jobs: mpsc::Receiver<Job>) {
        if let Err(error) = self.device.context.bind_to_thread() {
            self.shared.fail(format!("copier: {error:?}"));
        }
        for job in jobs {
            let closed = job.closed.clone();
            if let Err(error) = self.copy(job) {
                closed.store(true, Ordering::Relaxed);
                self.shared.fail(error.to_string());
                self.shared.finish_job();
            }
        }
    }

    fn copy(&self, job: Job) -> Result<(), OpsError> {
        let stream = &self.device.egress;
        stream.wait(&job.ready).map_err(device_error)?;
        let Job { staged, what, token_bytes, sink, closed, .. } = job;
        let staged = Arc::new(staged);
        let sleeping = CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32;
        let quiet = sleeping | CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        let profiling = self.shared.profiling.load(Ordering::Relaxed);
        for group in groups(&what, token_bytes) {
            let (first, end) = (group[0].start, group[group.len() - 1].end);
            let bytes = (end - first) * token_bytes;
            let slot = self.pool.take(bytes.max(COPY_BYTES))?;
            let source = staged.address() + ((first - what.tokens.start) * token_bytes) as u64;
            let started =
                profiling.then(|| mark(stream, CUevent_flags_enum::CU_EVENT_DEFAULT as u32)).transpose()?;
            // SAFETY: the flight keeps both ends until the copy was waited for.
            unsafe {
                cudarc::driver::sys::cuMemcpyDtoHAsync_v2(slot.host(), source, bytes, stream.cu_stream())
            }
            .result()
            .map_err(device_error)?;
            let flight = Flight {
                slot,
                copied: mark(stream, if profiling { sleeping } else { quiet })?,
                started,
                layer: what.layer,
                last_of_job: end == what.tokens.end,
                pieces: group,
                token_bytes,
                sink: sink.clone(),
                closed: closed.clone(),
                _staged: staged.clone(),
            };
            self.flights
                .send(flight)
                .map_err(|_| OpsError::Device("the deliverer thread has ended".into()))?;
        }
        Ok(())
    }
}

/// An event recorded on a stream.
struct Mark(cudarc::driver::sys::CUevent);

// SAFETY: events may be used from any thread.
unsafe impl Send for Mark {}

impl Mark {
    /// Sleeps until it has happened.
    fn wait(&self) -> Result<(), OpsError> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.0) }.map_err(device_error)
    }

    /// Milliseconds from this to another; 0 without timing.
    fn until_ms(&self, end: &Self) -> f64 {
        // SAFETY: both events are alive.
        unsafe { result::event::elapsed(self.0, end.0) }.map_or(0.0, f64::from)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: made in `mark`, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

fn mark(stream: &CudaStream, flags: u32) -> Result<Mark, OpsError> {
    let mut event = std::ptr::null_mut();
    // SAFETY: the pointer is valid; the event is recorded on a living stream of the bound context.
    unsafe {
        cudarc::driver::sys::cuEventCreate(&mut event, flags).result().map_err(device_error)?;
        let event = Mark(event);
        result::event::record(event.0, stream.cu_stream()).map_err(device_error)?;
        Ok(event)
    }
}

/// Pieces of a range in runs of at most [`COPY_BYTES`], at least one each.
fn groups(what: &Emit, token_bytes: usize) -> Vec<Vec<Range<usize>>> {
    let mut groups: Vec<Vec<Range<usize>>> = Vec::new();
    for piece in pieces(what.tokens.clone(), what.block_tokens) {
        match groups.last_mut() {
            Some(group) if (piece.end - group[0].start) * token_bytes <= COPY_BYTES => group.push(piece),
            _ => groups.push(vec![piece]),
        }
    }
    groups
}

fn deliver_all(flights: &mpsc::Receiver<Flight>, shared: &Shared) {
    for flight in flights {
        let last_of_job = flight.last_of_job;
        deliver(flight, shared);
        if last_of_job {
            shared.finish_job();
        }
    }
}

fn deliver(flight: Flight, shared: &Shared) {
    if let Err(error) = flight.copied.wait() {
        flight.closed.store(true, Ordering::Relaxed);
        shared.fail(format!("copy to host: {error}"));
        return;
    }
    if let Some(started) = &flight.started {
        shared.times.lock().copy_ms += started.until_ms(&flight.copied);
    }
    let slot = Arc::new(flight.slot);
    let mut offset = 0;
    for tokens in flight.pieces {
        if flight.closed.load(Ordering::Relaxed) {
            return;
        }
        let half = tokens.len() * flight.token_bytes / 2;
        let part = |start| Bytes::from_owner(Part { slot: slot.clone(), range: start..start + half });
        let piece = Piece { layer: flight.layer, tokens, keys: part(offset), values: part(offset + half) };
        offset += 2 * half;
        let start = Instant::now();
        let delivered = flight.sink.deliver(piece);
        shared.times.lock().delivery_ms += start.elapsed().as_secs_f64() * 1e3;
        if delivered.is_err() {
            flight.closed.store(true, Ordering::Relaxed);
            shared.state.lock().sink_closed = true;
        }
    }
    shared.copied_bytes.fetch_add(offset as u64, Ordering::Relaxed);
}

impl Shared {
    fn finish_job(&self) {
        self.state.lock().pending_jobs -= 1;
        self.changed.notify_all();
    }

    fn fail(&self, text: String) {
        tracing::error!(%text, "egress");
        self.state.lock().failure.get_or_insert(text);
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, OpsError> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(body)
        .map_err(|e| OpsError::Device(format!("{name}: {e}")))
}

#[cfg(test)]
mod tests {
    use super::{COPY_BYTES, groups};
    use crate::ops::Emit;
    use shared::layout::Dtype;

    #[test]
    fn small_pieces_travel_together_and_large_ones_alone() {
        let what = Emit { layer: 0, slot: 0, tokens: 100..1000, block_tokens: 256, dtype: Dtype::F16 };
        assert_eq!(groups(&what, 1), vec![vec![100..256, 256..512, 512..768, 768..1000]]);
        let each = COPY_BYTES / 256;
        assert_eq!(
            groups(&what, each),
            vec![vec![100..256], vec![256..512], vec![512..768], vec![768..1000]]
        );
        let two = COPY_BYTES / 512;
        assert_eq!(groups(&what, two), vec![vec![100..256, 256..512], vec![512..768, 768..1000]]);
    }
}
