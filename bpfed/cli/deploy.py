"""``bpfed deploy``: a federation of real sites, on Flower."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bpfed._util import text
from bpfed._util.errors import UserError
from bpfed._util.files import write_whole, writing
from bpfed.cli import terminal
from bpfed.cli.flags import MethodName, ModelName, with_schema
from bpfed.cli.run import overrides
from bpfed.cli.terminal import Group
from bpfed.config.registry import DATASETS, check_data, method_named

app = typer.Typer(
    name="deploy",
    cls=Group,
    help="A federation of real sites, on Flower: same methods and results, and personal model parts stay at the sites.",
    epilog="Example: bpfed deploy demo",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: A file that says that a folder is of a demonstration, which may be replaced; no other is ever deleted.
DEMO = ".demo"

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the deployment.")]


def _flower() -> None:
    if not all(importlib.util.find_spec(name) for name in ("cryptography", "flwr")):
        raise UserError("Deployments need Flower; install it with: pip install 'bpfed[deploy]'")


LogLevel = Annotated[
    str | None,
    typer.Option(
        metavar="debug|info|warning|error",
        help="Log from this level on. \\[default: BPFED_LOG_LEVEL, then info]",
        show_default=False,
    ),
]


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone
        print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)


@app.command("init", epilog="Example: bpfed deploy init fed --sites north,south,east --address fed.example.org:8000")
@with_schema
def init(
    folder: Folder,
    sites: Annotated[
        str | None,
        typer.Option(
            help="Names of the sites, separated by commas. \\[default: the clients of --data]", show_default=False
        ),
    ] = None,
    address: Annotated[
        str, typer.Option(help="Address at which sites reach the server, host:port.")
    ] = "127.0.0.1:8000",
    bind: Annotated[
        str,
        typer.Option(
            help="Address of the server's machine to listen at, if it is not that of --address (NAT, container); "
            "0.0.0.0: all.",
            show_default=False,
        ),
    ] = "",
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of settings, as for 'bpfed run'.", show_default=False)
    ] = None,
    preprocessing: Annotated[
        Path | None,
        typer.Option(
            help="A preprocessing file that all sites agree on (see 'bpfed data prepare'); then no site tells anything of "
            "its columns.",
            show_default=False,
        ),
    ] = None,
    former: Annotated[Path | None, typer.Option("--preparation", hidden=True)] = None,
    method: MethodName = None,
    model: ModelName = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. method.temperature=0.3; repeatable."),
    ] = None,
    **flags: str | None,
) -> None:
    """Create certificates, a key pair per site and the configuration, ready to be taken to the sites."""
    if former is not None:
        raise UserError(f"--preparation is called --preprocessing now; write --preprocessing {former}.")
    method = method_named(method, model)
    _flower()
    from bpfed.config.reader import read
    from bpfed.data.datasets import names
    from bpfed.deploy.ops import admin
    from bpfed.deploy.settings import Plan

    given = [name.strip() for name in sites.split(",")] if sites else []
    if given and config is None and flags.get("data") is None:
        flags["data"] = folder.name  # the sites' own files, which have no name together
    chosen = read(config, overrides(method, settings or [], flags))
    plan = Plan(admin.named_sites(chosen, given), address, bind=bind)
    admin.make(folder, plan, chosen, preprocessing)
    print(f"Created '{folder}' for {text.many(len(plan.sites), 'site')}. Next:")
    print(f"  bpfed deploy server {folder}            # on the server")
    first, own = admin.site_folder(folder, plan.sites[0]), admin.data_of(chosen, plan.sites[0])
    whose = "own folder" if own in names() else "own folder and its own file"
    print(f"  bpfed deploy client {first} --data {own}    # at each site, with its {whose}")
    print(f"  bpfed deploy run {folder}               # on the server")


@app.command("server", epilog="Example: bpfed deploy server fed")
def server(folder: Folder, log_level: LogLevel = None) -> None:
    """Run the server in the foreground until SIGTERM or Ctrl-C."""
    _flower()
    from bpfed.deploy import logs
    from bpfed.deploy.ops import flower
    from bpfed.deploy.settings import Plan, server_folder

    say = logs.to_terminal(log_level)
    own = server_folder(folder)
    flower.serve(own, Plan.read(own), say)


@app.command("client", epilog="Example: bpfed deploy client fed/site-north --data patients.csv")
def client(
    folder: Annotated[Path, typer.Argument(metavar="SITE", help="The site's folder.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="The site's file, or the name of a dataset of which it has a part. \\[default: the last one used]",
            show_default=False,
        ),
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Run a site in the foreground until SIGTERM or Ctrl-C."""
    _flower()
    from bpfed._util.files import PLAN
    from bpfed.deploy import logs
    from bpfed.deploy.ops import flower
    from bpfed.deploy.settings import Plan, no_deployment, site_folders

    say = logs.to_terminal(log_level)
    own = folder.resolve()
    if not (own / PLAN).exists():
        if inside := site_folders(folder):
            raise UserError(
                f"'{folder}' is the folder of a whole deployment; give that of one site, such as '{inside[0]}'."
            )
        raise no_deployment(folder)
    plan = Plan.read(own)
    if not plan.site:
        beside = [*site_folders(folder.parent), folder.parent / "site-a"]
        raise UserError(f"'{folder}' is not the folder of a site; give one such as '{beside[0]}'.")
    if data is not None and data not in DATASETS and (path := Path(data).expanduser()).exists():
        data = str(path.resolve())
    if not flower.join(own, plan, say, data):
        raise typer.Exit(2)


