"""Build the distributions, check them, and run the README's quickstart with the wheel.

    python tools/package.py

1. Builds the source distribution from this folder, and the wheel from it.
2. Requires that `twine check --strict` and `check-wheel-contents` pass, and that each distribution
   has all required files and no generated ones.
3. Renders README.md as a package index does. Relative links are errors; links to the project's own
   repository must lead to files of the source distribution.
4. Installs the wheel with the extra `diffusers` into an empty environment, with the versions of
   `tools/constraints.txt`. There, in an empty folder, runs the commands and Python blocks of the
   README's quickstart, on a small pipeline with random weights.

The build tools are in a separate environment, `.venv-package`. Without access to packages, exits
with status `NOT_INSTALLED`.
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
RENDERER = ("comrak",)  # readme_renderer's Markdown backend

SECONDS = 300
"""Time limit of one command of the quickstart, which takes seconds."""

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
"""Required files of a source distribution, among others."""

MADE = {"__pycache__", "build", "dist", "node_modules"}
MADE_SUFFIXES = {".pyc", ".pyo", ".so", ".o", ".coverage"}

PIPELINE = "import sys; from tests.pipelines import build_sdxl; build_sdxl(sys.argv[1], 'tiny')"

IMPORTED = """
import pathlib, sys, tierstore
assert pathlib.Path(tierstore.__file__).is_relative_to(sys.prefix), tierstore.__file__
assert (pathlib.Path(tierstore.__file__).parent / "py.typed").is_file(), "no py.typed"
assert dir(tierstore) == sorted([*tierstore.__all__, "errors", "types"]), dir(tierstore)
assert "torch" not in sys.modules, "importing tierstore imports torch"
for name in dir(tierstore):
    getattr(tierstore, name)
print(tierstore.__version__)
"""


class Failed(Exception):
    """A check of the distributions or of the quickstart failed."""


# Contents -----------------------------------------------------------------------------------


def is_generated(path: str) -> bool:
    """Return True for a generated file, which must not be published."""
    parts = Path(path).parts
    hidden = any(part.startswith(".") and part not in (".gitignore", ".github") for part in parts)
    return hidden or bool(MADE & set(parts)) or Path(path).suffix in MADE_SUFFIXES


def source_faults(names: Iterable[str]) -> list[str]:
    """Return the faults of a source distribution, given the relative paths of its files."""
    there = set(names)
    missing = [f"the source distribution lacks {name}" for name in EXPECTED if name not in there]
    return missing + [
        f"must not be published: {name}" for name in sorted(there) if is_generated(name)
    ]


def wheel_faults(names: Iterable[str], sources: Iterable[str]) -> list[str]:
    """Return the faults of a wheel, which must contain only the package's sources and metadata."""
    there = {name for name in names if ".dist-info/" not in name}
    wanted = {name for name in sources if name.startswith("tierstore/")}
    lacks = [f"the wheel lacks {name}" for name in sorted(wanted - there)]
    return lacks + [f"must not be published: {name}" for name in sorted(there - wanted)]


class Links(HTMLParser):
    """The targets of the links and images of a rendered page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, found: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in found if name in ("href", "src")]


def description_faults(html: str, source: str, version: str, root: Path) -> list[str]:
    """Return the broken links of README.md on a package index.

    `source` is the address of the repository. A link below it must lead to a file of `root` at this
    version's tag and, if it has an anchor, to a heading of that file.
    """
    found = []
    for link in Links(html).found:
        places = (f"{source}/blob/v{version}/", f"{source}/raw/v{version}/")
        place = next((place for place in places if link.startswith(place)), None)
        if place is not None:
            if not is_valid_link(root, link.removeprefix(place)):
                found.append(f"broken link: {link}")
        elif link.startswith(source):
            found.append(f"not a file of this version: {link}")
        elif not link.startswith(("https://", "http://", "#")):
            found.append(f"broken on a package index: {link}")
    return found


def is_valid_link(root: Path, link: str) -> bool:
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
    """Run a command and return its output. Raises Failed, with the output, if it fails."""
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
        raise Failed(f"{words}\nexited with status {done.returncode}:\n{done.stdout}")
    return str(done.stdout)


@contextmanager
def fetching(python: Path) -> Iterator[None]:
    """In the block, raise RuntimeError instead of Failed if packages cannot be downloaded."""
    try:
        yield
    except (Failed, RuntimeError) as error:
        raise (Failed if reaches_packages(python) else RuntimeError)(str(error)) from error


def reaches_packages(python: Path) -> bool:
    """Return True if pip can download a small package now, without its cache."""
    package = pinned(["click"], CONSTRAINTS.read_text())
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "pip", "download", "-q", "--no-cache-dir", "--no-deps"]
        done = subprocess.run([*command, "-d", folder, *package], check=False, capture_output=True)
    return done.returncode == 0


def build(python: Path, output: Path) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from it. Return their paths."""
    environment = {**without_workers(), "PIP_CONSTRAINT": str(CONSTRAINTS)}
    with fetching(python):
        call([python, "-m", "build", "--outdir", output, ROOT], env=environment)
    (source,) = output.glob("*.tar.gz")
    (wheel,) = output.glob("*.whl")
    call([python, "-m", "twine", "--no-color", "check", "--strict", source, wheel])
    call([python.parent / "check-wheel-contents", wheel])
    return source, wheel


def unpack(source: Path, folder: Path) -> Path:
    """Unpack a source distribution, and return its folder."""
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
    """Render Markdown to HTML as the package index does."""
    program = "import sys, readme_renderer.markdown as m; print(m.render(sys.stdin.read()))"
    html = call([python, "-c", program], input=markdown)
    if "<h2" not in html:
        raise Failed(f"README.md was not rendered: {html[:200]}")
    return html


def check_distributions(python: Path, source: Path, wheel: Path, folder: Path) -> Message:
    """Check both distributions, and return the wheel's metadata. Raises Failed with all faults."""
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
    """Run the quickstart of README.md in an empty folder, with the installed package."""
    environment = {name: text for name, text in without_workers().items() if name != "PYTHONPATH"}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    there = {"cwd": folder, "env": environment, "timeout": SECONDS}
    version = call([python, "-c", IMPORTED], **there).strip()
    if version != metadata["Version"]:
        raise Failed(f"the package has version {version}, but its metadata {metadata['Version']}")
    told = call([python.parent / "tierstore-inspect", "--version"], **there)
    if version not in told:
        raise Failed(f"tierstore-inspect --version printed {told!r}")
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
        raise Failed("the quickstart did not create boat.png")


def run(python: Path, folder: Path) -> None:
    with step("built and checked"):
        source, wheel = build(python, folder / "dist")
        metadata = check_distributions(python, source, wheel, folder / "source")
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
