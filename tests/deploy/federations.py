"""A small deployed federation in one process, and the same one simulated."""

import torch
from loopgrid import LoopGrid, node_of
from scenarios import classification

from bpfed.config.reader import Config, Document
from bpfed.config.settings import DataSettings, Settings
from bpfed.deploy.server.roster import GridTransport
from bpfed.deploy.server.server import Server
from bpfed.deploy.settings import Limits, Plan
from bpfed.deploy.site.data import one_client
from bpfed.deploy.site.site import Site
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.runs.pilot import run_calibration_pilots
from bpfed.runs.run import Run

SETTINGS = {"rounds": 5, "epochs": 2, "batch": 5, "eval_draws": 4, "eval_every": 1, "device": "cpu", "compile": "off"}
SETTINGS["adapt"] = "off"  # selection pilots have tests of their own


#: A site that tells of every row that it has: tests of numbers have few.
OPEN = Limits(minimum=1)


class PersonalNetwork:
    """A site's part of a federation made in a test."""

    notes = ()

    def __init__(self, data, site):
        self.own = one_client(data, site)

    def data_statement(self):
        own = self.own
        return {
            "shape": list(own.input_shape),
            "task": own.task,
            "classes": own.classes,
            "train": int(own.train.sizes[0]),
        }

    def data(self, common):
        return self.own


def configured(method, **settings):
    return Config(DataSettings(name="small"), method, Settings(**{**SETTINGS, **settings}), {}, Document.read(None))


class Deployed:
    """Sites and server in this process, on a grid that writes every message to bytes."""

    def __init__(self, folder, method, data=None, site_class=Site, plan=None, keys=None, **settings):
        self.folder, self.data = folder, classification() if data is None else data
        self.config = configured(method, **settings)
        self.plan = Plan(self.data.clients, timeout=1.0, wait=3.0, pause=0.0, attempts=3, **(plan or {}))
        self.said = []
        self.sites = {
            name: site_class(
                folder / name, name, self.config, PersonalNetwork(self.data, name), say=self.said.append, limits=OPEN
            )
            for name in self.data.clients
        }
        self.grid = LoopGrid({100 + i: node_of(site) for i, site in enumerate(self.sites.values())})
        self.keys = keys

    def node(self, name):
        return 100 + self.data.clients.index(name)

    def server(self, **changes):
        return Server(
            self.folder / "server",
            self.plan,
            self.config,
            self.keys,
            say=self.said.append,
            sleep=lambda s: None,
            **changes,
        )

    def serve(self, **changes):
        server = self.server(**changes)
        server.serve(GridTransport(self.grid, poll=0.01))
        return server

    def personal(self, name, run):
        """The newest state on a site's disk."""
        from bpfed.deploy.site.site import States

        return States(self.folder / name, name, run).at(10**6)


def simulated(method, data=None, away=None, **settings):
    """The same federation in the simulator; ``away`` maps a round to clients that are down in it."""
    data = classification() if data is None else data
    federation = Federation.start(method, data, Settings(**{**SETTINGS, **settings}))
    run_calibration_pilots([Run(federation)])
    everyone = federation.participants

    def present(round_):
        gone = [data.clients.index(name) for name in (away or {}).get(round_, ())]
        return torch.tensor([i for i in everyone(round_).tolist() if i not in gone], dtype=torch.int64)

    federation.participants = present
    simulator = Simulator([federation])
    history = []
    for _ in range(federation.settings.rounds):
        info = simulator.round()[0]
        history.append((info, evaluate_clients(federation)[0]))
    return federation, history
