"""Build what is published, look at it, and use it as a reader of README.md does.

    python tools/package.py

1. The source distribution is built from this folder, and the wheel from that.
2. `twine check --strict` and `check-wheel-contents` find nothing. Each has the files that it should
   have, and none that was made by running something.
3. README.md, rendered as a package index does, has no link that only works beside other files, and
   what it links to under the project's own address is in the source distribution.
4. The wheel with the extra `diffusers` is installed into an empty environment, with the versions of
   `tools/constraints.txt`. There, in an empty folder, run the commands and the Python blocks of the
   README's quickstart, on a small pipeline with random weights.

The tools are in an environment of their own, `.venv-package`. Where pip reaches no packages, it
says so and ends with the status `NOT_INSTALLED`.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import environments
from tools.environments import CONSTRAINTS, NOT_INSTALLED, ROOT, pinned, without_workers
from tools.markdown_pages import anchors, code_blocks

TOOLS = ROOT / ".venv-package"
NEEDED = ("build", "check-wheel-contents", "hatchling", "readme_renderer", "twine")
RENDERER = ("comrak",)  # what readme_renderer renders Markdown with

SECONDS = 300
"""For one command of the reader's; they take seconds."""

EXPECTED = (
    "LICENSE",
    "README.md",
    "docs/index.md",
    "docs/changelog.md",
    "pyproject.toml",
    "tests/conftest.py",
    "tierstore/__init__.py",
    "tierstore/py.typed",
    "tools/check.py",
    "tools/constraints.txt",
)
"""What a source distribution must have, among others."""

MADE = {"__pycache__", "build", "dist", "node_modules"}
MADE_SUFFIXES = {".pyc", ".pyo", ".so", ".o", ".coverage"}

PIPELINE = "import sys; from tests.pipelines import build_sdxl; build_sdxl(sys.argv[1], 'tiny')"

IMPORTED = """
import pathlib, sys, tierstore
assert pathlib.Path(tierstore.__file__).is_relative_to(sys.prefix), tierstore.__file__
assert (pathlib.Path(tierstore.__file__).parent / "py.typed").is_file(), "no py.typed"
assert dir(tierstore) == sorted([*tierstore.__all__, "errors", "types"]), dir(tierstore)
assert "torch" not in sys.modules, "to import tierstore imports torch"
for name in dir(tierstore):
    getattr(tierstore, name)
print(tierstore.__version__)
"""


class Failed(Exception):
    """What is published is not what it should be."""


# What there is -----------------------------------------------------------------------------------


def was_made(path: str) -> bool:
    """Whether running something has left this file, so that it is nothing to publish."""
    parts = Path(path).parts
    hidden = any(part.startswith(".") and part not in (".gitignore", ".github") for part in parts)
    return hidden or bool(MADE & set(parts)) or Path(path).suffix in MADE_SUFFIXES


def source_faults(names: Iterable[str]) -> list[str]:
    """What is wrong with the files of a source distribution, by their paths from its folder."""
    there = set(names)
    missing = [f"the source distribution lacks {name}" for name in EXPECTED if name not in there]
    return missing + [f"nothing to publish: {name}" for name in sorted(there) if was_made(name)]


def wheel_faults(names: Iterable[str], sources: Iterable[str]) -> list[str]:
    """What is wrong with a wheel's files: it has the package's sources and its metadata only."""
    there = {name for name in names if ".dist-info/" not in name}
    wanted = {name for name in sources if name.startswith("tierstore/")}
    lacks = [f"the wheel lacks {name}" for name in sorted(wanted - there)]
    return lacks + [f"nothing to publish: {name}" for name in sorted(there - wanted)]


