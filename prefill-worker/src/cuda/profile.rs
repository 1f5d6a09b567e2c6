//! Where the time of a run goes, from device events. Off unless a benchmark turns it on.

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags_enum;
use serde::Serialize;

use super::CudaOps;
use super::device::device_error;
use crate::ops::OpsError;

/// What the compute stream was doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Product,
    Attention,
    Reconstruction,
    Other,
}

/// Spans of the compute stream, not yet added up.
#[derive(Default)]
pub(super) struct Profile {
    spans: Vec<(Stage, CudaEvent, CudaEvent)>,
}

/// Milliseconds by stage. The first four are the compute stream's and add up to it; the others run beside it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct StageTimes {
    /// Matrix products.
    pub products_ms: f64,
    /// Attention.
    pub attention_ms: f64,
    /// Norms, rotation, activation, embedding.
    pub other_ms: f64,
    /// Casting and laying out pieces.
    pub reconstruction_ms: f64,
    /// Copying to the host, on the egress stream.
    pub copy_ms: f64,
    /// Waiting for the sink to take pieces, on the deliverer thread.
    pub delivery_ms: f64,
}

impl CudaOps {
    /// Turns stage times on or off.
    pub fn profile(&mut self, on: bool) {
        self.profile = on.then(Profile::default);
        self.egress.profile(on);
    }

    /// Adds up the spans since the last call; waits for the device.
    ///
    /// # Errors
    /// [`OpsError`] from the device.
    pub fn take_stage_times(&mut self) -> Result<StageTimes, OpsError> {
        self.finish_computing()?;
        let mut times = self.egress.take_times();
        let spans =
            self.profile.as_mut().map(|profile| std::mem::take(&mut profile.spans)).unwrap_or_default();
        for (stage, start, end) in spans {
            let ms = f64::from(start.elapsed_ms(&end).map_err(device_error)?);
            match stage {
                Stage::Product => times.products_ms += ms,
                Stage::Attention => times.attention_ms += ms,
                Stage::Reconstruction => times.reconstruction_ms += ms,
                Stage::Other => times.other_ms += ms,
            }
        }
        Ok(times)
    }

    /// Runs a piece of work, as a span if profiling is on.
    pub(super) fn staged<T>(
        &mut self,
        stage: Stage,
        work: impl FnOnce(&mut Self) -> Result<T, OpsError>,
    ) -> Result<T, OpsError> {
        if self.profile.is_none() {
            return work(self);
        }
        let timing = Some(CUevent_flags_enum::CU_EVENT_DEFAULT);
        let start = self.device.compute.record_event(timing).map_err(device_error)?;
        let result = work(self)?;
        let end = self.device.compute.record_event(timing).map_err(device_error)?;
        if let Some(profile) = &mut self.profile {
            profile.spans.push((stage, start, end));
        }
        Ok(result)
    }
}
