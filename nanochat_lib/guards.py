"""Guards: checks of a stage's first steps that find, for almost nothing, what a loss curve shows after days or never.

Each is one line of error with the numbers, the likely cause and the fix. `ops.guard_steps` says for how many steps of
each start the whole set runs (-1: always, 0: never). After those steps a cheap part stays on: ids in range, something
to train on, a gradient that is not zero. That loss and gradient are finite is checked by the trainer in every step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nanochat_lib import distributed, loader
from nanochat_lib.errors import UserError

NEAR_UNIFORM = 0.05  # nats: a fresh model's first loss is ln V to 0.003, in both recipes and up to width 1536
WORSE_THAN_HELD_OUT = 2.0  # nats: one batch beside another of the same kind
ABSURD = 4.0  # nats above ln V: the preset cpu's base model begins SFT about 1 above it
LOW_SHARE = 0.05  # of the positions of a chat batch: fewer trained ones are worth a warning
PROBE_TOLERANCE = 0.005  # nats; on the machine that saved it a loss comes back to the last bit
NORM_TOLERANCE = 1e-4  # relative; another number of devices adds in another order


@dataclass(frozen=True)
class FirstLoss:
    """Where the size of the first step's loss has to lie, nats a target."""

    low: float
    high: float
    what: str  # what the band comes from
    cause: str  # why a loss may lie outside, and what to do


def near_uniform(vocab_size: int) -> FirstLoss:
    """A model that knows nothing gives all V ids the same probability: its loss is ln V."""
    expected = math.log(vocab_size)
    return FirstLoss(
        expected - NEAR_UNIFORM, expected + NEAR_UNIFORM, f"ln {vocab_size:,} = {expected:.3f} ± {NEAR_UNIFORM}",
        "the initial weights are not small or not fresh, or the loss is not a mean over the targets; look at gpt.py's "
        "initialisation and use a new run folder",
    )  # fmt: skip


def not_worse_than(vocab_size: int, held_out: float | None = None) -> FirstLoss:
    """A stage that goes on from another's model: near what that model loses on `held_out` data of the new kind.

    A chat's own tokens, which the base model has never seen, cost it much: more than ln V on all tokens together. So
    without held-out data only what no model does that was read rightly is refused.
    """
    ceiling = math.log(vocab_size) + ABSURD
    high = ceiling if held_out is None else min(held_out + WORSE_THAN_HELD_OUT, ceiling)
    known = "" if held_out is None else f"; on held-out data the same model has {held_out:.3f}"
    return FirstLoss(
        -math.inf, high, f"at most {high:.3f}{known}",
        "these are not the weights or the tokenizer of the stage before, or the masks train what no text predicts; "
        "check the run's folder and the rendered conversations",
    )  # fmt: skip


