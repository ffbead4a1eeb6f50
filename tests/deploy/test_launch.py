"""A command of Flower's that ends as a whole."""

import subprocess
import sys

import pytest

from bpfed.deploy.ops import launch

#: A command that starts a part, leaves a thread behind, and whose main loop does what it is told to.
COMMAND = """
import subprocess, sys, threading, time
from bpfed.deploy.ops import launch
class Entry:
    @staticmethod
    def load():
        return run
def run():
    subprocess.Popen([sys.argv[1], "-c", "import time; time.sleep({part})"])
    threading.Thread(target=time.sleep, args=(600,)).start()
    {loop}
launch.importlib.metadata.entry_points = lambda **wanted: (Entry,)
launch.guard = lambda *given: None
launch.GRACE = 0.0
launch.watch_parts.__defaults__ = (0.0,)
sys.argv = ["launch", "a command", {executable!r}]
launch.main()
"""


@pytest.mark.parametrize(
    ("part", "loop", "code"),
    [
        (30, "pass", launch.INCOMPLETE),  # Flower's loop was ended by an error, and a thread of it goes on
        (0, "time.sleep(600)", launch.INCOMPLETE),  # the SuperExec is gone
        (30, "sys.exit(7)", 7),
        (30, "raise ValueError", 1),
        (30, "sys.exit()", 0),
    ],
)
def test_the_process_ends_when_a_part_of_it_has_ended(tmp_path, part, loop, code):
    own = tmp_path / launch.PART
    own.symlink_to(sys.executable)
    program = COMMAND.format(part=part, loop=loop, executable=str(own))
    with (tmp_path / "said").open("wb") as file:  # no pipe: the part may live longer and holds it
        done = subprocess.run([sys.executable, "-c", program], timeout=120, stderr=file)
    said = (tmp_path / "said").read_text()
    assert done.returncode == code, said
    assert ("ends, as" in said) == (code == launch.INCOMPLETE)


def test_the_superlink_waits_longer_for_its_database(monkeypatch):
    pytest.importorskip("sqlalchemy", reason="the SuperLink's database needs it")
    from flwr.supercore import sql_mixin

    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)
    before = dict(sql_mixin.SQLITE_PRAGMAS)
    launch.be_patient()
    assert dict(sql_mixin.SQLITE_PRAGMAS) == {**before, "busy_timeout": launch.BUSY}
    assert int(before["busy_timeout"]) < int(launch.BUSY)
