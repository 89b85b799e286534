#!/usr/bin/env python3
"""Rents a TPU through Google Cloud's queue, trains on it, and gives it back, whatever happens.

    python3 scripts/cloud/tpu_queued.py --preset tpu-v6e-8-d24 --durable gs://my-bucket/d24

It asks one zone after another until one has the machine, sets it up and trains on all its workers, and asks again when
the machine is taken away: the checkpoints are in --durable, so the next one goes on. On the way out (done, failed,
Ctrl-C) it deletes what it made. Killed with -9 or cut off it cannot; the same command finds what is there and takes it
over. Needs gcloud, logged in, and Python 3.11 or newer; nothing is installed here.

Exit codes: those of nanochat; 75 also when no zone had a machine in time, 130 after Ctrl-C, and 3 when something could
not be deleted and still costs money.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path

from tpu_machine import REACH_TRIES, Machine, Stop, say

from nanochat_lib.hardware import CHIPS, PRICE_DATE
from nanochat_lib.presets import PRESETS, Target, preset


def work(machine: Machine) -> int:
    """Rents and trains until the training is done or fails by itself; its exit code."""
    machine.find()
    for _ in range(machine.args.restarts + 1):
        machine.rent()
        broken = 0  # connections in a row
        while True:
            machine.attempt = machine.attempt or str(time.time_ns())
            code = machine.train()
            if code in (0, 2):
                return code
            if machine.lost():
                say("the machine was taken away; the next one goes on from the last checkpoint")
                machine.give_back()
                break
            broken = broken + 1 if code == 255 else 0
            if code not in (75, 255) or broken == REACH_TRIES:
                say(f"the training ended with {code} on a sound machine; its log is above")
                return 1
            if code == 75:  # stopped and saved: the same command again
                machine.attempt = ""
    raise Stop(75, f"{machine.args.restarts} machines were taken away; the same command goes on")


def hourly(target: Target, on_demand: bool) -> str:
    """What the whole slice costs, in words."""
    chip = next(chip for chip in CHIPS if chip.name == target.chip)
    price = chip.usd_hour if on_demand else chip.usd_hour_spot
    return f"${price * target.devices:.2f} an hour ({PRICE_DATE})" if price else "no price known here; look it up"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__.partition("\n\n")[0],
        epilog="What follows -- goes to every stage: … -- -s seed=1",
    )  # fmt: skip
    add = parser.add_argument
    add("--preset", required=True, choices=[name for name, config in PRESETS.items() if config.target.kind == "tpu"])
    add("--durable", required=True, metavar="URL", help="where the checkpoints outlive the machine: gs://BUCKET/RUN")
    add("--name", metavar="NAME", help="of the request and the machine (default: nanochat-PRESET)")
    add("--zones", metavar="A,B", help="zones to ask, in this order")
    add("--project", metavar="ID", help="Google Cloud project (default: gcloud's)")
    add("--on-demand", action="store_true", help="a machine that is not taken away, at several times the price")
    add(
        "--shared",
        metavar="HOST:/PATH",
        default="",
        help="a file system for the run; without one each worker keeps its part",
    )
    add("--stages", metavar="STAGES", default="", help='which ones, in order (default: "tokenizer pretrain")')
    add("--shards", metavar="N", default="", help="training shards of climbmix (default: what the preset needs)")
    add("--zone-minutes", type=float, default=15, metavar="M", help="wait this long in a zone (15)")
    add("--patience", type=float, default=24, metavar="H", help="look for a machine for this many hours (24)")
    add("--restarts", type=int, default=100, metavar="N", help="go on after so many machines were taken away (100)")
    add("--keep", action="store_true", help="delete nothing at the end: it goes on costing money")
    add("--dry-run", action="store_true", help="print the commands and the price, and do nothing")
    add("settings", nargs="*", metavar="SETTING", help="for every stage, after --")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = options().parse_args(argv)
    args.name = args.name or f"nanochat-{args.preset}"
    target = preset(args.preset).target
    machine = Machine(args, target)
    say(f"{args.preset}: a {machine.type}{'' if args.on_demand else ', spot'}: {hourly(target, args.on_demand)}")
    say("that is paid while the machine exists, idle or not; a request that waits is free; the bucket is paid, too")
    if args.dry_run:
        for zone in machine.zones:
            machine.zone = zone
            print(shlex.join(machine.create()))
        machine.attempt = "1"
        for command in (machine.copy(Path("nanochat.tgz")), machine.on_workers(machine.training()), machine.delete()):
            print(shlex.join(command))
        return 0

    def stop(number: int, frame: object) -> None:
        if machine.starting:
            machine.pending = number
        elif not machine.leaving:  # a second one changes nothing: what costs money is deleted first
            machine.leaving = True
            raise Stop(130 if number == signal.SIGINT else 143, "stopped")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        try:
            code, why = work(machine), ""
        finally:
            machine.leaving = True
    except Stop as error:
        code, why = error.code, str(error)
    except Exception as error:  # no gcloud, an answer that cannot be read: what is there is deleted all the same
        code, why = 1, f"{type(error).__name__}: {error}"
    try:
        if args.keep and machine.asked:
            say(f"{machine.name} in {machine.zone} is kept AND COSTS MONEY until: {shlex.join(machine.delete())}")
        elif code != 3:
            if code in (130, 143):
                machine.stop_training()
            machine.give_back()
    except Stop as error:  # not deleted
        code, why = error.code, str(error)
    say(why or ("done" if code == 0 else f"ended with {code}"))
    return code


if __name__ == "__main__":
    sys.exit(main())
