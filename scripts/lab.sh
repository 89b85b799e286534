#!/usr/bin/env bash
# Opens the course's chapters in JupyterLab. Sets the project up first when that is needed.
#
#   bash scripts/lab.sh                              in the browser
#   bash scripts/lab.sh --no-browser --port 8890     on a machine without one: prints the address to open
set -eu

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
    exit 0
    ;;
esac
root="$(cd "$(dirname "$0")/.." && pwd)"
bash "$root/scripts/setup.sh"
cd "$root"
# Huge pages for large arrays on Linux with glibc: fewer page faults in every step on a CPU (docs/tpu-step.md).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
# The scripts and kernels of .venv come first, so that notebooks run in the course's own Python.
PATH="$root/.venv/bin:$PATH" exec .venv/bin/python -m jupyterlab --LabApp.default_url=/lab/tree/chapters/12_capstone.ipynb "$@"
