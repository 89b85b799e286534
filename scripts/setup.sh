#!/usr/bin/env bash
# Makes .venv beside the project and installs the project into it (editable). Started again it does nothing, within a
# second, unless pyproject.toml changed or an earlier set-up was interrupted. The other scripts call it first.
#
#   bash scripts/setup.sh                            set up, or see that all is well
#   bash scripts/setup.sh --rebuild                  throw .venv away and set up anew
#   NANOCHAT_EXTRAS="cuda12 dev" bash scripts/setup.sh   with extras of pyproject.toml (they stay installed)
#   PYTHON=python3.12 bash scripts/setup.sh          with this Python (3.11 or newer)
#   NANOCHAT_INSTALLER=pip bash scripts/setup.sh     with pip although uv is there
#   NANOCHAT_NEWEST=1 bash scripts/setup.sh          with the newest versions that pyproject.toml allows, not those of
#                                                    scripts/versions.txt (say so each time)
set -euo pipefail

root="$(cd "$(dirname "$0")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/nanochat-setup"      # what is installed; written last
unfinished="$venv/nanochat-unfinished" # a new .venv that was not finished
log="$venv/nanochat-setup.log"
lock="$root/.venv.lock"
need_gb=3 # measured: 2.1 GB on Linux with the CPU build of torch

say() { echo "setup: $*" >&2; }
die() {
  say "$*"
  exit 1
}

read_stamp() { # $1: checksum, root or extras
  if [ -f "$stamp" ]; then sed -n "s/^$1=//p" "$stamp"; fi
}

extras="${NANOCHAT_EXTRAS:-}"
anew=""
case "${1:-}" in
  "") extras="$(read_stamp extras) $extras" ;;
  --rebuild)
    [ -n "$extras" ] || extras="$(read_stamp extras)"
    anew=1
    ;;
  *)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
    if [ "$1" = --help ] || [ "$1" = -h ]; then exit 0; else exit 2; fi
    ;;
esac

# --- What is wanted, what is there ------------------------------------------------------------------------------------

wanted=""
for extra in $(echo "$extras" | tr ',' ' '); do
  grep -q "^$extra = \[" "$root/pyproject.toml" || die "extra '$extra' is not in pyproject.toml (NANOCHAT_EXTRAS)"
  case " $wanted " in *" $extra "*) ;; *) wanted="${wanted:+$wanted }$extra" ;; esac
done
versions="$root/scripts/versions.txt" # what the tests passed with, without two extras that want older ones
case " $wanted " in *" nbgrader "* | *" cloud "*) versions=/dev/null ;; esac
[ -z "${NANOCHAT_NEWEST:-}" ] || versions=/dev/null
[ -r "$versions" ] || die "scripts/versions.txt is missing; take it back (git checkout scripts), or set NANOCHAT_NEWEST=1 to do without it"
checksum="$(cat "$root/pyproject.toml" "$0" "$versions" | cksum)"
accelerators=0
for extra in $wanted; do
  case "$extra" in tpu | cuda12 | cuda13) accelerators=$((accelerators + 1)) ;; esac
done
[ "$accelerators" -le 1 ] ||
  die "only one of tpu, cuda12, cuda13 fits in one .venv, got '$wanted'; start afresh: NANOCHAT_EXTRAS=… bash scripts/setup.sh --rebuild"

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

if [ -z "$anew" ] && [ -d "$venv" ] && [ ! -f "$unfinished" ]; then
  if [ -f "$stamp" ] && [ "$(read_stamp root)" != "$root" ]; then
    say "the project was moved from $(read_stamp root), making .venv anew"
    anew=1
  elif ! inside="$(version_of "$venv/bin/python")"; then
    [ -f "$stamp" ] || die "the Python of .venv does not run; start afresh: bash scripts/setup.sh --rebuild"
    say "the Python of .venv no longer runs, making .venv anew"
    anew=1
  elif [ -n "${PYTHON:-}" ] && [ "$(version_of "$PYTHON" || echo none)" != "$inside" ]; then
    say "PYTHON=$PYTHON is not the Python $inside of .venv, making .venv anew"
    anew=1
  elif [ "$(read_stamp checksum)" = "$checksum" ] && [ "$(read_stamp extras)" = "$wanted" ]; then
    exit 0
  fi
fi

# --- One set-up at a time ---------------------------------------------------------------------------------------------

waited="" tries=0
until mkdir "$lock" 2>/dev/null; do
  other="$(cat "$lock/pid" 2>/dev/null || true)"
  if [ -n "$other" ] && kill -0 "$other" 2>/dev/null; then
    [ -n "$waited" ] || say "another set-up (process $other) is at work, waiting for it"
    waited=1
  else # its owner is dead, or has only just come or gone
    tries=$((tries + 1))
    [ "$tries" -le 3 ] || die "cannot write to $root; look at its permissions and the disk's free space, or copy the project elsewhere"
    [ "$tries" -lt 2 ] || rm -rf "$lock"
  fi
  sleep 0.5
