"""Build the sdist and the wheel, check what is in them, and run the demo's data with the installed wheel.

python .ci/package.py           # dependencies from the environment of this Python
python .ci/package.py --bare    # an environment with nothing but what pip installs; minutes
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = "run --data digits --rounds 1 --epochs 1 --seed 0 --compile off --device cpu --baselines off --quiet --out first"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bare", action="store_true", help="Install the dependencies too.")
    bare = parser.parse_args().bare
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        call(sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", ROOT, quiet=True)
        (wheel,), (sdist,) = (place / "dist").glob("*.whl"), (place / "dist").glob("*.tar.gz")
        problems = [*in_wheel(wheel), *in_sdist(sdist)]
        if problems:
            sys.exit("\n".join(problems))
        bin_ = installed(wheel, place / "environment", bare)
        where = "import bpfed, importlib.util as u; assert not u.find_spec('experiments'); print(bpfed.__file__)"
        found = call(bin_ / "python", "-c", where, cwd=place).strip()
        if not Path(found).is_relative_to(place):
            sys.exit(f"bpfed is imported from '{found}', not from the wheel.")
        call(bin_ / "bpfed", *RUN.split(), cwd=place)
        if not (place / "first" / "report.html").stat().st_size:
            sys.exit("The run of the installed command has an empty report.")
        print(f"{wheel.name} and {sdist.name} hold what they should, and the installed command trains.")


def ours() -> set[str]:
    """The files of the package that are under version control."""
    listed = call("git", "ls-files", "bpfed", cwd=ROOT).splitlines()
    return {name for name in listed if (ROOT / name).is_file()}


def in_wheel(path: Path) -> list[str]:
    """What is wrong with the content of the wheel, a sentence each."""
    with zipfile.ZipFile(path) as wheel:
        names = {n for n in wheel.namelist() if not n.endswith("/")}
    metadata = {n for n in names if n.partition("/")[0].endswith(".dist-info")}
    print(f"{path.name}: {len(names)} files, {path.stat().st_size / 1e6:.1f} MB")
    return [
        *(f"{path.name} lacks {name}." for name in sorted(ours() - names)),
        *(f"{path.name} has {name}, which is not of the package." for name in sorted(names - metadata - ours())),
    ]


def in_sdist(path: Path) -> list[str]:
    """What is wrong with the content of the sdist, a sentence each."""
    with tarfile.open(path) as sdist:
        names = {m.name.partition("/")[2] for m in sdist.getmembers() if m.isfile()}
    print(f"{path.name}: {len(names)} files, {path.stat().st_size / 1e6:.1f} MB")
    strange = sorted(
        n for n in names if n.partition("/")[0] in ("tests", "experiments", "benchmarks", "results", "docs")
    )
    wanted = ours() | {"pyproject.toml", "README.md", "LICENSE"}
    return [
        *(f"{path.name} lacks {name}." for name in sorted(wanted - names)),
        *(f"{path.name} has {name}, which is not of the package." for name in strange),
    ]


def installed(wheel: Path, folder: Path, bare: bool) -> Path:
    """A new environment with the wheel; gives the folder of its commands."""
    call(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if bare:
        call(*pip, "--constraint", ROOT / "constraints.txt", wheel)
        return folder / "bin"
    call(*pip, "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Dependencies alone: what a .pth file of that folder adds, such as this checkout, is not read from here.
    (packages / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n")
    return folder / "bin"


def call(*command: str | Path, cwd: Path | None = None, quiet: bool = False) -> str:
    """What a command prints; where it fails, all of that is shown."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(str(c) for c in command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return "" if quiet else done.stdout


if __name__ == "__main__":
    main()
