//! In which order this device's matrix product adds up its terms.
//!
//! A BLAS on a CPU computes every element of `x Wᵀ` as a few *runs* over the inner dimension: within a run, fused
//! multiply-adds in order from zero; then the runs are added up in order. Where the runs are cut depends on the
//! library and the processor (OpenBLAS: half of what is left once less than two of its blocks are left). The cuts
//! are measured here, not assumed: a small product is compared, bit for bit, with candidates computed term by term.
//! A prefill worker that follows them gets the decoder's projections to the last bit.

use mlx_rs::{Array, ops};

use super::MlxError;
use super::host::{array_to_f32, dim};

/// Rows of the probe; enough for a library to take its ordinary path, not the one for tiny products.
const ROWS: usize = 64;
/// Elements compared.
const PROBES: usize = 48;

/// Lengths of the runs for products over `inner` terms with `columns` outputs, or empty if none of the candidates
/// is what this device does (a GPU's tree sums, or precision other than f32).
///
/// # Errors
/// MLX's own failures.
pub(super) fn runs(inner: usize, columns: usize) -> Result<Vec<u32>, MlxError> {
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    let x: Vec<f32> = (0..ROWS * inner).map(|_| noise.next()).collect();
    let w: Vec<f32> = (0..columns * inner).map(|_| noise.next()).collect();
    let (rows, inner_dim, columns_dim) = (dim("rows", ROWS)?, dim("inner", inner)?, dim("columns", columns)?);
    let weight = Array::from_slice(&w, &[columns_dim, inner_dim]);
    let product = ops::matmul(Array::from_slice(&x, &[1, rows, inner_dim]), weight.t())?;
    let product = array_to_f32(&product)?;
    let fits = |runs: &[usize]| {
        (0..PROBES).all(|i| {
            let (row, column) = ((i * 29) % ROWS, (i * 53) % columns);
            let sum = in_runs(&x[row * inner..][..inner], &w[column * inner..][..inner], runs);
            sum.to_bits() == product[row * columns + column].to_bits()
        })
    };
    let found = candidates(inner).into_iter().find(|runs| fits(runs)).unwrap_or_default();
    Ok(found.into_iter().map(|n| u32::try_from(n).unwrap_or(u32::MAX)).collect())
}

/// The sum as a library with these runs computes it.
fn in_runs(x: &[f32], w: &[f32], runs: &[usize]) -> f32 {
    let (mut start, mut total) = (0, None);
    for &n in runs {
        let terms = x[start..start + n].iter().zip(&w[start..start + n]);
        let sum = terms.fold(0.0f32, |acc, (a, b)| a.mul_add(*b, acc));
        total = Some(total.map_or(sum, |t: f32| t + sum));
        start += n;
    }
    total.unwrap_or(0.0)
}

/// One run, fixed blocks, and OpenBLAS's rule for every block size and rounding it uses.
fn candidates(inner: usize) -> Vec<Vec<usize>> {
    let mut all = vec![vec![inner]];
    for block in (64..=2048).step_by(16) {
        all.push(cut(inner, |left| left.min(block)));
        for round in [1, 2, 4, 8, 16, 24, 32, 64] {
            let half = |left: usize| left.div_ceil(2).next_multiple_of(round);
            all.push(cut(inner, |left| match left {
                l if l >= 2 * block => block,
                l if l > block => half(l).min(l),
                l => l,
            }));
        }
    }
    all.sort();
    all.dedup();
    all
}

fn cut(inner: usize, next: impl Fn(usize) -> usize) -> Vec<usize> {
    let (mut left, mut runs) = (inner, Vec::new());
    while left > 0 {
        let n = next(left);
        runs.push(n);
        left -= n;
    }
    runs
}

