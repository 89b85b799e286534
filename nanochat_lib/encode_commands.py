"""`nanochat data encode`: which corpus, which tokenizer, how many processes."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from nanochat_lib.errors import UserError


def encode(args: argparse.Namespace) -> None:
    from nanochat_lib import encode_ids
    from nanochat_lib.corpus import open_corpus
    from nanochat_lib.presets import DataConfig, from_dict
    from nanochat_lib.storage import read_json
    from nanochat_lib.tokenizer import Tokenizer

    if args.jobs < 1:
        raise UserError(f"--jobs {args.jobs} is out of range: at least 1 process")
    folder = Path(args.tokenizer) if args.tokenizer else Path(args.run_dir or "") / "tokenizer"
    data, seed = DataConfig(), 0
    if args.run_dir:
        if not (Path(args.run_dir) / "config.json").exists():
            begin = f"nanochat tokenizer --any-machine --run-dir {args.run_dir}"
            raise UserError(f"{args.run_dir} holds no run; begin it with `{begin}`")
        config = from_dict(read_json(Path(args.run_dir) / "config.json"))
        data, seed = config.data, config.seed
    elif not (args.corpus and args.tokenizer):
        raise UserError(
            "which corpus and which tokenizer? --run-dir DIR takes a run's own, or give CORPUS --tokenizer DIR"
        )
    if not (folder / "tokenizer.json").exists():
        raise UserError(f"{folder} holds no tokenizer; train the run's own first, with `nanochat tokenizer`")
    tokenizer = Tokenizer.load(folder)
    corpus = open_corpus(replace(data, corpus=args.corpus or data.corpus), seed)
    encode_ids.encode(corpus, tokenizer, args.jobs, plan=args.plan, check=args.check, wait=args.wait)


def _options(parser: argparse.ArgumentParser) -> None:
    jobs, wait = os.cpu_count() or 1, 3600.0
    parser.add_argument(
        "corpus", nargs="?", metavar="CORPUS",
        help="climbmix, fineweb-edu, a folder of shards, or a URL (default: the corpus of --run-dir)",
    )  # fmt: skip
    parser.add_argument("--run-dir", metavar="DIR", help="encode for this run: with its tokenizer, its corpus")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: that of --run-dir)")
    parser.add_argument(
        "--jobs", type=int, default=jobs, metavar="K", help=f"processes (default {jobs}, as cores here)"
    )
    parser.add_argument(
        "--plan", action="store_true", help="encode nothing; say how many shards, GB and minutes it takes"
    )
    parser.add_argument("--check", action="store_true", help="read all ids that are kept and make damaged ones anew")
    parser.add_argument(
        "--wait",
        type=float,
        default=wait,
        metavar="S",
        help="seconds to wait for another process that encodes the same",
    )


ABOUT = "encode shards once and keep the token ids beside them, so that training reads ids"
EXAMPLES = """nanochat data encode --run-dir runs/d24 --plan
         nanochat data encode --run-dir runs/d24
         nanochat data encode gs://my-bucket/shards --tokenizer runs/d24/tokenizer --jobs 8"""
ACTION = (encode, _options, ABOUT, EXAMPLES)
