"""One schema for files and flags: what it takes, what it refuses, and how it says so."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from bpfed._util.errors import UserError
from bpfed.config import registry
from bpfed.config.reader import Document, Override, read
from bpfed.config.schema import TABLES, about, fields_of
from bpfed.config.settings import DataSettings, Settings, words
from bpfed.methods import METHODS, BPFed, FedAvg, Recipe


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def written(text: str) -> Path:
        Path("c.toml").write_text(text)
        return Path("c.toml")

    return written


def test_nothing_said_is_all_defaults() -> None:
    config = read()
    assert (config.data, config.method, config.run) == (DataSettings(), Recipe(), Settings())


def test_a_file_says_it_all(write) -> None:
    path = write(
        """
        [data]
        name = "mnist-small"
        partition = "random"
        [method]
        name = "bpfed"
        temperature = 0.3
        prior_step = false
        personal = ["fc2", "*.bias"]
        predict = "aggregated"
        [run]
        rounds = 40
        participants = 3
        schedule = "cosine"
        drop_rate = 0
        """
    )
    config = read(path)
    assert config.data == DataSettings("mnist-small", partition="random")
    assert config.method == BPFed(temperature=0.3, prior_step=False, personal=("fc2", "*.bias"), predict="aggregated")
    assert config.run == Settings(rounds=40, participants=3, schedule="cosine", drop_rate=0.0)
    assert isinstance(config.run.drop_rate, float)


def test_what_is_typed_becomes_what_the_field_is(write) -> None:
    path = write("[run]\nparticipants = 3\n[method]\nlr = 0.1\n")
    said = {
        "run.rounds": "7",
        "run.drop_rate": "1e-1",
        "run.participants": "none",
        "run.device": "cpu",
        "method.name": "bpfed",
        "method.prior_step": "off",
        "method.personal": '["a", "b"]',
        "method.lr": "1",
        "data.partition": "shards:2",
    }
    config = read(path, [Override(key, text) for key, text in said.items()])
    assert config.run == Settings(rounds=7, drop_rate=0.1, participants=None, device="cpu")
    assert config.method == BPFed(prior_step=False, personal=("a", "b"), lr=1.0)
    assert config.data.partition == "shards:2"


def test_columns_to_ignore_may_be_a_list(write) -> None:
    assert read(write('[data]\nignore = ["a", "b c"]')).data.ignore == "a,b c"
    assert read(None, [Override("data.ignore", '["a", "b"]')]).data.ignore == "a,b"
    with pytest.raises(UserError, match=r"data\.ignore is .'a', 1., but must be text"):
        read(write("[data]\nignore = ['a', 1]"))


def test_none_is_a_word_where_it_is_one() -> None:
    assert read(None, [Override("method.personal", "none")]).method.personal == "none"


def test_the_last_word_counts() -> None:
    assert read(None, [Override("run.rounds", "7"), Override("run.rounds", "8")]).run.rounds == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[run]\nrounds = 5\n\n# more\nronds = 3",
            "'c.toml', line 5: unknown key 'ronds' in [run]; did you mean 'rounds'?",
        ),
        (
            "[method]\ntemprature = 1",
            "'c.toml', line 2: unknown key 'temprature' in [method]; did you mean 'temperature'?",
        ),
        ("[run]\ntemperature = 1", "line 2: unknown key 'temperature' in [run]; did you mean 'method.temperature'?"),
        ("rounds = 5", "line 1: unknown key 'rounds'; did you mean 'run.rounds'?"),
        ("[run]\n[data]\nx.y = 1", "line 3: unknown key 'x' in [data]; choose from: client_column, clients"),
        ("[data]\nname='digits'\n\n[rnu]\nrounds = 1", "'c.toml', line 4: unknown table [rnu]; did you mean 'run'?"),
        ("run = 5", "line 1: 'run' must be a table; write [run] on a line of its own."),
        (
            "[data]\ndata_dir = '/x'",
            "line 2: 'data_dir' is a location, not a setting; pass it as --data-dir instead.",
        ),
        ("[method]\nname = 'bpfedd'", "'c.toml', line 2: Unknown method 'bpfedd'; did you mean 'bpfed'?"),
        (
            "[method]\nname = 'fedavg'\nsigma = 1",
            "line 3: unknown key 'sigma' in [method]; ",
        ),
        ("[run]\nrounds = '5'", "line 2: run.rounds is '5', but must be a whole number."),
        ("[run]\nrounds = 5.0", "line 2: run.rounds is 5.0, but must be a whole number."),
        ("[run]\nrounds = true", "line 2: run.rounds is True, but must be a whole number."),
        ("[run]\ndrop_rate = nan", "line 2: run.drop_rate is nan, but must be a number."),
        ("[run]\nstore = 'disk'", "line 2: run.store is 'disk', but must be 'auto', 'memory' or 'file'."),
        ('[method]\nname = "bpfed"\nprior_step = 1', "line 3: method.prior_step is 1, but must be true or false."),
        ("[method]\npersonal = [1]", "line 2: method.personal is [1], but must be text or a list of text."),
        ("[data]\nclients = [\n 1,\n]\n", "line 2: data.clients is [1], but must be a whole number."),
        ("[run\nrounds = 5", "The configuration file 'c.toml' is not valid TOML: "),
        ("[run]\nrounds = 5\nrounds = 6\n", "(at line 3, column 11)"),
    ],
)
def test_a_mistake_is_named_with_its_line(write, text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        read(write(text))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (
            "clinics",
            "'clinics' is a folder, not a configuration file; to train on the files in it, use --data folder:clinics.",
        ),
        (
            "clinics/north.CSV",
            "use --data folder:clinics for a folder with one file per client, or --data folder:clinics/north.CSV ",
        ),
        ("run", "'run' is a run folder, not a configuration file; use the one in it, 'run/config.toml'."),
        ("away.csv", "There is no configuration file 'away.csv'; check the path."),
    ],
)
def test_data_in_the_place_of_a_file_of_settings(
    place: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (Path("clinics/north.CSV"), Path("run/config.toml")):
        file.parent.mkdir()
        file.write_text("")  # which is valid TOML
    with pytest.raises(UserError, match=re.escape(sentence)):
        read(Path(place))
    assert read(Path("run/config.toml")).run == Settings()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no configuration file"):
        read(tmp_path / "nosuch.toml")
    (tmp_path / "circle.toml").symlink_to(tmp_path / "circle.toml")
    for name in ("circle.toml", "x" * 300):
        with pytest.raises(UserError, match="cannot be read"):
            read(tmp_path / name)
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read(tmp_path / "c.toml")


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_every_method_can_be_said_in_both_ways(write, name: str) -> None:
    for key, field in fields_of(METHODS[name]).items():
        default = field.default
        toml = str(default).lower() if isinstance(default, bool | int | float) else f"'{default}'"
        by_file = read(write(f"[method]\nname = '{name}'\n{key} = {toml}"))
        by_flag = read(None, [Override("method.name", name), Override(f"method.{key}", str(default))])
        assert by_file.method == by_flag.method == METHODS[name]()


@pytest.mark.parametrize("table", TABLES)
def test_every_setting_is_described(table: str) -> None:
    for field in fields_of(TABLES[table]).values():
        assert about(field)
        assert "`" not in about(field)
        assert words(field.annotation) != str(field.annotation)


def test_a_new_method_needs_no_change_here(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Mine(FedAvg):
        """Mine.

        Attributes:
            knobs: How many
                knobs.
        """

        name: ClassVar[str] = "mine"
        knobs: int | None = None

    monkeypatch.setitem(registry.METHODS.own, "mine", f"{__name__}:Mine")
    monkeypatch.setitem(globals(), "Mine", Mine)
    assert about(fields_of(Mine)["knobs"]) == "How many knobs."
    assert read(None, [Override("method.name", "mine"), Override("method.knobs", "3")]).method == Mine(knobs=3)
    with pytest.raises(UserError, match="did you mean 'knobs'"):
        read(None, [Override("method.name", "mine"), Override("method.knob", "3")])


def test_a_run_from_before_a_setting_is_refused_where_it_did_something_else(write) -> None:
    """A file of one's own has the settings of now; a run's own file says what was done then, and its states are shaped by that."""
    method = '[method]\nname = "bpfed-recipe"\nlr = 0.001\n'
    assert read(write(f'bpfed = "0.3.0"\n{method}unseen = 1.0\n')).method == Recipe(lr=0.001)
    assert read(write(f'bpfed = "0.3.0"\n{method}')).method == Recipe(lr=0.001)
    assert read(write('bpfed = "0.2.0"\n'), [Override("method.name", "bpfed-recipe")]).method == Recipe()
    other = r"method.unseen_pseudocount is 0.0 in this run, and is a constant .*; use this run with bpfed 0.2.0"
    named = [Override("method.name", "bpfed-recipe")]  # as in the file, whose settings are used
    for text, said in ((f"{method}bias_count = 0.0\n", []), (f"{method}bias_count = 0.0\n", named), ("", [])):
        with pytest.raises(UserError, match=other):
            read(write(f'bpfed = "0.2.0"\n{text}'), said)
    with pytest.raises(
        UserError,
        match=r"'c.toml', line 5: method.bias_count was removed in bpfed 0.3.0; use this run with bpfed 0.2.0",
    ):
        read(write(f'bpfed = "0.2.0"\n{method}bias_count = 0.5\n'))


def test_a_variant_is_no_method_of_a_run() -> None:
    with pytest.raises(UserError, match=r"^'fedper\+members' is a variant, which only 'bpfed compare' accepts"):
        read(None, [Override("method.name", "fedper+members")])


@pytest.mark.parametrize("name", ["members", "hidden"])
def test_another_network_is_another_run(write, name: str) -> None:
    path = write('bpfed = "0.3.0"\n[model]\nweights = 3\n')
    assert read(path).recorded["model"] == {"weights": 3}
    assert read(path, [Override("run.epochs", "2")]).recorded["model"] == {"weights": 3}
    assert read(path, [Override(f"run.{name}", "2")]).recorded == {}


def test_what_a_run_noted_of_itself_is_a_promise(write) -> None:
    path = write('bpfed = "0.9.0"\n[data]\nfingerprint = "ab"\nprotocol = "own"\n[model]\nweights = 3\n')
    config = read(path)
    assert config.recorded == {"data": {"fingerprint": "ab", "protocol": "own"}, "model": {"weights": 3}}
    assert config.notes[0].startswith("'c.toml' was written by bpfed 0.9.0, but this is ")
    made = {"data": {"fingerprint": "ab", "protocol": "own"}, "model": {"weights": 3, "more": 1}}
    config.confirm(made)
    with pytest.raises(
        UserError, match=r"'c.toml', line 3: data.fingerprint was 'ab' .* cannot be reproduced .* delete the line"
    ):
        config.confirm(made | {"data": {"fingerprint": "cd", "protocol": "own"}})
    with pytest.raises(UserError, match=r"'c.toml', line 6: model.weights was 3 .* delete the \[model\] table"):
        config.confirm(made | {"model": {"weights": 4}})


@pytest.mark.parametrize(
    ("key", "text", "kept"),
    [
        ("run.seed", "1", False),
        ("data.clients", "3", False),
        ("method.personal", "all", False),
        ("run.chunk", "1", True),
    ],
)
def test_whoever_changes_what_is_computed_expects_nothing(write, key: str, text: str, kept: bool) -> None:
    config = read(write('[data]\nfingerprint = "ab"\n'), [Override(key, text)])
    assert bool(config.recorded) == kept


def test_the_data_follow_the_runs_seed_unless_they_have_their_own() -> None:
    config = read(None, [Override("run.seed", "4"), Override("data.clients", "2")])
    assert config.load_data().seed == 4
    assert replace(config, data=replace(config.data, seed=5)).load_data().seed == 5


def test_types_in_words() -> None:
    assert words(str | None) == "text"
    assert words(int | float) == "a whole number or a number"
    assert words(list[int]) == "a list of a whole number"


def test_lines_of_keys(tmp_path: Path) -> None:
    text = '# c\n[a]\nx = """\none\ntwo"""\n\ny = 1\n[b.c]\nz = [\n1,\n]\n[[d]]\nw=1\n'
    (tmp_path / "t.toml").write_text(text.replace("\n", "\r\n"))
    document = Document.read(tmp_path / "t.toml")
    assert [document.line(*keys) for keys in (("a",), ("a", "x"), ("a", "y"), ("b", "c"), ("b", "c", "z"), ("d",))] == [
        2,
        3,
        7,
        8,
        9,
        12,
    ]