done
echo $$ >"$lock/pid"
trap 'rm -rf "$lock"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if [ -n "$waited" ]; then # look again: perhaps nothing is left to do
  rm -rf "$lock"
  trap - EXIT
  exec bash "$0"
fi

write_stamp() { # $1: checksum of what is installed
  printf 'checksum=%s\nroot=%s\nextras=%s\n' "$1" "$root" "$wanted" >"$stamp.new"
  mv "$stamp.new" "$stamp"
}

# --- .venv ------------------------------------------------------------------------------------------------------------

installer="${NANOCHAT_INSTALLER:-$(command -v uv >/dev/null 2>&1 && echo uv || echo pip)}"
if [ -n "$anew" ] || [ -f "$unfinished" ] || [ ! -d "$venv" ]; then
  python="" found=""
  for candidate in ${PYTHON:+"$PYTHON"} python3 python python3.12 python3.11 python3.13 python3.14; do
    version="$(version_of "$candidate")" || version=""
    case "$version" in
      3.1[1-9] | 3.[2-9][0-9]) python="$candidate" && break ;;
    esac
    [ -z "$version" ] || found="${found:+$found, }$candidate is $version"
    [ -z "${PYTHON:-}" ] || break
  done
  [ -n "$python" ] ||
    die "Python 3.11 or newer is needed (${found:-no Python found}); install one, or name it: PYTHON=/path/to/python3.12 bash scripts/setup.sh"

  case " $wanted " in *" cuda"*) need_gb=$((need_gb + 5)) ;; *" tpu "*) need_gb=$((need_gb + 1)) ;; esac
  free_gb="$(df -Pk "$root" | awk 'NR == 2 { print int($4 / 1048576) }')"
  [ "$free_gb" -ge "$need_gb" ] || die "$free_gb GB of disk are free at $root, $need_gb GB are needed; free some space or move the project"

  if [[ "$OSTYPE" == linux* ]] && [ "$free_gb" -lt 8 ]; then
    say "$free_gb GB of disk are free; where pip brings torch with CUDA, its default on Linux, about 8 GB are needed"
  fi
  say "making .venv with Python $version and installing (about $need_gb GB, some minutes)"
  rm -rf "$venv"
  mkdir "$venv"
  touch "$unfinished"
  "$python" -m venv "$venv" >"$log" 2>&1 || {
    if grep -qi 'ensurepip\|No module named venv' "$log"; then
      die "this Python lacks its venv module; on Debian and Ubuntu: sudo apt install python3-venv"
    fi
    die "making .venv failed: $(tail -n 1 "$log")"
  }
else
  case "$inside" in
    3.1[1-9] | 3.[2-9][0-9]) ;;
    *) die "the Python of .venv is $inside, 3.11 or newer is needed; start afresh: bash scripts/setup.sh --rebuild" ;;
  esac
  say "updating .venv"
  write_stamp interrupted
fi

# --- The project and what it needs ------------------------------------------------------------------------------------

# The user's pip settings for other places must not lead the packages out of .venv.
unset PIP_TARGET PIP_PREFIX PIP_ROOT PYTHONHOME
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1
what=".${wanted:+[${wanted// /,}]}"

install() {
  if [ "$installer" = uv ]; then
    uv pip install --python "$venv/bin/python" -c "$versions" -e "$what"
  else
    "$venv/bin/python" -m pip install --progress-bar off -c "$versions" -e "$what"
  fi
}

show() { # a line that renews itself, when somebody is watching
  if [ -t 2 ]; then
    awk '/^ *(Collecting|Downloading|Building|Installing|Preparing|Resolved|Prepared|Installed) /{printf "\r\033[K  %.100s", $0 > "/dev/stderr"} END {printf "\r\033[K" > "/dev/stderr"}'
  else
    cat >/dev/null
  fi
}

cd "$root"
if ! install 2>&1 | tee "$log" | show; then
  if grep -qi 'no space left on device\|disk quota exceeded' "$log"; then
    die "the disk is full (also look at TMPDIR and pip's cache); free some space and run this again"
  elif grep -qi 'name resolution\|name or service not known\|nodename nor servname\|connection refused\|connection reset\|network is unreachable\|NewConnectionError\|ConnectTimeout\|timed out\|ProxyError\|SSLError\|certificate verify failed\|dns error\|error sending request\|failed to fetch' "$log"; then
    die "the package index cannot be reached; check the network and the proxy, or name another index with PIP_INDEX_URL (uv: UV_INDEX_URL), and run this again; details: .venv/nanochat-setup.log"
  fi
  die "installing failed: $(grep -i 'error' "$log" | tail -n 1 | cut -c 1-300); details: .venv/nanochat-setup.log"
fi

write_stamp "$checksum"
rm -f "$unfinished"
say "ready"
