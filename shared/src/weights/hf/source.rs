//! A model directory's tensors, over one or more safetensors files.

use super::shard::{Shard, unsupported};
use crate::spec::Quantization;
use crate::weights::{FloatVec, HostTensor, TensorFormat, TensorInfo, TensorSource, WeightsError};
use safetensors::Dtype;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Tensors of a directory; triples `weight`, `scales`, `biases` of MLX's quantization appear as one tensor.
#[derive(Debug)]
pub struct HfSource {
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    /// Shards of the weight and, if quantized, of its scales and biases.
    shards: [usize; 3],
    info: TensorInfo,
    stored_bytes: u64,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl HfSource {
    /// Open a directory with `model.safetensors`, or with several files and their index. `quantization` is what the
    /// configuration says of MLX-quantized tensors.
    ///
    /// # Errors
    /// [`WeightsError`] naming the first tensor that is damaged, missing from its file, or of an unsupported format.
    pub fn open(dir: &Path, quantization: &Quantization) -> Result<Self, WeightsError> {
        let (shards, places) = open_shards(dir)?;
        let mut tensors = BTreeMap::new();
        for name in places.keys() {
            if is_derived(name) || is_part_of_quantized(name, &places) {
                continue;
            }
            tensors.insert(name.clone(), describe(name, &shards, &places, quantization)?);
        }
        Ok(Self { shards, tensors })
    }

    /// True when there is a separate output head.
    #[must_use]
    pub fn has_lm_head(&self) -> bool {
        self.tensors.contains_key("lm_head.weight")
    }

    /// Leave out a copy of the embedding table that some tools write as the head of a tied model.
    pub fn drop_lm_head(&mut self) {
        self.tensors.remove("lm_head.weight");
    }

    fn parts(&self, name: &str) -> Result<&Entry, WeightsError> {
        self.tensors.get(name).ok_or_else(|| WeightsError::Missing { tensor: name.to_owned() })
    }
}

impl TensorSource for HfSource {
    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.tensors.get(name).map(|entry| entry.info.clone())
    }

    fn stored_bytes(&self, name: &str) -> Option<u64> {
        self.tensors.get(name).map(|entry| entry.stored_bytes)
    }

    fn load(&self, name: &str) -> Result<HostTensor, WeightsError> {
        let Entry { shards: [weight, scales, biases], info, .. } = self.parts(name)?;
        let shape = info.shape.clone();
        if let TensorFormat::Affine { bits, group_size } = info.format {
            let [scales_name, biases_name] = part_names(name);
            return Ok(HostTensor::Affine {
                shape,
                bits,
                group_size,
                packed: self.shards[*weight].words(name)?,
                scales: self.shards[*scales].floats(&scales_name)?,
                biases: self.shards[*biases].floats(&biases_name)?,
            });
        }
        Ok(match self.shards[*weight].floats(name)? {
            FloatVec::F32(data) => HostTensor::F32 { shape, data },
            FloatVec::F16(data) => HostTensor::F16 { shape, data },
            FloatVec::BF16(data) => HostTensor::BF16 { shape, data },
        })
    }
}

type Places = BTreeMap<String, usize>;

fn open_shards(dir: &Path) -> Result<(Vec<Shard>, Places), WeightsError> {
    let index_path = dir.join(INDEX);
    let weight_map = if index_path.exists() {
        let bytes = std::fs::read(&index_path)
            .map_err(|source| WeightsError::Io { path: index_path.clone(), source })?;
        let index: Index = serde_json::from_slice(&bytes)
            .map_err(|e| WeightsError::Malformed { path: index_path.clone(), reason: e.to_string() })?;
        Some(index.weight_map)
    } else {
        None
    };
    let mut files: Vec<&str> = match &weight_map {
        Some(map) => map.values().map(String::as_str).collect(),
        None => vec![SINGLE],
    };
    files.sort_unstable();
    files.dedup();
    if let Some(file) = files.iter().find(|file| !is_plain_file_name(file)) {
        let reason = format!("{file:?} is not the name of a file in this directory");
        return Err(WeightsError::Malformed { path: index_path, reason });
    }
    let mut shards = Vec::with_capacity(files.len());
    let mut places = Places::new();
    for (number, file) in files.iter().enumerate() {
        let path = dir.join(file);
        let shard = Shard::open(&path)?;
        for name in shard.names() {
            if weight_map.as_ref().is_some_and(|map| map.get(name).map(String::as_str) != Some(*file)) {
                return Err(WeightsError::Unexpected { tensor: name.clone() });
            }
            if places.insert(name.clone(), number).is_some() {
                let reason = format!("tensor {name} is also in another file");
                return Err(WeightsError::Malformed { path, reason });
            }
        }
        shards.push(shard);
    }
    if let Some(tensor) =
        weight_map.into_iter().flatten().map(|(name, _)| name).find(|n| !places.contains_key(n))
    {
        return Err(WeightsError::Missing { tensor });
    }
    Ok((shards, places))
}

