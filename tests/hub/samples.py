"""Small data sets of the right shape, made here: shards of parquet, an evaluation bundle."""

import io
import random
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq

CLIMBMIX = "karpathy/climbmix-400b-shuffle"


def parquet(seed: int, documents: int = 200) -> bytes:
    """A small shard, about 90 kB: random letters do not compress."""
    rng = random.Random(seed)
    texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz     ", k=700)) for _ in range(documents)]
    out = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), out, row_group_size=64, compression="zstd")
    return out.getvalue()


def bundle(top: str = "eval_bundle/", leave_out: str = "") -> bytes:
    """A CORE bundle of one task."""
    files = {
        "core.yaml": "icl_tasks:\n- label: copa\n  dataset_uri: commonsense/copa.jsonl\n  num_fewshot: [0]\n"
        "  icl_task_type: multiple_choice\n",
        "eval_meta_data.csv": "Eval Task,Random baseline\ncopa,50\n",
        "eval_data/commonsense/copa.jsonl": '{"query": "a", "choices": ["b", "c"], "gold": 0}\n' * 500,
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, text in files.items():
            if name != leave_out:
                archive.writestr(top + name, text)
        archive.writestr("__MACOSX/eval_bundle/core.yaml", "junk")
    return out.getvalue()


SHARDS = {f"shard_{i:05d}.parquet": parquet(i) for i in (0, 1, 2, 6542)}
