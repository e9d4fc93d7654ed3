"""The notebook of the documentation runs in a reader's kernel, and shows the promised results.

It is kept without outputs: figures and pictures of the machine on which it was saved would be taken
for those of the text, and each run would be a change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples"


def test_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.full("runs a pipeline in a kernel")
def test_notebook_runs_and_shows_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that raises ends the run with an error."""
    for name, text in {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, text)
    for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    tables = "\n".join(str(output.get("data", {}).get("text/html", "")) for output in outputs)
    text = "\n".join(output.get("text", "") for output in outputs)
    assert all(each in tables for each in ("TierStore on cpu", "OffloadHandle of FluxPipeline"))
    assert shown.count("image/png") == 1
    assert "Each step of transformer" in text and "Error:" not in text
    assert "110% of the weights:     0 MB read" in text
    assert not list(tmp_path.glob("tierstore-*"))