@dataclass
class Guards:
    """The checks of one start of a stage: `before` each step with its batch, `after` it with what came out."""

    stage: str
    vocab_size: int
    steps: int = 10  # of this start, checked whole; -1: all, 0: none
    first_loss: FirstLoss | None = None  # of step 0; None at a restart
    repeats: bool = False  # batches may repeat: a model's own answers do once they are all the same
    low_share: float = 0.0  # of trained positions, below which a line warns
    seen: int = 0
    kept: tuple[dict, dict] | None = None  # the newest batch, and the hashes it was handed out with
    trained: list[int] = field(default_factory=lambda: [0, 0])  # (targets, positions) so far
    idle: bool = False  # all weights of this batch are zero: no gradient is expected

    @property
    def whole(self) -> bool:
        """Whether the present step is one of the first."""
        return self.steps < 0 or self.seen < self.steps

    def before(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Looks at this process's batch, (A, b, T) each, before step `step` (from 0) computes with it."""
        if self.steps == 0:
            return
        where = f"{self.stage} step {step + 1}"
        check_ids(where, arrays, self.vocab_size)
        self.idle = "weights" in arrays and not np.any(arrays["weights"])
        if self.kept:
            check_unchanged(where, *self.kept)
        earlier, self.kept = self.kept, None
        if self.whole:
            check_aligned(where, arrays["inputs"], arrays["targets"])
            now = {name: digests(x) for name, x in arrays.items()}
            if not self.repeats:
                check_distinct(where, arrays, now, earlier[1] if earlier else {})
            self.kept = dict(arrays), now

    def after(self, step: int, out: Mapping[str, float], positions: int) -> None:
        """Looks at the step's figures; `positions` are all that could have been trained, over all processes."""
        if self.steps == 0:
            return
        where = f"{self.stage} step {step + 1}"
        if not out["tokens"]:
            raise UserError(
                f"{where}: none of the batch's {positions:,} targets is trained, all are -1: the mask leaves nothing "
                "of what the assistant says, or rows are cut before it; look at the masks, or use a longer "
                "model.sequence_len"
            )
        if out["grad_norm"] == 0 and not self.idle:
            raise UserError(
                f"{where}: the gradient is exactly 0 with a loss of {out['loss']:.4g} over {int(out['tokens']):,} "
                "targets: something between the weights and the loss cuts the gradient off (stop_gradient, an integer, "
                "a constant), or the loss is computed with other weights; compare with the library's own functions"
            )
        if step == 0 and self.first_loss:
            check_first_loss(where, out["loss"], self.first_loss)
        if self.whole:
            self.trained = [self.trained[0] + int(out["tokens"]), self.trained[1] + positions]
        self.seen += 1
        if self.seen == self.steps and (share := self.trained[0] / self.trained[1]) < self.low_share:
            distributed.say(
                f"{self.stage}: only {share:.1%} of the positions are trained ({self.trained[0]:,} of "
                f"{self.trained[1]:,} in {self.seen} steps), the rest is prompts and padding: most of each step is "
                "wasted; use a shorter model.sequence_len or conversations with longer answers"
            )


# ---- what a batch must be


def check_ids(where: str, arrays: Mapping[str, np.ndarray], vocab_size: int) -> None:
    """Inputs are integers in [0, V); targets too, or -1 where nothing is trained. On a device others go unnoticed."""
    for name, low in (("inputs", 0), ("targets", -1)):
        x = np.asarray(arrays[name])
        if x.dtype.kind not in "iu":
            raise UserError(
                f"{where}: {name} are {x.dtype}, must be integers: the batch was computed with, or its dtype "
                "forgotten; make it int32"
            )
        for value in (int(x.min()), int(x.max())):
            if not low <= value < vocab_size:
                at = place(np.argwhere(x == value)[0])
                hint = ", or -1 where nothing is trained" if low < 0 else ""
                raise UserError(
                    f"{where}: {name} hold {value:,} ({at}), must be 0 … {vocab_size - 1:,}{hint}: the tokenizer is "
                    "not the model's, or the buffer was not filled; use the run's own tokenizer, and -1 for the ignored"
                )


def check_aligned(where: str, inputs: np.ndarray, targets: np.ndarray) -> None:
    """Where a target is trained it is the input one position on: anything else teaches to copy or to skip."""
    shown, wanted = targets[..., :-1], inputs[..., 1:]
    wrong = (shown >= 0) & (shown != wanted)
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0])
        raise UserError(
            f"{where}: {int(wrong.sum()):,} of {int((shown >= 0).sum()):,} trained targets are not the next input "
            f"({place(first)}: target {shown[first]}, next input {wanted[first]}): targets or mask are shifted by "
            "another number than one; make inputs ids[:, :-1] and targets ids[:, 1:] of the same rows"
        )


def check_distinct(where: str, arrays: Mapping[str, np.ndarray], now: dict, earlier: dict) -> None:
    """No two micro-batches of a step are equal, and none is one of the step before. All-padding ones may be."""
    try:
        loader.distinct_microbatches(arrays["inputs"], arrays["targets"])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    before = {digest: i for i, digest in enumerate(earlier.get("inputs", []))}
    for i, digest in enumerate(now["inputs"]):
        if digest in before and (arrays["targets"][i] >= 0).any():
            raise UserError(
                f"{where}: micro-batch {i} is equal to micro-batch {before[digest]} of the step before: the loader "
                "hands out old batches, or the data repeat after one step; use more documents or smaller batches "
                "(ops.guard_steps=0 if it is meant)"
            )