@app.command("run", epilog="Example: bpfed deploy run fed")
def run(
    folder: Folder,
    back_to: Annotated[
        int | None,
        typer.Option(
            metavar="ROUND",
            min=0,
            help="Go on from the state after this round; the rounds after it are dropped.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the remaining rounds, on the server's machine, and write the report."""
    _flower()
    from bpfed._util.files import REPORT, RUN
    from bpfed.deploy.ops import admin
    from bpfed.deploy.server.status import StatusDisplay
    from bpfed.deploy.settings import Plan, server_folder

    own = server_folder(folder)
    try:
        with StatusDisplay() as shown:
            if back_to is not None:
                admin.go_back(own, back_to, shown.say)
            record = admin.run(own, Plan.read(own), shown.say, shown.status, shown.waiting)
    except KeyboardInterrupt:
        _say("No longer watching; a run that has started continues. Check it with 'bpfed deploy status'.")
        raise typer.Exit(130) from None
    terminal.result(record, own / RUN / REPORT)


@app.command("status", epilog="Example: bpfed deploy status fed")
def status(folder: Folder) -> None:
    """Show which sites are online, the round, and the latest metrics."""
    _flower()
    from bpfed.deploy.ops import admin
    from bpfed.deploy.server.status import where
    from bpfed.deploy.settings import Plan, server_folder

    own = server_folder(folder)
    plan = Plan.read(own)
    found = admin.status(own)
    if found is None:
        print(f"No run yet; start one with: bpfed deploy run {folder}")
        return
    ago = time.time() - float(found["at"])
    state = found["state"]
    over = state in ("finished", "stopped")
    if not over and not admin.alive(int(found["pid"])):
        state, over = "interrupted", True
    print(f"{state}, {where(found)}, {ago:.0f} s ago" + _because(found))
    shown = terminal.table("site", "online", "last round used", "refused", "lost", right=3)
    for site in plan.sites:
        seen = found["sites"].get(site, {})
        numbers = [str(seen.get(key, 0)) for key in ("counted", "refused", "lost")]
        online = "yes" if seen.get("ready") else "joining" if seen.get("online") else "no"
        shown.add_row(site, text.MISSING if over else online, *numbers)
    terminal.put(shown)
    if over:
        print("Which sites are online is known only during a run.")
    for site in plan.sites:
        if why := found["sites"].get(site, {}).get("why"):
            print(f"Last message about site '{site}': {why}")
    for note in found.get("notes", ()):
        print(note)
    print(_metrics(found))


@app.command("demo", epilog="Example: bpfed deploy demo --out runs/deployed")
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the demonstration; an earlier one is replaced.")] = Path(
        "runs/deploy-demo"
    ),
    sites: Annotated[int, typer.Option(help="Number of sites.", min=2)] = 4,
    rounds: Annotated[int, typer.Option(help="Number of rounds.", min=1)] = 5,
    data: Annotated[str, typer.Option(help="A named dataset, distributed over the sites.")] = "digits",
) -> None:
    """Run a server and several sites on this machine, with TLS and keys, and write the report."""
    check_data(data)
    _flower()
    from bpfed._util.files import REPORT, RUN, SERVER
    from bpfed.config.reader import Override, read
    from bpfed.deploy.ops import admin, supervise
    from bpfed.deploy.server.status import StatusDisplay
    from bpfed.deploy.settings import Plan

    earlier = not admin.empty(out)
    if earlier and not (out / DEMO).is_file():
        raise UserError(f"'{out}' contains other files; choose another --out.")
    wanted = {"data.name": data, "data.clients": sites, "run.rounds": rounds, "run.eval_every": 1}
    chosen = read(None, [Override(key, str(value)) for key, value in wanted.items()])
    plan = Plan(admin.named_sites(chosen, ()), f"127.0.0.1:{supervise.free_port()}", timeout=300.0, wait=300.0)
    if earlier:
        with writing(out):
            shutil.rmtree(out)
    _say("Creating certificates and keys.")
    admin.make(out, plan, chosen)
    write_whole(out / DEMO, "Made by 'bpfed deploy demo', which replaces this folder when it is run again.\n")
    own = (out / SERVER).resolve()
    try:
        with (
            supervise.until_told(),
            StatusDisplay() as shown,
            admin.started(out.resolve(), plan, data, shown.say, shown.waiting),
        ):
            record = admin.run(own, plan, shown.say, shown.status, shown.waiting)
            shown.say("Stopping.")
    except supervise.Stopped:
        raise typer.Exit(130) from None
    terminal.result(record, out / SERVER / RUN / REPORT)


def _metrics(found: dict[str, Any]) -> str:
    from bpfed.callbacks.progress import figures

    metrics = found.get("metrics") or {}
    return f"Round {metrics['round']}: {figures(metrics)}" if metrics else ""


def _because(found: dict[str, Any]) -> str:
    return f" ({found['error']})" if found.get("error") else ""
