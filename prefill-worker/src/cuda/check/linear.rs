//! Linear layers against their reference: bias, accumulation into the f32 residual, packed weights, FP8.

use shared::weights::{FloatVec, HostTensor};

use super::super::CudaOps;
use super::super::elementwise::Format;
use super::CheckReport;
use super::reference;
use super::sample::{Sample, limit, relative_error, round};
use crate::ops::{Chunk, HostLinear, Ops, OpsError};

/// Tokens, output rows, input columns.
const SHAPES: [(usize, usize, usize); 4] =
    [(1, 64, 576), (77, 960, 576), (513, 1152, 1536), (600, 256, 4096)];

pub(super) fn check(ops: &mut CudaOps, seed: u64) -> Result<Vec<CheckReport>, OpsError> {
    let mut reports = Vec::new();
    for (i, shape) in SHAPES.into_iter().enumerate() {
        for (bias, accumulate) in [(false, false), (true, false), (false, true), (true, true)] {
            reports.push(check_dense(ops, shape, bias, accumulate, limit(ops.element), seed + i as u64)?);
        }
    }
    for (bits, group) in [(4, 32), (4, 64), (8, 32), (8, 64)] {
        for keep_packed in [false, true] {
            reports.push(check_affine(ops, bits, group, keep_packed, seed)?);
        }
    }
    Ok(reports)
}

/// E4M3 keeps 3 bits of mantissa: about 2.6 % per operand on normal data.
pub(super) fn check_fp8(ops: &mut CudaOps, seed: u64) -> Result<Vec<CheckReport>, OpsError> {
    SHAPES[1..]
        .iter()
        .flat_map(|shape| [false, true].map(|accumulate| (*shape, accumulate)))
        .map(|(shape, accumulate)| check_dense(ops, shape, false, accumulate, 0.045, seed))
        .collect()
}

fn check_dense(
    ops: &mut CudaOps,
    (tokens, rows, columns): (usize, usize, usize),
    bias: bool,
    accumulate: bool,
    limit: f64,
    seed: u64,
) -> Result<CheckReport, OpsError> {
    let mut sample = Sample::new(seed);
    let x = sample.normal(tokens * columns, 1.0, ops.element);
    let w = sample.normal(rows * columns, 1.0 / (columns as f32).sqrt(), ops.element);
    let b = sample.normal(rows, 1.0, ops.element);
    let expected = reference::linear(&x, &w, bias.then_some(&b), columns);
    let part = rows / 8 * 3;
    let tensor = |range: std::ops::Range<usize>| HostTensor::F32 {
        shape: vec![range.len(), columns],
        data: w[range.start * columns..range.end * columns].to_vec(),
    };
    let vector =
        |range: std::ops::Range<usize>| HostTensor::F32 { shape: vec![range.len()], data: b[range].to_vec() };
    let host = HostLinear {
        weights: vec![tensor(0..part), tensor(part..rows)],
        biases: if bias { vec![vector(0..part), vector(part..rows)] } else { Vec::new() },
    };
    let error = run(ops, host, &x, (tokens, rows, columns), accumulate, &expected)?;
    let name =
        format!("linear {tokens}x{rows}x{columns} bias={bias} accumulate={accumulate} {}", ops.describe());
    Ok(CheckReport::new(name, error, limit))
}

fn check_affine(
    ops: &mut CudaOps,
    bits: u8,
    group: usize,
    keep_packed: bool,
    seed: u64,
) -> Result<CheckReport, OpsError> {
    let (tokens, rows, columns) = (65, 128, 512);
    let mut sample = Sample::new(seed);
    let x = sample.normal(tokens * columns, 1.0, ops.element);
    let packed = sample.below(rows * columns * usize::from(bits) / 32, u32::MAX);
    let scales = sample.normal(rows * columns / group, 0.01, Format::F16);
    let biases = sample.normal(rows * columns / group, 0.1, Format::F16);
    let halves = |values: &[f32]| FloatVec::F16(values.iter().map(|x| half::f16::from_f32(*x)).collect());
    let tensor = HostTensor::Affine {
        shape: vec![rows, columns],
        bits,
        group_size: u32::try_from(group).unwrap_or(0),
        packed,
        scales: halves(&scales),
        biases: halves(&biases),
    };
    let w: Vec<f32> = tensor.to_f32().into_iter().map(|x| round(x, ops.element)).collect();
    let expected = reference::linear(&x, &w, None, columns);
    let before = std::mem::replace(&mut ops.options.keep_packed, keep_packed);
    let host = HostLinear { weights: vec![tensor], biases: Vec::new() };
    let error = run(ops, host, &x, (tokens, rows, columns), false, &expected);
    ops.options.keep_packed = before;
    let name = format!("linear from {bits}-bit groups of {group}, packed={keep_packed}, {:?}", ops.element);
    Ok(CheckReport::new(name, error?, limit(ops.element)))
}

fn run(
    ops: &mut CudaOps,
    host: HostLinear,
    x: &[f32],
    (tokens, rows, columns): (usize, usize, usize),
    accumulate: bool,
    expected: &[f64],
) -> Result<f64, OpsError> {
    let chunk = Chunk { offset_tokens: 0, tokens };
    let weight = ops.upload_linear(host)?;
    let mut input = ops.buffer(tokens, columns)?;
    ops.write(chunk, x, &mut input)?;
    let mut out = ops.buffer(tokens, rows)?;
    let mut expected = expected.to_vec();
    if accumulate {
        // What accumulates is the f32 residual, which starts as an embedding.
        let table = ops.random_embedding(16, rows, 7)?;
        ops.embed(&table, &vec![3; tokens], &mut out)?;
        let start = ops.read(chunk, &out)?;
        expected.iter_mut().zip(&start).for_each(|(e, s)| *e += f64::from(*s));
    }
    ops.linear(chunk, &weight, &input, accumulate, &mut out)?;
    Ok(relative_error(&ops.read(chunk, &out)?, &expected))
}
