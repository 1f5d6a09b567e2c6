//! Matrix products through cublasLt: `out[tokens, rows] (+)= x[tokens, columns] · W[rows, columns]ᵀ (+ bias)`.
//!
//! cublasLt is column-major, so the product is written as `outᵀ = W · xᵀ`. For each shape class the fastest of the
//! library's own proposals is found once by timing them, then kept. The workspace has a fixed size.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUevent_flags_enum;

use super::Precision;
use super::device::{Device, device_error};
use super::memory::{DeviceMemory, Ledger};
use crate::ops::OpsError;

/// Proposals asked of cublasLt for each shape.
const PROPOSALS: usize = 6;
/// Timed runs of each proposal after one that warms it up. Proposals take turns, so that a clock that sinks while the
/// device heats up treats them alike.
const TIMED_RUNS: usize = 2;
/// Products with fewer tokens take the first proposal untimed.
const TIMED_FROM_TOKENS: usize = 512;

/// `cublasOperation_t` value for a transposed operand.
const CUBLAS_OP_T: i32 = 1;
/// Plans kept; prompts of many lengths would otherwise pile them up.
const MAX_PLANS: usize = 512;

/// One product.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    /// Activations, `[tokens, columns]`.
    pub(super) x: u64,
    /// Weights, `[rows, columns]`.
    pub(super) weight: u64,
    /// Output, `[tokens, rows]`.
    pub(super) out: u64,
    /// Bias of `rows` values in the output's type; 0 for none.
    pub(super) bias: u64,
    /// Scales of an FP8 product: per output channel and per token; 0 otherwise.
    pub(super) scales: (u64, u64),
    /// Shape and types.
    pub(super) kind: Kind,
}

/// What decides the algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    pub(super) tokens: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Output in f32 instead of elements.
    pub(super) out_f32: bool,
    /// Add to what the output holds.
    pub(super) accumulate: bool,
    /// With bias.
    pub(super) bias: bool,
    /// Operands in E4M3.
    pub(super) fp8: bool,
}

/// A cublasLt handle with its plans.
pub(super) struct Gemm {
    device: Arc<Device>,
    handle: sys::cublasLtHandle_t,
    ledger: Arc<Ledger>,
    workspace: DeviceMemory,
    element: sys::cudaDataType,
    plans: HashMap<Kind, Plan>,
    /// Fastest algorithm of a shape class: the tokens of the kind rounded up to a power of two.
    chosen: HashMap<Kind, sys::cublasLtMatmulAlgo_t>,
}

// SAFETY: a cublasLt handle and its descriptors may move between threads; they are used by one at a time here.
unsafe impl Send for Gemm {}

