"""The cells of a comparison, methods x seeds, each a run in a folder of its own: ``DIR/METHOD/seed-K``.

All methods of a seed get the same split, so that their differences are paired. A cell that is finished is not run
again, and one that was interrupted goes on; but only if it is the very run that is asked for now.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from bpfed import __version__
from bpfed._util.console import Say, to_stderr
from bpfed._util.errors import Diverged, UserError
from bpfed._util.files import clear_parts, from_toml, is_part, lock, to_json, to_toml, write_whole, writing
from bpfed.callbacks.progress import CellProgress
from bpfed.comparison import tables
from bpfed.comparison.candidates import CSV, MARKDOWN, REPORT, REQUEST, RESULT, Candidate, candidates
from bpfed.comparison.record import METHODS_AND_SEEDS, Comparison, Vocabulary, baselines_of, chosen_reference
from bpfed.config.schema import ROUNDS, changed, differences
from bpfed.config.settings import Settings
from bpfed.data.datasets import load
from bpfed.data.federated import FederatedData
from bpfed.engine.federation import check_data, pick_device
from bpfed.inference.likelihoods import Likelihood
from bpfed.methods.base import Method
from bpfed.report.manifest import finished
from bpfed.report.record import RunRecord
from bpfed.runs.fit import RunRequest, get_ready, method_of, seeds_of, train_ready
from bpfed.runs.folder import Folder, begun
from bpfed.runs.run import Run, once


@dataclass
class Cell:
    """One run of a comparison that is not finished.

    Attributes:
        candidate: Whose.
        run: Before its first round of this sitting.
        request: What it was made of.
    """

    candidate: Candidate
    run: Run
    request: RunRequest


def compare(
    methods: str | Sequence[str | Method] | Mapping[str, Method | str] = "all",
    data: FederatedData | str | Callable[[int], FederatedData] = "digits",
    seeds: int | Sequence[int] = 3,
    *,
    reference: str | None = None,
    model: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    say: Callable[[str], None] | None = None,
    settings: Settings | None = None,
    **changes: Any,
) -> Comparison:
    """Run methods on the same data with the same seeds and set them side by side.

    Args:
        methods: Names such as ``["bpfed", "fedper+laplace"]`` or ``"all"``, or methods (or their names) under names of
            your own. ``"default"`` is what `fit` trains where no method is given.
        data: Name of a dataset, dealt out again for each seed; or a function from the seed to the data; or the data
            itself, the same for all seeds.
        seeds: Which, or how many: 3 is 0, 1 and 2.
        reference: Whom the others' differences are taken from; None: ``default``, else ``bpfed-adaptive``,
            else ``bpfed-recipe``, else ``bpfed``, else the first.
        out: Folder to keep everything in; what is finished there is not run again. None: nothing is written.
        settings: See `Settings`; single ones can be given by name. Rounds are 30 where nothing is said.

    For the other arguments see `fit`.
    """
    chosen = changed(settings or Settings(rounds=ROUNDS), changes, fixed=("seed",))
    with displayed(progress, say) as (display, tell):
        return run_cells(
            candidates(methods, chosen),
            _deal(data),
            seeds,
            reference=reference,
            model=model,
            likelihood=likelihood,
            out=Path(out) if out is not None else None,
            display=display,
            say=tell,
        )


@contextmanager
def displayed(progress: bool | None, say: Say | None) -> Iterator[tuple[CellProgress | None, Say]]:
    """A display of all cells, where it is wanted, and who is told sentences; see `bpfed.fit`."""
    wanted = progress or (progress is None and sys.stderr.isatty())
    display = CellProgress(delay=0.0 if progress else 2.0) if wanted else None
    try:
        yield display, say or (display.say if display is not None else to_stderr)
    finally:
        if display is not None:
            display.close()


def run_cells(
    who: Sequence[Candidate],
    deal: Callable[[int], FederatedData],
    seeds: int | Sequence[int],
    *,
    reference: str | None = None,
    model: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    out: Path | None = None,
    display: CellProgress | None = None,
    say: Callable[[str], None] = lambda sentence: None,
    stack: bool | None = None,
    words: Vocabulary = METHODS_AND_SEEDS,
    spare: bool = False,
) -> Comparison:
    """Run the cells that are not finished, and read those that are.

    Args:
        who: Who is compared.
        deal: From a seed to the data of all its cells.
        display: Told how far things are.
        stack: Whether the seeds of a method are trained side by side; None: on a GPU, where that costs little more than
            one of them. On a CPU it saves nothing and holds the data of all seeds at once.
        words: What things are called.
        spare: Whether one that diverges is left out, if it is not the reference; else that is an error.

    For the other arguments see `compare`.
    """
    chosen = seeds_of(seeds)
    _check(who)
    base = chosen_reference([candidate.name for candidate in who], reference)
    runner = _Runner(who, base, model, likelihood, out, display, say, spare)
    if stack is None:
        stack = pick_device(who[0].settings.device, who[0].settings.tf32).type == "cuda"
    if display is not None:
        display.expect([(candidate.name, seed) for seed in chosen for candidate in who])
    with _kept(out, words.kind):
        for together in [chosen] if stack else [[seed] for seed in chosen]:
            if display is not None:
                display.doing(f"loading the data of seed {', '.join(map(str, together))}")
            dealt = {seed: deal(seed) for seed in together}
            waiting = runner.look(dealt)  # at all before one is trained
            if out is not None and together[0] == chosen[0]:
                write_whole(out / REQUEST, to_toml(_request(who, chosen, base, dealt[together[0]], words)))
            runner.train(waiting)
        if not runner.trained:
            say(f"All {len(who) * len(chosen)} runs in '{out}' are finished already; none was run again.")
        ordered = {name: {seed: own[seed] for seed in chosen} for name, own in runner.records.items()}
        wanted = any(candidate.settings.baselines == "auto" for candidate in who)
        titles = {candidate.name: candidate.title for candidate in who}
        found = Comparison(ordered, titles, base, words, baselines_of(ordered) if wanted else {})
        if out is not None:
            if display is not None:
                display.doing("writing the report")
            save(found, out)
    return found


def _check(who: Sequence[Candidate]) -> None:
    for candidate in who:
        try:
            if candidate.method is not None:
                candidate.method.check()
        except UserError as error:
            raise UserError(f"{candidate.name}: {error}") from None


class _Runner:
    """The cells of a comparison while they are run; for the arguments see `run_cells`.

    Attributes:
        records: What is finished, by name and seed; one that was left out is not among them.
        trained: How many of them were trained now.
    """

    def __init__(
        self,
        who: Sequence[Candidate],
        base: str,
        model: nn.Module | None,
        likelihood: Likelihood | None,
        out: Path | None,
        display: CellProgress | None,
        say: Say,
        spare: bool,
    ) -> None:
        self.who, self.base, self.model, self.likelihood = who, base, model, likelihood
        self.out, self.display, self.say, self.spare = out, display, say, spare
        self.tell = once(say)
        self.records: dict[str, dict[int, RunRecord]] = {candidate.name: {} for candidate in who}
        self.trained = 0
        self.fitted: dict[Any, Any] = {}  # baselines, once for all methods of a seed

    def look(self, dealt: Mapping[int, FederatedData]) -> list[list[Cell]]:
        """Read the cells of these seeds that are finished; a list for each candidate of those that are not."""
        waiting = []
        for candidate in (e for e in self.who if e.name in self.records):
            cells = []
            for seed, data in dealt.items():
                cell = _cell(candidate, seed, data, self.model, self.likelihood, self.out, self.tell, self.fitted)
                if isinstance(cell, Cell):
                    cells.append(cell)
                    continue
                self.records[candidate.name][seed] = cell
                if self.display is not None:
                    self.display.found(candidate.name, seed, cell.summary.get("seconds"))
            waiting.append(cells)
        return waiting

    def train(self, waiting: list[list[Cell]]) -> None:
        """Train these cells, those of one candidate side by side; none of them is held any longer than that."""
        while waiting:
            cells = waiting.pop(0)
            try:
                for cell in _train(cells, self.display):
                    self.records[cell.candidate.name][cell.run.settings.seed] = cell.run.record()
                    self.trained += 1
            except Diverged as error:
                self._leave_out(cells[0].candidate.name, error)

    def _leave_out(self, name: str, error: Diverged) -> None:
        """Go on without a candidate, where that is allowed."""
        if not self.spare or name == self.base:
            raise error
        self.say(f"{error} It is left out.")
        del self.records[name]
        if self.display is not None:
            self.display.leave_out(name)


def save(comparison: Comparison, folder: Path) -> None:
    """Write the figures, the tables and the report, each whole."""
    write_whole(folder / CSV, tables.table_csv(comparison))
    write_whole(folder / MARKDOWN, tables.markdown(comparison))
    comparison.report(folder / REPORT)
    write_whole(folder / RESULT, to_json(tables.record(comparison)))


def _cell(
    candidate: Candidate,
    seed: int,
    data: FederatedData,
    model: nn.Module | None,
    likelihood: Likelihood | None,
    out: Path | None,
    say: Callable[[str], None],
    fitted: dict[Any, Any],
) -> Cell | RunRecord:
    """A cell that is ready to run, or the record of one that is finished."""
    settings = replace(candidate.settings, seed=seed)
    network = "auto" if candidate.method is None else candidate.method.network
    if not settings.members and model is None and data.flat and network == "auto":
        settings = replace(settings, members=method_of(None, data).flat_members)  # the same number for all of them
    path = out / candidate.name / f"seed-{seed}" if out is not None else None
    folder = Folder(path, resume=begun(path)) if path is not None else None
    request = RunRequest(candidate.method, data, settings, model, likelihood, folder)
    run = get_ready(request, say)
    run.fitted = fitted
    if path is None or not finished(path):
        return Cell(candidate, run, request)
    record = RunRecord.read(path)
    here = from_toml(to_toml(run.config()))
    here["run"]["device"] = record.config["run"]["device"]  # where it ran does not matter once it has
    if differs := differences(record.config, here):
        raise UserError(
            f"'{path}' was run with other settings: {'; '.join(differs)}; choose another --out, or delete that folder "
            "to run it again."
        )
    if not record.baselines and (plain := run.baselines()):  # of an earlier version, or without them
        record = replace(record, evaluation={**record.evaluation, "baselines": plain})
    return record


def _train(cells: list[Cell], display: CellProgress | None) -> list[Cell]:
    """Train cells of one candidate side by side."""
    if not cells:
        return cells
    candidate, seeds = cells[0].candidate, [cell.run.settings.seed for cell in cells]
    requests = [cell.request for cell in cells]
    if display is not None:
        display.begin(candidate.name, candidate.title, seeds)
        requests[0] = replace(requests[0], callbacks=[display])
    try:
        train_ready([cell.run for cell in cells], requests, display)
    except UserError as error:
        raise type(error)(f"{candidate.name}, seed {', '.join(map(str, seeds))}: {error}") from error
    if display is not None:
        display.finished()
    return cells


@contextmanager
def _kept(out: Path | None, kind: str) -> Iterator[None]:
    """Hold the folder for this process alone; one that was made for nothing is taken away again."""
    if out is None:
        yield
        return
    made = not out.exists()
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        there = [p.name for p in out.iterdir() if not is_part(p)]
    if there and REQUEST not in there:
        raise UserError(f"'{out}' holds other files, not a {kind}, so nothing is written there; choose another --out.")
    if there and (held := _kind(out)) != kind:
        raise UserError(f"'{out}' holds a {held}, not a {kind}, so nothing is written there; choose another --out.")
    handle = lock(out)
    try:
        clear_parts(out)
        yield
    finally:
        os.close(handle)
        if made and not any(out.iterdir()):
            out.rmdir()


def _kind(folder: Path) -> str:
    """What a folder is of; one that does not say is a comparison."""
    try:
        return str(from_toml((folder / REQUEST).read_bytes()).get("kind", METHODS_AND_SEEDS.kind))
    except (OSError, ValueError):
        return METHODS_AND_SEEDS.kind


def _request(
    who: Sequence[Candidate], seeds: list[int], reference: str, data: FederatedData, words: Vocabulary
) -> dict[str, Any]:
    """What was asked for, for people to read; what counts is in every cell's own folder."""
    return {
        "bpfed": __version__,
        "kind": words.kind,
        "data": data.name,
        "methods": [candidate.name for candidate in who],
        "seeds": seeds,
        "reference": reference,
        "rounds": who[0].settings.rounds,
    }


def _deal(data: FederatedData | str | Callable[[int], FederatedData]) -> Callable[[int], FederatedData]:
    if isinstance(data, FederatedData):
        return lambda seed: data
    if isinstance(data, str):
        return lambda seed: load(data, seed=seed)
    if not callable(data):
        check_data(data)
    return data
