#!/usr/bin/env bash
# Passes the tests. Sets the project up first, with what the tests need.
#
#   bash scripts/test.sh                             the default tests
#   bash scripts/test.sh -m slow                     the long ones
#   bash scripts/test.sh tests/test_cli.py -x        any options of pytest
set -eu

root="$(cd "$(dirname "$0")/.." && pwd)"
NANOCHAT_EXTRAS="${NANOCHAT_EXTRAS:-} dev" bash "$root/scripts/setup.sh"
cd "$root"
exec .venv/bin/python -m pytest "$@"