struct Plan {
    descriptor: Descriptor,
    weight: Layout,
    x: Layout,
    out: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Gemm {
    pub(super) fn new(
        device: &Arc<Device>,
        ledger: &Arc<Ledger>,
        precision: Precision,
        workspace_bytes: usize,
    ) -> Result<Self, OpsError> {
        device.context.bind_to_thread().map_err(device_error)?;
        let workspace = DeviceMemory::new(device, ledger, "cublasLt workspace", workspace_bytes)?;
        let element = match precision {
            Precision::Bf16 | Precision::Fp8 => sys::cudaDataType_t::CUDA_R_16BF,
            Precision::F16 => sys::cudaDataType_t::CUDA_R_16F,
        };
        let handle = result::create_handle().map_err(error)?;
        Ok(Self {
            device: device.clone(),
            handle,
            ledger: ledger.clone(),
            workspace,
            element,
            plans: HashMap::new(),
            chosen: HashMap::new(),
        })
    }

    /// Runs a product in order with computing.
    pub(super) fn run(&mut self, product: &Product) -> Result<(), OpsError> {
        if !self.plans.contains_key(&product.kind) {
            let plan = self.plan(product)?;
            if self.plans.len() >= MAX_PLANS {
                self.plans.clear();
            }
            self.plans.insert(product.kind, plan);
        }
        match self.plans.get(&product.kind) {
            Some(plan) => self.execute(plan, product, &plan.algorithm),
            None => Err(OpsError::Device("cublasLt plan missing".into())),
        }
    }

    fn plan(&mut self, product: &Product) -> Result<Plan, OpsError> {
        let kind = product.kind;
        let operand = if kind.fp8 { sys::cudaDataType_t::CUDA_R_8F_E4M3 } else { self.element };
        let output = if kind.out_f32 { sys::cudaDataType_t::CUDA_R_32F } else { self.element };
        let mut plan = Plan {
            descriptor: Descriptor::new(kind, output)?,
            weight: Layout::new(operand, kind.columns, kind.rows)?,
            x: Layout::new(operand, kind.columns, kind.tokens)?,
            out: Layout::new(output, kind.rows, kind.tokens)?,
            // SAFETY: plain bytes; overwritten below before any use.
            algorithm: unsafe { std::mem::zeroed() },
        };
        let class = Kind { tokens: kind.tokens.next_power_of_two(), ..kind };
        if let Some(algorithm) = self.chosen.get(&class)
            && self.accepts(&plan, algorithm)
        {
            plan.algorithm = *algorithm;
            return Ok(plan);
        }
        // cublasLt refuses to propose for a descriptor whose bias or scales have no address yet.
        plan.descriptor.point(product)?;
        let proposals = self.proposals(&plan)?;
        plan.algorithm = proposals[0];
        if kind.tokens >= TIMED_FROM_TOKENS {
            plan.algorithm = self.fastest(&plan, product, &proposals)?;
            self.chosen.insert(class, plan.algorithm);
        }
        Ok(plan)
    }

    fn proposals(&self, plan: &Plan) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, OpsError> {
        let preference = Preference::new(self.workspace.bytes())?;
        let mut found = 0;
        // SAFETY: an array of plain values for cublasLt to fill.
        let mut results: [sys::cublasLtMatmulHeuristicResult_t; PROPOSALS] = unsafe { std::mem::zeroed() };
        // SAFETY: every descriptor is alive; the array holds the number of results asked for.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                plan.descriptor.0,
                plan.weight.0,
                plan.x.0,
                plan.out.0,
                plan.out.0,
                preference.0,
                PROPOSALS as i32,
                results.as_mut_ptr(),
                &mut found,
            )
        }
        .result()
        .map_err(error)?;
        let usable: Vec<_> = results
            .iter()
            .take(usize::try_from(found).unwrap_or(0))
            .filter(|r| r.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS)
            .map(|r| r.algo)
            .collect();
        if usable.is_empty() {
            return Err(OpsError::Unsupported("cublasLt has no algorithm for this product".into()));
        }
        Ok(usable)
    }

    /// Whether an algorithm found for another token count works for this one.
    fn accepts(&self, plan: &Plan, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        // SAFETY: a plain value for cublasLt to fill.
        let mut checked: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: every descriptor is alive.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle,
                plan.descriptor.0,
                plan.weight.0,
                plan.x.0,
                plan.out.0,
                plan.out.0,
                algorithm,
                &mut checked,
            )
        };
        status.result().is_ok() && checked.workspaceSize <= self.workspace.bytes()
    }

    /// Times the proposals on the product's own operands, into scratch memory. Waits for the device; happens once per
    /// shape class. Without memory for the scratch the first proposal stands.
    fn fastest(
        &self,
        plan: &Plan,
        product: &Product,
        proposals: &[sys::cublasLtMatmulAlgo_t],
    ) -> Result<sys::cublasLtMatmulAlgo_t, OpsError> {
        let timing = Some(CUevent_flags_enum::CU_EVENT_DEFAULT);
        let bytes = product.kind.tokens * product.kind.rows * if product.kind.out_f32 { 4 } else { 2 };
        let Ok(scratch) = DeviceMemory::new(&self.device, &self.ledger, "timing scratch", bytes) else {
            return Ok(proposals[0]);
        };
        let product = &Product { out: scratch.address(), ..*product };
        let mut totals_ms = vec![0f32; proposals.len()];
        for round in 0..=TIMED_RUNS {
            for (algorithm, total_ms) in proposals.iter().zip(&mut totals_ms) {
                let start = self.device.compute.record_event(timing).map_err(device_error)?;
                let ran = self.execute(plan, product, algorithm);
                let end = self.device.compute.record_event(timing).map_err(device_error)?;
                let elapsed_ms = start.elapsed_ms(&end).map_err(device_error)?;
                match ran {
                    Ok(()) if round > 0 => *total_ms += elapsed_ms,
                    Ok(()) => {}
                    Err(_) => *total_ms = f32::INFINITY,
                }
            }
        }
        let fastest = totals_ms.iter().zip(proposals).min_by(|a, b| a.0.total_cmp(b.0));
        let best =
            fastest.map_or((f32::NAN, proposals[0]), |(ms, algorithm)| (ms / TIMED_RUNS as f32, *algorithm));
        tracing::debug!(kind = ?product.kind, ms = best.0, "product timed");
        Ok(best.1)
    }

    fn execute(
        &self,
        plan: &Plan,
        product: &Product,
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> Result<(), OpsError> {
        plan.descriptor.point(product)?;
        let (alpha, beta) = (1f32, if product.kind.accumulate { 1f32 } else { 0f32 });
        // SAFETY: layouts describe the buffers the backend checked; the workspace is alive and of the stated size;
        // alpha and beta are read before the call returns.
        unsafe {
            result::matmul(
                self.handle,
                plan.descriptor.0,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                product.weight as *const c_void,
                plan.weight.0,
                product.x as *const c_void,
                plan.x.0,
                product.out as *const c_void,
                plan.out.0,
                product.out as *mut c_void,
                plan.out.0,
                algorithm,
                self.workspace.address() as *mut c_void,
                self.workspace.bytes(),
                self.device.compute.cu_stream().cast(),
            )
        }
        .map_err(error)
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        // SAFETY: made by `create_handle`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

struct Descriptor(sys::cublasLtMatmulDesc_t);

impl Descriptor {
    fn new(kind: Kind, output: sys::cudaDataType) -> Result<Self, OpsError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let descriptor = Self(
            result::create_matmul_desc(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType_t::CUDA_R_32F,
            )
            .map_err(error)?,
        );
        descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &CUBLAS_OP_T)?;
        if kind.bias {
            descriptor.set(
                Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
                &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            )?;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &output)?;
        }
        if kind.fp8 {
            let per_row = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &per_row)?;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &per_row)?;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1i8)?;
        }
        Ok(descriptor)
    }

    /// Sets the addresses that change from call to call.
    fn point(&self, product: &Product) -> Result<(), OpsError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if product.kind.bias {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &product.bias)?;
        }
        if product.kind.fp8 {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &product.scales.0)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &product.scales.1)?;
        }
        Ok(())
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), OpsError> {
        // SAFETY: the descriptor is alive; the value has the attribute's type, which its size confirms.
        unsafe {
            result::set_matmul_desc_attribute(
                self.0,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
        .map_err(error)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// A dense column-major matrix.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(dtype: sys::cudaDataType, rows: usize, columns: usize) -> Result<Self, OpsError> {
        let leading = i64::try_from(rows).map_err(|e| OpsError::Shape(e.to_string()))?;
        result::create_matrix_layout(dtype, rows as u64, columns as u64, leading).map(Self).map_err(error)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(workspace_bytes: usize) -> Result<Self, OpsError> {
        let preference = Self(result::create_matmul_pref().map_err(error)?);
        // SAFETY: the preference is alive; the attribute takes a size.
        unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&workspace_bytes).cast(),
                size_of::<usize>(),
            )
        }
        .map_err(error)?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

fn error(error: CublasError) -> OpsError {
    OpsError::Device(format!("cublasLt: {error}"))
}
