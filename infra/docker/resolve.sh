#!/usr/bin/env bash
# Resolves every pip line of the Dockerfile from the index, without docker and without installing anything. Minutes to a
# quarter of an hour: an index without metadata of its own makes pip load the wheels. PIP: another pip, of Python 3.11.
set -euo pipefail
cd "$(dirname "$0")/../.."
# As the Dockerfile has them. For the image with vLLM: CONSTRAINTS=infra/docker/constraints-vllm.txt and EXTRA as its
# build has it.
eval "$(sed -nE 's/^ARG ([A-Z]+)=(.*)/\1=${\1:-\2}/p' infra/docker/Dockerfile)"
sed -e ':a' -e '/\\$/N; s/\\\n//; ta' infra/docker/Dockerfile | grep -oE 'pip install [^&]+' | while read -r line; do
  echo "${line}"
  eval "${PIP:-python3 -m pip} ${line#pip } --dry-run --ignore-installed --quiet --disable-pip-version-check"
done
