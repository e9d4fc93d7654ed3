"""What is looked for in what is published is found; tools/package.py looks in the full lane."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from tools import package

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCE = PROJECT["project"]["urls"]["Source"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def as_published(text: str, version: str = "1.2.3") -> str:
    """README.md with the substitutions of pyproject.toml, as a build makes them."""
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for each in hook["substitutions"]:
        replacement = each["replacement"].replace("$HFPR_VERSION", version)
        text = re.sub(each["pattern"], replacement, text)
    return text


def links(text: str) -> str:
    """The links of a Markdown text as HTML, which is all that is looked at."""
    found = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    return "\n".join(f'<img src="{to}">' if mark else f'<a href="{to}">' for mark, to in found)


def test_every_link_of_the_readme_leads_somewhere_on_a_package_index() -> None:
    html = links(as_published(README))
    assert html.count("<") > 30
    assert f'<img src="{SOURCE}/raw/v1.2.3/docs/three-tiers.svg">' in html
    assert f'<a href="{SOURCE}/blob/v1.2.3/docs/why.md">' in html
    assert package.description_faults(html, SOURCE, "1.2.3", ROOT) == []


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("docs/why.md", "leads nowhere on a package index"),
        (f"{SOURCE}/blob/v1.2.3/docs/nowhere.md", "leads nowhere: "),
        (f"{SOURCE}/blob/v1.2.3/docs/why.md#no-such-heading", "leads nowhere: "),
        (f"{SOURCE}/blob/v1.2.2/docs/why.md", "is no file of this version"),
        (f"{SOURCE}/blob/main/docs/why.md", "is no file of this version"),
    ],
)
def test_a_link_that_leads_nowhere_is_noticed(link: str, fault: str) -> None:
    (found,) = package.description_faults(f'<a href="{link}">', SOURCE, "1.2.3", ROOT)
    assert fault in found


def test_links_that_lead_elsewhere_or_to_the_page_itself_are_left_alone() -> None:
    text = "[a](https://elsewhere.example/x) [b](#quickstart) ![c](http://a.example/b.png)"
    assert as_published(text) == text
    assert package.description_faults(links(text), SOURCE, "1.2.3", ROOT) == []


def test_the_files_of_a_source_distribution() -> None:
    whole = [*package.EXPECTED, "tests/durations.json", ".gitignore", ".github/SECURITY.md"]
    assert package.source_faults(whole) == []
    assert package.source_faults(whole[1:]) == [f"the source distribution lacks {whole[0]}"]
    for name in (
        "tests/__pycache__/a.cpython-311.pyc",
        "tests/a.pyc",
        "tierstore/a.so",
        ".venv/bin/python",
        "docs/.cache/a",
        "build/site/index.html",
        ".coverage",
    ):
        assert package.source_faults([*whole, name]) == [f"nothing to publish: {name}"]


def test_the_files_of_a_wheel() -> None:
    sources = ["tierstore/__init__.py", "tierstore/py.typed", "tests/conftest.py"]
    whole = [*sources[:2], "tierstore-0.1.0.dist-info/METADATA"]
    assert package.wheel_faults(whole, sources) == []
    assert package.wheel_faults(whole[1:], sources) == ["the wheel lacks tierstore/__init__.py"]
    more = [*whole, "tests/conftest.py"]
    assert package.wheel_faults(more, sources) == ["nothing to publish: tests/conftest.py"]


def test_the_quickstart_has_what_is_run_of_it() -> None:
    assert [code.count("tierstore-inspect") for code in package.code_blocks(README, "sh")] == [
        0,
        3,
        0,
        0,
    ]
    first, second = package.code_blocks(README, "python")
    assert '"path/to/pipeline"' in first
    assert "/nvme/" in first
    assert "boat.png" in first
    assert "dispatch_model" in second


def test_a_command_that_fails_tells_what_it_printed(tmp_path: Path) -> None:
    assert package.call(["echo", "all is well"], cwd=tmp_path) == "all is well\n"
    with pytest.raises(package.Failed, match="status 3:\nno"):
        package.call(["bash", "-c", "echo no >&2; exit 3"])


@pytest.mark.full("asks pip for a package")
def test_a_failure_is_one_of_ours_only_if_packages_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel that cannot be installed fails; a machine without a network tells nothing of it."""
    python = Path(sys.executable)
    if package.reaches_packages(python):
        with pytest.raises(package.Failed, match="no such version"), package.fetching(python):
            raise RuntimeError("no such version")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match="no such version"), package.fetching(python):
        raise package.Failed("no such version")


def test_each_extra_is_there_for_something() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = "\n".join(
        path.read_text(encoding="utf-8")
        for path in [ROOT / "README.md", *(ROOT / "docs" / "guides").glob("*.md")]
    )
    for extra in set(extras) - {"docs", "test"}:
        assert f"tierstore[{extra}]" in named, f"no guide names the extra {extra}"


def test_each_dependency_is_imported() -> None:
    imports = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tierstore").rglob("*.py")
    )
    for dependency in PROJECT["project"]["dependencies"]:
        name = re.match(r"[\w-]+", dependency)[0]  # type: ignore[index]
        assert re.search(rf"^ *(import|from) {name}\b", imports, re.MULTILINE), dependency
