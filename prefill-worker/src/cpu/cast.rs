//! From f32 to the decoder's element type and layout.

use std::ops::Range;

use bytes::Bytes;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use shared::layout::Dtype;

use super::cache::HeadRows;
/// One array's tokens as little-endian bytes, contiguous `[n_kv_heads, tokens, head_dim]`.
pub(super) fn array_bytes(array: &HeadRows, head_dim: usize, tokens: &Range<usize>, dtype: Dtype) -> Bytes {
    let runs = array.heads().map(|head| &head[tokens.start * head_dim..tokens.end * head_dim]);
    match dtype {
        Dtype::F32 => bytes_of(runs, |run, out: &mut [f32]| out.copy_from_slice(run)),
        Dtype::F16 => bytes_of(runs, |run, out: &mut [f16]| out.convert_from_f32_slice(run)),
        Dtype::Bf16 => bytes_of(runs, |run, out: &mut [bf16]| out.convert_from_f32_slice(run)),
    }
}

fn bytes_of<'a, T: bytemuck::Pod + Send>(
    runs: impl Iterator<Item = &'a [f32]>,
    convert: impl Fn(&[f32], &mut [T]),
) -> Bytes {
    let mut out: Vec<T> = Vec::new();
    for run in runs {
        let start = out.len();
        out.resize(start + run.len(), T::zeroed());
        convert(run, &mut out[start..]);
    }
    Bytes::from_owner(Owner(out))
}

/// Lets typed elements be seen as bytes without another copy.
struct Owner<T>(Vec<T>);

impl<T: bytemuck::Pod> AsRef<[u8]> for Owner<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}
