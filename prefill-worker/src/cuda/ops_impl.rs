//! [`Ops`] on a GPU.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::cast_slice;
use shared::weights::HostTensor;

use super::attention::Problem;
use super::backend::CudaOps;
use super::elementwise::{Format, RopeAppend};
use super::handles::{Buffer, Cache, Rope, Saved, widen};
use super::profile::Stage;
use super::weights::{Stored, Weight};
use crate::ops::{At, CacheShape, Chunk, Emit, Heads, HostLinear, Ops, OpsError, Sink};

/// Block size that cuts nothing.
const ONE_PIECE: usize = i32::MAX as usize;

impl Ops for CudaOps {
    type Weight = Weight;
    type Buffer = Buffer;
    type Rope = Rope;
    type Cache = Cache;
    type Saved = Saved;

    fn describe(&self) -> String {
        let facts = &self.device.facts;
        format!("cuda ({}, {}, {:?})", facts.name, facts.architecture, self.options.precision).to_lowercase()
    }

    fn preferred_chunk_tokens(&self) -> usize {
        self.options.chunk_tokens
    }

    fn upload_linear(&mut self, linear: HostLinear) -> Result<Weight, OpsError> {
        self.store_linear(&linear)
    }

    fn upload_norm(&mut self, weight: HostTensor) -> Result<Weight, OpsError> {
        self.store_norm(&weight)
    }

    fn upload_embedding(&mut self, table: HostTensor) -> Result<Weight, OpsError> {
        self.store_embedding(&table)
    }

    fn upload_rope(&mut self, inv_freq: &[f32]) -> Result<Rope, OpsError> {
        if inv_freq.is_empty() || !inv_freq.len().is_multiple_of(8) {
            return Err(OpsError::Unsupported(format!("rotation over {} pairs", inv_freq.len())));
        }
        self.attention.prepare(inv_freq.len() * 2)?;
        let memory = self.memory("rotary frequencies", inv_freq.len() * 4)?;
        memory.write(0, cast_slice(inv_freq))?;
        self.next_rope += 1;
        Ok(Rope { id: self.next_rope, inv_freq: memory, half_dim: inv_freq.len() })
    }

    fn buffer(&mut self, rows: usize, columns: usize) -> Result<Buffer, OpsError> {
        let memory = self.memory("activations", rows * columns * 2)?;
        Ok(Buffer { memory, format: self.element, rows, columns })
    }

    fn cache(&mut self, shape: CacheShape) -> Result<Cache, OpsError> {
        let values = shape.n_layers * 2 * shape.n_kv_heads * shape.capacity_tokens * shape.head_dim;
        Ok(Cache { memory: self.memory("keys and values", values * 2)?, shape })
    }

    fn save(&mut self, cache: &Cache, tokens: Range<usize>) -> Result<Saved, OpsError> {
        cache.layer(0, &tokens)?;
        let planes = cache.planes();
        let memory =
            self.memory("saved keys and values", planes.heads * tokens.len() * planes.head_dim * 2)?;
        self.kernels.pack_pieces(memory.address(), planes, &tokens, ONE_PIECE, self.element)?;
        Ok(Saved { memory, tokens: tokens.len() })
    }

    fn restore(&mut self, saved: &Saved, cache: &mut Cache, at: usize) -> Result<(), OpsError> {
        cache.layer(0, &(at..at + saved.tokens))?;
        let planes = cache.planes();
        if planes.heads * saved.tokens * planes.head_dim * 2 != saved.memory.bytes() {
            return Err(OpsError::Shape("saved tokens are of another model".into()));
        }
        self.kernels.restore_cache(planes, saved.memory.address(), at, saved.tokens)
    }

    fn saved_bytes(&self, saved: &Saved) -> usize {
        saved.memory.bytes()
    }

    fn embed(&mut self, table: &Weight, tokens: &[u32], out: &mut Buffer) -> Result<(), OpsError> {
        let Stored::Embedding { memory, format, vocab, hidden } = &table.0 else {
            return Err(OpsError::Shape("not an embedding table".into()));
        };
        if tokens.len() > out.rows || *hidden != out.columns {
            return Err(OpsError::Shape(format!(
                "{} tokens of {hidden} into {} rows",
                tokens.len(),
                out.rows
            )));
        }
        if out.format != Format::F32 {
            // The buffer that takes embeddings is the residual stream: from now on it is f32.
            out.memory = self.memory("residual stream", out.rows * out.columns * 4)?;
            out.format = Format::F32;
        }
        if self.ids.as_ref().is_none_or(|ids| ids.bytes() < tokens.len() * 4) {
            self.ids = Some(self.memory("token ids", out.rows * 4)?);
        }
        let Some(ids) = &self.ids else { return Err(OpsError::Device("no memory for token ids".into())) };
        ids.write(0, cast_slice(tokens))?;
        let (target, ids, table) = (out.memory.address(), ids.address(), (memory.address(), *format));
        self.staged(Stage::Other, |ops| ops.kernels.embed(target, table, ids, tokens.len(), *hidden, *vocab))
    }

    fn rms_norm(
        &mut self,
        chunk: Chunk,
        x: &Buffer,
        weight: &Weight,
        eps: f32,
        out: &mut Buffer,
    ) -> Result<(), OpsError> {
        let Stored::Norm { memory, columns } = &weight.0 else {
            return Err(OpsError::Shape("not a norm weight".into()));
        };
        let source = x.check(chunk, *columns, Format::F32)?;
        let target = out.check(chunk, *columns, self.element)?;
        self.staged(Stage::Other, |ops| {
            ops.kernels.rms_norm(source, memory.address(), target, chunk.tokens, *columns, eps)
        })
    }

