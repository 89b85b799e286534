#!/usr/bin/env bash
# Passes the tests. Sets the project up first, with what the tests need.
#
#   bash scripts/test.sh                             the default tests
#   bash scripts/test.sh -m slow                     the long ones
#   bash scripts/test.sh tests/test_cli.py -x        any options of pytest
#   NANOCHAT_TEST_WORKERS=0 bash scripts/test.sh …   in this process instead of two beside each other (for --pdb)
set -eu

root="$(cd "$(dirname "$0")/.." && pwd)"
NANOCHAT_EXTRAS="${NANOCHAT_EXTRAS:-} dev" bash "$root/scripts/setup.sh"
cd "$root"
# Most tests compile on one core, so two processes halve the time. A file stays in one, for its shared fixtures, and the
# dearest come first (tests/conftest.py).
exec .venv/bin/python -m pytest -n "${NANOCHAT_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
