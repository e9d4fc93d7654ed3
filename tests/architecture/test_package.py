"""The checks of published files find each fault; tools/package.py runs them in the full lane."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tools import package

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCE = PROJECT["project"]["urls"]["Source"]


def links(text: str) -> str:
    """Return the links of README.md as HTML, with the substitutions that a build makes."""
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for each in hook["substitutions"]:
        replacement = each["replacement"].replace("$HFPR_VERSION", "1.2.3")
        text = re.sub(each["pattern"], replacement, text)
    found = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    return "\n".join(f'<img src="{to}">' if mark else f'<a href="{to}">' for mark, to in found)


def test_readme_links_work_on_a_package_index() -> None:
    html = links((ROOT / "README.md").read_text(encoding="utf-8"))
    assert f'<img src="{SOURCE}/raw/v1.2.3/docs/three-tiers.svg">' in html
    assert f'<a href="{SOURCE}/blob/v1.2.3/docs/why.md">' in html
    assert package.description_faults(html, SOURCE, "1.2.3", ROOT) == []


@pytest.mark.parametrize(
    "link",
    [
        "docs/why.md",
        f"{SOURCE}/blob/v1.2.3/docs/nowhere.md",
        f"{SOURCE}/blob/v1.2.3/docs/why.md#no-such-heading",
        f"{SOURCE}/blob/v1.2.2/docs/why.md",
    ],
)
def test_dead_link_is_reported(link: str) -> None:
    assert len(package.description_faults(f'<a href="{link}">', SOURCE, "1.2.3", ROOT)) == 1


def test_distribution_has_its_files_and_no_generated_ones() -> None:
    made = ["tests/__pycache__/a.pyc", "tierstore/a.so", ".venv/bin/python", "build/a", ".coverage"]
    whole = [*package.EXPECTED, "tests/durations.json", ".gitignore", ".github/SECURITY.md"]
    assert package.source_faults(whole) == []
    lacks = f"the source distribution lacks {whole[0]}"
    more = {f"must not be published: {name}" for name in made}
    assert set(package.source_faults([*whole[1:], *made])) == {lacks, *more}

    sources = ["tierstore/__init__.py", "tierstore/py.typed", "tests/conftest.py"]
    wheel = [*sources[:2], "tierstore-0.1.0.dist-info/METADATA"]
    assert package.wheel_faults(wheel, sources) == []
    assert package.wheel_faults([*wheel[1:], "tests/conftest.py"], sources) == [
        "the wheel lacks tierstore/__init__.py",
        "must not be published: tests/conftest.py",
    ]


def test_dependencies_are_imported_and_extras_are_in_guides() -> None:
    def text(*places: str) -> str:
        files = [file for place in places for file in sorted(ROOT.glob(place))]
        return "\n".join(file.read_text(encoding="utf-8") for file in files)

    imports, guides = text("tierstore/**/*.py"), text("README.md", "docs/guides/*.md")
    for dependency in PROJECT["project"]["dependencies"]:
        name = re.split(r"[^\w-]", dependency)[0]
        assert re.search(rf"^ *(import|from) {name}\b", imports, re.MULTILINE), dependency
    for extra in PROJECT["project"]["optional-dependencies"].keys() - {"docs", "test"}:
        assert f"tierstore[{extra}]" in guides, f"no guide names the extra {extra}"
