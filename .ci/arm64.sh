#!/bin/sh
# Usage: .ci/arm64.sh VENV LOCK PYTHON. Makes VENV, whose Python is Debian's for 64-bit Arm, emulated by qemu, with the
# pins of LOCK and radixlm itself, of this folder. PYTHON is one with pip, for this machine. Only qemu is installed
# elsewhere.
set -eu
venv=$(realpath -m "$1")
lock=$2
python=$3
root=$venv/root
sh .ci/debian.sh qemu-aarch64=qemu-user
if ! [ -e /etc/apt/sources.list.d/debian.sources ] && ! grep -qs "^deb" /etc/apt/sources.list; then
    echo "this suite needs the packages of Debian" >&2
    exit 2
fi
rm -rf "$venv"
mkdir -p "$venv/apt/lists/partial" "$venv/apt/archives/partial" "$venv/apt/parts" "$venv/bin" "$root"

echo "fetching Python for 64-bit Arm"
cp /etc/apt/sources.list.d/debian.sources "$venv/apt/parts" 2>/dev/null || true
: >"$venv/apt/status"  # as if nothing was installed
cat >"$venv/apt/conf" <<END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$venv/apt";
Dir::State::status "$venv/apt/status";
Dir::Cache "$venv/apt";
Dir::Etc::sourceparts "$venv/apt/parts";
END
export APT_CONFIG="$venv/apt/conf"
apt-get update -qq
apt-get install -qq --no-install-recommends --download-only python3-minimal libpython3-stdlib libstdc++6 zlib1g >/dev/null
for package in "$venv"/apt/archives/*.deb; do
    dpkg-deb -x "$package" "$root"
done
rm -rf "$venv/apt"

name=$(basename "$(realpath "$root/usr/bin/python3")")  # python3.11
cat >"$venv/pyvenv.cfg" <<END
home = $root/usr/bin
include-system-site-packages = false
END
# The name is the emulated program's own too: so it starts other emulated programs.
cat >"$venv/bin/python" <<END
#!/bin/sh
export QEMU_CPU="\${QEMU_CPU:-max,pauth-impdef=on}"
exec qemu-aarch64 -L "$root" -0 "\$0" "$root/usr/bin/$name" "\$@"
END
chmod +x "$venv/bin/python"

echo "installing $lock for 64-bit Arm"
packages=$venv/lib/$name/site-packages
platforms=
for glibc in 31 28 27 26 24 17; do
    platforms="$platforms --platform manylinux_2_${glibc}_aarch64"
done
"$python" -m pip install --quiet --disable-pip-version-check --target "$packages" --python-version "${name#python}" \
    --implementation cp --only-binary=:all: --no-deps --no-compile $platforms --platform manylinux2014_aarch64 -r "$lock"
mkdir "$packages/radixlm"
for folder in cli compile runtime tokenizer_fix; do
    ln -s "$PWD/$folder" "$packages/radixlm/$folder"
done
ln -s "$PWD"/package/* "$packages/radixlm"
