"""The twin's optimiser: nanochat's Muon and AdamW in PyTorch, on one device, a reference for `optim` and `muon`.

Written from nanochat's description and independent of the JAX one. Groups, their order and the state's layout are
nanochat's, so `load_state_dict` takes the optimiser file of a run on one rank as it is. With `compiled=True` the two
update rules go through `torch.compile`; scalars enter as 0-d tensors, so a changing value never compiles again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanochat_lib.twin import GPT

POLAR = (  # Polar Express, five steps
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SMEAR_LR = 0.2


class MuonRule(NamedTuple):
    """What differs between the recipes."""

    equilibrate: bool  # MuonEq: rows of one norm before the iteration
    margin: float
    rescale: bool  # Muon+: Frobenius norm √min(R, N) after it
    beta2: float
    always_bf16: bool  # iterate in bfloat16 whatever the compute dtype is, and stay there until the update


RULES = {
    "head": MuonRule(True, 1.01, True, 0.9, False),
    "recipe4": MuonRule(False, 1.02, False, 0.95, True),
}


def adamw_update(
    p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: Tensor, beta1: Tensor,
    beta2: Tensor, eps: Tensor, weight_decay: Tensor,
) -> None:  # fmt: skip
    """One AdamW step in place, in float32; results go back to the storage dtype."""
    g = grad.float()
    m = exp_avg.float().lerp(g, 1 - beta1)
    v = exp_avg_sq.float().lerp(g.square(), 1 - beta2)
    denominator = (v / (1 - beta2**step)).sqrt() + eps
    p.copy_(p.float() * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / denominator)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def frobenius(x: Tensor) -> Tensor:
    return x.float().norm(dim=(-2, -1), keepdim=True)


def polar_express(x: Tensor, margin: float) -> Tensor:
    x = x / (frobenius(x) * margin + 1e-6).to(x.dtype)
    tall = x.size(-2) > x.size(-1)
    for a, b, c in POLAR:
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = b * gram + c * (gram @ gram)
        x = a * x + (x @ polynomial if tall else polynomial @ x)
    return x


def muon_update(
    p: Tensor, grad: Tensor, buffer: Tensor, second: Tensor, lr: Tensor, momentum: Tensor, weight_decay: Tensor,
    rule: MuonRule, bf16: bool,
) -> Tensor:  # fmt: skip
    """The new weights of a stack (K, R, N); `buffer` and `second` change in place."""
    rows, columns = p.shape[-2:]
    buffer.lerp_(grad, 1 - momentum)
    u = grad.lerp(buffer, momentum)
    if bf16 or rule.always_bf16:
        u = u.bfloat16()
    if rule.equilibrate:
        norms = u.float().norm(dim=-1, keepdim=True).clamp_min(1e-6)
        u = u * (frobenius(u) / rows**0.5 / norms).to(u.dtype)
    u = polar_express(u, rule.margin)
    if not rule.always_bf16:
        u = u.to(p.dtype)
    if rule.rescale:
        u = u * (min(rows, columns) ** 0.5 / frobenius(u).clamp_min(1e-6)).to(u.dtype)
    axis = -1 if rows >= columns else -2
    mean = u.float().square().mean(dim=axis, keepdim=True)
    second.lerp_(mean.to(second.dtype), 1 - rule.beta2)
    scale = second.clamp_min(1e-10).rsqrt()
    before = (u.size(axis) * mean.sum(dim=(-2, -1), keepdim=True)).sqrt()
    after = (u.size(axis) * (mean * scale.square()).sum(dim=(-2, -1), keepdim=True)).sqrt()
    u = u * (scale * before / after.clamp_min(1e-10)).to(u.dtype)
    rate = (lr * max(1, rows / columns) ** 0.5).to(u.dtype)
    agree = u * p >= 0
    return p - (rate * u + rate * weight_decay.to(u.dtype) * p * agree)


class MuonAdamW(torch.optim.Optimizer):
    """`MuonAdamW(model)` of a plain `twin.GPT` (before `torch.compile`); rates as nanochat's, at width 768.

    Schedules write `lr` (from `initial_lr`), `momentum` and, for Muon, `weight_decay` into `param_groups`. Every
    parameter must have a gradient when `step` is called.
    """

    def __init__(
        self,
        model: GPT,
        *,
        unembedding_lr: float = 0.004,
        embedding_lr: float = 0.2,
        matrix_lr: float = 0.02,
        scalar_lr: float = 0.5,
        weight_decay: float = 0.0,
        compiled: bool = False,
    ) -> None:
        head = model.config.recipe == "head"
        self.rule, self.bf16 = RULES[model.config.recipe], model.compute_dtype == torch.bfloat16
        self.adamw_update, self.muon_update = adamw_update, muon_update
        if compiled:  # one program a shape; torch gives up after eight of one function unless told otherwise
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            self.adamw_update = torch.compile(adamw_update, fullgraph=True, dynamic=False)
            self.muon_update = torch.compile(muon_update, fullgraph=True, dynamic=False)
        width = (model.config.n_embd / 768) ** -0.5

        def adamw(params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], decay: float) -> dict:
            betas, decay = (betas, decay) if head else ((betas[0], 0.95), 0.0)
            return {
                "params": list(params), "kind": "adamw", "lr": lr, "betas": betas, "eps": 1e-10, "weight_decay": decay,
            }  # fmt: skip

        embeds_lr = embedding_lr * width * (0.5 if head else 1.0)
        groups = [
            adamw([model.lm_head.weight], unembedding_lr * width, (0.8, 0.96), 0.01),
            adamw([model.transformer["wte"].weight], embedding_lr * width, (0.8, 0.995), 0.001),
            adamw((table.weight for table in model.value_embeds.values()), embeds_lr, (0.8, 0.995), 0.01),
            adamw([model.resid_lambdas], scalar_lr * 0.01, (0.8, 0.95), 0.05),
            adamw([model.x0_lambdas], scalar_lr, (0.96, 0.95), 0.0),
        ]
        if head:
            smear = [model.smear_gate.weight, model.smear_lambda, model.backout_lambda]
            groups.append(adamw(smear, SMEAR_LR, (0.8, 0.95), 0.0))
        matrices = list(model.transformer["h"].parameters())
        for shape in sorted({tuple(p.shape) for p in matrices}):
            members = [p for p in matrices if p.shape == shape]
            groups.append({
                "params": members, "kind": "muon", "lr": matrix_lr, "momentum": 0.95, "ns_steps": 5,
                "beta2": self.rule.beta2, "weight_decay": weight_decay,
            })  # fmt: skip
        super().__init__(groups, {})
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates every parameter from its gradient."""
        for group in self.param_groups:
            (self._adamw if group["kind"] == "adamw" else self._muon)(group)

    def _adamw(self, group: dict) -> None:
        betas = [torch.tensor(beta, dtype=torch.float32) for beta in group["betas"]]
        lr, eps, decay = (torch.tensor(group[name], dtype=torch.float32) for name in ("lr", "eps", "weight_decay"))
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            state["step"] += 1
            step = torch.tensor(state["step"], dtype=torch.float32)
            self.adamw_update(p, p.grad, state["exp_avg"], state["exp_avg_sq"], step, lr, *betas, eps, decay)

    def _muon(self, group: dict) -> None:
        params = group["params"]
        state = self.state[params[0]]
        stacked = torch.stack(list(params))
        if not state:
            kept = stacked[..., :1] if stacked.size(-2) >= stacked.size(-1) else stacked[..., :1, :]
            state |= {"momentum_buffer": torch.zeros_like(stacked), "second_momentum_buffer": torch.zeros_like(kept)}
        lr, momentum, decay = (
            torch.tensor(group[name], dtype=torch.float32) for name in ("lr", "momentum", "weight_decay")
        )
        grads = torch.stack([p.grad for p in params])
        new = self.muon_update(
            stacked, grads, state["momentum_buffer"], state["second_momentum_buffer"], lr, momentum, decay,
            self.rule, self.bf16,
        )  # fmt: skip
        torch._foreach_copy_(list(params), list(new.unbind()))
