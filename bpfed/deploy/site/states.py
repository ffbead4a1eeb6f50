"""A site's personal states on its own disk: one file a round, each written whole, found again after any restart."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import safetensors
import safetensors.torch as torch_safetensors
import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed._util.files import PART, clear_parts, lock, sync_folder, write_whole, writing
from bpfed.deploy.site.limits import when_full
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import RoundInfo
from bpfed.metrics import Evaluation
from bpfed.runs.folder import Folder
from bpfed.runs.run import Run

#: States of earlier rounds that are kept at least, for a server that goes back to an older checkpoint.
KEPT = 3


class States:
    """The personal states of one site in one run, as rows of numbers, by the round after which they were so.

    The server says in which round a site's contribution was last used, and the site goes on from its state of that
    round. So a reply that was lost, or a round that is asked for twice, leaves no trace: as if the site had been away.

    Args:
        folder: Of all runs' states.
        site: Whose they are.
        run: A word for the run.
        kept: States of earlier rounds that are kept: as many as the server keeps checkpoints to go back to.
    """

    def __init__(self, folder: Path, site: str, run: str, kept: int = KEPT) -> None:
        if not re.fullmatch(r"[0-9a-f]{1,64}", run):
            raise UserError("The run's name is not a plain word, so nothing is kept for it.")
        self.folder, self.site, self.kept = folder / run, site, max(KEPT, kept)

    def at(self, round_: int) -> tuple[int, Tensor | None]:
        """The newest sound state up to a round and that state's round; 0 and None where there is none."""
        for number in sorted((n for n in self.rounds() if n <= round_), reverse=True):
            row = self._read(number)
            if row is not None:
                return number, row
        return 0, None

    def put(self, round_: int, row: Tensor, counted: int) -> None:
        """Keep the state after a round; of others those that ``counted`` may still point at."""
        clear_parts(self.folder)
        self._write(self._path(round_), round_, row)
        used = sorted(n for n in self.rounds() if n <= counted)
        for number in self.rounds():
            if number != round_ and number not in used[-self.kept :]:
                self._path(number).unlink(missing_ok=True)

    def settle(self, round_: int, row: Tensor) -> None:
        """Keep the state that the site predicts with once the run is finished."""
        self._write(self.folder / "settled.safetensors", round_, row)

    def rounds(self) -> list[int]:
        """Rounds of which there is a file."""
        return [int(path.stem.partition("-")[2]) for path in self.folder.glob("round-*.safetensors")]

    def _path(self, round_: int) -> Path:
        return self.folder / f"round-{round_:06d}.safetensors"

    def _write(self, path: Path, round_: int, row: Tensor) -> None:
        plain = row.detach().cpu().float().contiguous()
        noted = {"site": self.site, "round": str(round_), "sha256": _digest(plain)}
        with when_full(path, "and the site rejoins by itself"):
            write_whole(path, torch_safetensors.save({"personal": plain}, noted))

    def _read(self, round_: int) -> Tensor | None:
        try:
            data = self._path(round_).read_bytes()
            row = torch_safetensors.load(data)["personal"]
            noted = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        except (OSError, KeyError, ValueError, safetensors.SafetensorError):
            return None
        sound = noted.get("sha256") == _digest(row) and noted.get("round") == str(round_)
        if noted.get("site") != self.site:
            raise UserError(
                f"'{self._path(round_)}' is the state of site '{noted.get('site')}', not of '{self.site}'; give every "
                "site a folder of its own."
            )
        return row if sound and row.dtype == torch.float32 else None


def _digest(row: Tensor) -> str:
    return hashlib.sha256(row.numpy().tobytes()).hexdigest()


# --- A site's own model -----------------------------------------------------------------------------------------------
#
# A run folder of this client alone, so that it can be used where its data is.


def keep(
    folder: Path, federation: Federation, evaluated: tuple[Evaluation, Tensor], say: Callable[[str], None]
) -> None:
    """Write the finished model of one client, as a finished run is written; the one that was there is kept beside it.

    The old one is in `previous` then, where it replaces an older one. At any moment one of them is whole on the disk.

    Args:
        folder: Where, in the site's own folder: nothing of it is sent.
        federation: Of this client alone, after the last round.
        evaluated: Its test in that round.
        say: Told what the user should know.
    """
    run = Run(federation, say)
    run.deployed = True
    run.evaluation = evaluated
    run.history = [{"round": federation.round, **evaluated[0].record()}]
    Folder(folder, overwrite=True)  # says why, if that is no place for a run
    new = folder.with_name(f".{folder.name}{PART}")
    _remove(new)
    kept = Folder(new)
    try:
        kept.start(run)
        kept.round(run, RoundInfo(0, {}), run.history[0])
        kept.end(run)
        if folder.exists():
            held = lock(folder)
            try:
                _remove(previous(folder))
                with writing(folder):
                    folder.rename(previous(folder))
            finally:
                os.close(held)
        with writing(folder):
            new.rename(folder)
            sync_folder(folder.parent)
    finally:
        kept.stop(run)
        _remove(new)


def previous(folder: Path) -> Path:
    """Where the model is that was in this folder before."""
    return folder.with_name(f"{folder.name}-previous")


def _remove(folder: Path) -> None:
    if folder.exists():
        with writing(folder):
            shutil.rmtree(folder)
