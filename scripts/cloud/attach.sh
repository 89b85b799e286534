#!/usr/bin/env bash
# Runs a command in the background and follows what it prints. When the connection breaks the command goes on, and the
# same call follows it again; it never runs twice at a time.
#
#   bash scripts/cloud/attach.sh FOLDER ATTEMPT COMMAND…
#   bash scripts/cloud/attach.sh FOLDER stop             tells it to stop, and waits until it has saved
#
# FOLDER keeps the log and the exit code. A command that still runs is followed, whatever the attempt; one that has
# ended is started again under a new ATTEMPT only. Ends with the command's exit code.
set -euo pipefail

folder="$1" attempt="$2"
shift 2
mkdir -p "$folder"
exec 9>"$folder/lock"
flock 9 # two callers at once: one starts, both follow

pid="$(cat "$folder/pid" 2>/dev/null || true)"
running() { [ -n "$pid" ] && grep -qsF "$folder" "/proc/$pid/cmdline"; } # its number may be another's by now

if [ "$attempt" = stop ]; then
  if running; then pkill -TERM -P "$pid" || true; fi
  for ((i = 0; i < 150; i++)); do # seconds; a save takes one or two minutes
    running || exit 0
    sleep 1
  done
  exit 1
fi

from=-20 # lines of the log that were seen before
if ! running && [ "$(cat "$folder/attempt" 2>/dev/null)" != "$attempt" ]; then
  rm -f "$folder/code"
  : >"$folder/log" # before it is followed
  # shellcheck disable=SC2016 # the inner shell is to expand it
  setsid nohup bash -c 'code=0; "$@" || code=$?; echo $code >"$0/code"' "$folder" "$@" \
    >"$folder/log" 2>&1 </dev/null 9>&- &
  pid=$!
  echo "$pid" >"$folder/pid"
  echo "$attempt" >"$folder/attempt"
  from=+1
fi
flock -u 9

tail -n "$from" -s 0.5 -F --pid="$pid" "$folder/log" 2>/dev/null 9>&- || true
exit "$(cat "$folder/code" 2>/dev/null || echo 137)" # without a code it was killed
