//! The forward and the reconstruction against caches that mlx-lm made (`data/make_golden.py`).

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;

use prefill_worker::cpu::CpuOps;
use prefill_worker::forward::{Forward, Sequence, Target};
use prefill_worker::ops::{HostLinear, Ops};
use prefill_worker::reconstruct::FullKv;
use shared::layout::Dtype;
use shared::weights::TensorSource;
use support::{Collect, Golden, relative_error};
use tokio_util::sync::CancellationToken;

const CASES: [&str; 2] = ["tiny_plain", "tiny_biased_llama3"];

fn own(forward: &mut Forward<CpuOps>, golden: &Golden) -> FullKv<CpuOps> {
    let heads = forward.heads();
    FullKv::new(&mut forward.ops, heads, &golden.inv_freq, vec![None; golden.spec.n_layers]).unwrap()
}

fn target(golden: &Golden, sink: &Arc<Collect>, block_tokens: usize, dtype: Dtype) -> Target {
    Target {
        sink: sink.clone(),
        tokens: 0..golden.tokens.len(),
        block_tokens,
        dtypes: vec![dtype; golden.spec.n_layers].into(),
    }
}

fn read(
    forward: &mut Forward<CpuOps>,
    sequence: &mut Sequence<CpuOps>,
    tokens: &[u32],
    reconstruct: &FullKv<CpuOps>,
    target: Option<&Target>,
) {
    for chunk in tokens.chunks(forward.chunk_tokens()) {
        forward.chunk(sequence, chunk, reconstruct, target, &CancellationToken::new()).unwrap();
    }
}

fn check(golden: &Golden, sink: &Collect, dtype: Dtype, tolerance: f64) {
    let (tokens, spec) = (golden.tokens.len(), &golden.spec);
    for layer in 0..spec.n_layers {
        for (keys, what) in [(true, "k"), (false, "v")] {
            let made = sink.array(layer, keys, tokens, spec.n_kv_heads, spec.head_dim, dtype);
            let error = relative_error(&made, golden.recorded(layer, what));
            assert!(error < tolerance, "{} layer {layer} {what}: {error:e}", spec.name);
        }
    }
}

#[test]
fn every_array_is_mlx_lms_whatever_the_chunk_and_block() {
    for case in CASES {
        let golden = Golden::open(case);
        for (chunk, block) in [(128, 256), (83, 16), (16, 16), (7, 5), (1, 32)] {
            let mut forward = golden.forward(chunk);
            let reconstruct = own(&mut forward, &golden);
            let sink = Collect::new();
            let mut sequence = forward.begin(golden.tokens.len(), &reconstruct).unwrap();
            let target = target(&golden, &sink, block, Dtype::F32);
            read(&mut forward, &mut sequence, &golden.tokens, &reconstruct, Some(&target));
            check(&golden, &sink, Dtype::F32, 3e-6);
        }
    }
}

#[test]
fn half_precision_is_rounded_once() {
    for (dtype, tolerance) in [(Dtype::F16, 4e-4), (Dtype::Bf16, 3e-3)] {
        let golden = Golden::open(CASES[0]);
        let mut forward = golden.forward(32);
        let reconstruct = own(&mut forward, &golden);
        let sink = Collect::new();
        let mut sequence = forward.begin(golden.tokens.len(), &reconstruct).unwrap();
        let target = target(&golden, &sink, 32, dtype);
        read(&mut forward, &mut sequence, &golden.tokens, &reconstruct, Some(&target));
        check(&golden, &sink, dtype, tolerance);
    }
}

#[test]
fn reconstruction_from_the_decoders_inputs_is_the_decoders_cache() {
    for case in CASES {
        let golden = Golden::open(case);
        let mut forward = golden.forward(20);
        let reconstruct = own(&mut forward, &golden);
        let sink = Collect::new();
        let tokens = golden.tokens.len();
        let mut sequence = forward.begin(tokens, &reconstruct).unwrap();
        let target = target(&golden, &sink, tokens, Dtype::F32);
        for layer in 0..golden.spec.n_layers {
            let input = golden.recorded(layer, "attn_input");
            forward.reconstruct_layer(&mut sequence, layer, input, &reconstruct, &target).unwrap();
        }
        check(&golden, &sink, Dtype::F32, 5e-7);
    }
}

#[test]
fn inverse_frequencies_are_mlxs() {
    for case in CASES {
        let golden = Golden::open(case);
        let ours = prefill_worker::model::inverse_frequencies(&golden.spec.rope, golden.spec.head_dim);
        for (a, b) in ours.iter().zip(&golden.inv_freq) {
            assert!((a - b).abs() <= 1e-6 * b, "{a} {b}");
        }
    }
}

/// Worker and decoder have different projections: the worker's forward runs on its own, the cache is the decoder's.
#[test]
fn a_decoders_other_projections_make_its_cache() {
    let golden = Golden::open(CASES[1]);
    let ours = golden.with_other_projections(0.1);
    let mut forward = ours.forward(16);
    let heads = forward.heads();
    let projections = (0..golden.spec.n_layers).map(|layer| {
        let load = |name: &str| golden.load(&format!("model.layers.{layer}.self_attn.{name}")).unwrap();
        let linear = HostLinear {
            weights: vec![load("k_proj.weight"), load("v_proj.weight")],
            biases: vec![load("k_proj.bias"), load("v_proj.bias")],
        };
        // The first layer stays our own, so that both ways are taken in one sequence.
        (layer > 0).then(|| Arc::new(forward.ops.upload_linear(linear).unwrap()))
    });
    let projections: Vec<_> = projections.collect();
    let reconstruct = FullKv::new(&mut forward.ops, heads, &golden.inv_freq, projections).unwrap();
    assert_eq!(reconstruct.foreign_layers(), golden.spec.n_layers - 1);
    let sink = Collect::new();
    let mut sequence = forward.begin(golden.tokens.len(), &reconstruct).unwrap();
    let target = target(&golden, &sink, 16, Dtype::F32);
    read(&mut forward, &mut sequence, &golden.tokens, &reconstruct, Some(&target));
    check(&golden, &sink, Dtype::F32, 3e-6);
}

#[test]
fn a_cancelled_chunk_can_be_read_again() {
    let golden = Golden::open(CASES[0]);
    let mut forward = golden.forward(83);
    let reconstruct = own(&mut forward, &golden);
    let sink = Collect::new();
    let mut sequence = forward.begin(golden.tokens.len(), &reconstruct).unwrap();
    let cancel = CancellationToken::new();
    cancel.cancel();
    assert!(forward.chunk(&mut sequence, &golden.tokens, &reconstruct, None, &cancel).is_err());
    let target = target(&golden, &sink, 256, Dtype::F32);
    read(&mut forward, &mut sequence, &golden.tokens, &reconstruct, Some(&target));
    check(&golden, &sink, Dtype::F32, 3e-6);
}
