//! `pd-prefill bench-kernels`.

use clap::Args;

use super::{ToolError, say};
use crate::cuda::{AttentionShape, CudaOptions, Precision, Rate, open};

/// Arguments of `bench-kernels`.
#[derive(Debug, Args)]
pub struct BenchKernelsArgs {
    /// Prompt lengths for attention.
    #[arg(long, value_delimiter = ',', default_value = "2048,8192,32768,131072")]
    tokens: Vec<usize>,
    /// Largest number of queries at once; longer prompts measure their last chunk too.
    #[arg(long, default_value_t = 8192)]
    chunk: usize,
    /// Query heads, key heads, head dimension.
    #[arg(long, value_delimiter = ',', num_args = 3, default_value = "32,8,128")]
    heads: Vec<usize>,
    /// Products as tokens x rows x columns, `8192x28672x4096`; `+` at the end accumulates into f32.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8192x8192x8192,8192x6144x4096,8192x4096x4096+,8192x28672x4096,8192x4096x14336+"
    )]
    products: Vec<String>,
    /// Timed runs; the median counts.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &BenchKernelsArgs) -> Result<(), ToolError> {
    let &[n_heads, n_kv_heads, head_dim] = args.heads.as_slice() else {
        return Err(ToolError::Argument("--heads takes three numbers".into()));
    };
    for precision in [Precision::Bf16, Precision::Fp8] {
        let mut ops = open(&CudaOptions { precision, ..CudaOptions::default() })?;
        for product in &args.products {
            let (shape, accumulate) = parse_product(product)?;
            print(&ops.measure_product(shape, accumulate, args.runs)?, args.json)?;
        }
        if precision == Precision::Fp8 {
            break;
        }
        for &tokens in &args.tokens {
            let whole = AttentionShape { n_heads, n_kv_heads, head_dim, q_len: tokens, q_start: 0 };
            let last =
                AttentionShape { q_len: args.chunk, q_start: tokens.saturating_sub(args.chunk), ..whole };
            for shape in if tokens > args.chunk { vec![whole, last] } else { vec![whole] } {
                for rate in ops.measure_attention(shape, args.runs)? {
                    print(&rate, args.json)?;
                }
            }
        }
    }
    Ok(())
}

fn print(rate: &Rate, json: bool) -> Result<(), ToolError> {
    let line = if json {
        serde_json::to_string(rate)?
    } else {
        let (low, high) = rate.range_ms;
        format!("{:8.1} TFLOP/s {:10.3} ms ({low:.3}..{high:.3})  {}", rate.tflops, rate.median_ms, rate.name)
    };
    Ok(say(&line)?)
}

/// `TOKENSxROWSxCOLUMNS`, with `+` at the end to accumulate.
fn parse_product(text: &str) -> Result<((usize, usize, usize), bool), ToolError> {
    let (sizes, accumulate) = text.strip_suffix('+').map_or((text, false), |sizes| (sizes, true));
    let numbers: Vec<usize> = sizes.split('x').filter_map(|n| n.parse().ok()).collect();
    match numbers.as_slice() {
        &[tokens, rows, columns] => Ok(((tokens, rows, columns), accumulate)),
        _ => Err(ToolError::Argument(format!("{text} is not a product such as 8192x4096x4096"))),
    }
}

#[cfg(test)]
mod tests {
    use super::parse_product;

    #[test]
    fn products_are_read() {
        assert_eq!(parse_product("1x2x3").unwrap(), ((1, 2, 3), false));
        assert_eq!(parse_product("8192x4096x4096+").unwrap(), ((8192, 4096, 4096), true));
        assert!(parse_product("8192x4096").is_err());
    }
}
