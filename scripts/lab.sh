#!/usr/bin/env bash
# Opens the course in JupyterLab, at chapter 00. Sets the project up first when that is needed.
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
export PATH="$root/.venv/bin:$PATH" JUPYTER_PREFER_ENV_PATH=1
# Defaults for this start alone, see scripts/lab: the system's light or dark theme, no news from outside, no dead controls in
# saved notebooks. What you set in JupyterLab counts more, and nothing is written into your Jupyter settings.
export JUPYTER_CONFIG_PATH="${JUPYTER_CONFIG_PATH:+$JUPYTER_CONFIG_PATH:}$root/scripts/lab"
# A notebook that was changed outside of JupyterLab is newer than the .py beside it, and would not open there.
for notebook in chapters/*.ipynb; do
  text="${notebook%.ipynb}.py"
  if [ "$notebook" -nt "$text" ] && git diff --quiet -- "$notebook" "$text" 2>/dev/null; then
    touch "$text" # both as built, only written in this order
  elif [ "$notebook" -nt "$text" ]; then
    .venv/bin/python -m jupytext --quiet --to py:percent "$notebook" || true
  fi
done
exec .venv/bin/python -m jupyterlab --LabApp.default_url=/lab/tree/chapters/00_start.ipynb "$@"
