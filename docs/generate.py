"""Pages of the reference that follow from the code: commands, settings, methods, messages and the API.

``conf.py`` calls `generate` before Sphinx reads its pages. Nothing is listed by hand but which public names share a page.
"""

from __future__ import annotations

import ast
import inspect
import shutil
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

#: Pages of the API: title, what it is for, and the public names on it. ``MODULE.*`` stands for a module's ``__all__``.
API = {
    "fit": ("Train", "Train a federation in one call.", ["bpfed.fit", "bpfed.fit_seeds"]),
    "runs": (
        "Runs, clients and predictions",
        "What `fit` returns, and what can be asked of it.",
        ["bpfed.Run", "bpfed.Client", "bpfed.runs.adapt.NewClient", "bpfed.inference.predictive.Prediction"],
    ),
    "data": ("Data", "Load examples by client, or make them from arrays and frames.", ["bpfed.data.*"]),
    "settings": (
        "Settings as classes",
        "Every setting with its type and default. [Settings](../settings.md) lists the same as flags and TOML keys.",
        ["bpfed.Settings", "bpfed.config.settings.DataSettings", "bpfed.config.*"],
    ),
    "methods": (
        "Methods",
        'Methods are chosen by name (`method="bpfed"`) or as an instance. [Methods](../methods.md) lists their settings.',
        ["bpfed.methods.METHODS", "bpfed.methods.method", "bpfed.methods.names"],
    ),
    "contract": (
        "The contract of a method",
        "What to implement for [a method of your own](../../../tutorials/add-a-method.md).",
        [f"bpfed.methods.base.{name}" for name in ("Method", "RunShape", "Weights", "Initial", "Finished", "Phase")],
    ),
    "comparison": (
        "Compare and tune",
        "Several methods or settings on the same data and seeds.",
        ["bpfed.comparison.*"],
    ),
    "callbacks": ("Callbacks", "What watches a run, or keeps it in a folder.", ["bpfed.callbacks.*"]),
    "metrics": ("Metrics", "Scores of predictions, by client and together.", ["bpfed.metrics.*"]),
    "sklearn": ("scikit-learn", "Estimators with `fit`, `predict` and `predict_proba`.", ["bpfed.sklearn.*"]),
    "plugins": (
        "Plug-ins",
        "Registries, and the classes that [plug-ins](../../../how-to/plug-ins.md) extend.",
        [
            *("bpfed.config.registry.Registry", "bpfed.inference.likelihoods.Likelihood"),
            *(f"bpfed.inference.likelihoods.{name}" for name in ("Categorical", "Normal")),
            *(f"bpfed.inference.tasks.{name}" for name in ("Task", "register_task", "get_task")),
            *(f"bpfed.data.sources.pooled.{name}" for name in ("Entry", "Natural")),
        ],
    ),
    "report": ("Reports", "Write the report of a run.", ["bpfed.report.*"]),
    "errors": ("Errors", "What a user can mend.", ["bpfed.UserError"]),
}


