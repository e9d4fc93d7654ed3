"""The notebook of the documentation runs, in a kernel as a reader's would, and shows what it says.

It is kept without outputs: figures and pictures of the machine on which it was saved would be taken
for those of the text, and each run would be a change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples"
NOTEBOOK = EXAMPLES / "first_steps.ipynb"
SECONDS_PER_CELL = 300


def run(notebook: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all cells, in a process of their own. Raises if one of them does."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(temporary),
    }
    kept = {"IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "runtime"}
    for name, value in (variables | {n: str(temporary / of) for n, of in kept.items()}).items():
        monkeypatch.setenv(name, value)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=SECONDS_PER_CELL, resources=resources).execute()


def outputs(notebook: Any) -> list[Any]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs]


def text_of(notebook: Any) -> str:
    streams = [output.text for output in outputs(notebook) if output.output_type == "stream"]
    return "\n".join(streams)


def shown(notebook: Any, kind: str) -> list[str]:
    """What cells show of one kind, such as `text/html`."""
    datas = [output.data for output in outputs(notebook) if "data" in output]
    return [data[kind] for data in datas if kind in data]


def test_it_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) > 15
    assert outputs(notebook) == []
    counts = [cell.get("execution_count") for cell in notebook.cells]
    assert not any(counts)


@pytest.mark.full("a run of a pipeline in a kernel")
def test_it_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    run(notebook, tmp_path, monkeypatch)
    tables = shown(notebook, "text/html")
    assert any("TierStore on cpu" in table for table in tables)
    assert any("OffloadHandle of FluxPipeline" in table for table in tables)
    assert any("Stats" in table for table in tables)
    assert len(shown(notebook, "image/png")) == 1
    text = text_of(notebook)
    assert "Each step of transformer" in text and "Error:" not in text
    assert text.count("of the weights: ") == 3
    assert "110% of the weights:     0 MB read" in text
    assert not list(tmp_path.glob("tierstore-*"))


@pytest.mark.full("a start of a kernel")
def test_a_cell_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = [
        nbformat.v4.new_code_cell("import tierstore\nassert tierstore.TierStore is None")
    ]
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        run(notebook, tmp_path, monkeypatch)
