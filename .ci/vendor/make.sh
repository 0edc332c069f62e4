#!/bin/sh
# Usage: .ci/vendor/make.sh DIRECTORY. Copies the libraries of the web UI from npm into DIRECTORY, with their licences.
# package.json has the versions, package-lock.json the checksums that `npm ci` compares; NOTICE lists those of the copies.
set -eu
target=$1
here=$(cd "$(dirname "$0")" && pwd)
languages="markup css clike javascript typescript python bash json c cpp rust go java sql yaml diff"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/package.json" "$here/package-lock.json" "$work"
(cd "$work" && npm ci --no-audit --no-fund --ignore-scripts --loglevel=error)
modules=$work/node_modules

mkdir -p "$target"
grep -v '^//# sourceMappingURL=' "$modules/marked/lib/marked.esm.js" > "$target/marked.js"
{
    echo "// prismjs $(node -p "require('$modules/prismjs/package.json').version"), MIT, with: $languages. See NOTICE."
    echo "globalThis.Prism = { manual: true };"
    for name in core $languages; do
        cat "$modules/prismjs/components/prism-$name.min.js"
        echo
    done
    echo "export default Prism;"
} > "$target/prism.js"
{
    echo "Copied from npm by \`make vendor\`; sha256 of the copies:"
    (cd "$target" && sha256sum marked.js prism.js)
    for name in marked prismjs; do
        printf '\n== %s %s, https://www.npmjs.com/package/%s\n\n' \
            "$name" "$(node -p "require('$modules/$name/package.json').version")" "$name"
        cat "$modules/$name/LICENSE"
    done
} > "$target/NOTICE"