class Links(HTMLParser):
    """Where the links and pictures of a rendered page lead."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, found: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in found if name in ("href", "src")]


def description_faults(html: str, source: str, version: str, root: Path) -> list[str]:
    """What is wrong with the links of README.md as a package index shows it.

    `source` is the address of the repository; a link below it has to be one to a file of `root` at
    this version's tag, and to a heading of it, if it names one.
    """
    found = []
    for link in Links(html).found:
        places = (f"{source}/blob/v{version}/", f"{source}/raw/v{version}/")
        place = next((place for place in places if link.startswith(place)), None)
        if place is not None:
            if not leads_somewhere(root, link.removeprefix(place)):
                found.append(f"leads nowhere: {link}")
        elif link.startswith(source):
            found.append(f"is no file of this version: {link}")
        elif not link.startswith(("https://", "http://", "#")):
            found.append(f"leads nowhere on a package index: {link}")
    return found


def leads_somewhere(root: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    file = root / path
    if not file.is_file():
        return False
    return not anchor or anchor in anchors(file.read_text(encoding="utf-8"))


# Building ----------------------------------------------------------------------------------------


@contextmanager
def step(name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def call(command: list[str | Path], **more: object) -> str:
    """Run a command and return what it printed. Raises Failed, with that, if it fails."""
    done = subprocess.run(
        command,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **more,  # type: ignore[call-overload]
    )
    if done.returncode:
        words = " ".join(map(str, command))
        raise Failed(f"{words}\nended with the status {done.returncode}:\n{done.stdout}")
    return str(done.stdout)


@contextmanager
def fetching(python: Path) -> Iterator[None]:
    """What may fail as packages are out of reach: RuntimeError if they are, Failed if not."""
    try:
        yield
    except (Failed, RuntimeError) as error:
        raise (Failed if reaches_packages(python) else RuntimeError)(str(error)) from error


def reaches_packages(python: Path) -> bool:
    """Whether pip gets a small package at this moment, and not out of its cache."""
    package = pinned(["click"], CONSTRAINTS.read_text())
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "pip", "download", "-q", "--no-cache-dir", "--no-deps"]
        done = subprocess.run([*command, "-d", folder, *package], check=False, capture_output=True)
    return done.returncode == 0


def build(python: Path, output: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    environment = {**without_workers(), "PIP_CONSTRAINT": str(CONSTRAINTS)}
    with fetching(python):
        call([python, "-m", "build", "--outdir", output, ROOT], env=environment)
    (source,) = output.glob("*.tar.gz")
    (wheel,) = output.glob("*.whl")
    call([python, "-m", "twine", "--no-color", "check", "--strict", source, wheel])
    call([python.parent / "check-wheel-contents", wheel])
    return source, wheel


def unpack(source: Path, folder: Path) -> Path:
    """The folder of an unpacked source distribution."""
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def description_of(metadata: Message) -> str:
    body = metadata.get_payload(decode=True)
    assert isinstance(body, bytes)
    return body.decode()


def rendered(python: Path, markdown: str) -> str:
    """Markdown as the package index renders it."""
    program = "import sys, readme_renderer.markdown as m; print(m.render(sys.stdin.read()))"
    html = call([python, "-c", program], input=markdown)
    if "<h2" not in html:
        raise Failed(f"README.md was not rendered: {html[:200]}")
    return html


def look_at(python: Path, source: Path, wheel: Path, folder: Path) -> Message:
    """Raises Failed with all that is wrong. Returns the wheel's metadata."""
    root = unpack(source, folder)
    names = [str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()]
    with zipfile.ZipFile(wheel) as archive:
        found = source_faults(names) + wheel_faults(archive.namelist(), names)
    metadata = metadata_of(wheel)
    html = rendered(python, description_of(metadata))
    address = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    found += description_faults(html, address, metadata["Version"], root)
    if found:
        raise Failed("\n".join(found))
    return metadata


# Using -------------------------------------------------------------------------------------------


def use(python: Path, metadata: Message, folder: Path) -> None:
    """Do in an empty folder what README.md says, with what was installed."""
    environment = {name: text for name, text in without_workers().items() if name != "PYTHONPATH"}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    there = {"cwd": folder, "env": environment, "timeout": SECONDS}
    version = call([python, "-c", IMPORTED], **there).strip()
    if version != metadata["Version"]:
        raise Failed(f"the package says that it is {version}, its metadata {metadata['Version']}")
    told = call([python.parent / "tierstore-inspect", "--version"], **there)
    if version not in told:
        raise Failed(f"tierstore-inspect --version says {told!r}")
    description = description_of(metadata)
    commands = [code for code in code_blocks(description, "sh") if "tierstore-inspect" in code]
    programs = code_blocks(description, "python")
    if len(commands) != 1 or len(programs) != 2:
        raise Failed(f"a quickstart of {len(commands)} and {len(programs)} blocks, not of 1 and 2")
    call(["bash", "-euo", "pipefail", "-c", commands[0]], **there)
    for program in programs:
        # The README's disk is one that a test may not write to.
        call([python, "-c", program.replace("/nvme/", "nvme/")], **there)
    if not (folder / "boat.png").stat().st_size:
        raise Failed("the quickstart has painted no boat")


def run(python: Path, folder: Path) -> None:
    with step("built and looked at"):
        source, wheel = build(python, folder / "dist")
        metadata = look_at(python, source, wheel, folder / "source")
    reader = folder / "environment"
    with step("installed into an empty environment"), fetching(python):
        environments.make(reader, [f"{wheel}[diffusers]"], constrained=True)
    place = folder / "reader"
    with step("the README's quickstart"):
        call([sys.executable, "-c", PIPELINE, place / "path/to/pipeline"], cwd=ROOT)
        use(reader / "bin" / "python", metadata, place)


def main(place: Path = TOOLS) -> int:
    folder = Path(tempfile.mkdtemp(prefix="tierstore-package-"))
    try:
        packages = pinned((*NEEDED, *RENDERER), CONSTRAINTS.read_text())
        environments.make(place, packages, constrained=True)
        run(place / "bin" / "python", folder)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return NOT_INSTALLED
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