/// Uniform values in −1..1 from a 64-bit xorshift; any fixed noise will do.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_cover_the_inner_dimension_once() {
        for inner in [1, 64, 576, 4096] {
            let all = candidates(inner);
            assert!(all.iter().all(|runs| runs.iter().sum::<usize>() == inner && !runs.contains(&0)));
            assert!(all.contains(&vec![inner]));
        }
        assert!(candidates(576).contains(&vec![288, 288]));
    }

    #[test]
    fn what_is_found_is_what_the_device_does() {
        // Whatever BLAS is linked: a found order holds for other numbers and more rows, too.
        let (inner, columns, rows) = (576, 192, 200);
        let runs: Vec<usize> = runs(inner, columns).unwrap().into_iter().map(|n| n as usize).collect();
        if runs.is_empty() {
            return;
        }
        let mut noise = Noise(42);
        let x: Vec<f32> = (0..rows * inner).map(|_| noise.next()).collect();
        let w: Vec<f32> = (0..columns * inner).map(|_| noise.next()).collect();
        let weight = Array::from_slice(&w, &[columns as i32, inner as i32]);
        let product = ops::matmul(Array::from_slice(&x, &[rows as i32, inner as i32]), weight.t()).unwrap();
        let product = array_to_f32(&product).unwrap();
        for (row, x) in x.chunks_exact(inner).enumerate() {
            for (column, w) in w.chunks_exact(inner).enumerate() {
                assert_eq!(in_runs(x, w, &runs).to_bits(), product[row * columns + column].to_bits());
            }
        }
    }

    /// What `deploy/setup/blas_forward.cpp` promises: one order of summation for every shape, so that a row does not
    /// depend on its neighbours, nor an element on how the product is cut into pieces for threads.
    #[test]
    #[cfg(target_os = "linux")]
    fn every_shape_is_summed_in_the_same_runs() {
        let mut noise = Noise(3);
        let mut random = |n: usize| (noise.next().abs() * n as f32) as usize % n;
        let mut shapes: Vec<[usize; 3]> =
            (0..40).map(|_| [1 + random(40), 1 + random(150), 1 + random(700)]).collect();
        shapes.extend([
            [1, 576, 576],
            [11, 64, 576],
            [5, 192, 576],
            [8, 192, 576],
            [13, 33, 2500],
            [64, 65, 1024],
        ]);
        let mut noise = Noise(4);
        for [rows, columns, inner] in shapes {
            let numbers =
                |n: usize, noise: &mut Noise| -> Vec<f32> { (0..n).map(|_| noise.next()).collect() };
            let (x, w) = (numbers(rows * inner, &mut noise), numbers(columns * inner, &mut noise));
            let runs = cut(inner, |left| left.min(1024));
            let expected: Vec<u32> = x
                .chunks_exact(inner)
                .flat_map(|x| w.chunks_exact(inner).map(|w| in_runs(x, w, &runs).to_bits()))
                .collect();
            let left = Array::from_slice(&x, &[rows as i32, inner as i32]);
            let weight = Array::from_slice(&w, &[columns as i32, inner as i32]);
            let bits = |product: &Array| -> Vec<u32> {
                array_to_f32(product).unwrap().into_iter().map(f32::to_bits).collect()
            };
            let by_rows = bits(&ops::matmul(&left, weight.t()).unwrap());
            assert!(by_rows == expected, "{rows} rows, {columns} columns stored as rows, {inner} terms");
            let turned = weight.t().contiguous().unwrap();
            let by_columns = bits(&ops::matmul(&left, &turned).unwrap());
            assert!(
                by_columns == expected,
                "{rows} rows, {columns} columns stored as columns, {inner} terms"
            );
            // With a bias, a scale and an old result; and the left side turned.
            let bias = Array::from_slice(&vec![0.5_f32; columns], &[columns as i32]);
            let biased = bits(&ops::addmm(&bias, &left, weight.t(), None, None).unwrap());
            let alone =
                ops::addmm(&bias, left.t().contiguous().unwrap().t(), weight.t(), None, None).unwrap();
            assert!(biased == bits(&alone), "{rows} {columns} {inner} with a bias");
        }
    }
}
