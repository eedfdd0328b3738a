#!/bin/sh
# Measurements of docs/lab/timings-*.md on a GPU, one JSON file each:
#     benchmarks/gpu.sh [attention|rebuilt|once|ablations|engine|prefill|compress|replay]...   (default: all)
#     benchmarks/gpu.sh uneven      of the ablations, ZACK's KE on unequal heads and Palu's shared latents
#     benchmarks/gpu.sh agents documents composites    of docs/lab/vllm.md and docs/lab/composites.md
#     benchmarks/gpu.sh suites      published benchmarks of MODEL, with questions of TASKS, on DEVICES (0), BESIDE (4) settings each; maps in FOLDER (made)
#     benchmarks/gpu.sh tools       MODEL as an agent, served on PORT (8123)
# RESULTS: folder of the files (benchmarks/results); PYTHON: of the scripts (python).
# `pip install flashinfer-python` adds that baseline. Then: python tools/performance_page.py
set -e
results=${RESULTS:-benchmarks/results}
python="${PYTHON:-python}"

attention() {
    $python benchmarks/bench_attention.py --batch 64 --tokens 8192 --rounds 10 --json "$results/attention-8b-64x8192.json" \
        --variants bf16-full,bf16-half,bf16-half-ragged,int8-half,int4-half,int4-half-evict8 \
        --baselines sdpa-flash,sdpa-cudnn,sdpa-cudnn-folded,flashinfer,flex
    $python benchmarks/bench_attention.py --batch 1 --tokens 65536 --rounds 10 --json "$results/attention-8b-1x65536.json" \
        --variants bf16-full,bf16-half,int8-half,int4-half,int4-half-evict8 --baselines sdpa-flash,sdpa-cudnn,flashinfer
    $python benchmarks/bench_attention.py --shape llama-2-7b-norope --batch 1 --tokens 65536 --rounds 10 \
        --json "$results/attention-7b-norope.json" --variants bf16-half,int4-half --baselines sdpa-cudnn
}

rebuilt() {
    $python benchmarks/bench_attention.py --batch 64 --tokens 8192 --rounds 10 --json "$results/rebuilt-8b-64x8192.json" \
        --variants lean-31,lean-35,small-10,small-25 --baselines sdpa-cudnn
    $python benchmarks/bench_attention.py --shape llama-2-7b --batch 1 --tokens 65536 --rounds 10 --json "$results/rebuilt-7b-1x65536.json" \
        --variants palu-g1,palu-g4,palu-g32 --baselines sdpa-cudnn
    $python benchmarks/bench_decode.py --shape llama-2-7b --batch 1 --tokens 65536 --steps 4 --json "$results/rebuilt-decode-7b.json" \
        --variants bf16-full,palu-g1,palu-g4,palu-g32
}

once() {
    $python benchmarks/bench_attention.py --batch 64 --tokens 8192 --layers 2 --rounds 5 --json "$results/attention-once-8b.json" --baselines sdpa-cudnn \
        --variants lean-6x,lean-6x-odd,lean-8x,lean-6x-32,lean-6x-odd-32,lean-8x-32,lean-4x-odd,swift-4x-odd,swift-4.6x-odd,swift-int4
    $python benchmarks/bench_decode.py --batch 64,8,1 --tokens 8192 --steps 8 --json "$results/decode-tiers-once-8b.json" --prefill \
        --variants bf16-full,swift-int4,lean-6x,int8-full,lean-8x,swift-4.6x-odd,lean-6x-odd,swift-5.9x-odd,swift-4x-odd,lean-4x-odd
    $python benchmarks/bench_decode.py --batch 256 --tokens 2048 --steps 8 --json "$results/decode-256-8b.json" \
        --variants bf16-full,swift-int4,lean-6x,int8-full
}

ablations() {
    $python benchmarks/bench_attention.py --batch 1,64 --tokens 8192 --rounds 10 --json "$results/ablations-8b.json" --baselines sdpa-cudnn \
        --variants bf16-half,bf16-half-decompressed,bf16-half-longest,bf16-half-whole,bf16-half-pareto,bf16-half-pareto-longest,bf16-half-pareto-whole
    $python benchmarks/bench_decode.py --batch 1,64 --tokens 8192 --steps 10 --json "$results/ablations-decode-8b.json" --prefill \
        --variants bf16-half,bf16-half-online,bf16-half-ragged
    uneven
}

