#!/bin/sh
# Usage: .ci/llama_cpp.sh DIRECTORY PYTHON [TARGET]. Builds llama.cpp for this machine's processor, or for one with AVX2
# (x86-64-v3), also with AVX-VNNI (x86-64-v3-vnni), and puts its programs in DIRECTORY: the sources are those in PyPI's
# llama-cpp-python. cmake is this machine's, or PyPI's, in PYTHON's environment. Four minutes on two cores.
set -eu
requirement=llama-cpp-python==0.3.36
programs="llama-server llama-completion llama-bench llama-quantize"
directory=$1
python=$2
. "$(dirname "$0")/ggml_flags.sh"
flags=$(ggml_flags "${3:-native}")

PATH=$PATH:$(dirname "$python")
command -v cmake >/dev/null || "$python" -m pip install --quiet --disable-pip-version-check cmake
rm -rf "$directory"
mkdir -p "$directory/source"
echo "building llama.cpp of $requirement in $directory"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    --dest "$directory" "$requirement"
tar -xzf "$directory"/llama_cpp_python-*.tar.gz -C "$directory/source" --strip-components 1
cmake -S "$directory/source/vendor/llama.cpp" -B "$directory/build" -DCMAKE_BUILD_TYPE=Release $flags \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF >"$directory/build.log" 2>&1
cmake --build "$directory/build" --parallel "$(nproc)" --target $programs >>"$directory/build.log" 2>&1 || {
    tail -20 "$directory/build.log" >&2
    exit 1
}
(cd "$directory/build/bin" && cp $programs ../..)
rm -rf "$directory/build" "$directory/source" "$directory"/llama_cpp_python-*.tar.gz
