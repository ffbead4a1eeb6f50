"""Everything there is under ``results/``, read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bpfed._util.errors import UserError
from experiments.records import CellRecord, Records, read_cells
from experiments.sweeps import Shift, Sweep, Theory, read_novel, read_shifts, read_sweep, read_theory


@dataclass(frozen=True)
class Results:
    """What the experiments have written so far.

    Args:
        cells: The tables' cells, ``[protocol][partition][cell][method]``.
        others: The same with other rounds than the protocol's, by number of rounds.
        novel: By cell a sweep over ``steps`` and one over ``examples``.
        heterogeneity: Over Dirichlet α; None if it was not run.
        scale: Over the number of clients; None if it was not run.
        shift: Over changes of the test inputs, by cell.
        theory: The theorem's error, over examples and over clients; None if it was not run.
    """

    cells: Records
    others: Mapping[int, Records]
    novel: Mapping[str, Mapping[str, Sweep]]
    heterogeneity: Sweep | None
    scale: Sweep | None
    shift: Mapping[str, Shift]
    theory: Theory | None

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read a folder of results.

        Raises:
            UserError: There is no such folder, or a file in it is not what an experiment writes.
        """
        if not folder.is_dir():
            raise UserError(f"There is no folder of results '{folder}'; run an experiment first, or name another.")
        tags = {path.name for path in folder.glob("*/*/*/rounds-*") if path.is_dir()}
        lengths = sorted(int(length) for tag in tags if (length := tag.removeprefix("rounds-")).isdecimal())
        return cls(
            read_cells(folder),
            {length: read_cells(folder, f"rounds-{length}") for length in lengths},
            read_novel(folder / "novel"),
            read_sweep(folder / "heterogeneity.json"),
            read_sweep(folder / "scale.json"),
            read_shifts(folder),
            read_theory(folder / "theory.json"),
        )

    def of(self, protocol: str, partition: str) -> Mapping[str, Mapping[str, CellRecord]]:
        """The cells of a protocol and partition, ``[cell][method]``."""
        return self.cells.get(protocol, {}).get(partition, {})