    fn linear(
        &mut self,
        chunk: Chunk,
        weight: &Weight,
        x: &Buffer,
        accumulate: bool,
        out: &mut Buffer,
    ) -> Result<(), OpsError> {
        let Stored::Linear(linear) = &weight.0 else {
            return Err(OpsError::Shape("not a linear layer".into()));
        };
        let source = x.check(chunk, linear.columns, self.element)?;
        // The last layer's projection is narrower than the buffer: its rows lie densely at the front.
        if chunk.tokens > out.rows || linear.rows > out.columns {
            return Err(OpsError::Shape(format!("{} rows of {} do not fit", chunk.tokens, linear.rows)));
        }
        let out_f32 = out.format == Format::F32;
        let target = out.memory.address();
        self.staged(Stage::Product, |ops| {
            ops.product(linear, source, target, chunk.tokens, out_f32, accumulate)
        })
    }

    fn rope_append(
        &mut self,
        at: At,
        heads: Heads,
        rope: &Rope,
        qkv: &mut Buffer,
        cache: &mut Cache,
    ) -> Result<(), OpsError> {
        let tokens = at.chunk.offset_tokens..at.chunk.end();
        let (keys, values) = cache.parts(at.layer, &tokens)?;
        let shape = cache.shape;
        let fits = heads.columns() <= qkv.columns && at.chunk.tokens <= qkv.rows;
        if !fits
            || rope.half_dim * 2 != heads.head_dim
            || heads.n_kv_heads != shape.n_kv_heads
            || heads.head_dim != shape.head_dim
        {
            return Err(OpsError::Shape(format!("{heads:?} against {shape:?} and {} pairs", rope.half_dim)));
        }
        let table = self.staged(Stage::Other, |ops| ops.rope_table(rope, at.chunk))?;
        let append = RopeAppend {
            qkv: qkv.memory.address(),
            keys,
            values,
            table,
            tokens: at.chunk.tokens,
            start: at.chunk.offset_tokens,
            q_heads: heads.n_heads,
            kv_heads: heads.n_kv_heads,
            head_dim: heads.head_dim,
            capacity_tokens: shape.capacity_tokens,
        };
        self.staged(Stage::Other, |ops| ops.kernels.rope_append(append))
    }

    fn attention(
        &mut self,
        at: At,
        heads: Heads,
        window_tokens: Option<usize>,
        qkv: &Buffer,
        cache: &Cache,
        out: &mut Buffer,
    ) -> Result<(), OpsError> {
        let (k, v) = cache.parts(at.layer, &(0..at.chunk.end()))?;
        let q = qkv.check(at.chunk, heads.columns(), self.element)?;
        let target = out.check(at.chunk, heads.n_heads * heads.head_dim, self.element)?;
        let problem = Problem {
            q,
            q_row_stride: heads.columns(),
            k,
            v,
            out: target,
            q_len: at.chunk.tokens,
            q_start: at.chunk.offset_tokens,
            n_heads: heads.n_heads,
            n_kv_heads: heads.n_kv_heads,
            head_dim: heads.head_dim,
            capacity_tokens: cache.shape.capacity_tokens,
            window: window_tokens.unwrap_or(0),
        };
        self.staged(Stage::Attention, |ops| ops.attention.run(&problem))
    }

    fn swiglu(&mut self, chunk: Chunk, gate_up: &Buffer, out: &mut Buffer) -> Result<(), OpsError> {
        let inner = out.columns;
        let source = gate_up.check(chunk, 2 * inner, self.element)?;
        let target = out.check(chunk, inner, self.element)?;
        self.staged(Stage::Other, |ops| ops.kernels.swiglu(target, source, chunk.tokens, inner))
    }

    fn emit(&mut self, what: Emit, cache: &Cache, sink: &Arc<dyn Sink>) -> Result<(), OpsError> {
        let planes = cache.layer(what.slot, &what.tokens)?;
        let format = Format::from(what.dtype);
        let token_bytes = planes.heads * planes.head_dim * format.bytes();
        for tokens in self.egress.portions(&what, token_bytes) {
            let staged = self.egress.reserve(tokens.len() * token_bytes)?;
            self.staged(Stage::Reconstruction, |ops| {
                ops.kernels.pack_pieces(staged.address(), planes, &tokens, what.block_tokens, format)
            })?;
            self.egress.send(staged, Emit { tokens, ..what.clone() }, token_bytes, sink)?;
        }
        Ok(())
    }

    fn read(&mut self, chunk: Chunk, x: &Buffer) -> Result<Vec<f32>, OpsError> {
        let values = chunk.tokens.min(x.rows) * x.columns;
        let mut bytes = vec![0u8; values * x.format.bytes()];
        x.memory.read(0, &mut bytes)?;
        Ok(widen(&bytes, x.format))
    }

    fn write(&mut self, chunk: Chunk, values: &[f32], out: &mut Buffer) -> Result<(), OpsError> {
        if values.len() != chunk.tokens * out.columns || chunk.tokens > out.rows {
            return Err(OpsError::Shape(format!(
                "{} values for {} rows of {}",
                values.len(),
                chunk.tokens,
                out.columns
            )));
        }
        let wide = self.memory("values from the host", values.len() * 4)?;
        wide.write(0, cast_slice(values))?;
        self.kernels.cast((out.memory.address(), out.format), (wide.address(), Format::F32), values.len())
    }

    fn synchronize(&mut self) -> Result<(), OpsError> {
        let computed = self.finish_computing();
        self.egress.drain().and(computed)
    }
}
