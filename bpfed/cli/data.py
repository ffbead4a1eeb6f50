"""``bpfed data``: which datasets there are, getting one, and looking at how it is dealt out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from bpfed.cli import show

if TYPE_CHECKING:
    from bpfed.data import FederatedData

app = typer.Typer(help="List, fetch and inspect datasets.", epilog="Example: bpfed data list", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the dataset, see 'bpfed data list'.")]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the dataset's files. \\[default: BPFED_DATA, then the cache]", show_default=False),
]
#: Clients that have a row, width of a bar, and letters of a class's name that can head a column.
ROWS, BAR, SHORT = 40, 12, 3


@app.command("list", epilog="Example: bpfed data list --data-dir ~/datasets")
def list_(data_dir: DataDir = None) -> None:
    """List the datasets, and whether their files are present."""
    from bpfed.data import describe

    shown = show.table("name", "present", "what it is", "examples", "clients", right=2)
    for row in describe(data_dir):
        present = Text("yes", "green") if row.present else Text("no", "yellow")
        shown.add_row(row.name, present, row.sentence, f"{row.examples}", f"{row.clients}")
    show.put(shown)


@app.command(epilog="Example: bpfed data fetch mnist")
def fetch(name: Name, data_dir: DataDir = None) -> None:
    """Make sure that a dataset's files are present, downloading them if not."""
    from bpfed.data import fetch as get

    place = get(name, data_dir)
    told = f"'{name}' is built in." if place is None else f"'{name}' is in {place}."
    Console().print(told, highlight=False, markup=False, soft_wrap=True)


@app.command(epilog="Example: bpfed data inspect digits --partition dirichlet:0.3 --clients 20")
def inspect(
    name: Name,
    partition: Annotated[
        str | None,
        typer.Option(help="groups, random:3, dirichlet:0.3, shards:2 or iid. \\[default: groups]", show_default=False),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Number of clients. \\[default: the dataset's own]", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Which examples go where.")] = 0,
    test_fraction: Annotated[
        float | None, typer.Option(help="Part held out for testing. \\[default: 0.5]", show_default=False)
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Show how many examples each client would have, and of which classes."""
    from bpfed.data import load

    data = load(name, partition=partition, clients=clients, seed=seed, test_fraction=test_fraction, data_dir=data_dir)
    console = Console()
    tables = [_clients(data, bars, classes) for bars, classes in ((True, True), (False, True), (True, False))]
    show.put(next((t for t in tables if show.narrowest(t) <= console.width), tables[-1]))
    if not all(len(word) <= SHORT for word in data.labels):
        console.print("Classes: " + ", ".join(f"{i} {word}" for i, word in enumerate(data.labels)), highlight=False)
    total = f"{len(data.train.y)} training and {len(data.test.y)} test examples of {data.classes} classes"
    cut = f", {ROWS} of {len(data)} shown" if len(data) > ROWS else ""
    console.print(f"{len(data)} clients{cut}; {total}; each {' x '.join(map(str, data.input_shape))}.", highlight=False)


def _clients(data: FederatedData, bars: bool, classes: bool) -> show.Table:
    """A row for each client, with a bar for its size and a column for each class if so wanted."""
    from bpfed.data import inspect as look

    words = data.labels if all(len(word) <= SHORT for word in data.labels) else [str(c) for c in range(data.classes)]
    columns = ["client", "train", "test", *([""] if bars else []), *(words if classes else ["classes"])]
    rows = look(data)
    what = "training examples of each class" if classes else "number of classes it trains on"
    shown = show.table(*columns, title=f"{data.name}, partition {data.partition}: {what}", right=len(columns))
    shown.columns[0].justify = "left"
    shown.padding = (0, 1, 0, 0)
    largest = max(row.train + row.test for row in rows)
    for row in rows[:ROWS]:
        bar = Text("█" * max(1, round(BAR * row.train / largest)), "cyan")
        bar.append("░" * round(BAR * row.test / largest), "cyan dim")
        bar.pad_right(BAR + 1 - len(bar))
        mix = [str(n) if n else "·" for n in row.train_labels] if classes else [str(sum(map(bool, row.train_labels)))]
        shown.add_row(row.client, str(row.train), str(row.test), *([bar] if bars else []), *mix)
    return shown
