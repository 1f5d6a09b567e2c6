//! The header: metadata and the table of tensors.
//!
//! Every length in it comes from outside, so each is checked against the bytes that are left before anything is
//! allocated, and the header as a whole is bounded.

use super::blocks::BlockFormat;
use super::value::GgufValue;
use crate::weights::WeightsError;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Largest header that is read. Vocabularies take a few megabytes.
const MAX_HEADER_BYTES: u64 = 256 << 20;
/// First read; grown until the header fits.
const FIRST_READ_BYTES: u64 = 8 << 20;
const MAX_DIMS: u32 = 4;
const MAX_ALIGNMENT: u64 = 1 << 20;

/// An open GGUF file.
#[derive(Debug)]
pub(crate) struct GgufFile {
    pub(crate) path: PathBuf,
    file: File,
    metadata: BTreeMap<String, GgufValue>,
    tensors: BTreeMap<String, GgufTensor>,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct GgufTensor {
    /// Logical shape, slowest dimension first (the file has it the other way round).
    pub(crate) shape: Vec<usize>,
    pub(crate) format: BlockFormat,
    offset_bytes: u64,
    len_bytes: u64,
}

impl GgufFile {
    /// Read the header and check that every tensor lies within the file.
    pub(crate) fn open(path: &Path) -> Result<Self, WeightsError> {
        let io = |source| WeightsError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        let limit = file_bytes.min(MAX_HEADER_BYTES);
        let mut read = limit.min(FIRST_READ_BYTES);
        loop {
            let mut buffer = vec![0u8; usize::try_from(read).unwrap_or(usize::MAX)];
            file.read_exact_at(&mut buffer, 0).map_err(io)?;
            match parse(&buffer, file_bytes) {
                Ok((metadata, tensors)) => {
                    return Ok(Self { path: path.to_owned(), file, metadata, tensors });
                }
                Err(HeaderError::OutOfBytes) if read < limit => read = (read * 4).min(limit),
                Err(error) => return Err(error.into_weights(path)),
            }
        }
    }

    pub(crate) fn value(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.get(key)
    }

    pub(crate) fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.tensors
    }

    /// The stored bytes of a tensor.
    pub(crate) fn read(&self, tensor: &GgufTensor) -> Result<Vec<u8>, WeightsError> {
        // `len_bytes` was checked against the length of the file when the header was read.
        let mut bytes = vec![0u8; usize::try_from(tensor.len_bytes).unwrap_or(usize::MAX)];
        self.file
            .read_exact_at(&mut bytes, tensor.offset_bytes)
            .map_err(|source| WeightsError::Io { path: self.path.clone(), source })?;
        Ok(bytes)
    }
}

