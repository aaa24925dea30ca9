#!/usr/bin/env bash
# Prepares a bare Debian 12 machine for development. Safe and quick to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "setup: $*"; }

system_packages() {
    local wanted=(postgresql-15 postgresql-client-15 postgresql-15-plpgsql-check pgbouncer faketime chromium python3-venv make)
    local missing=() package
    for package in "${wanted[@]}"; do
        dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed \
            || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    if ((EUID != 0)); then
        say "not root, and these Debian packages are missing: ${missing[*]}" >&2
        return 1
    fi
    say "installing ${missing[*]}"

    # Debian would create and start a cluster (and a pgbouncer) that nobody here uses.
    mkdir -p /etc/postgresql-common/createcluster.d
    printf 'create_main_cluster = false\n' >/etc/postgresql-common/createcluster.d/pgmb.conf
    if [[ ! -e /etc/postgresql-common/createcluster.conf ]]; then
        printf "create_main_cluster = false\ninclude_dir '/etc/postgresql-common/createcluster.d'\n" \
            >/etc/postgresql-common/createcluster.conf
    fi
    local policy=/usr/sbin/policy-rc.d ours=
    if [[ ! -e $policy ]]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        ours=yes
    fi
    local status=0
    export DEBIAN_FRONTEND=noninteractive UCF_FORCE_CONFFOLD=1
    {
        apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold "${missing[@]}" \
            || { apt-get update -qq && apt-get install -y -qq --no-install-recommends \
                -o Dpkg::Options::=--force-confold "${missing[@]}"; }
    } >/dev/null || status=$?
    [[ -z $ours ]] || rm -f "$policy"
    return "$status"
}

virtualenv() {
    local stamp=.venv/.pgmb-setup digest
    digest=$(cat requirements/dev.txt pyproject.toml | sha256sum)
    [[ -f $stamp && $(<"$stamp") == "$digest" ]] && return 0
    say "filling .venv"
    [[ -x .venv/bin/python ]] || python3 -m venv .venv
    # uv takes a fifth of pip's time, and finds what pip's settings name: the index and the certificates. The lock names
    # every package, so nothing is resolved.
    local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps) given=(--require-hashes -r)
    "${pip[@]}" "${given[@]}" <(awk '/^[^ ]/ { wanted = /^uv==/ } wanted' requirements/dev.txt)
    local uv=(.venv/bin/uv pip install --quiet --no-config --python .venv/bin/python --no-deps) index
    index=${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}
    [[ -z $index ]] || export UV_DEFAULT_INDEX=$index
    [[ -z ${PIP_CERT:-} ]] || export SSL_CERT_FILE=$PIP_CERT
    # PySpark has no wheel. The one that is built is unpacked at once: to compress it would take 20 s.
    export DIST_EXTRA_CONFIG=$PWD/scripts/build.cfg
    "${uv[@]}" "${given[@]}" requirements/dev.txt || "${pip[@]}" "${given[@]}" requirements/dev.txt
    "${pip[@]}" --no-build-isolation --no-index --editable .
    printf '%s\n' "$digest" >"$stamp"
}

# Without Debian's python3-venv there is no .venv to fill; else both are done at once.
if python3 -c 'import ensurepip' 2>/dev/null; then
    virtualenv &
    filling=$!
    system_packages
else
    system_packages
    virtualenv &
    filling=$!
fi
python3 scripts/postgres18.py
wait "$filling"
say "ready"
