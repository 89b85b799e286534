#!/usr/bin/env bash
# What a rented machine runs, on every worker: a Python if there is none, the set-up, the data, then stage after stage.
# The recipes beside this file call it. Started again it goes on where it stopped, on another machine too.
#
#   NANOCHAT_PRESET=tpu-v6e-8-d24 NANOCHAT_DURABLE=gs://my-bucket/d24 bash scripts/cloud/train.sh -s seed=1
#
# Arguments go to every stage; the argument `setup` alone ends before the first. From the environment:
#   NANOCHAT_PRESET   the preset (required)
#   NANOCHAT_DURABLE  where checkpoints outlive the machine (ops.durable): gs://…, s3://… or a folder
#   NANOCHAT_EXTRAS   what scripts/setup.sh installs besides: tpu, cuda12 or cuda13; store for gs:// and s3://
#   NANOCHAT_STAGES   the stages, in order; "tokenizer pretrain" when not given
#   NANOCHAT_SHARDS   training shards of climbmix to fetch; as many as the preset trains on when not given, 0: none
#   NANOCHAT_RUN_DIR  the run's folder, with several workers one that all of them see; runs/PRESET when not given
#   NANOCHAT_SHARED   a file system to mount at /mnt/nanochat first: HOST:/PATH (NFS), or gs://BUCKET through gcsfuse
#   NANOCHAT_COORDINATOR_TIMEOUT  seconds to wait for slower workers, 900 when not given
#   NANOCHAT_SPOT     1: the machine may be taken away, and is paid as such (ops.spot)
#
# Ends with 0 when all is done, with 75 when it was stopped and the same command goes on, else with the exit code of
# what failed.
set -euo pipefail

root="$(cd "$(dirname "$0")/../.." && pwd)"
say() { echo "train: $*" >&2; }
die() {
  say "$*"
  exit 2
}

# --- One child at a time, to which a signal is passed on: it saves and ends -------------------------------------------

child="" stopped=""
stop() {
  stopped=1
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true
}
trap stop TERM INT HUP

run() {
  [ -z "$stopped" ] || exit 75
  local code=0
  "$@" &
  child=$!
  [ -z "$stopped" ] || stop # it came in between
  while true; do # a signal ends `wait` before the child has ended
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  child=""
  [ "$code" = 0 ] || {
    [ -z "$stopped" ] || code=75 # whatever it was doing, the same command goes on
    say "$1 ended with $code"
    exit "$code"
  }
}

preset="${NANOCHAT_PRESET:-}"
[ -n "$preset" ] || die "NANOCHAT_PRESET names no preset (nanochat presets lists them)"

# --- What the machine lacks -------------------------------------------------------------------------------------------

python_is_there() {
  local name
  for name in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11 python3.13; do
    "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
  done
  return 1
}
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
install() { # a fresh machine updates itself at first and holds the lock meanwhile
  as_root apt-get -qq -o DPkg::Lock::Timeout=300 update
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 install "$@"
}
get_python() { install python3.12 python3.12-venv || install python3.11 python3.11-venv; }
if ! python_is_there; then # Ubuntu 22.04, which TPU machines run, has Python 3.10
  say "installing Python"
  run get_python
fi

mount_shared() {
  as_root mkdir -p /mnt/nanochat
  case "$NANOCHAT_SHARED" in
    gs://*)
      command -v gcsfuse >/dev/null || die "NANOCHAT_SHARED=$NANOCHAT_SHARED needs gcsfuse on this machine"
      as_root chown "$(id -u)" /mnt/nanochat
      gcsfuse --implicit-dirs --rename-dir-limit 100000 "${NANOCHAT_SHARED#gs://}" /mnt/nanochat
      ;;
    *:/*)
      command -v mount.nfs >/dev/null || install nfs-common
      as_root mount -t nfs -o lookupcache=none "$NANOCHAT_SHARED" /mnt/nanochat # a new file is seen at once
      ;;
    *) die "NANOCHAT_SHARED is $NANOCHAT_SHARED, must be HOST:/PATH or gs://BUCKET" ;;
  esac
}
if [ -n "${NANOCHAT_SHARED:-}" ] && ! mountpoint -q /mnt/nanochat; then run mount_shared; fi

run bash "$root/scripts/setup.sh"
cd "$root"
nanochat=.venv/bin/nanochat

# --- The data and the stages ------------------------------------------------------------------------------------------

case "$preset:${NANOCHAT_SHARDS:-}" in
  cpu*: | *:0) ;;
  *:) run "$nanochat" data get climbmix --preset "$preset" ;;
  *) run "$nanochat" data get climbmix --shards "$NANOCHAT_SHARDS" ;;
esac

[ "${1:-}" != setup ] || exit 0

export NANOCHAT_COORDINATOR_TIMEOUT="${NANOCHAT_COORDINATOR_TIMEOUT:-900}" # one fetches the data faster than another
settings=()
[ -z "${NANOCHAT_DURABLE:-}" ] || settings+=(-s "ops.durable=$NANOCHAT_DURABLE")
[ "${NANOCHAT_SPOT:-}" != 1 ] || settings+=(-s ops.spot=true)
folder="${NANOCHAT_RUN_DIR:-runs/$preset}"
for stage in ${NANOCHAT_STAGES:-tokenizer pretrain}; do
  say "$stage"
  case "$stage" in
    tokenizer | pretrain | sft | rl | eval)
      run "$nanochat" "$stage" --preset "$preset" --run-dir "$folder" ${settings[@]+"${settings[@]}"} "$@"
      ;;
    report) run "$nanochat" report --run-dir "$folder" ;;
    *) die "NANOCHAT_STAGES has $stage, must be among tokenizer, pretrain, sft, rl, eval, report" ;;
  esac
done
say "done"
