"""transformers' Trainer with an OffloadModel: it asks a model for the names of its arguments."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from tests.store.helpers import open_store
from tierstore import OffloadModel

ROWS = 8


def tiny() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, with a column that no model accepts."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens, "number": torch.tensor(number)}


def trained(model: nn.Module, folder: Path) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Return the losses of the steps, the evaluation's loss, and the saved weights."""
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "saved"))
    return losses, evaluated, load_file(folder / "saved" / "model.safetensors")


@pytest.mark.full("trains twice with another library")
def test_trainer_trains_it_like_the_model_itself(tmp_path: Path, disk_dir: Path) -> None:
    expected = trained(tiny(), tmp_path / "plain")
    module = tiny()
    weights = sum(parameter.nbytes for parameter in module.parameters())
    with open_store(disk_dir, weights) as store:
        model = OffloadModel(module, store)
        losses, evaluated, saved = trained(model, tmp_path / "offloaded")
        assert (losses, evaluated) == expected[:2]
        assert len(set(losses)) == 4
        assert saved.keys() == expected[2].keys()
        for name, value in expected[2].items():
            assert torch.equal(saved[name], value), name
        assert store.stats().bytes_read > 0
        assert model.disable() is module


def test_forward_signature_is_the_modules(disk_dir: Path) -> None:
    class Adding(nn.Linear):
        def forward(self, x: torch.Tensor, *, more: float = 0.0) -> torch.Tensor:
            return super().forward(x) + more

    with open_store(disk_dir) as store:
        model = OffloadModel(Adding(8, 8), store)
        assert isinstance(model, OffloadModel) and type(model).__name__ == "OffloadModel"
        assert list(inspect.signature(model.forward).parameters) == ["x", "more"]
        assert torch.equal(model(torch.ones(2, 8), more=1.0), model(torch.ones(2, 8)) + 1.0)
        assert list(inspect.signature(OffloadModel.forward).parameters)[-1] == "kwargs"
