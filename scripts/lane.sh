#!/usr/bin/env bash
# Runs tests in another version of Python: scripts/lane.sh 3.13 tests/app -q
# Beside the gate, which has one version. The environment is .venv-VERSION.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$1
shift
venv=.venv-$version
digest=$(cat requirements/dev.txt pyproject.toml | sha256sum)
if [[ ! -f $venv/.pgmb-setup || $(<"$venv/.pgmb-setup") != "$digest" ]]; then
    [[ -x $venv/bin/python ]] || .venv/bin/uv venv --quiet --no-config --no-python-downloads --python "$version" "$venv"
    index=${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}
    [[ -z $index ]] || export UV_DEFAULT_INDEX=$index
    [[ -z ${PIP_CERT:-} ]] || export SSL_CERT_FILE=$PIP_CERT
    export DIST_EXTRA_CONFIG=$PWD/scripts/build.cfg
    uv=(.venv/bin/uv pip install --quiet --no-config --python "$venv/bin/python" --no-deps)
    "${uv[@]}" --require-hashes -r requirements/dev.txt
    "${uv[@]}" --no-build-isolation --editable .
    printf '%s\n' "$digest" >"$venv/.pgmb-setup"
fi
exec "$venv/bin/python" -m pytest "$@"
