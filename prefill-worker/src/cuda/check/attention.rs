//! Attention against its reference: odd lengths, one query, chunk borders, windows, both precisions, every variant.

use super::super::CudaOps;
use super::super::attention::{Problem, Variant};
use super::super::sources::{HEAD_DIMS, MmaTile};
use super::CheckReport;
use super::reference::{self, Case};
use super::sample::{Sample, download, encode, limit, poisoned, relative_error, upload};
use crate::ops::OpsError;

pub(super) fn check(ops: &mut CudaOps, seed: u64, quick: bool) -> Result<Vec<CheckReport>, OpsError> {
    let mut reports = Vec::new();
    for head_dim in HEAD_DIMS {
        for (i, case) in cases(head_dim, quick).into_iter().enumerate() {
            reports.extend(check_case(ops, case, seed + i as u64)?);
        }
    }
    Ok(reports)
}

fn cases(head_dim: usize, quick: bool) -> Vec<Case> {
    let case = |n_heads, n_kv_heads, q_len, q_start, window| Case {
        head_dim,
        n_heads,
        n_kv_heads,
        q_len,
        q_start,
        window,
    };
    let mut cases = vec![
        case(2, 1, 1, 0, 0),
        case(3, 1, 1, 300, 0),
        case(4, 2, 77, 0, 0),
        case(2, 2, 129, 255, 0),
        case(2, 1, 130, 200, 100),
    ];
    if !quick {
        cases.extend([
            case(4, 2, 128, 128, 0),
            case(4, 1, 300, 1000, 0),
            case(2, 1, 257, 511, 1),
            case(2, 1, 200, 0, 64),
            case(2, 1, 1025, 3071, 0),
            case(2, 1, 512, 2048, 777),
        ]);
    }
    cases
}

fn variants(ops: &CudaOps, head_dim: usize) -> Vec<Variant> {
    let facts = ops.facts();
    let mut variants = vec![Variant::Mma(MmaTile::choose(head_dim, facts.shared_bytes_per_block))];
    let small = Variant::Mma(MmaTile::choose(head_dim, 99 << 10));
    if !variants.contains(&small) {
        variants.push(small);
    }
    if facts.capability == (9, 0) && matches!(head_dim, 64 | 128) {
        variants.extend([false, true].map(|pingpong| Variant::Wgmma { pingpong }));
    }
    variants
}

fn check_case(ops: &mut CudaOps, case: Case, seed: u64) -> Result<Vec<CheckReport>, OpsError> {
    let Case { head_dim, n_heads, n_kv_heads, q_len, q_start, window } = case;
    let format = ops.element;
    let mut sample = Sample::new(seed);
    let kv_len = q_start + q_len;
    // Planes are longer than what is valid, and the rest is NaN: nothing of it may be seen.
    let capacity_tokens = kv_len + 37;
    let row_columns = (n_heads + 2 * n_kv_heads) * head_dim;
    let q = sample.normal(q_len * n_heads * head_dim, 1.5, format);
    let [k, v] = [1.5, 1.0].map(|deviation| sample.normal(n_kv_heads * kv_len * head_dim, deviation, format));
    let expected = reference::attention(case, &q, &k, &v);

    let mut rows = vec![f32::NAN; q_len * row_columns];
    for (row, values) in rows.chunks_mut(row_columns).zip(q.chunks(n_heads * head_dim)) {
        row[..values.len()].copy_from_slice(values);
    }
    let device_q = upload(ops, &rows, format)?;
    let mut planes = Vec::new();
    for part in [&k, &v] {
        let memory = poisoned(ops, n_kv_heads * capacity_tokens * head_dim, format)?;
        for (h, plane) in part.chunks(kv_len * head_dim).enumerate() {
            memory.write(h * capacity_tokens * head_dim * 2, &encode(plane, format))?;
        }
        planes.push(memory);
    }
    let mut reports = Vec::new();
    for variant in variants(ops, head_dim) {
        let out = poisoned(ops, q_len * n_heads * head_dim, format)?;
        let problem = Problem {
            q: device_q.address(),
            q_row_stride: row_columns,
            k: planes[0].address(),
            v: planes[1].address(),
            out: out.address(),
            q_len,
            q_start,
            n_heads,
            n_kv_heads,
            head_dim,
            capacity_tokens,
            window,
        };
        ops.attention.run_variant(variant, &problem)?;
        let error = relative_error(&download(&out, expected.len(), format)?, &expected);
        let name = format!(
            "attention {variant:?} {format:?} d={head_dim} heads={n_heads}/{n_kv_heads} q={q_len}+{q_start} window={window}"
        );
        reports.push(CheckReport::new(name, error, limit(format)));
    }
    Ok(reports)
}