def generate(folder: Path) -> None:
    """Write all pages into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {"settings.md": settings(), "deploy-settings.md": deploy_settings(), "methods.md": methods()}
    pages |= {"messages.md": messages()}
    pages |= {f"commands/{name}.md": text for name, text in commands()}
    pages |= {f"api/{name}.md": api(*about) for name, about in API.items()}
    classes = {name: getattr(import_module("bpfed.methods"), name) for name in _method_classes()}
    of_methods = {
        f"method-{cls.name}": (name, f"`--method {cls.name}`", [f"bpfed.methods.{name}"])
        for name, cls in classes.items()
    }
    pages |= {f"api/{name}.md": api(*about) for name, about in of_methods.items()}
    pages["api/methods.md"] += "\n".join(["```{toctree}", ":maxdepth: 1", "", *of_methods, "```", ""])
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def table(*head: str) -> list[str]:
    """The first two lines of a Markdown table."""
    return [row(*head), "|" + "---|" * len(head)]


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def typed(default: Any) -> str:
    """A default as TOML has it; empty where there is none."""
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


# --- Commands ---------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """A page for each command of ``bpfed``, with every argument and flag that its help has."""
    import click
    import typer

    from bpfed.cli import app
    from experiments.cli import app as paper

    def walk(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            for child in sorted(command.commands):
                yield from walk(command.commands[child], f"{name} {child}")
        else:
            yield name, command

    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    found = [*walk(root, "bpfed"), *walk(typer.main.get_command(paper), "bpfed paper")]
    pages: dict[str, list[tuple[str, click.Command]]] = {}
    for name, command in found:
        if name != "bpfed paper":
            pages.setdefault(name.split()[1], []).append((name, command))
    for page, of_page in sorted(pages.items()):
        lines = [f"# bpfed {page}", ""]
        for name, command in of_page:
            lines += [f"## {name}", ""] if len(of_page) > 1 else []
            lines += [" ".join(inspect.cleandoc(command.help or "").replace("\\[", "[").split()), ""]
            lines += [f"    {command.epilog.removeprefix('Example: ')}", ""] if command.epilog else []
            panels: dict[str, list[str]] = {}
            for parameter in command.params:
                panel = str(getattr(parameter, "rich_help_panel", None) or "Arguments and flags")
                panels.setdefault(panel, []).append(_parameter(parameter))
            for panel, rows in panels.items():
                lines += [f"**{panel}**", "", *table("", "value", "what it is"), *rows, ""]
        yield page, "\n".join(lines)


def _parameter(parameter: Any) -> str:
    names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else str(parameter.name).upper()
    about = str(getattr(parameter, "help", "") or "").replace("\\[", "[")
    default = parameter.default
    shown = getattr(parameter, "show_default", False) and default not in (None, False, [], ()) and not callable(default)
    kind = "" if getattr(parameter, "is_flag", False) else str(parameter.metavar or parameter.type.name.upper())
    return row(code(names), code(kind), about + (f" [default: {default}]" if shown and "[default" not in about else ""))


# --- Settings ---------------------------------------------------------------------------------------------------------


def settings() -> str:
    """Every key of ``[data]`` and ``[run]`` with its flag, type, default and description."""
    from bpfed.cli.flags import flag
    from bpfed.config.schema import TABLES, about, fields_of, short

    lines = ["# Settings", ""]
    lines += ["Each is a key of a TOML file, a flag of `bpfed run`, and an argument in Python. A file looks so:", ""]
    lines += ["```toml", "[data]", 'name = "folder:hospitals"', 'target = "disease"', "", "[run]", "rounds = 50", ""]
    lines += ["[method]", 'name = "bpfed-recipe"', "temperature = 0.05", "```", ""]
    lines += [
        "The keys of `[method]` are those of the [method](methods.md). An empty default is chosen by the run.",
        "",
    ]
    for name, of_table in TABLES.items():
        lines += [f"## [{name}]", "", *table("key", "flag", "value", "default", "what it is")]
        for key, field in fields_of(of_table).items():
            choices = short(field).replace("|", " or ")
            lines.append(row(code(key), code(flag(f"{name}.{key}")), choices, code(typed(field.default)), about(field)))
        lines.append("")
    return "\n".join(lines)


def deploy_settings() -> str:
    """Every key of ``deploy.toml``."""
    from bpfed.config.schema import about, fields_of
    from bpfed.deploy.settings import Plan

    lines = ["# Settings of deploy.toml", "", "Each part of a deployment has such a file.", ""]
    lines += table("key", "default", "what it is")
    lines += [row(code(key), code(typed(f.default)), about(f)) for key, f in fields_of(Plan).items()]
    return "\n".join([*lines, ""])


def methods() -> str:
    """The methods, and every setting of each."""
    from bpfed.config.schema import about, fields_of, plain
    from bpfed.methods import METHODS

    lines = [
        "# Methods and their settings",
        "",
        "Choose one with `--method NAME`, and set one of its settings with",
        "",
    ]
    lines += ["`--set method.KEY=VALUE` or in the table `[method]` of a TOML file.", ""]
    lines += table("name", "shared", "personal", "random", "paper")
    for name, method in METHODS.items():
        m = method
        lines.append(row(f"[{name}](#{name})", m.shared_words, m.personal_words, m.random_words, m.paper))
    lines.append("")
    for name, method in METHODS.items():
        first = inspect.cleandoc(method.__doc__ or "").split("\n\n")[0]
        lines += [f"## {name}", "", plain(" ".join(first.split())), "", *table("key", "default", "what it is")]
        lines += [row(code(key), code(typed(f.default)), about(f)) for key, f in fields_of(method).items()]
        lines.append("")
    return "\n".join(lines)


# --- Messages ---------------------------------------------------------------------------------------------------------


def messages() -> str:
    """Every sentence with which bpfed refuses something, by the module that says it; "…" is what differs."""
    import bpfed

    root = Path(inspect.getfile(bpfed)).parent
    lines = ["# Messages", ""]
    lines += [
        "bpfed refuses what cannot be right with one sentence: what was wrong, where, and what to do. In Python it"
    ]
    lines += [
        "is a `bpfed.UserError`. A command prints it on stderr and exits with 2. Exit code 130 is Ctrl-C, and 0 is"
    ]
    lines += ["success. Search this page for a few words of a sentence. `…` stands for a name or a number.", ""]
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _raised(node)]
        said = dict.fromkeys(_sentence(call.args[0]) for call in calls)
        said.pop("…", None)
        if said:
            name = ".".join(("bpfed", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
            lines += [f"## {name}", "", *(f"- {' '.join(sentence.split())}" for sentence in said), ""]
    return "\n".join(lines)


def _raised(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "UserError" and bool(call.args)


def _sentence(text: ast.expr) -> str:
    """The text of a message as Markdown, with a dot for each part that is computed."""
    if isinstance(text, ast.Constant):
        said = str(text.value)
        for mark in "\\`*_[]<>#|":
            said = said.replace(mark, f"\\{mark}")
        return said
    if isinstance(text, ast.JoinedStr):
        return "".join(_sentence(part) for part in text.values)
    if isinstance(text, ast.BinOp):
        return _sentence(text.left) + _sentence(text.right)
    return "…"


# --- API --------------------------------------------------------------------------------------------------------------


def _method_classes() -> list[str]:
    """The classes of `bpfed.methods` that are methods themselves."""
    module = import_module("bpfed.methods")
    return [name for name in module.__all__ if getattr(module, name) in module.METHODS.values()]


def api(title: str, about: str, names: list[str]) -> str:
    """One page of the API: its names with signatures, arguments and methods, from their docstrings."""
    lines = [f"# {title}", "", about, "", "```{eval-rst}"]
    for full in public(names):
        module, _, attribute = full.rpartition(".")
        value = getattr(import_module(module), attribute)
        if inspect.isclass(value):
            lines += [f".. autoclass:: {full}", "   :members:"]
            lines += ["   :show-inheritance:"] if value.__bases__ != (object,) else []
        elif callable(value):
            lines.append(f".. autofunction:: {full}")
        else:
            shown = ", ".join(f"``{key}``" for key in value) if isinstance(value, Collection) else f"``{value!r}``"
            lines += [f".. py:data:: {full}", "", f"   {shown}"]
        lines.append("")
    return "\n".join([*lines, "```", ""])


def public(names: list[str]) -> list[str]:
    """The names, with ``MODULE.*`` replaced by those of its ``__all__``."""
    found: list[str] = []
    for name in names:
        module, _, last = name.rpartition(".")
        found += [f"{module}.{each}" for each in import_module(module).__all__] if last == "*" else [name]
    return found
