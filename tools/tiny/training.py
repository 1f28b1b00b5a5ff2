"""The training loop: random windows, two losses, a schedule that fits the time allowed."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .network import Network

# Share of the rows of a batch; the documentation is repeated most.
MIXTURE = {"docs": 0.45, "code": 0.35, "tests": 0.20}
MTP_WEIGHT = 0.3

Heads = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Plan:
    """How long and how hard to train."""

    device: str
    steps: int | None  # None: as many as fit into ``minutes``
    minutes: float
    rows: int
    length: int
    learning_rate: float
    weight_decay: float
    dropout: float
    compile: bool
    seed: int
    warmup: int = 100
    evaluate_every: int = 100
    save_every_s: float = 60.0


class Windows:
    """Random windows of the training streams, kinds mixed as ``MIXTURE`` says."""

    def __init__(self, streams: dict[str, np.ndarray], length: int, device: str, seed: int) -> None:
        kinds = [kind for kind in MIXTURE if len(streams.get(kind, ())) > length]
        if not kinds:
            raise ValueError(f"no training stream is longer than a window of {length} tokens")
        sizes = [len(streams[kind]) for kind in kinds]
        self._tokens = torch.from_numpy(np.concatenate([streams[k] for k in kinds])).to(device)
        self._sizes = torch.tensor(sizes, device=device)
        self._starts = self._sizes.cumsum(0) - self._sizes
        self._weights = torch.tensor([MIXTURE[kind] for kind in kinds], device=device)
        self._offsets = torch.arange(length, device=device)
        self._random = torch.Generator(device).manual_seed(seed)

    def draw(self, rows: int) -> Tensor:
        """[rows, length] int64."""
        kinds = torch.multinomial(self._weights, rows, replacement=True, generator=self._random)
        where = torch.rand(rows, generator=self._random, device=self._sizes.device)
        first = (where * (self._sizes[kinds] - len(self._offsets))).long() + self._starts[kinds]
        return self._tokens[first[:, None] + self._offsets].long()


def head_losses(
    rows: Tensor, ahead: Tensor, matrix: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats of the next token, and of the MTP head against the main head.

    The MTP head learns what the main head will say one row later (its distribution, no gradient
    into it): that is what a draft is accepted by, and a softer target than the text.
    """
    logits = F.linear(rows, matrix)
    main = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    teacher = logits[:, 1:].detach().float().softmax(-1)
    draft = F.linear(ahead[:, :-1], matrix).float().log_softmax(-1)
    return main, -(teacher * draft).sum(-1).mean()


def losses(network: Network, tokens: Tensor, heads: Heads = head_losses) -> tuple[Tensor, Tensor]:
    """``head_losses`` of the windows ``tokens`` [B, T + 1]."""
    rows, ahead = network(tokens[:, :-1], tokens[:, 1:])
    return heads(rows, ahead, network.model.embed_tokens.weight, tokens[:, 1:])


def _optimizer(network: Network, plan: Plan) -> torch.optim.Optimizer:
    matrices = [p for p in network.parameters() if p.ndim == 2]
    others = [p for p in network.parameters() if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = plan.device.startswith("cuda")
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=fused)


def compiled(network: Network, tokens: Tensor, autocast: torch.autocast) -> Heads:
    """Compile layer by layer (their graphs are shared), and the heads with their losses.

    One pass over ``tokens`` proves it. Where the compiler fails, everything stays eager, aloud.
    """
    for layer in [*network.model.layers, *network.mtp.layers]:
        layer.compile()
    heads: Heads = torch.compile(head_losses)
    try:
        with autocast:
            sum(losses(network, tokens, heads)).backward()
    except Exception as error:  # whatever a compiler may raise
        print(f"torch.compile failed, training eagerly: {type(error).__name__}: {error}")
        torch.compiler.set_stance("force_eager")
    network.zero_grad(set_to_none=True)
    return heads


def train(
    network: Network,
    streams: dict[str, np.ndarray],
    held_out: np.ndarray,
    plan: Plan,
    save: Callable[[Network], Any],
    curve: Path,
) -> int:
    """Train in place; write ``curve`` (CSV) and call ``save`` every minute. Returns the steps."""
    network.to(plan.device).train()
    optimizer = _optimizer(network, plan)
    windows = Windows(streams, plan.length + 1, plan.device, plan.seed)
    held = _rows(held_out, plan.length + 1, plan.rows).to(plan.device)
    autocast = torch.autocast(plan.device.split(":")[0], dtype=torch.bfloat16)
    limit = time.monotonic() + 60 * plan.minutes
    heads = head_losses
    if plan.compile:
        heads = compiled(network, windows.draw(plan.rows), autocast)
    started = saved = time.monotonic()
    step, progress = 0, 0.0
    with curve.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            ["step", "seconds", "learning_rate", "loss", "mtp_loss", "held_out", "held_out_mtp"]
        )
        while progress < 1.0:
            warm = (step + 1) / min(plan.warmup, (plan.steps or 1000) // 10 + 1)
            rate = plan.learning_rate * min(1.0, warm, 1.0 - progress)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with autocast:
                main, ahead = losses(network, windows.draw(plan.rows), heads)
            (main + MTP_WEIGHT * ahead).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 10 == 0 or step == plan.steps:  # the only wait for the device
                values = [main.item(), ahead.item()]
                if not all(map(math.isfinite, values)):
                    raise FloatingPointError(f"the loss is {values} at step {step}")
                elapsed = time.monotonic() - started
                spent = elapsed / max(limit - started, 1e-3)
                progress = spent if plan.steps is None else max(spent, step / plan.steps)
                test = ["", ""]
                if step in {10, 50} or step % plan.evaluate_every == 0 or progress >= 1.0:
                    test = [f"{x:.4f}" for x in _evaluate(network, held, autocast)]
                    print(
                        f"{step} {elapsed:.1f}s {values[0]:.4f} {values[1]:.4f} {test}", flush=True
                    )
                table.writerow(
                    [step, f"{elapsed:.1f}", f"{rate:.2e}", *(f"{x:.4f}" for x in values), *test]
                )
                if time.monotonic() - saved > plan.save_every_s:
                    saved = time.monotonic()
                    file.flush()
                    save(network)
    network.eval()
    return step


def _rows(tokens: np.ndarray, length: int, rows: int) -> Tensor:
    """Up to ``rows`` windows, spread evenly."""
    last = max(len(tokens) - length, 0)
    firsts = np.linspace(0, last, min(rows, max(last // length, 1))).astype(int)
    return torch.from_numpy(np.stack([tokens[f : f + length] for f in firsts])).long()


@torch.no_grad()
def _evaluate(network: Network, held: Tensor, autocast: torch.autocast) -> tuple[float, float]:
    network.eval()
    with autocast, torch.compiler.set_stance("force_eager"):
        main, ahead = losses(network, held)
    network.train()
    return main.item(), ahead.item()
