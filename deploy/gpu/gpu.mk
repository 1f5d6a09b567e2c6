# GPU verbs; the top Makefile includes this file.

.PHONY: check-kernels gpu-bundle

check-kernels: ## compile every CUDA kernel for sm_80, sm_90a and sm_121 (no GPU needed)
	cargo run --quiet --release -p prefill-worker --bin pd-prefill -- check-kernels \
	  --nvrtc-dir "$$(deploy/gpu/fetch_nvrtc.sh)" --arch sm_80,sm_90a,sm_121

gpu-bundle: ## folder for a GPU machine without Rust: target/gpu-bundle, at most 60 MiB
	@deploy/gpu/make_bundle.sh

# The kernels are compiled in every test run.
test: check-kernels
