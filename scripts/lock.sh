#!/usr/bin/env bash
# Writes requirements/dev.txt, every package `make setup` installs, and requirements/server.txt, those of the image,
# pinned with hashes.
# The file must install from any index, so it names none and carries no path of the machine that wrote it.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/dev.txt
served=requirements/server.txt
# `env -u`: pip's and uv's own settings on this machine must not leak into the lock.
env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL -u PIP_INDEX_URL -u UV_FIND_LINKS -u UV_INDEX -u UV_INDEX_URL \
    .venv/bin/uv pip compile pyproject.toml --group dev --output-file "$lock" --quiet "$@" \
    --universal --python-version 3.11 --no-config --no-sources \
    --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate
# What the image installs, of the same versions.
env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL -u PIP_INDEX_URL -u UV_FIND_LINKS -u UV_INDEX -u UV_INDEX_URL \
    .venv/bin/uv pip compile pyproject.toml --extra binary --extra server --extra webhooks --constraint "$lock" \
    --output-file "$served" --quiet --universal --python-version 3.11 --no-config --no-sources \
    --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate

if grep -nE '://|^-|(^|[[:space:]])/' "$lock" "$served"; then
    echo "$lock or $served names an index, an option or a path" >&2
    exit 1
fi
