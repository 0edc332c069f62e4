#!/bin/sh
# Usage: .ci/ik_llama_cpp.sh DIRECTORY PYTHON [TARGET]. Builds ik_llama.cpp for this machine's processor, or for a
# TARGET as llama_cpp.sh does, and puts its server in DIRECTORY. The sources are cloned from GitHub; IK_LLAMA_CPP names
# another repository, or one on this disk. cmake is this machine's, or PyPI's, in PYTHON's environment. A quarter of an
# hour on two cores; JOBS=1 uses one.
set -eu
commit=8337e4cd3861406fc04e0854b1409cd1b027fbc9
origin=${IK_LLAMA_CPP:-https://github.com/ikawrakow/ik_llama.cpp}
directory=$1
python=$2
. "$(dirname "$0")/ggml_flags.sh"
flags=$(ggml_flags "${3:-native}")

PATH=$PATH:$(dirname "$python")
command -v cmake >/dev/null || "$python" -m pip install --quiet --disable-pip-version-check cmake
rm -rf "$directory"
mkdir -p "$directory"
echo "building ik_llama.cpp of $origin in $directory"
git clone --quiet --no-checkout "$origin" "$directory/source"
git -C "$directory/source" checkout --quiet "$commit"
cmake -S "$directory/source" -B "$directory/build" -DCMAKE_BUILD_TYPE=Release $flags -DLLAMA_CURL=OFF \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF >"$directory/build.log" 2>&1
cmake --build "$directory/build" --parallel "${JOBS:-$(nproc)}" --target llama-server >>"$directory/build.log" 2>&1 || {
    tail -20 "$directory/build.log" >&2
    exit 1
}
cp "$directory/build/bin/llama-server" "$directory"
rm -rf "$directory/build" "$directory/source"
