//! One safetensors file.

use crate::weights::{FloatVec, WeightsError};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// An open safetensors file whose header has been checked against its length.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: File,
    data_start: u64,
    tensors: BTreeMap<String, TensorInfo>,
}

impl Shard {
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
        let io = |source| WeightsError::Io { path: path.to_owned(), source };
        let malformed = |reason: String| WeightsError::Malformed { path: path.to_owned(), reason };
        let file = File::open(path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        let mut length = [0u8; 8];
        if file_bytes < 8 {
            return Err(malformed("the header is cut off".to_owned()));
        }
        file.read_exact_at(&mut length, 0).map_err(io)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES || header_bytes > file_bytes - 8 {
            return Err(malformed(format!("a header of {header_bytes} bytes does not fit")));
        }
        let mut header = vec![0u8; usize::try_from(header_bytes).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut header, 8).map_err(io)?;
        let entries: Map<String, Value> =
            serde_json::from_slice(&header).map_err(|e| malformed(format!("header: {e}")))?;
        let data_start = 8 + header_bytes;
        let tensors = parse(path, entries, file_bytes - data_start)?;
        Ok(Self { path: path.to_owned(), file, data_start, tensors })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.tensors.keys()
    }

    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Read little-endian 32-bit words.
    pub(super) fn words(&self, name: &str) -> Result<Vec<u32>, WeightsError> {
        let info = self.expect(name, Dtype::U32)?;
        self.read(info, u32::from_le)
    }

    /// Read floats in the precision they are stored in.
    pub(super) fn floats(&self, name: &str) -> Result<FloatVec, WeightsError> {
        let info = self.info(name).ok_or_else(|| WeightsError::Missing { tensor: name.to_owned() })?;
        Ok(match info.dtype {
            Dtype::F32 => FloatVec::F32(self.read(info, |x: f32| f32::from_bits(u32::from_le(x.to_bits())))?),
            Dtype::F16 => FloatVec::F16(self.read(info, |x: f16| f16::from_bits(u16::from_le(x.to_bits())))?),
            Dtype::BF16 => {
                FloatVec::BF16(self.read(info, |x: bf16| bf16::from_bits(u16::from_le(x.to_bits())))?)
            }
            other => return Err(unsupported(name, other)),
        })
    }

    fn expect(&self, name: &str, dtype: Dtype) -> Result<&TensorInfo, WeightsError> {
        let info = self.info(name).ok_or_else(|| WeightsError::Missing { tensor: name.to_owned() })?;
        if info.dtype == dtype { Ok(info) } else { Err(unsupported(name, info.dtype)) }
    }

    /// Read straight into the elements' own memory.
    fn read<T: bytemuck::Pod>(
        &self,
        info: &TensorInfo,
        native: impl Fn(T) -> T,
    ) -> Result<Vec<T>, WeightsError> {
        let bytes = info.data_offsets.1 - info.data_offsets.0;
        let mut data = vec![T::zeroed(); bytes / size_of::<T>()];
        self.file
            .read_exact_at(bytemuck::cast_slice_mut(&mut data), self.data_start + info.data_offsets.0 as u64)
            .map_err(|source| WeightsError::Io { path: self.path.clone(), source })?;
        if cfg!(target_endian = "big") {
            data.iter_mut().for_each(|x| *x = native(*x));
        }
        Ok(data)
    }
}

/// Read the table of tensors. Each must have exactly the bytes its shape needs, all within the file and none shared.
fn parse(
    path: &Path,
    entries: Map<String, Value>,
    data_bytes: u64,
) -> Result<BTreeMap<String, TensorInfo>, WeightsError> {
    let malformed = |reason: String| WeightsError::Malformed { path: path.to_owned(), reason };
    let mut tensors = BTreeMap::new();
    for (name, entry) in entries {
        if name == "__metadata__" {
            continue;
        }
        let info: TensorInfo = match serde_json::from_value(entry.clone()) {
            Ok(info) => info,
            Err(error) => {
                let known = |dtype: &&Value| serde_json::from_value::<Dtype>((*dtype).clone()).is_ok();
                return Err(match entry.get("dtype").filter(|d| d.is_string() && !known(d)) {
                    Some(dtype) => WeightsError::UnsupportedDtype { tensor: name, dtype: dtype.to_string() },
                    None => malformed(format!("tensor {name}: {error}")),
                });
            }
        };
        let bits = info.shape.iter().try_fold(info.dtype.bitsize() as u64, |n, d| n.checked_mul(*d as u64));
        let needed_bytes = bits.map_or(u64::MAX, |bits| bits.div_ceil(8));
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let found_bytes = end.min(data_bytes).saturating_sub(start);
        if found_bytes < needed_bytes {
            return Err(WeightsError::Short { tensor: name, needed_bytes, found_bytes });
        }
        if start > end || end - start != needed_bytes {
            return Err(malformed(format!("tensor {name} has more bytes than its shape needs")));
        }
        tensors.insert(name, info);
    }
    let mut by_offset: Vec<_> = tensors.iter().collect();
    by_offset.sort_by_key(|(_, info)| info.data_offsets);
    if let Some(pair) = by_offset.windows(2).find(|p| p[0].1.data_offsets.1 > p[1].1.data_offsets.0) {
        return Err(malformed(format!("tensors {} and {} overlap", pair[0].0, pair[1].0)));
    }
    Ok(tensors)
}

pub(super) fn unsupported(name: &str, dtype: Dtype) -> WeightsError {
    WeightsError::UnsupportedDtype { tensor: name.to_owned(), dtype: format!("{dtype:?}") }
}
