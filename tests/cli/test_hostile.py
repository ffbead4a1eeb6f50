"""Uploads that no training can have led to: refused, named, and without a trace in the run; honest ones never are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scenarios import classification, start
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.hostile import CREEPING, REFUSED, WITHIN, Lie, Stage
from bpfed._util.errors import Diverged, UserError
from bpfed.config.settings import Settings
from bpfed.engine.federation import Federation
from bpfed.engine.server import judged
from bpfed.engine.simulator import Simulator
from bpfed.inference.gaussian import Gaussian
from bpfed.methods import METHODS, BPFed, FedAvg
from bpfed.methods.base import Weights
from bpfed.runs.run import Run

LIAR = 5


@pytest.fixture(scope="module", params=["mean", "moments", "precision"])
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(BPFed(rule=request.param), rounds=len(REFUSED), epochs=1, hidden=8)


def each_in_turn() -> Lie:
    lies = list(REFUSED.values())
    return lambda upload, shared, round_, old: lies[round_ - 1](upload, shared, round_, old)


def test_a_run_with_another_lie_in_every_round_is_the_run_without_the_liar(stage: Stage) -> None:
    lied = stage.play(each_in_turn())
    shared, personal = lied.federation.shared, lied.federation.store.get(torch.arange(6))
    liar = lied.federation.data.clients[LIAR]
    assert [list(refused) for refused in lied.refused.values()] == [[liar]] * len(REFUSED)
    away = stage.play(None)
    assert away.accuracy == lied.accuracy
    for a, b in zip(
        tree_leaves((shared, personal)),
        tree_leaves((away.federation.shared, away.federation.store.get(torch.arange(6)))),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)  # up to the rounding of five or six clients in one product


class First:
    """The uploads of a first round, and what a server makes of them."""

    def __init__(self) -> None:
        self.federation = Stage(BPFed(), rounds=2, epochs=1, hidden=8).federation
        receive = Federation.receive
        kept: list[Any] = []

        def keep(state: Federation, *given: Any) -> dict[str, str]:
            kept.append(given)
            return {}

        Federation.receive = keep  # type: ignore[method-assign, assignment]
        try:
            Simulator([self.federation]).round()
        finally:
            Federation.receive = receive  # type: ignore[method-assign]
        self.clients, self.uploads, self.personal = kept[0]
        self.shared = self.federation.shared
        self.settings, self.first_store = self.federation.settings, self.federation.store

    def told(self, lie: Lie | None, honest: int) -> tuple[torch.Tensor, Gaussian, Any]:
        """The uploads of the first few clients, and of one that lies."""
        who = [*range(honest), LIAR]
        clients, uploads, personal = tree_map(lambda t: t[who], (self.clients, self.uploads, self.personal))
        if lie is not None:
            own = tree_map(lambda t: t[-1], uploads)
            uploads = tree_map(lambda t, new: torch.cat([t[:-1], new[None]]), uploads, lie(own, self.shared, 1, [own]))
        return clients, uploads, personal

    def receive(self, lie: Lie | None, honest: int = 5, **settings: Any) -> dict[str, str]:
        state = self.federation
        state.settings = replace(self.settings, **settings)
        state.shared, state.round, state.lengths = self.shared, 0, {}
        return state.receive(*self.told(lie, honest))

    @property
    def liar(self) -> str:
        return self.federation.data.clients[int(self.clients[LIAR])]


@pytest.fixture(scope="module")
def first() -> First:
    return First()


@pytest.mark.parametrize("honest", [5, 2, 1])
@pytest.mark.parametrize("name", REFUSED)
def test_a_lie_is_refused_in_the_first_round_also_where_there_are_but_two(first: First, name: str, honest: int) -> None:
    assert list(first.receive(REFUSED[name], honest)) == [first.liar]
    assert all(torch.isfinite(t).all() for t in tree_leaves(first.federation.shared))


@pytest.mark.parametrize(
    "options", [{"robust": "median"}, {"robust": "trimmed:0.2"}, {"clip": 0.5}, {"compression": "half"}]
)
@pytest.mark.parametrize("name", ["one mean of 1e20", "all σ 3e38", "all σ 1e-30", "all numbers 3e38"])
def test_lies_are_refused_with_every_option(first: First, name: str, options: dict[str, Any]) -> None:
    assert list(first.receive(REFUSED[name], **options)) == [first.liar]
    with_lie = first.federation.shared
    who = [*range(5)]
    first.federation.shared, first.federation.round, first.federation.lengths = first.shared, 0, {}
    given = tree_map(lambda t: t[who], (first.clients, first.uploads, first.personal))
    assert first.federation.receive(*given) == {}
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(with_lie), first.federation.shared, strict=True))


def test_with_noise_for_privacy_nobody_is_judged_by_others(first: First) -> None:
    assert first.receive(REFUSED["one mean of 1e20"], clip=0.5, noise=1.0) == {}
    assert float((first.federation.shared.mean - first.shared.mean).norm()) < 20.0


def test_a_lone_client_is_bounded_by_the_size_of_the_first_weights_and_then_by_its_own_past(first: First) -> None:
    assert first.receive(None, honest=0) == {}
    with pytest.raises(Diverged, match=r"round 1 \(no upload can be used, client .*moved 'mean' by 1e\+20"):
        first.receive(REFUSED["one mean of 1e20"], honest=0)
    far: Lie = lambda u, s, r, old: u._replace(mean=s.mean + 30.0 * s.mean / s.mean.norm())  # noqa: E731
    assert first.receive(far, honest=0) == {}  # nothing to compare with but the weights
    first.receive(None, honest=0)
    moved = first.federation.lengths["mean"]
    first.federation.lengths["mean"] = moved * 5
    with pytest.raises(Diverged, match="moved 'mean' by 30"):
        first.federation.receive(*first.told(far, 0))


def test_a_sentence_names_what_moved_and_what_to_do(first: First) -> None:
    (why,) = first.receive(REFUSED["one mean of 1e20"]).values()
    assert why.startswith("it moved 'mean' by 1e+20, where ")
    assert why.endswith("if it can be trusted, raise max_update_ratio, now 20 (0: no limit).")
    (why,) = first.receive(REFUSED["all σ times 1000"]).values()
    assert why.startswith("'sigma' is ")
    assert why.endswith("raise max_sigma_ratio, now 100 (0: no limit).")


def test_a_state_that_is_not_finite_is_not_taken_and_the_furthest_is_named(first: First) -> None:
    """With the bounds off, and a rule that squares a finite number."""
    first.federation.method = BPFed(rule="moments")
    try:
        with pytest.raises(Diverged, match=rf"state would not be finite; client '{first.liar}' moved it furthest"):
            first.receive(REFUSED["one mean of 1e20"], max_update_ratio=0.0, max_sigma_ratio=0.0)
    finally:
        first.federation.method = BPFed()
    assert first.federation.round == 0
    assert first.federation.shared is first.shared


def test_lies_within_the_bounds_cost_less_than_a_point() -> None:
    stage = Stage(BPFed(lr=5e-3), rounds=8, epochs=6, hidden=15)
    away = stage.play(None).accuracy
    assert away > 0.9
    for name, lie in WITHIN.items():
        found = stage.play(lie)
        assert found.accuracy > away - 0.01, name
        told = sum(bool(refused) for refused in found.refused.values())
        assert told == {"the server's state": 0, "an earlier upload again": 7}.get(name, 6), name


@pytest.mark.parametrize("name", CREEPING)
def test_no_client_can_multiply_sigma_round_by_round(stage: Stage, name: str) -> None:
    """With the rule "precision" that ended a run in its eighth round, and with "mean" σ was 5e13 after twelve."""
    found = stage.play(CREEPING[name])
    liar, sigma = found.federation.data.clients[LIAR], found.federation.shared.sigma
    first = found.federation.method.init(found.federation.model).shared.sigma
    assert bool((sigma < 100.0 * first.max()).all())
    assert bool((sigma > first.min() / 100.0).all())
    assert {client for refused in found.refused.values() for client in refused} <= {liar}
    if name == "99 times the server's σ" or stage.federation.method.settings()["rule"] == "precision":
        assert sum(liar in refused for refused in found.refused.values()) >= len(REFUSED) - 2


def test_far_from_the_first_sigma_the_median_of_the_round_counts() -> None:
    """All that honest clients do together is allowed, however far it leads."""
    shared = Gaussian(torch.linspace(-1, 1, 9), torch.full((9,), 1e-5))
    means = torch.stack([shared.mean + 0.01 * k for k in range(1, 6)])
    for factors, refused in (
        ([0.6, 0.8, 1.0, 1.2, 1.4], [False] * 5),
        ([0.6, 0.8, 1.0, 1.2, 0.3], [False] * 4 + [True]),
        ([0.6, 0.8, 1.0, 1.2, 90.0], [False] * 5),  # back to where the run began
    ):
        uploads = Gaussian(means, torch.tensor(factors)[:, None] * shared.sigma)
        found = judged(BPFed(), Settings(), shared, uploads, {}, 2.0, {"sigma": (0.07, 0.07)})
        assert [bool(why) for why in found.why] == refused
    assert (
        "far from what the run began with"
        in judged(
            BPFed(),
            Settings(),
            shared,
            Gaussian(means, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.1])[:, None] * shared.sigma),
            {},
            2.0,
            {"sigma": (0.07, 0.07)},
        ).why[4]
    )


def test_the_liar_is_named_to_the_user_and_in_the_metrics() -> None:
    federation = start(FedAvg(), rounds=3, eval_every=1)
    said: list[str] = []
    receive = federation.receive

    def lying(clients: torch.Tensor, uploads: Weights, personal: Any) -> dict[str, str]:
        if federation.round == 1:
            uploads.weights[2, 3] = 1e20
        return receive(clients, uploads, personal)

    federation.receive = lying  # type: ignore[method-assign]
    run = Run(federation, said.append).train()
    name = federation.data.clients[int(federation.participants(2)[2])]
    assert [s for s in said if s.startswith(f"Round 2: the upload of client '{name}' was not used: it moved 'weights'")]
    assert [line.get("refused") for line in run.history] == [None, [name], None]
    assert [line["participants"] for line in run.history] == [5, 4, 5]


UNEVEN = (1, 2, 3, 5, 8, 300)


@pytest.mark.parametrize("name", ["bpfed-recipe", "bpfed-population", "fedsoul", "pfedvem"])
def test_honest_clients_of_very_different_sizes_are_never_refused(name: str) -> None:
    federation = start(METHODS[name](), classification(UNEVEN), rounds=3, epochs=2)
    simulator = Simulator([federation])
    for _ in range(3):
        (info,) = simulator.round()
        assert info is not None
        assert info.refused == {}
        assert info.participants == len(UNEVEN)


@pytest.mark.parametrize("setting", ["max_update_ratio", "max_sigma_ratio"])
@pytest.mark.parametrize("value", [-1.0, 0.5, 1.0, float("inf"), float("nan")])
def test_a_bound_that_is_none_is_refused(setting: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{setting} is {value}, but must be above 1, or 0 for no limit"):
        Settings(**{setting: value}).check(5)  # type: ignore[arg-type]


def test_of_two_that_disagree_neither_is_refused_for_moving_little() -> None:
    """A client that sends next to nothing does not make the other look like a liar."""
    shared, settings = Weights(torch.linspace(-1, 1, 9)), Settings()
    honest, idle = shared.weights + 0.3, shared.weights + 1e-9 * torch.arange(9)
    found = judged(FedAvg(), settings, shared, Weights(torch.stack([honest, idle])), {"weights": [1e-9, 0.9] * 40}, 2.0)
    assert found.why == ["", ""]


def test_what_was_sent_before_is_known_again_but_doing_nothing_is_not_a_lie() -> None:
    shared, settings = Weights(torch.linspace(-1, 1, 9)), Settings()
    sent = Weights(torch.stack([shared.weights + 0.1, shared.weights]))
    judge: Callable[..., Any] = lambda earlier: judged(FedAvg(), settings, shared, sent, earlier, 2.0)  # noqa: E731
    sizes = judge({}).sizes
    assert judge({"upload itself": sizes}).why == ["it is an upload of an earlier round.", ""]
