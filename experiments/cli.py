"""``bpfed paper``: the paper's tables and figures, each one command; results are kept as JSON, nothing is run twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.markdown import Markdown

from bpfed._util.console import Console
from bpfed._util.errors import UserError
from bpfed.cli.terminal import Group
from bpfed.config import settings

if TYPE_CHECKING:
    from experiments.cell import Cell

app = typer.Typer(
    cls=Group,
    help="The paper's experiments: run them, and make their tables and figures.",
    epilog="Example: bpfed paper table1 --cells small --methods bpfed,bpfed-recipe,fedper --seeds 3",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RESULTS = Path("results")
DOCS = Path("docs")

Cells = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Cells, e.g. mnist-small, or mnist, small, large. \\[default: all six]"),
]
#: The same for commands that have a default of their own.
ChosenCells = Annotated[str, typer.Option(metavar="A,B", help="Cells, e.g. mnist-small, or mnist, small, large.")]
Methods = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Methods, e.g. bpfed,fedper+laplace; table: the paper's nine. \\[default: all]"),
]


def _methods(default: str) -> typer.models.OptionInfo:
    """The option of an experiment that takes methods by their names alone, and these where nothing is said."""
    about = f"Methods by name, without variants. \\[default: {default}]"
    return typer.Option(metavar="A,B", help=about)


def _device(word: str) -> settings.Device:
    """The device of that name, looked at before any data are."""
    known = get_args(settings.Device)
    if word not in known:
        raise UserError(f"--device is {word!r}, but must be one of: {', '.join(known)}.")
    return known[known.index(word)]


NovelMethods = Annotated[
    str | None, _methods("fedper, fedrep, lg-fedavg, fedsoul, bpfed, bpfed-recipe, bpfed-population")
]
PublishedMethods = Annotated[str | None, _methods("bpfed, pfedbayes, which are all there are")]
HeterogeneityMethods = Annotated[str | None, _methods("bpfed-recipe, bpfed, fedper, pfedbayes, local, fedavg-ft")]
ShiftMethods = Annotated[
    str | None, _methods("bpfed-recipe, bpfed-population, bpfed, pfedbayes, fedper, fedavg-ft, local")
]
Partitions = Annotated[str, typer.Option(metavar="A,B", help="groups (the paper's), random, or both.")]
Seeds = Annotated[int | None, typer.Option(min=1, help="Number of seeds. \\[default: 5 for the recipes, 3 for others]")]
FewSeeds = Annotated[int, typer.Option(min=1, help="Number of seeds.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds. \\[default: the experiment's own]")]
Jobs = Annotated[
    int, typer.Option(min=1, help="Cells at a time, each in a process of its own; a large GPU takes some 14.")
]
Device = Annotated[settings.Device, typer.Option(parser=_device, metavar="auto|cpu|cuda", help="Where to run.")]
Results = Annotated[Path, typer.Option("--results", help="Folder of results.")]
Docs = Annotated[Path, typer.Option("--docs", help="Folder of the page of results and its figures.")]


@app.command(epilog="Example: bpfed paper table1 --cells mnist-small --methods table --seeds 3")
def table1(
    cells: Cells = None,
    methods: Methods = None,
    partitions: Partitions = "groups",
    seeds: Seeds = None,
    rounds: Rounds = None,
    jobs: Jobs = 1,
    device: Device = "auto",
    results: Results = RESULTS,
) -> None:
    """Table 1: accuracy of every method in every cell, beside the published numbers."""
    _run_cells(cells, methods, partitions, seeds, rounds, jobs, device, results)
    _show_table("accuracy", partitions, results, _tag(rounds))


@app.command(epilog="Example: bpfed paper table2 --cells small --methods bpfed,bpfed-recipe,pfedbayes")
def table2(
    cells: Cells = None,
    methods: Methods = None,
    partitions: Partitions = "groups",
    seeds: Seeds = None,
    rounds: Rounds = None,
    jobs: Jobs = 1,
    device: Device = "auto",
    results: Results = RESULTS,
) -> None:
    """Table 2: calibration (ECE) of every method in every cell, and its NLL; the runs are those of Table 1."""
    _run_cells(cells, methods, partitions, seeds, rounds, jobs, device, results)
    for measure in ("ece", "nll"):
        _show_table(measure, partitions, results, _tag(rounds))


@app.command(epilog="Example: bpfed paper figures --cells mnist")
def figures(
    cells: Cells = None,
    methods: Methods = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    device: Device = "auto",
    results: Results = RESULTS,
    docs: Docs = DOCS,
) -> None:
    """Figures 3 to 6: convergence and reliability; the runs are those of Table 1."""
    _run_cells(cells, methods, "groups", seeds, None, jobs, device, results)
    _render(results, docs)


@app.command(epilog="Example: bpfed paper novel --cells small --methods fedper,bpfed-recipe")
def novel(
    cells: Cells = None,
    methods: NovelMethods = None,
    partition: Annotated[str, typer.Option(metavar="groups|random", help="How labels are dealt out.")] = "groups",
    seeds: FewSeeds = 3,
    rounds: Rounds = None,
    device: Device = "auto",
    results: Results = RESULTS,
) -> None:
    """Figures 7 to 9: a client that took no part in training joins."""
    from experiments import novel as experiment
    from experiments import protocol

    with _saying() as say:
        names = experiment.METHODS if methods is None else _listed(methods)
        (dealt,) = protocol.partitions([partition])
        experiment.run(results, protocol.cells(cells), names, seeds, rounds or experiment.ROUNDS, device, say, dealt)


@app.command(epilog="Example: bpfed paper theory --seeds 3")
def theory(seeds: FewSeeds = 3, device: Device = "auto", results: Results = RESULTS) -> None:
    """The theorem, measured: error over examples and over clients, where the true functions are known."""
    from experiments import theory as experiment

    with _saying() as say:
        experiment.run(results / experiment.FILE, seeds, device, say)


@app.command(epilog="Example: bpfed paper published --cells mnist-small --methods bpfed")
def published(
    cells: Cells = None,
    methods: PublishedMethods = None,
    seeds: FewSeeds = 1,
    rounds: Rounds = None,
    device: Device = "auto",
    results: Results = RESULTS,
) -> None:
    """BPFed and pFedBayes as the public reference code runs them, 800 rounds."""
    from experiments import protocol, reference

    with _saying() as say:
        names = None if methods is None else _listed(methods)
        reference.run(results, range(seeds), rounds or reference.ROUNDS, device, say, protocol.cells(cells), names)


@app.command(epilog="Example: bpfed paper audit --seeds 3")
def audit(
    cells: ChosenCells = "mnist-small",
    only: Annotated[
        str | None, typer.Option(metavar="A,B", help="Variants, e.g. published,printed/noise. \\[default: all]")
    ] = None,
    seeds: FewSeeds = 3,
    rounds: Rounds = None,
    device: Device = "auto",
    results: Results = RESULTS,
) -> None:
    """What each difference between the paper and its public code is worth, switched one by one."""
    from experiments import audit as experiment
    from experiments import protocol

    with _saying() as say:
        variants = None if only is None else _listed(only)
        experiment.run(results, range(seeds), rounds or experiment.ROUNDS, device, say, protocol.cells(cells), variants)


@app.command(epilog="Example: bpfed paper heterogeneity --axes alpha --methods bpfed-recipe,fedper")
def heterogeneity(
    axes: Annotated[str, typer.Option(metavar="A,B", help="alpha (label skew), clients (their number), or both.")] = (
        "alpha,clients"
    ),
    methods: HeterogeneityMethods = None,
    seeds: FewSeeds = 3,
    rounds: Rounds = None,
    device: Device = "auto",
    results: Results = RESULTS,
) -> None:
    """Accuracy and calibration over the skew of labels and over the number of clients."""
    from experiments import heterogeneity as experiment

    with _saying() as say:
        names = experiment.METHODS if methods is None else _listed(methods)
        experiment.run(results, _listed(axes), names, seeds, rounds, device, say)


@app.command(epilog="Example: bpfed paper shift --cells mnist-small")
def shift(
    cells: ChosenCells = "mnist-small",
    methods: ShiftMethods = None,
    seeds: FewSeeds = 3,
    rounds: Rounds = None,
    device: Device = "auto",
    results: Results = RESULTS,
) -> None:
    """Rotated and noisy test images, and images of classes that were never seen."""
    from experiments import protocol
    from experiments import shift as experiment

    with _saying() as say:
        names = experiment.METHODS if methods is None else _listed(methods)
        experiment.run(results, protocol.cells(cells), names, seeds, rounds or experiment.ROUNDS, device, say)


@app.command(epilog="Example: bpfed paper search --cells small --rounds 300 --grid '[{\"temperature\": 0.1}]'")
def search(
    cells: ChosenCells = "small",
    method: Annotated[str, typer.Option(metavar="NAME", help="Method whose settings are tried.")] = "bpfed-recipe",
    grid: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="List of settings to try. \\[default: around those of the recipe]"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every run.")] = 100,
    sharp: Annotated[
        bool, typer.Option("--sharp", help="Cut small cells out of large ones, to score 42 500 examples, not 250.")
    ] = False,
    device: Device = "auto",
    results: Results = RESULTS,
) -> None:
    """Settings of a method, tried on validation data cut from the training data; no test example takes part."""
    from experiments import protocol
    from experiments import search as experiment

    with _saying() as say:
        tried = experiment.GRID if grid is None else experiment.read_grid(grid)
        experiment.run(results, protocol.cells(cells), method, tried, rounds, device, say, sharp)


@app.command("all", epilog="Example: bpfed paper all --device cuda")
def everything(
    cells: Cells = None,
    methods: Methods = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    device: Device = "auto",
    results: Results = RESULTS,
    docs: Docs = DOCS,
) -> None:
    """Everything in turn, then the tables and figures. What is finished is not run again.

    A result that answers another request than this one, e.g. with other rounds, is kept, and the rest goes on.
    """
    from experiments.training import OtherResult

    few, kept = seeds or 3, []
    for part in (
        lambda: _run_cells(cells, methods, "groups,random", seeds, None, jobs, device, results),
        lambda: novel(cells, seeds=few, device=device, results=results),
        lambda: published(cells, None, 1, None, device, results),
        lambda: audit(seeds=few, device=device, results=results),
        lambda: heterogeneity(seeds=few, device=device, results=results),
        lambda: shift(seeds=few, device=device, results=results),
        lambda: theory(few, device, results),
    ):
        try:
            part()
        except OtherResult as error:
            kept.append(str(error))
    _render(results, docs)
    if kept:
        raise OtherResult(" ".join(kept))


@app.command(epilog="Example: bpfed paper render")
def render(results: Results = RESULTS, docs: Docs = DOCS) -> None:
    """Write summary.json, the tables of all pages and the figures from the results that are there."""
    _render(results, docs)


def _run_cells(
    cells: str | None,
    methods: str | None,
    partitions: str,
    seeds: int | None,
    rounds: int | None,
    jobs: int,
    device: settings.Device,
    results: Path,
) -> None:
    """Run what is missing of these cells, in turn or several at a time."""
    from bpfed.callbacks.progress import CellProgress

    display = CellProgress()
    try:
        display.doing("starting")
        from experiments import pool, protocol
        from experiments.cell import Cell, run
        from experiments.summary import write
        from experiments.training import OtherResult

        tag = _tag(rounds)
        chosen = None if seeds is None else tuple(range(seeds))
        todo = [
            Cell(cell, method, partition, rounds, chosen, tag)
            for partition in protocol.partitions(partitions)
            for cell in protocol.cells(cells)
            for method in protocol.methods(methods)
        ]
        missing, kept = {}, []
        for cell in todo:  # all are looked at before one is run
            try:
                missing[cell] = cell.missing(results)
            except OtherResult as error:
                kept.append(str(error))
        left = [cell for cell, seeds_left in missing.items() if seeds_left]
        display.expect([(cell.name, seed) for cell in left for seed in missing[cell]])
        if jobs > 1:
            display.close()
            with _saying() as say:
                pool.run(left, jobs, results, device, say)
        else:
            for cell in left:
                display.doing(f"loading {cell.cell}")
                run(cell, results, device, lambda sentence: None, display)
    finally:
        display.close()
    write(results)
    for sentence in kept:
        Console(stderr=True).print(sentence, soft_wrap=True)
    _count(missing, results)


def _count(missing: dict[Cell, list[int]], results: Path) -> None:
    run = sum(map(len, missing.values()))
    wanted = sum(len(cell.wanted) for cell in missing)
    Console(stderr=True).print(
        f"Runs done now: {run}, there already: {wanted - run}; the records are in {results}.",
        soft_wrap=True,
    )


def _tag(rounds: int | None) -> str:
    """What runs beside the protocol's are kept under."""
    return "" if rounds is None else f"rounds-{rounds}"


def _show_table(measure: str, partitions: str, results: Path, tag: str) -> None:
    from experiments import protocol
    from experiments.markdown import measure_table
    from experiments.published import TABLES
    from experiments.records import read_cells

    found = read_cells(results, tag).get("paper", {})
    for partition in protocol.partitions(partitions):
        beside = partition == "groups" and measure in TABLES and not tag
        text = measure_table(found.get(partition, {}), measure, beside)
        after = f" after {tag.removeprefix('rounds-')} rounds" if tag else ""
        Console().print(Markdown(f"**{measure}, partition {partition}, last round{after}**\n\n{text}"))


def _render(results: Path, docs: Path) -> None:
    with _saying() as say:
        from experiments import render as pages
        from experiments.summary import write

        if all(path.name == "summary.json" for path in results.rglob("*.json")):
            raise UserError(f"There are no results in '{results}'; run 'bpfed paper table1' first, or name --results.")
        say(str(write(results)))
        pages.render(results, docs, lambda path: say(str(path)))


@contextmanager
def _saying() -> Iterator[Callable[[str], None]]:
    """Sentences on stderr, as they come."""
    console = Console(stderr=True)
    yield lambda sentence: console.print(sentence, soft_wrap=True)


def _listed(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]
