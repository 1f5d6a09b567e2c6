//! The kernel sources and the options each is compiled with. Plain data, no CUDA calls.

use super::Precision;

const COMMON: &str = include_str!("kernels/common.cuh");
const HOPPER: &str = include_str!("kernels/hopper.cuh");
const ELEMENTWISE: &str = include_str!("kernels/elementwise.cu");
const FP8: &str = include_str!("kernels/fp8.cu");
const ATTENTION_MMA: &str = include_str!("kernels/attention_mma.cu");
const ATTENTION_WGMMA: &str = include_str!("kernels/attention_wgmma.cu");

/// One translation unit with its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unit {
    /// File name, for compiler messages.
    pub(super) name: &'static str,
    /// Shared code and the file itself.
    parts: &'static [(&'static str, &'static str)],
    /// `NAME=VALUE` or `NAME`.
    pub(super) defines: Vec<String>,
}

impl Unit {
    /// Everything between the matrix products.
    pub(super) fn elementwise(precision: Precision) -> Self {
        Self {
            name: "elementwise.cu",
            parts: &[("common.cuh", COMMON), ("elementwise.cu", ELEMENTWISE)],
            defines: vec![element(precision)],
        }
    }

    /// Casts to FP8.
    pub(super) fn fp8() -> Self {
        Self {
            name: "fp8.cu",
            parts: &[("common.cuh", COMMON), ("fp8.cu", FP8)],
            defines: vec!["ELEM_BF16".into()],
        }
    }

    /// Attention on `mma.sync`.
    pub(super) fn attention_mma(precision: Precision, head_dim: usize, tile: MmaTile) -> Self {
        Self {
            name: "attention_mma.cu",
            parts: &[("common.cuh", COMMON), ("attention_mma.cu", ATTENTION_MMA)],
            defines: vec![
                element(precision),
                format!("HEAD_DIM={head_dim}"),
                format!("TILE_M={}", tile.m),
                format!("TILE_N={}", tile.n),
                format!("WARPS={}", tile.warps),
                format!("WARP_TILES={}", tile.m / (16 * tile.warps)),
                format!("MIN_BLOCKS={}", tile.min_blocks),
            ],
        }
    }

    /// Attention on warp groups (sm_90a).
    pub(super) fn attention_wgmma(precision: Precision, head_dim: usize, pingpong: bool) -> Self {
        Self {
            name: "attention_wgmma.cu",
            parts: &[("common.cuh", COMMON), ("hopper.cuh", HOPPER), ("attention_wgmma.cu", ATTENTION_WGMMA)],
            defines: vec![
                element(precision),
                format!("HEAD_DIM={head_dim}"),
                format!("PINGPONG={}", u8::from(pingpong)),
            ],
        }
    }

    /// The whole text, with markers so that messages name the right file.
    pub(super) fn source(&self) -> String {
        self.parts.iter().map(|(name, text)| format!("#line 1 \"{name}\"\n{text}\n")).collect()
    }

    /// NVRTC options for an architecture such as `sm_90a`.
    pub(super) fn options(&self, architecture: &str) -> Vec<String> {
        let mut options: Vec<String> =
            [format!("--gpu-architecture={architecture}"), "--std=c++17".into(), "--use_fast_math".into()]
                .into();
        options.extend(self.defines.iter().map(|define| format!("-D{define}")));
        options
    }
}

/// Tile of the `mma.sync` attention kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct MmaTile {
    /// Query rows per block.
    pub(super) m: usize,
    /// Keys per step.
    pub(super) n: usize,
    /// Warps per block; each takes `m / warps` rows.
    pub(super) warps: usize,
    /// Blocks per multiprocessor the register budget is planned for.
    pub(super) min_blocks: usize,
}

impl MmaTile {
    /// Tile for a head dimension where a block may use `shared_bytes` of shared memory.
    ///
    /// 32 rows per warp let each loaded key and value fragment serve two products; head dimension 256 has registers
    /// for 16 rows only.
    pub(super) fn choose(head_dim: usize, shared_bytes: usize) -> Self {
        let wide = |n| {
            if head_dim > 128 {
                Self { m: 64, n: n / 2, warps: 4, min_blocks: 2 }
            } else {
                Self { m: 128, n, warps: 4, min_blocks: 2 }
            }
        };
        let tile = wide(64);
        if tile.shared_bytes(head_dim) <= shared_bytes { tile } else { Self { min_blocks: 1, ..wide(32) } }
    }

    /// Dynamic shared memory of a block.
    pub(super) fn shared_bytes(&self, head_dim: usize) -> usize {
        (self.m + 4 * self.n) * (head_dim + 8) * 2
    }
}

/// Head dimensions with an attention kernel.
pub(super) const HEAD_DIMS: [usize; 4] = [64, 96, 128, 256];

/// Every unit that can run on an architecture; what a compile check has to cover.
pub(super) fn all_units(architecture: &str) -> Vec<Unit> {
    let mut units = if has_fp8(architecture) { vec![Unit::fp8()] } else { Vec::new() };
    for precision in [Precision::Bf16, Precision::F16] {
        units.push(Unit::elementwise(precision));
        for head_dim in HEAD_DIMS {
            for shared_bytes in [99 << 10, 227 << 10] {
                let unit = Unit::attention_mma(precision, head_dim, MmaTile::choose(head_dim, shared_bytes));
                if !units.contains(&unit) {
                    units.push(unit);
                }
            }
        }
        if architecture == "sm_90a" {
            for (head_dim, pingpong) in [(64, false), (64, true), (128, false), (128, true)] {
                units.push(Unit::attention_wgmma(precision, head_dim, pingpong));
            }
        }
    }
    units
}

/// FP8 conversions exist from sm_89 on.
fn has_fp8(architecture: &str) -> bool {
    let number: String = architecture.chars().filter(char::is_ascii_digit).collect();
    number.parse::<u32>().is_ok_and(|number| number >= 89)
}

fn element(precision: Precision) -> String {
    match precision {
        Precision::Bf16 | Precision::Fp8 => "ELEM_BF16".into(),
        Precision::F16 => "ELEM_F16".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_small_and_large_shared_memory() {
        for head_dim in HEAD_DIMS {
            for limit in [99 << 10, 163 << 10, 227 << 10] {
                assert!(
                    MmaTile::choose(head_dim, limit).shared_bytes(head_dim) <= limit,
                    "{head_dim} {limit}"
                );
            }
        }
    }

    #[test]
    fn warp_group_kernels_exist_for_hopper_only() {
        let has = |arch| all_units(arch).iter().any(|unit| unit.name == "attention_wgmma.cu");
        assert!(has("sm_90a"));
        assert!(!has("sm_80") && !has("sm_121"));
    }

    #[test]
    fn fp8_starts_at_ada() {
        assert_eq!(
            ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_121"].map(has_fp8),
            [false, false, true, true, true]
        );
    }
}