fn is_plain_file_name(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|n| n == name)
}

/// Buffers that older exports saved although they follow from the configuration.
fn is_derived(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}

fn part_names(weight: &str) -> [String; 2] {
    let module = weight.strip_suffix(".weight").unwrap_or(weight);
    [format!("{module}.scales"), format!("{module}.biases")]
}

fn is_part_of_quantized(name: &str, places: &Places) -> bool {
    let module = name.strip_suffix(".scales").or_else(|| name.strip_suffix(".biases"));
    module.is_some_and(|module| places.contains_key(&format!("{module}.weight")))
}

fn describe(
    name: &str,
    shards: &[Shard],
    places: &Places,
    quantization: &Quantization,
) -> Result<Entry, WeightsError> {
    let find = |name: &str| -> Result<_, WeightsError> {
        let missing = || WeightsError::Missing { tensor: name.to_owned() };
        let shard = *places.get(name).ok_or_else(missing)?;
        Ok((shard, shards[shard].info(name).ok_or_else(missing)?))
    };
    let bytes_of =
        |info: &safetensors::tensor::TensorInfo| (info.data_offsets.1 - info.data_offsets.0) as u64;
    let (shard, weight) = find(name)?;
    let plain = |format| {
        let info = TensorInfo { shape: weight.shape.clone(), format };
        Ok(Entry { shards: [shard; 3], info, stored_bytes: bytes_of(weight) })
    };
    match weight.dtype {
        Dtype::F32 => return plain(TensorFormat::F32),
        Dtype::F16 => return plain(TensorFormat::F16),
        Dtype::BF16 => return plain(TensorFormat::BF16),
        Dtype::U32 => {}
        other => return Err(unsupported(name, other)),
    }
    let module = name.strip_suffix(".weight").ok_or_else(|| unsupported(name, Dtype::U32))?;
    let refuse = |reason: String| WeightsError::Quantization { tensor: name.to_owned(), reason };
    let (bits, group_size) = quantization.of(module).ok_or_else(|| {
        refuse("packed integers, but the configuration does not say it is quantized".to_owned())
    })?;
    let [scales_name, biases_name] = part_names(name);
    let (scales_shard, scales) = find(&scales_name)?;
    let (biases_shard, biases) = find(&biases_name)?;
    for (part, info) in [(&scales_name, scales), (&biases_name, biases)] {
        if !matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(unsupported(part, info.dtype));
        }
    }
    let &[rows, words] = weight.shape.as_slice() else {
        return Err(refuse(format!("packed shape {:?} is not a matrix", weight.shape)));
    };
    // The words are in the file, so this cannot overflow.
    let columns = words * (32 / usize::from(bits));
    let groups = vec![rows, columns / (group_size as usize)];
    if !columns.is_multiple_of(group_size as usize) || scales.shape != groups || biases.shape != groups {
        return Err(refuse(format!(
            "{columns} columns in groups of {group_size} need scales and biases of {groups:?}, found {:?} and {:?}",
            scales.shape, biases.shape
        )));
    }
    Ok(Entry {
        shards: [shard, scales_shard, biases_shard],
        info: TensorInfo { shape: vec![rows, columns], format: TensorFormat::Affine { bits, group_size } },
        stored_bytes: bytes_of(weight) + bytes_of(scales) + bytes_of(biases),
    })
}