impl GgufTensor {
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

enum HeaderError {
    /// The buffer ended; a longer one may do.
    OutOfBytes,
    Malformed(String),
    Tensor(WeightsError),
}

impl HeaderError {
    fn into_weights(self, path: &Path) -> WeightsError {
        let reason = match self {
            Self::OutOfBytes => "the header is cut off".to_owned(),
            Self::Malformed(reason) => reason,
            Self::Tensor(error) => return error,
        };
        WeightsError::Malformed { path: path.to_owned(), reason }
    }
}

fn malformed(reason: impl Into<String>) -> HeaderError {
    HeaderError::Malformed(reason.into())
}

type Header = (BTreeMap<String, GgufValue>, BTreeMap<String, GgufTensor>);

fn parse(buffer: &[u8], file_bytes: u64) -> Result<Header, HeaderError> {
    let mut cursor = Cursor { buffer, at: 0, file_bytes };
    if cursor.take(4)? != b"GGUF" {
        return Err(malformed("not a GGUF file"));
    }
    match cursor.u32()? {
        2 | 3 => {}
        version if matches!(version.swap_bytes(), 1..=3) => {
            return Err(malformed("big-endian GGUF is not supported"));
        }
        version => return Err(malformed(format!("GGUF version {version} is not supported (2 and 3 are)"))),
    }
    let tensor_count = cursor.u64()?;
    let value_count = cursor.u64()?;
    let mut metadata = BTreeMap::new();
    for _ in 0..value_count {
        let key = cursor.string()?;
        let kind = cursor.u32()?;
        let value = cursor.value(kind, &key)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(malformed(format!("metadata key {key} occurs twice")));
        }
    }
    let mut tensors = BTreeMap::new();
    for _ in 0..tensor_count {
        let (name, tensor) = cursor.tensor()?;
        if tensors.insert(name.clone(), tensor).is_some() {
            return Err(malformed(format!("tensor {name} occurs twice")));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(value) => value
            .as_u64()
            .filter(|a| a.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(a))
            .ok_or_else(|| malformed("general.alignment is not a power of two from 8 to 1 MiB"))?,
    };
    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    for (name, tensor) in &mut tensors {
        place(name, tensor, data_start, alignment, file_bytes)?;
    }
    Ok((metadata, tensors))
}

/// Make a tensor's offset absolute and check it against the file.
fn place(
    name: &str,
    tensor: &mut GgufTensor,
    data_start: u64,
    alignment: u64,
    file_bytes: u64,
) -> Result<(), HeaderError> {
    if !tensor.offset_bytes.is_multiple_of(alignment) {
        return Err(malformed(format!("tensor {name} is not aligned")));
    }
    let needed_bytes = tensor.len_bytes;
    let found_bytes =
        file_bytes.saturating_sub(data_start).saturating_sub(tensor.offset_bytes).min(needed_bytes);
    if found_bytes < needed_bytes {
        return Err(HeaderError::Tensor(WeightsError::Short {
            tensor: name.to_owned(),
            needed_bytes,
            found_bytes,
        }));
    }
    tensor.offset_bytes = data_start.saturating_add(tensor.offset_bytes);
    Ok(())
}

struct Cursor<'a> {
    buffer: &'a [u8],
    at: usize,
    file_bytes: u64,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: u64) -> Result<&'a [u8], HeaderError> {
        if n > self.file_bytes.saturating_sub(self.at as u64) {
            return Err(malformed("a length exceeds the file"));
        }
        let end = usize::try_from(n).ok().and_then(|n| self.at.checked_add(n));
        let bytes = end.and_then(|end| self.buffer.get(self.at..end)).ok_or(HeaderError::OutOfBytes)?;
        self.at += bytes.len();
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], HeaderError> {
        let mut out = [0u8; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, HeaderError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, HeaderError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn string(&mut self) -> Result<String, HeaderError> {
        let len = self.u64()?;
        let bytes = self.take(len)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| malformed("a string is not UTF-8"))
    }

    fn bool(&mut self) -> Result<bool, HeaderError> {
        Ok(self.array::<1>()? != [0])
    }

    fn unsigned(&mut self, width: usize) -> Result<u64, HeaderError> {
        let mut wide = [0u8; 8];
        wide.iter_mut().zip(self.take(width as u64)?).for_each(|(w, b)| *w = *b);
        Ok(u64::from_le_bytes(wide))
    }

    fn signed(&mut self, width: usize) -> Result<i64, HeaderError> {
        let unused_bits = 64 - 8 * width as u32;
        Ok(((self.unsigned(width)? << unused_bits) as i64) >> unused_bits)
    }

    fn float(&mut self, width: usize) -> Result<f64, HeaderError> {
        if width == 4 {
            Ok(f64::from(f32::from_le_bytes(self.array()?)))
        } else {
            Ok(f64::from_le_bytes(self.array()?))
        }
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<GgufValue, HeaderError> {
        Ok(match Kind::of(kind, key)? {
            Kind::Unsigned(width) => GgufValue::Unsigned(self.unsigned(width)?),
            Kind::Signed(width) => GgufValue::Signed(self.signed(width)?),
            Kind::Float(width) => GgufValue::Float(self.float(width)?),
            Kind::Bool => GgufValue::Bool(self.bool()?),
            Kind::String => GgufValue::String(self.string()?),
            Kind::Array => {
                let element = self.u32()?;
                let count = self.u64()?;
                match Kind::of(element, key)? {
                    Kind::Unsigned(w) => GgufValue::Unsigneds(self.many(count, w, |c| c.unsigned(w))?),
                    Kind::Signed(w) => GgufValue::Signeds(self.many(count, w, |c| c.signed(w))?),
                    Kind::Float(w) => GgufValue::Floats(self.many(count, w, |c| c.float(w))?),
                    Kind::Bool => GgufValue::Bools(self.many(count, 1, Self::bool)?),
                    Kind::String => GgufValue::Strings(self.many(count, 8, Self::string)?),
                    Kind::Array => return Err(malformed(format!("metadata key {key}: nested arrays"))),
                }
            }
        })
    }

    /// Read `count` elements of at least `min_bytes` each; refuses a count that the buffer cannot hold before allocating.
    fn many<T>(
        &mut self,
        count: u64,
        min_bytes: usize,
        mut read: impl FnMut(&mut Self) -> Result<T, HeaderError>,
    ) -> Result<Vec<T>, HeaderError> {
        let least = count.checked_mul(min_bytes as u64).ok_or_else(|| malformed("an array is too long"))?;
        let start = self.at;
        self.take(least)?;
        self.at = start;
        (0..count).map(|_| read(self)).collect()
    }

    fn tensor(&mut self) -> Result<(String, GgufTensor), HeaderError> {
        let name = self.string()?;
        let n_dims = self.u32()?;
        if n_dims == 0 || n_dims > MAX_DIMS {
            return Err(malformed(format!("tensor {name} has {n_dims} dimensions")));
        }
        let mut shape = Vec::with_capacity(n_dims as usize);
        for _ in 0..n_dims {
            let dim = usize::try_from(self.u64()?).ok().filter(|d| *d > 0);
            shape.push(dim.ok_or_else(|| malformed(format!("tensor {name} has an impossible dimension")))?);
        }
        shape.reverse();
        let kind = self.u32()?;
        let offset_bytes = self.u64()?;
        let format = BlockFormat::of(kind).map_err(|dtype| {
            HeaderError::Tensor(WeightsError::UnsupportedDtype { tensor: name.clone(), dtype })
        })?;
        let len_bytes = format.len_bytes(&shape).ok_or_else(|| {
            malformed(format!("tensor {name}: rows are not whole blocks, or its size overflows"))
        })?;
        Ok((name, GgufTensor { shape, format, offset_bytes, len_bytes }))
    }
}

enum Kind {
    Unsigned(usize),
    Signed(usize),
    Float(usize),
    Bool,
    String,
    Array,
}

impl Kind {
    fn of(kind: u32, key: &str) -> Result<Self, HeaderError> {
        Ok(match kind {
            0 => Self::Unsigned(1),
            1 => Self::Signed(1),
            2 => Self::Unsigned(2),
            3 => Self::Signed(2),
            4 => Self::Unsigned(4),
            5 => Self::Signed(4),
            6 => Self::Float(4),
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::Unsigned(8),
            11 => Self::Signed(8),
            12 => Self::Float(8),
            other => return Err(malformed(format!("metadata key {key}: unknown type {other}"))),
        })
    }
}
