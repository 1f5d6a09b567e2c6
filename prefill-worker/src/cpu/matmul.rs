//! Matrix products over row-major slices.

use std::ops::Range;

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};

/// A row-major matrix inside a slice; rows may be further apart than they are long.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    view: MatRef<'a, f32>,
}

impl<'a> Matrix<'a> {
    /// `rows x columns` elements, a row every `columns` elements.
    pub(super) fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        Self { view: MatRef::from_row_major_slice(&data[..rows * columns], rows, columns) }
    }

    /// Some of the columns, without moving anything.
    pub(super) fn columns(self, columns: Range<usize>) -> Self {
        Self { view: self.view.subcols(columns.start, columns.len()) }
    }

    /// The transpose, without moving anything.
    pub(super) fn transposed(self) -> Self {
        Self { view: self.view.transpose() }
    }
}

/// Columns of a task are a multiple of this: the widest kernel of the library covers 96, 64 divides most models' widths.
const COLUMN_STEP: usize = 64;
/// Tasks per thread: enough for one that lags (because something else runs on its core) to give some away.
const TASKS_PER_THREAD: usize = 3;

/// `out = a b`, or `out += a b` when `accumulate`; `out` is row-major and contiguous.
///
/// With more than one thread the columns are cut into tasks for the current rayon pool. The library's own threading meets
/// at spinning barriers, which is slow as soon as a core is shared with anything else.
pub(super) fn product(out: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, accumulate: bool, threads: usize) {
    let (rows, columns) = (a.view.nrows(), b.view.ncols());
    let out = MatMut::from_row_major_slice_mut(&mut out[..rows * columns], rows, columns);
    let accum = if accumulate { Accum::Add } else { Accum::Replace };
    let tasks = if threads > 1 { threads * TASKS_PER_THREAD } else { 1 };
    let task_columns = columns.div_ceil(tasks).next_multiple_of(COLUMN_STEP);
    by_columns(out, accum, a.view, b.view, task_columns);
}

/// Halves the columns until a half is one task.
fn by_columns(
    out: MatMut<'_, f32>,
    accum: Accum,
    a: MatRef<'_, f32>,
    b: MatRef<'_, f32>,
    task_columns: usize,
) {
    let tasks = out.ncols().div_ceil(task_columns);
    if tasks <= 1 {
        matmul(out, accum, a, b, 1.0, Par::Seq);
        return;
    }
    let cut = tasks / 2 * task_columns;
    let (out_left, out_right) = out.split_at_col_mut(cut);
    let (left, right) = b.split_at_col(cut);
    rayon::join(
        || by_columns(out_left, accum, a, left, task_columns),
        || by_columns(out_right, accum, a, right, task_columns),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(a: &[f32], w: &[f32], m: usize, n: usize, k: usize) -> Vec<f32> {
        let dot = |i: usize, j: usize| {
            (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(w[j * k + l])).sum::<f64>() as f32
        };
        (0..m * n).map(|ij| dot(ij / n, ij % n)).collect()
    }

    /// A decoder's order of summation can be followed only if a product over one run is a chain of fused
    /// multiply-adds in order.
    #[test]
    fn one_run_is_summed_in_order_to_the_last_bit() {
        for (m, n, k) in [(512, 960, 288), (27, 192, 288), (64, 1536, 320)] {
            let noise = |i: usize| ((i * 2_654_435_761) % 1_000_003) as f32 / 500_001.5 - 1.0;
            let a: Vec<f32> = (0..m * k).map(noise).collect();
            let w: Vec<f32> = (0..n * k).map(|i| noise(i + 77)).collect();
            let mut out = vec![f32::NAN; m * n];
            product(&mut out, Matrix::new(&a, m, k), Matrix::new(&w, n, k).transposed(), false, 2);
            for (i, got) in out.iter().enumerate().step_by(7) {
                let terms = a[i / n * k..][..k].iter().zip(&w[i % n * k..][..k]);
                let want = terms.fold(0.0f32, |sum, (x, y)| x.mul_add(*y, sum));
                assert_eq!(got.to_bits(), want.to_bits(), "{m}x{n}x{k} at {i}");
            }
        }
    }

    #[test]
    fn agrees_with_the_definition_at_odd_sizes() {
        for (m, n, k) in [(1, 1, 1), (7, 33, 19), (65, 130, 64), (3, 257, 576)] {
            let a: Vec<f32> = (0..m * k).map(|i| ((i * 7919) % 101) as f32 / 50.0 - 1.0).collect();
            let w: Vec<f32> = (0..n * k).map(|i| ((i * 104_729) % 103) as f32 / 51.0 - 1.0).collect();
            let expected = naive(&a, &w, m, n, k);
            let mut out = vec![f32::NAN; m * n];
            let (lhs, rhs) = (Matrix::new(&a, m, k), Matrix::new(&w, n, k).transposed());
            product(&mut out, lhs, rhs, false, 2);
            product(&mut out, lhs, rhs, true, 1);
            for (got, want) in out.iter().zip(&expected) {
                assert!((got - 2.0 * want).abs() < 1e-4 * (1.0 + want.abs()), "{got} {want}");
            }
        }
    }
}