def check_unchanged(where: str, arrays: dict[str, np.ndarray], handed_out: dict[str, list[bytes]]) -> None:
    """The batch of the step before is still what it was: a device may be reading it."""
    for name, x in arrays.items():
        changed = [i for i, digest in enumerate(digests(x)) if digest != handed_out[name][i]]
        if changed:
            raise UserError(
                f"{where}: the {name} of the step before have changed since they were handed out (micro-batches "
                f"{', '.join(map(str, changed))} of {len(x)}): the loader fills a buffer again that it gave away; copy "
                "each batch (np.array, where np.asarray or a slice is only a view)"
            )


def digests(array: np.ndarray) -> list[bytes]:
    """A hash of each micro-batch's content."""
    return [hashlib.blake2b(np.ascontiguousarray(part), digest_size=16).digest() for part in array]


def place(index: Any) -> str:
    return ", ".join(f"{name} {int(i)}" for name, i in zip(("micro-batch", "row", "position"), index, strict=True))


def check_first_loss(where: str, loss: float, band: FirstLoss) -> None:
    """`loss` may be negative in RL, where advantages weigh it: its size counts."""
    if not band.low <= abs(loss) <= band.high:
        raise UserError(f"{where}: the first loss is {loss:.3f}, expected {band.what}: {band.cause}")


# ---- is a restored state the one that was saved


def probe(eval_step: Callable, batch: tuple, token_bytes: np.ndarray) -> Callable[[dict], float]:
    """A function of the parameters: the mean loss, nats a target, of one fixed (inputs, targets), (B, T) each."""

    def loss(params: dict) -> float:
        *_, nll, count = jax.device_get(eval_step(params, *batch, token_bytes))
        return float(nll) / max(int(count), 1)

    return loss


def probe_rows(batch: tuple[np.ndarray, np.ndarray], mine: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch with the first `rows` rows of all processes' trained only: the same loss on any number of devices.

    `mine` are the numbers of this process's rows.
    """
    inputs, targets = batch
    return inputs, np.where((np.asarray(mine) < rows)[:, None], targets, -1).astype(targets.dtype)


def mark(state: Any, measure: Callable[[dict], float] | None) -> dict:
    """Figures by which a TrainState is known again, for its checkpoint's meta. All processes call this together."""
    params, moments = jax.device_get(_norms(state.params, state.opt_state))
    found = {"step": int(state.step), "params_norm": float(params), "optimizer_norm": float(moments)}
    return found | ({"probe_loss": measure(state.params)} if measure else {})


@jax.jit
def _norms(params: Any, opt_state: Any) -> tuple[jax.Array, jax.Array]:
    def norm(tree: Any) -> jax.Array:
        floats = [x.astype(jnp.float32) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
        return optax.tree.norm(floats)

    return norm(params), norm(opt_state)


def check_restored(name: str, folder: Path, state: Any, meta: dict, measure: Callable[[dict], float] | None) -> None:
    """Raises UserError when `state`, read from the checkpoint with `meta`, is not the one that was saved there.

    A checkpoint without marks (converted, or of an earlier version) passes. All processes call this together.
    """
    saved = meta.get("mark")
    if not saved:
        return
    found = mark(state, measure)
    allowed = {
        "step": 0.0,
        "params_norm": NORM_TOLERANCE * abs(saved["params_norm"]),
        "optimizer_norm": NORM_TOLERANCE * abs(saved["optimizer_norm"]),
        "probe_loss": PROBE_TOLERANCE,
    }
    for figure in [figure for figure in allowed if figure in saved and figure in found]:
        if not abs(found[figure] - saved[figure]) <= allowed[figure]:
            raise UserError(
                f"{name}: the state read from step {meta['step']} in {folder} is not what was saved: "
                f"{figure.replace('_', ' ')} {found[figure]:.6g}, saved {saved[figure]:.6g} (tolerance "
                f"{allowed[figure]:.2g}): it was restored only in part, or another program changed the checkpoint; "
                f"remove that checkpoint to go on from the one before it, or use a new run folder"
            )
