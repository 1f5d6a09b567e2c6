//! The memory-bound kernels against their references.

use super::super::CudaOps;
use super::super::elementwise::{Format, Planes, RopeAppend};
use super::CheckReport;
use super::reference;
use super::sample::{Sample, download, limit, poisoned, relative_error, round, upload};
use crate::ops::{OpsError, pieces};

pub(super) fn check(ops: &mut CudaOps, seed: u64) -> Result<Vec<CheckReport>, OpsError> {
    let mut reports = Vec::new();
    for (rows, hidden) in [(1, 64), (7, 576), (3, 4096), (5, 5120), (2, 8192)] {
        reports.push(check_norm(ops, rows, hidden, seed)?);
    }
    for (rows, inner) in [(1, 64), (13, 1536), (3, 14336)] {
        reports.push(check_swiglu(ops, rows, inner, seed)?);
    }
    for (tokens, start, head_dim) in
        [(1, 0, 64), (19, 250, 128), (33, 131_000, 128), (5, 7, 96), (4, 4000, 256)]
    {
        reports.extend(check_rope(ops, tokens, start, head_dim, seed)?);
    }
    for format in [Format::F32, Format::F16, Format::Bf16] {
        reports.push(check_embedding(ops, format, seed)?);
        reports.push(check_pack(ops, format, seed)?);
    }
    reports.push(check_restore(ops, seed)?);
    Ok(reports)
}

fn check_norm(ops: &mut CudaOps, rows: usize, hidden: usize, seed: u64) -> Result<CheckReport, OpsError> {
    let mut sample = Sample::new(seed);
    let x = sample.normal(rows * hidden, 3.0, Format::F32);
    let weight = sample.normal(hidden, 1.0, Format::F32);
    let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let expected = reference::rms_norm(&wide, &weight, 1e-5);
    let device_x = upload(ops, &x, Format::F32)?;
    let device_weight = upload(ops, &weight, Format::F32)?;
    let out = poisoned(ops, rows * hidden, ops.element)?;
    ops.kernels.rms_norm(device_x.address(), device_weight.address(), out.address(), rows, hidden, 1e-5)?;
    let error = relative_error(&download(&out, rows * hidden, ops.element)?, &expected);
    let name = format!("rms_norm {rows}x{hidden} {:?}", ops.element);
    Ok(CheckReport::new(name, error, limit(ops.element)))
}

fn check_swiglu(ops: &mut CudaOps, rows: usize, inner: usize, seed: u64) -> Result<CheckReport, OpsError> {
    let gate_up = Sample::new(seed).normal(rows * 2 * inner, 4.0, ops.element);
    let source = upload(ops, &gate_up, ops.element)?;
    let out = poisoned(ops, rows * inner, ops.element)?;
    ops.kernels.swiglu(out.address(), source.address(), rows, inner)?;
    let error =
        relative_error(&download(&out, rows * inner, ops.element)?, &reference::swiglu(&gate_up, inner));
    Ok(CheckReport::new(format!("swiglu {rows}x{inner} {:?}", ops.element), error, limit(ops.element)))
}

fn check_rope(
    ops: &mut CudaOps,
    tokens: usize,
    start: usize,
    head_dim: usize,
    seed: u64,
) -> Result<Vec<CheckReport>, OpsError> {
    let (q_heads, kv_heads, half_dim) = (5, 2, head_dim / 2);
    let (heads, capacity_tokens) = (q_heads + 2 * kv_heads, start + tokens + 3);
    let rows = Sample::new(seed).normal(tokens * heads * head_dim, 1.0, ops.element);
    let inv_freq: Vec<f32> = (0..half_dim).map(|i| 500_000f32.powf(-(i as f32) / half_dim as f32)).collect();
    let head = |t: usize, h: usize| &rows[(t * heads + h) * head_dim..][..head_dim];
    let rotated = |t: usize, h: usize| reference::rotate(head(t, h), &inv_freq, start + t);

    let qkv = upload(ops, &rows, ops.element)?;
    let frequencies = upload(ops, &inv_freq, Format::F32)?;
    let table = poisoned(ops, tokens * half_dim * 2, Format::F32)?;
    let plane = capacity_tokens * head_dim;
    let [keys, values] =
        [poisoned(ops, kv_heads * plane, ops.element)?, poisoned(ops, kv_heads * plane, ops.element)?];
    ops.kernels.rope_table(table.address(), frequencies.address(), start, half_dim, tokens)?;
    ops.kernels.rope_append(RopeAppend {
        qkv: qkv.address(),
        keys: keys.address(),
        values: values.address(),
        table: table.address(),
        tokens,
        start,
        q_heads,
        kv_heads,
        head_dim,
        capacity_tokens,
    })?;
    let mut out = Vec::new();
    let mut expected: [Vec<f64>; 3] = Default::default();
    let got_rows = download(&qkv, rows.len(), ops.element)?;
    let (got_keys, got_values) =
        (download(&keys, kv_heads * plane, ops.element)?, download(&values, kv_heads * plane, ops.element)?);
    let mut got: [Vec<f32>; 3] = Default::default();
    for t in 0..tokens {
        for h in 0..q_heads {
            expected[0].extend(rotated(t, h));
            got[0].extend(&got_rows[(t * heads + h) * head_dim..][..head_dim]);
        }
        for h in 0..kv_heads {
            let at = h * plane + (start + t) * head_dim;
            expected[1].extend(rotated(t, q_heads + h));
            got[1].extend(&got_keys[at..][..head_dim]);
            expected[2].extend(head(t, q_heads + kv_heads + h).iter().map(|x| f64::from(*x)));
            got[2].extend(&got_values[at..][..head_dim]);
        }
    }
    for (part, (got, expected)) in ["queries", "keys", "values"].iter().zip(got.iter().zip(&expected)) {
        let limit = if *part == "values" { 0.0 } else { limit(ops.element) };
        let name = format!("rope {part} {tokens}+{start} d={head_dim} {:?}", ops.element);
        out.push(CheckReport::new(name, relative_error(got, expected), limit));
    }
    Ok(out)
}

