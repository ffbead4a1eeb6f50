"""A run as the engine would leave it, and what a browser would make of its page."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import torch

from bpfed.metrics import evaluate, evaluate_regression
from bpfed.report import RunRecord


def record(n: int = 8, rounds: int = 5, task: str = "classification", names: list[str] | None = None) -> RunRecord:
    """A run as the engine would leave it: made-up predictions that get better, client 2 without test examples."""
    g = torch.Generator().manual_seed(n)
    train = torch.randint(20, 400, (n,), generator=g)
    sizes = train // 10 + 3
    if n > 2:
        sizes[2] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    total = int(sizes.sum())
    y = torch.randint(3, (total,), generator=g)
    noise = torch.randn(total, 3, generator=g)
    history: list[dict[str, Any]] = []
    for t in range(1, rounds + 1):
        if task == "classification":
            evaluation = evaluate((noise + t * torch.eye(3)[y]).softmax(1), y, offsets)
        else:
            target, scale = y.float(), torch.full((total,), 1 / t)
            nll = -torch.distributions.Normal(target + noise[:, 0] / t, scale).log_prob(target)
            evaluation = evaluate_regression(target + noise[:, 0] / t, scale, nll, target, offsets)
        entry = {"round": t} | evaluation.record()
        history.append(entry | {"train_nll": 1 / t, "train_kl": 0.1 / t, "participants": n, "seconds": 1.2})
    detail = evaluation.detail(rounds, names or [f"site-{i}" for i in range(n)], train.tolist())
    described = {"method": "BPFed", "data": "digits", "partition": "groups", "protocol": "paper", "device": "cpu"}
    summary = described | {"seed": 0, "rounds": rounds, "clients": n, "seconds": 83.2}
    return RunRecord({"rounds": rounds, "method": {"lr": 1e-3}}, history, detail, summary)


class Page(HTMLParser):
    """What a browser would make of the page: tags balanced, attributes, text."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data

    def count(self, tag: str) -> int:
        return sum(t == tag for t, _ in self.tags)


def plain(words: str) -> str:
    return words.replace("\u202f", " ").replace("\u00a0", " ")
