#!/usr/bin/env bash
# Builds tests/c/gpu_device.c and gpu_rates.c with the core's C files and kernels, and runs them on GPU 0: the tests,
# once more under compute-sanitizer where that is installed, and the rates.  Needs CUDA_HOME or nvcc.
#
#     tests/c/run_gpu.sh [--build-only]
set -euo pipefail
cd "$(dirname "$0")/../.."

nvcc="${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"
[ -x "$nvcc" ] || nvcc=$(command -v nvcc)
include="$(dirname "$(dirname "$nvcc")")/include"
arch="${GEMINI_CUDA_ARCHS:-90}"
out="build/gpu"
read -ra cc <<<"${CC:-cc}"
mkdir -p "$out"

targets=()
for a in ${arch//[,;]/ }; do
    targets+=("-gencode=arch=compute_$a,code=[sm_$a,compute_$a]")
done
for kernel in csrc/device/kernels/*.cu; do
    printf '#include "%s"\n' "$PWD/$kernel"
done >"$out/kernels.cu"
"$nvcc" -fatbin -O3 -std=c++17 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true -Icsrc \
    "${targets[@]}" "$out/kernels.cu" -o "$out/kernels.fatbin"
cat >"$out/fatbin.S" <<EOF
    .section .rodata
    .balign 64
    .globl gm_fatbin
gm_fatbin:
    .incbin "$out/kernels.fatbin"
    .section .note.GNU-stack,"",@progbits
EOF

objects=()
for source in tests/c/gpu_{device,rates}.c "$out/fatbin.S" csrc/{base/*,arith/*,device/hostmem,device/cuda/*,engine/rates,torch/alloc}.c; do
    extra=()
    if [ "$(uname -m)" = x86_64 ]; then
        case "$source" in
        *_avx2.c) extra=(-mavx2 -mfma) ;;
        *_avx512.c) extra=(-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma) ;;
        esac
    fi
    object="$out/$(tr / . <<<"${source%.*}").o"
    "${cc[@]}" -std=c11 -O3 -ffp-contract=off -fno-math-errno -fvisibility=hidden -pthread -Wall -Wextra \
        -Wconversion -Wshadow -Wstrict-prototypes -Werror -DGM_WITH_CUDA -DGM_DEBUG -Icsrc -isystem "$include" \
        "${extra[@]}" -c "$source" -o "$object"
    case "$source" in
    tests/*) ;;
    *) objects+=("$object") ;;
    esac
done
for program in gpu_device gpu_rates; do
    "${cc[@]}" -pthread "$out/tests.c.$program.o" "${objects[@]}" -o "$out/$program" -ldl -lm
done
[ "${1:-}" = --build-only ] && exit 0

"$out/gpu_device"
if command -v compute-sanitizer >/dev/null; then
    # Probing calls that are meant to fail are part of the tests: only errors of kernels count.
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$out/gpu_device" --short
    compute-sanitizer --tool racecheck --error-exitcode 9 "$out/gpu_device" --short
fi
"$out/gpu_rates"