fn check_embedding(ops: &mut CudaOps, format: Format, seed: u64) -> Result<CheckReport, OpsError> {
    let (vocab, hidden, tokens) = (301, 576, 45);
    let mut sample = Sample::new(seed);
    let table = sample.normal(vocab * hidden, 1.0, format);
    let ids = sample.below(tokens, 301);
    let expected: Vec<f64> =
        ids.iter().flat_map(|id| &table[*id as usize * hidden..][..hidden]).map(|x| f64::from(*x)).collect();
    let device_table = upload(ops, &table, format)?;
    let device_ids = ops.memory("ids", tokens * 4)?;
    device_ids.write(0, bytemuck::cast_slice(&ids))?;
    let out = poisoned(ops, tokens * hidden, Format::F32)?;
    ops.kernels.embed(
        out.address(),
        (device_table.address(), format),
        device_ids.address(),
        tokens,
        hidden,
        vocab,
    )?;
    let error = relative_error(&download(&out, tokens * hidden, Format::F32)?, &expected);
    Ok(CheckReport::new(format!("embedding from {format:?}"), error, 0.0))
}

fn check_pack(ops: &mut CudaOps, format: Format, seed: u64) -> Result<CheckReport, OpsError> {
    let (heads, capacity_tokens, head_dim, tokens, block_tokens) = (6, 90, 64, 17..58, 16);
    let rows = Sample::new(seed).normal(heads * capacity_tokens * head_dim, 1.0, ops.element);
    let expected: Vec<f64> = pieces(tokens.clone(), block_tokens)
        .flat_map(|piece| {
            let planes = rows.chunks(capacity_tokens * head_dim);
            planes.flat_map(move |plane| &plane[piece.start * head_dim..piece.end * head_dim])
        })
        .map(|x| f64::from(round(*x, format)))
        .collect();
    let cache = upload(ops, &rows, ops.element)?;
    let out = poisoned(ops, expected.len(), format)?;
    let planes = Planes { address: cache.address(), heads, capacity_tokens, head_dim };
    ops.kernels.pack_pieces(out.address(), planes, &tokens, block_tokens, format)?;
    let error = relative_error(&download(&out, expected.len(), format)?, &expected);
    Ok(CheckReport::new(format!("pack_pieces {:?} to {format:?}", ops.element), error, 0.0))
}

fn check_restore(ops: &mut CudaOps, seed: u64) -> Result<CheckReport, OpsError> {
    let (heads, capacity_tokens, head_dim, first, tokens) = (4, 70, 96, 11, 29);
    let rows = Sample::new(seed).normal(heads * tokens * head_dim, 1.0, ops.element);
    let source = upload(ops, &rows, ops.element)?;
    let cache = poisoned(ops, heads * capacity_tokens * head_dim, ops.element)?;
    let planes = Planes { address: cache.address(), heads, capacity_tokens, head_dim };
    ops.kernels.restore_cache(planes, source.address(), first, tokens)?;
    let all = download(&cache, heads * capacity_tokens * head_dim, ops.element)?;
    let got: Vec<f32> = all
        .chunks(capacity_tokens * head_dim)
        .flat_map(|plane| &plane[first * head_dim..(first + tokens) * head_dim])
        .copied()
        .collect();
    let untouched =
        all.iter().filter(|x| x.is_nan()).count() == (capacity_tokens - tokens) * heads * head_dim;
    let expected: Vec<f64> = rows.iter().map(|x| f64::from(*x)).collect();
    let error = if untouched { relative_error(&got, &expected) } else { f64::INFINITY };
    Ok(CheckReport::new(format!("restore_cache {:?}", ops.element), error, 0.0))
}
