# pd-bridge: `make help` lists the verbs.

MODEL ?= .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
PORT  ?= 8000
PROMPT ?= shared/docs/ARCHITECTURE.md

.PHONY: help setup build run test bench-ttft bench-batch bench-gateway bench-soak bench-sampling bench-structured verify dist clean bench-bus bench-fleet bench-bus-faults fuzz-http

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## fetch the start model and, on Linux, MLX (once; no root)
	@deploy/setup/setup.sh

build: setup ## release binaries in target/release
	cargo build --release --workspace --bins

dist: ## pd-bridge to be installed, in target/dist: less processor time per answer, minutes more of building
	cargo build --profile dist -p gateway --bin pd-bridge

run: build ## all three processes on this machine: make run MODEL=… PORT=…
	@deploy/setup/run.sh "$(MODEL)" "$(PORT)"

test: build ## formatting, lints, unit and end-to-end tests
	@tests/clients/all.sh
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings
	cargo test --release --workspace --no-fail-fast

bench-ttft: build ## time to first token, native against bridged
	@deploy/bench/ttft.py --model "$(MODEL)" $(BENCH_ARGS)

bench-gateway: build dist ## this gateway beside its peers, same source, client and cores
	@deploy/bench/gateway/run.py $(BENCH_ARGS)

bench-soak: build ## ten minutes of clients that leave at random; memory must come back
	PD_TEST_SOAK_S=$(or $(SOAK_S),600) cargo test --release --workspace --test load soak -- --nocapture

bench-batch: build ## tokens per second at 1 to 16 requests at once: make bench-batch BENCH_ARGS=ROUNDS
	cargo run --quiet --release --example batch -- target/release/pd-decode "$(MODEL)" $(BENCH_ARGS)

bench-sampling: setup ## microseconds per token of the sampler and of constraint masks
	cargo run --release --example sampling -- "$(MODEL)"

bench-structured: build ## answers of the model to random JSON schemas: all must be valid
	PD_TEST_SCHEMAS=$(or $(SCHEMAS),200) cargo test --release --workspace --test structured -- --nocapture

bench-bus: build ## a command's round trip over NATS, and 100 MB of its output
	cargo run --release --example bench_bus
bench-fleet: build ## 1,000 simulated agents on one NATS server and one gateway
	PD_TEST_AGENTS=1000 PD_TEST_AGENTS_MEASURE_S=60 cargo test --release --workspace --test discovery -- --nocapture many_agents

bench-bus-faults: build ## bus, agents, workers and cables fail, 20 times each: make bench-bus-faults ROUNDS=…
	PD_TEST_BUS_FAULT_ROUNDS=$(or $(ROUNDS),20) PD_TEST_NATS_DOWN_S=30 cargo test --release --workspace --test bus_faults -- --nocapture --test-threads 1

verify: build ## is the bridged cache the decoder's own? make verify PROMPT=FILE
	target/release/pd-bridge verify --model "$(MODEL)" --prompt-file "$(PROMPT)" --cache-dtype f16

FUZZ_SECONDS ?= 600
FUZZ_SEED    ?= 1

fuzz-http: build ## mutated requests against the front door: make fuzz-http FUZZ_SECONDS=600 FUZZ_SEED=1
	PD_TEST_HTTP_FUZZ_MS=$$(($(FUZZ_SECONDS) * 1000)) PD_TEST_FUZZ_SEED=$(FUZZ_SEED) \
		cargo test --release --workspace --test http_fuzz -- --nocapture

clean: ## build products (keeps what setup fetched; remove .cache for that)
	cargo clean

include deploy/gpu/gpu.mk
