#!/usr/bin/env bash
# Everything that needs a GPU, in under eight minutes: builds the kernels in place for the GPU that is there, runs
# `pytest -m gpu`, then `python -m benchmarks.gpu` with this script's arguments. Needs Python with torch, SB3, pybind11
# and pytest (PYTHONPATH may lead to what is not installed), nvcc and g++; no internet. Logs and results are copied into
# $OUT if that is set. Fails if any of it failed, after having done the rest. Other versions of libraries may be there
# than tests are written for: what they warn of fails none.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
logs=${OUT:-build/gpu}
mkdir -p "$logs"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

step() { # name, seconds that it may take, command
    local name=$1 limit=$2
    shift 2
    echo "== $name" >&2
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$logs/$name.log"
    local status=${PIPESTATUS[0]}
    test "$status" = 0 && return
    echo "== $name failed: $status" >&2
    failed=1
    return "$status"
}

archs=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || exit 1
export SB3_FP16_CPU=1 SB3_FP16_CUDA=1 SB3_FP16_CUDA_ARCHS=${SB3_FP16_CUDA_ARCHS:-$archs}
step build 90 "$python" setup.py --quiet build_ext --inplace || exit 1
step tests 180 "$python" -m pytest -m gpu -W default -W "error:The graph engine" tests/cuda/test_gpu.py -q --durations 10
step benchmark 205 "$python" -m benchmarks.gpu --into "$logs" "$@"
test "$logs" != build/gpu || cp "$logs"/gpu_*.csv benchmarks/results/
exit "$failed"
