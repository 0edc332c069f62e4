# Read by the scripts that build llama.cpp and ik_llama.cpp: `ggml_flags TARGET` prints cmake's options for a target.
ggml_flags() {
    avx2="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF"
    case $1 in
    native) echo "-DGGML_NATIVE=ON" ;;
    x86-64-v3) echo "$avx2" ;;
    x86-64-v3-vnni) echo "$avx2 -DGGML_AVX_VNNI=ON" ;;
    *) echo "no build for $1; use native, x86-64-v3 or x86-64-v3-vnni" >&2 && return 2 ;;
    esac
}
