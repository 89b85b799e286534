#!/usr/bin/env bash
# Runs the whole pipeline end to end: tokenizer, pretraining, evaluation, SFT, RL, chat evaluation, report.
# Sets the project up first when that is needed. Stopped and started again, it continues.
#
#   bash scripts/capstone.sh                         the preset cpu, into runs/cpu
#   bash scripts/capstone.sh cpu-smoke               another preset
#   bash scripts/capstone.sh cpu --seed 1 --run-dir runs/one -s pretrain.steps=100   options of `nanochat run`
set -eu

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
    exit 0
    ;;
esac
preset=cpu
case "${1:-}" in
  "" | -*) ;;
  *)
    preset="$1"
    shift
    ;;
esac
root="$(cd "$(dirname "$0")/.." && pwd)"
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m nanochat_lib run --preset "$preset" "$@"