uneven() {
    heads=bf16-half-uneven
    $python benchmarks/bench_attention.py --batch 1,16,64 --tokens 8192 --rounds 5 --json "$results/ablations-uneven-8b.json" \
        --variants $heads,$heads-longest,$heads-whole,$heads-pareto,$heads-pareto-longest,$heads-pareto-whole \
        --baselines sdpa-cudnn
    $python benchmarks/bench_prefill.py --batch 1 --tokens 1024,8192 --rounds 10 --json "$results/ablations-prefill-8b.json" \
        --variants half-uneven,half-uneven@zack,half-uneven@64x64w4s3,quarter,quarter@128x64w8s3 --baselines sdpa-cudnn
    $python benchmarks/bench_decode.py --batch 1 --tokens 8192 --steps 4 --json "$results/ablations-first-8b.json" --prefill \
        --variants $heads,$heads-zack,$heads-fixed
    for shape in llama-2-7b llama-2-7b-norope; do
        $python benchmarks/bench_attention.py --shape $shape --batch 1 --tokens 65536 --rounds 5 --json "$results/shared-$shape.json" \
            --variants palu-g1,palu-g4,palu-g32 --baselines sdpa-cudnn
    done
}

engine() {
    $python benchmarks/bench_decode.py --batch 1,8,64 --tokens 8192 --steps 10 --json "$results/decode-8b-8192.json" --prefill \
        --variants bf16-full,bf16-half,int4-half,lean-35,small-10,transformers,transformers-static
    $python benchmarks/bench_decode.py --batch 1,8 --tokens 32768,131072 --steps 10 --json "$results/decode-8b-long.json" \
        --variants bf16-full,int4-half,lean-35,transformers
    $python benchmarks/bench_decode.py --shape llama-2-7b --batch 1,8 --tokens 4096,32768 --steps 10 --json "$results/decode-7b.json" \
        --variants bf16-full,int4-half,transformers
}

prefill() {
    $python benchmarks/bench_prefill.py --batch 1 --tokens 8192,32768 --rounds 10 --json "$results/prefill-8b.json" \
        --variants full,half,half-ragged,quarter
}

compress() {
    $python benchmarks/bench_compress.py --batch 64 --tokens 8192 --steps 8 --json "$results/compress-8b-64x8192.json" --variants int4-half
}

replay() {
    $python benchmarks/bench_replay.py --tokens 8192 --policies kvzip --variants bf16-full,int4-half --json "$results/replay-8b.json"
}

# After the colon: how many sessions are tried. A run ends with the first number that is not borne.
agents() {
    for run in bits-4:118 bits-8:52,60 swift-4x:130 lean-8x:150,220; do
        kind=${run%:*}
        $python benchmarks/vllm_agents.py "$kind" --sessions "${run#*:}" --limit 400 --json "$results/agents-$kind.json"
    done
}

documents() {
    for kind in fp8 swift-5.1x-odd; do
        $python benchmarks/vllm_agents.py $kind --sessions '' --documents 128 --reading 60 --limit 500 --json "$results/documents-$kind.json"
    done
}

composites() {
    $python benchmarks/serving_composites.py --json "$results/serving-composites-8b.json"
}

suites() {
    table="$python benchmarks/suite_table.py $MODEL --folder ${FOLDER:-made} --beside ${BESIDE:-4} --devices ${DEVICES:-0}"
    $table --suites "math=$TASKS/gsm8k-test.jsonl" "code=$TASKS/HumanEval.jsonl.gz" \
        --set suite-rows=200 --json "$results/suites-questions.json"
    for tokens in 4096 8192 16384; do
        $table --suites ruler --set suite-length=$tokens suite-rows=20 --json "$results/suites-ruler-$tokens.json"
    done
}

tools() {
    $python -m kvfold serve "$MODEL" --port "${PORT:-8123}" --max-tokens 8192 &
    server=$!
    until $python -c "import socket; socket.create_connection(('127.0.0.1', ${PORT:-8123}))" 2>/dev/null; do
        kill -0 $server
        sleep 1
    done
    for choice in scripted required auto; do
        $python benchmarks/tool_agents.py --url "http://127.0.0.1:${PORT:-8123}/v1" --choice $choice --at-once 50 \
            --json "$results/tool-agents-$choice.json"
    done
    kill $server
    wait $server || true
}

for section in "${@:-attention rebuilt once ablations engine prefill compress replay}"; do
    for name in $section; do "$name"; done
done
