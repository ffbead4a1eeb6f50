"""What travels: a `Request` from the server to a site, a `Reply` back, and the door that both sides check them at."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from bpfed import __version__
from bpfed._util.files import renamed
from bpfed.config.reader import Config
from bpfed.deploy.protocol.state_schema import RejectedMessage, StateSchema, Upload, listed
from bpfed.inference.calibration import HeldOutSlopes
from bpfed.inference.tasks import Task
from bpfed.metrics import Form, Sums

if TYPE_CHECKING:
    from bpfed.methods.base import State

#: Raised whenever a message changes its meaning.
PROTOCOL = 5
#: A message may hold so many bytes beside its tensors.
BESIDE = 1 << 20
#: More sites or examples than this are not believed.
MOST = 10**9
#: Larger sums than this are mistakes, and those of all sites together would be no number.
LARGEST = 1e100
#: Larger losses of a training are mistakes, and the mean of all sites' would be no float32.
LARGEST_LOSS = 1e30
#: Sums that are of no more examples than another, by name; all others are of no more than there are.
PARTS = {"sure_right": "sure", "positive_right": "positive", "coverage": "counted"}
#: Sums of what is at most 1 for an example.
SHARES = ("sure", "sure_right", "risk", "majority", "positive", "positive_right", "counted", "coverage")
#: By how much sums may be off, by rounding.
ROUNDING = 1e-6
#: Settings of a run that have no part in what a site computes.
LOCAL_SETTINGS = (
    *("device", "tf32", "compile", "chunk", "memory", "store"),
    *("baselines", "checkpoints", "max_update_ratio", "max_sigma_ratio"),
)
#: Settings of the data that a site may have for its own file alone, in its own ``config.toml``.
LOCAL_COLUMNS = ("missing", "rename", "map", "convert")


def fingerprint(config: Config) -> str:
    """A short hash of all that server and sites must agree on: protocol, version, data's settings, method and run."""
    run = {k: v for k, v in vars(config.run).items() if k not in LOCAL_SETTINGS}
    data = {k: v for k, v in vars(config.data).items() if k not in LOCAL_COLUMNS}
    agreed = [PROTOCOL, __version__, data, config.method.name, config.method.settings(), run]
    agreed += config.plugins  # nothing where all is of bpfed itself
    return hashlib.blake2b(json.dumps(agreed, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


class HeldOutScore(NamedTuple):
    """What a site tells of a candidate at the end of a selection pilot.

    Attributes:
        examples: How many training examples it held out.
        nll: Their −log p, summed over all of them; infinite where a prediction is not a number.
    """

    examples: int
    nll: float


@dataclass(frozen=True)
class Request:
    """From the server to a site.

    Attributes:
        fingerprint: Of the configuration.
        run: A word for this run; a site keeps its states by it.
        round: The round to train in, from 1; 0: only describe the site's data (`Reply.statement`).
        train: Whether to train.
        evaluate: Whether to test the shared state, which is that after round ``round - 1``.
        counted: The last round in which this site's upload was used; it goes on from its own state of that round.
        common: What all sites' data have in common, as JSON.
        pilot: Which calibration pilot the round is of, from 1; 0: it is of the run itself.
        calibration_temperature: In the run itself, what calibration pilots have learnt; 1 where there were none.
        candidate: Settings of the method that are tried or were chosen, by their places among those that the site's own
            method offers (`bpfed.runs.pilot.with_candidates`).
        fold: Which fold of its training examples a site holds out in this selection pilot, from 1; 0: it is none.
        shared: The server's state; None in round 0.
    """

    fingerprint: str
    run: str
    round: int
    train: bool = False
    evaluate: bool = False
    counted: int = 0
    common: str = ""
    pilot: int = 0
    calibration_temperature: float = 1.0
    candidate: tuple[int, ...] = ()
    fold: int = 0
    shared: State | None = None

    @property
    def of_pilot(self) -> bool:
        """Whether it is of a calibration or selection pilot."""
        return self.pilot > 0 or self.fold > 0

    def write(self, schema: StateSchema | None = None) -> RecordDict:
        """As it travels."""
        plain = renamed(vars(self), _ON_THE_WIRE) | {"candidate": list(self.candidate)}
        del plain["shared"]
        record = RecordDict({"request": ConfigRecord({"protocol": PROTOCOL, "version": __version__, **plain})})
        if schema is not None:
            assert self.shared is not None
            record["shared"] = schema.write(self.shared)
        return record

    @classmethod
    def read(cls, record: RecordDict) -> Request:
        """Of a message without its tensors, or `RejectedMessage`; `shared_of` reads those."""
        plain = _plain(record, "request", _REQUEST)
        if not all(type(place) is int for place in plain["candidate"]):
            raise RejectedMessage("the candidate that it names is not valid.")
        return cls(**renamed(plain, {"facts": "common"}) | {"candidate": tuple(plain["candidate"])})


def shared_of(record: RecordDict, schema: StateSchema) -> State:
    """The server's state in a message, or `RejectedMessage`."""
    _only(record, ("request", "shared"), schema.bytes)
    return schema.read(_part(record, "shared", ArrayRecord))


@dataclass(frozen=True)
class Reply:
    """From a site to the server.

    Attributes:
        fingerprint: Of the configuration at the site.
        run: Of the request.
        round: Of the request.
        site: The site's name.
        refused: Why the site did not do what it was asked; empty: it did.
        statement: What data the site has, as JSON (round 0 only).
        train: Number of its training examples.
        seconds: Time it took.
        work: Of these, what training and testing took.
        upload: What it gives to the server, if it trained.
        sums: Of its test examples, if it tested.
        held: Of the training examples that it held out, at the end of a calibration pilot.
        score: Of the training examples that it held out, at the end of a selection pilot.
        info: What is reported of its training.
    """

    fingerprint: str
    run: str
    round: int
    site: str
    refused: str = ""
    statement: str = ""
    train: int = 0
    seconds: float = 0.0
    work: float = 0.0
    upload: Upload | None = None
    sums: Sums | None = None
    held: HeldOutSlopes | None = None
    score: HeldOutScore | None = None
    info: dict[str, float] = field(default_factory=dict)

    def write(self, schema: StateSchema | None = None) -> RecordDict:
        """As it travels."""
        fields = {k: v for k, v in vars(self).items() if k not in ("upload", "sums", "held", "score", "info")}
        plain = renamed(fields, _ON_THE_WIRE)
        record = RecordDict({"reply": ConfigRecord({"protocol": PROTOCOL, "version": __version__, **plain})})
        if self.upload is not None:
            assert schema is not None
            assert isinstance(self.upload, Upload)
            record["upload"] = schema.write(self.upload.state)
        if self.sums is not None:
            cells, losses, further = self.sums
            named = {"cells": cells, "losses": losses, **further}
            record["sums"] = MetricRecord({name: part.flatten().tolist() for name, part in named.items()})
        if self.held is not None:
            record["held"] = MetricRecord({"examples": self.held.examples, "slopes": self.held.slopes.tolist()})
        if self.score is not None:
            record["score"] = MetricRecord({"examples": self.score.examples, "nll": self.score.nll})
        if self.info:
            record["info"] = MetricRecord({name: float(v) for name, v in self.info.items()})
        return record

    @classmethod
    def read(
        cls,
        record: RecordDict,
        schema: StateSchema | None,
        form: Form | None,
        most_held: int = -1,
        task: Task | None = None,
        most_scored: int = -1,
    ) -> Reply:
        """Of a message, or `RejectedMessage`.

        Args:
            record: The message.
            pattern: What an upload must look like; None: there must be none.
            form: What sums must look like; None: there must be none.
            most_held: Of how many held-out examples it may tell; below 0: of none.
            task: Of their data; needed where it may tell of held-out examples or of their score.
            most_scored: Of how many held-out examples it may tell the score of a candidate; below 0: of none.
        """
        allowed = ("reply", *(("upload", "info") if schema else ()), *(("sums",) if form else ()))
        allowed += (*(("held",) if most_held >= 0 else ()), *(("score",) if most_scored >= 0 else ()))
        _only(record, allowed, schema.bytes if schema else 0)
        plain = renamed(_plain(record, "reply", _REPLY), {"facts": "statement"})
        if plain["refused"]:
            return cls(**plain)
        if not (0 <= plain["train"] <= MOST and math.isfinite(plain["seconds"]) and math.isfinite(plain["work"])):
            raise RejectedMessage("its number of examples or its time is not valid.")
        upload = Upload(schema.read(_part(record, "upload", ArrayRecord))) if schema else None
        sums = _sums(_part(record, "sums", MetricRecord), form) if form else None
        held = _held(_part(record, "held", MetricRecord), most_held, task) if most_held >= 0 and task else None
        score = _score(_part(record, "score", MetricRecord), most_scored, task) if most_scored >= 0 and task else None
        info: dict[str, float] = {}
        if schema and "info" in record:
            for name, value in _part(record, "info", MetricRecord).items():
                if isinstance(value, list) or not abs(value) <= LARGEST_LOSS:
                    raise RejectedMessage(f"'{name[:40]}' of its training is not a finite number.")
                info[name] = float(value)
        return cls(**plain, upload=upload, sums=sums, held=held, score=score, info=info)


# Names and types of the fields on the wire.
_REQUEST: dict[str, type] = {
    "fingerprint": str,
    "run": str,
    "round": int,
    "train": bool,
    "evaluate": bool,
    "counted": int,
    "facts": str,
    "pilot": int,
    "calibration_temperature": float,
    "candidate": list,
    "fold": int,
}
_REPLY: dict[str, type] = {
    "fingerprint": str,
    "run": str,
    "round": int,
    "site": str,
    "refused": str,
    "facts": str,
    "train": int,
    "seconds": float,
    "work": float,
}
#: Fields that have another name on the wire.
_ON_THE_WIRE = {"common": "facts", "statement": "facts"}


def size(part: Any) -> int:
    """Bytes of a record as Flower writes it, all its parts together."""
    inside = sum(size(child) for child in (part.children or {}).values())
    # Flower sends equal pieces of an array once; what they fill is what counts.
    return len(part.deflate()) + (max(inside, len(part.data)) if isinstance(part, Array) else inside)


def _only(record: RecordDict, names: tuple[str, ...], tensors: int) -> None:
    strange = [name for name in record if name not in names]
    if strange:
        raise RejectedMessage(f"it holds {listed(strange)}, which does not belong in it.")
    held = size(record)
    if held > tensors + BESIDE:
        raise RejectedMessage(f"it is {held} bytes; the limit is {tensors} of tensors plus {BESIDE}.")


def _plain(record: RecordDict, name: str, kinds: dict[str, type]) -> dict[str, Any]:
    plain = dict(_part(record, name, ConfigRecord))
    protocol, version = plain.pop("protocol", None), plain.pop("version", None)
    if protocol != PROTOCOL:
        raise RejectedMessage(
            f"it uses protocol {str(protocol)[:20]}, but this is {PROTOCOL}; install the same version everywhere."
        )
    if version != __version__:
        raise RejectedMessage(
            f"it is from bpfed {str(version)[:20]}, but this is {__version__}; install the same version everywhere."
        )
    if set(plain) != set(kinds) or any(type(plain[key]) is not kind for key, kind in kinds.items()):
        raise RejectedMessage("its fields are not those of this protocol.")
    if plain["round"] < 0:
        raise RejectedMessage(f"its round is {plain['round']}.")
    return plain


def _part(record: RecordDict, name: str, kind: type) -> Any:
    part = record.get(name)
    if not isinstance(part, kind):
        raise RejectedMessage(f"it has no '{name}'.")
    return part


def _sums(record: MetricRecord, form: Form) -> Sums:
    made: dict[str, Tensor] = {}
    wanted = {"cells": (form.rows, 1, form.bins), "losses": (2, 1), **dict.fromkeys(form.further, (1,))}
    if strange := [name for name in record if name not in wanted]:
        raise RejectedMessage(f"its sums hold {listed(strange)}, which does not belong in them.")
    for name, shape in wanted.items():
        values = record.get(name)
        if not isinstance(values, list) or len(values) != math.prod(shape):
            raise RejectedMessage(f"its '{name}' are not {math.prod(shape)} numbers.")
        tensor = torch.tensor(values, dtype=torch.float64)
        if not bool((tensor.abs() <= LARGEST).all()) or (name != "losses" and bool((tensor < 0).any())):
            raise RejectedMessage(f"its '{name}' are not sums.")
        made[name] = tensor.reshape(shape)
    counts = made["cells"][0]
    if not (bool((counts == counts.round()).all()) and float(counts.sum()) <= MOST):
        raise RejectedMessage("the counts in its sums are not numbers of examples.")
    found = Sums(made.pop("cells"), made.pop("losses"), made)
    if excess := _excess(found, form):
        raise RejectedMessage(f"its '{excess}' are more than its examples allow.")
    return found


def _excess(sums: Sums, form: Form) -> str:
    """The name of a sum that is more than so many examples can add up to; empty: there is none."""
    counts, *of_bins = sums.cells
    if any(bool((row > counts + ROUNDING * (1.0 + counts)).any()) for row in of_bins):
        return "cells"
    total = {name: float(part) for name, part in sums.further.items()}
    most = {
        name: total[PARTS[name]] if name in PARTS else float(sums.examples)
        for name in (*SHARES, *form.shares)
        if name in total
    }
    if "in_order" in total:
        most["in_order"] = total["positive"] * (sums.examples - total["positive"])
    if "in_order_pairs" in total:  # of a time to event: each event with all other examples, at most
        most |= {"in_order_pairs": total["pairs"], "pairs": total["events"] * sums.examples}
    return next((name for name, limit in most.items() if total[name] > limit + ROUNDING * (1.0 + limit)), "")


def _held(record: MetricRecord, most: int, task: Task) -> HeldOutSlopes:
    examples, slopes = record.get("examples"), record.get("slopes")
    if set(record) != {"examples", "slopes"} or type(examples) is not int or not isinstance(slopes, list):
        raise RejectedMessage("what it reports on held-out examples cannot be read.")
    if not 0 <= examples <= most:
        raise RejectedMessage(f"it reports {examples} held-out examples, but has only {most} in all.")
    told = HeldOutSlopes(examples, torch.tensor(slopes, dtype=torch.float64))
    if why := task.slopes_fault(told):
        raise RejectedMessage(why)
    return told


def _score(record: MetricRecord, most: int, task: Task) -> HeldOutScore:
    examples, nll = record.get("examples"), record.get("nll")
    if set(record) != {"examples", "nll"} or type(examples) is not int or type(nll) is not float:
        raise RejectedMessage("its score of a candidate cannot be read.")
    if not 0 <= examples <= most:
        raise RejectedMessage(f"it reports {examples} held-out examples, but has only {most} in all.")
    low, high = (end * examples if examples else 0.0 for end in task.nll_range)  # infinite where it is no number
    near = ROUNDING * (1.0 + examples)
    if not (abs(nll) <= LARGEST and low - near <= nll <= high + near) and not (examples and nll == math.inf):
        raise RejectedMessage(f"its score of a candidate is {nll}, which is no sum over {examples} examples.")
    return HeldOutScore(examples, nll)
