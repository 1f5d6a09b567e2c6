//! Tiny models with recorded caches.
#![allow(dead_code, reason = "each test binary uses its own part of this module")]

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use prefill_worker::cpu::CpuOps;
use prefill_worker::forward::Forward;
use prefill_worker::ops::{Piece, Sink, SinkClosed};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype as Stored;
use shared::layout::{CacheLayout, Dtype, LayerCache};
use shared::spec::{ModelSpec, from_hf};
use shared::weights::{HostTensor, TensorInfo, TensorSource, WeightsError};

/// A recorded case: see `data/make_golden.py`, which names the versions it was made with.
#[derive(Clone)]
pub(crate) struct Golden {
    pub(crate) spec: ModelSpec,
    pub(crate) tokens: Vec<u32>,
    pub(crate) inv_freq: Vec<f32>,
    tensors: HashMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Golden {
    pub(crate) fn open(name: &str) -> Self {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(format!("{name}.safetensors"));
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = header.metadata().as_ref().unwrap()["config"].clone();
        let spec = from_hf(name, &serde_json::from_str(&config).unwrap(), None, false).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors = HashMap::new();
        let mut tokens = Vec::new();
        for (key, view) in file.tensors() {
            let words = view.data().as_chunks::<4>().0;
            if key == "tokens" {
                tokens = words.iter().map(|w| u32::from_le_bytes(*w)).collect();
            } else {
                assert_eq!(view.dtype(), Stored::F32, "{key}");
                let data = words.iter().map(|w| f32::from_le_bytes(*w)).collect();
                tensors.insert(key, (view.shape().to_vec(), data));
            }
        }
        let inv_freq = tensors.remove("inv_freq").unwrap().1;
        Self { spec, tokens, inv_freq, tensors }
    }

    pub(crate) fn forward(&self, chunk_tokens: usize) -> Forward<CpuOps> {
        Forward::load(CpuOps::new(2).unwrap(), &self.spec, self, chunk_tokens).unwrap()
    }

    /// `golden.{layer}.{what}`.
    pub(crate) fn recorded(&self, layer: usize, what: &str) -> &[f32] {
        &self.tensors[&format!("golden.{layer}.{what}")].1
    }

    pub(crate) fn layout(&self, dtype: Dtype, block_tokens: u32) -> CacheLayout {
        let (n_kv_heads, head_dim) = (self.spec.n_kv_heads as u32, self.spec.head_dim as u32);
        CacheLayout::uniform(
            self.spec.n_layers,
            LayerCache::Full { n_kv_heads, head_dim, dtype },
            block_tokens,
        )
    }

    /// The same model with other K/V projections in its last layer, as another quantization of it would have. Nothing
    /// that follows depends on them, so that the decoder's projections must give the recorded cache exactly.
    pub(crate) fn with_other_projections(&self, by: f32) -> Self {
        let mut other = self.clone();
        let last = format!("model.layers.{}.self_attn.", self.spec.n_layers - 1);
        for (name, (_, data)) in &mut other.tensors {
            if name.starts_with(&last) && (name.contains("k_proj") || name.contains("v_proj")) {
                data.iter_mut().enumerate().for_each(|(i, x)| *x += by * (i as f32).sin());
            }
        }
        other
    }
}

impl TensorSource for Golden {
    fn names(&self) -> Vec<String> {
        self.tensors.keys().filter(|name| !name.starts_with("golden.")).cloned().collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let tensor = self.load(name).ok()?;
        Some(TensorInfo { shape: tensor.shape().to_vec(), format: tensor.format() })
    }

    fn load(&self, name: &str) -> Result<HostTensor, WeightsError> {
        let missing = || WeightsError::Missing { tensor: name.to_owned() };
        let (shape, data) = self.tensors.get(name).ok_or_else(missing)?.clone();
        Ok(HostTensor::F32 { shape, data })
    }
}

/// Keeps pieces and puts arrays together from them.
#[derive(Default)]
pub(crate) struct Collect(pub(crate) Mutex<Vec<Piece>>);

impl Sink for Collect {
    fn deliver(&self, piece: Piece) -> Result<(), SinkClosed> {
        self.0.lock().unwrap().push(piece);
        Ok(())
    }
}

impl Collect {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// One layer's keys or values as f32 `[n_kv_heads, tokens, head_dim]` for tokens `0..tokens`; every position exactly
    /// once.
    pub(crate) fn array(
        &self,
        layer: usize,
        keys: bool,
        tokens: usize,
        heads: usize,
        head_dim: usize,
        dtype: Dtype,
    ) -> Vec<f32> {
        let mut out = vec![f32::NAN; heads * tokens * head_dim];
        for piece in self.0.lock().unwrap().iter().filter(|p| p.layer == layer) {
            let values = decode(if keys { &piece.keys } else { &piece.values }, dtype);
            let n = piece.tokens.len();
            assert_eq!(values.len(), heads * n * head_dim);
            for head in 0..heads {
                let target = &mut out[(head * tokens + piece.tokens.start) * head_dim..][..n * head_dim];
                assert!(target.iter().all(|x| x.is_nan()), "emitted twice");
                target.copy_from_slice(&values[head * n * head_dim..][..n * head_dim]);
            }
        }
        assert!(out.iter().all(|x| !x.is_nan()), "not all positions of layer {layer} were emitted");
        out
    }
}

pub(crate) fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|w| f32::from_le_bytes(*w)).collect(),
        Dtype::F16 => bytes.as_chunks::<2>().0.iter().map(|w| f16::from_le_bytes(*w).to_f32()).collect(),
        Dtype::Bf16 => bytes.as_chunks::<2>().0.iter().map(|w| bf16::from_le_bytes(*w).to_f32()).collect(),
    }
}

/// `‖a − b‖ / ‖b‖`.
pub(crate) fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let norm: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (difference / norm).sqrt()
}
