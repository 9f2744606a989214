# Side by side in one process: ours, the peers, and what bounds them. reports/BENCHMARKS.md.
#   make bench [SECTIONS="loss mx"] [RUNS=7]
#   make bench-gpu                            on CUDA; without a GPU it says so and writes nothing
RUNS ?= 7
SECTIONS ?=
BENCH_THREADS := $(shell nproc)

.PHONY: bench bench-gpu
bench: peers
	OMP_NUM_THREADS=$(BENCH_THREADS) $(PEERS)/bin/python -m benchmarks.run $(SECTIONS) --runs $(RUNS)

bench-gpu:
	$(PYTHON) -m benchmarks.gpu --runs $(RUNS)
