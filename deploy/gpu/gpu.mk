# GPU verbs; the top Makefile includes this file.

.PHONY: check-kernels gpu-bundle

check-kernels: build ## compile every CUDA kernel for sm_80, sm_90a and sm_121 (no GPU needed)
	target/release/pd-prefill check-kernels --nvrtc-dir "$$(deploy/gpu/fetch_nvrtc.sh)" --arch sm_80,sm_90a,sm_121

gpu-bundle: ## folder for a GPU machine without Rust: target/gpu-bundle, at most 60 MiB
	@deploy/gpu/make_bundle.sh

# Where NVIDIA's compiler runs, the kernels are compiled in every test run.
ifeq ($(shell uname -s),Linux)
test: check-kernels
endif
