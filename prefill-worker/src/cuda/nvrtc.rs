//! Compiling CUDA C++ to machine code with NVRTC.

use std::ffi::{CStr, CString};
use std::ptr::null_mut;

use cudarc::nvrtc::{result, sys};

use crate::ops::OpsError;

/// NVRTC's version, part of the key of a compiled kernel.
pub(super) fn version() -> Result<(i32, i32), OpsError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for the call.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(error)?;
    Ok((major, minor))
}

/// Compiles `source` for one real architecture (`sm_90a`) and returns the machine code (cubin).
///
/// # Errors
/// [`OpsError::Device`] with the compiler's log.
pub(super) fn compile(name: &str, source: &str, options: &[String]) -> Result<Vec<u8>, OpsError> {
    let source = CString::new(source).map_err(|e| OpsError::Device(format!("{name}: {e}")))?;
    let c_name = CString::new(name).map_err(|e| OpsError::Device(format!("{name}: {e}")))?;
    let program = Program(result::create_program(&source, Some(&c_name)).map_err(error)?);
    // SAFETY: the program lives until the end of this function.
    if let Err(failed) = unsafe { result::compile_program(program.0, options) } {
        // SAFETY: as above.
        let log = unsafe { result::get_program_log(program.0) }.map_err(error)?;
        // SAFETY: NVRTC ends its log with a zero byte.
        let text = unsafe { CStr::from_ptr(log.as_ptr()) }.to_string_lossy().into_owned();
        return Err(OpsError::Device(format!("{name}: {failed:?}: {text}")));
    }
    let mut bytes = 0;
    // SAFETY: the program is valid and so is the pointer.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut bytes) }.result().map_err(error)?;
    let mut cubin = vec![0u8; bytes];
    // SAFETY: the buffer has the size NVRTC asked for.
    unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) }.result().map_err(error)?;
    Ok(cubin)
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        if !std::ptr::eq(self.0, null_mut()) {
            // SAFETY: made by `create_program`, destroyed once.
            let _ = unsafe { result::destroy_program(self.0) };
        }
    }
}

fn error(error: result::NvrtcError) -> OpsError {
    OpsError::Device(format!("NVRTC: {error:?}"))
}
