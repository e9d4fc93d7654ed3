"""Load a checkpoint's weights into a model as maps of its files, in the same Parameter objects.

Expected values come from `from_pretrained`, `load_state_dict` or safetensors itself.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from tests.helpers.tensors import assert_same
from tierstore import TransferError
from tierstore.adapters import loading
from tierstore.adapters.loading import load_weights
from tierstore.errors import InvalidHeaderError, StaleCheckpointError
from tierstore.system.maps import AddressSpace

SEED = 7
SHARDS = "60KB"

Build = Callable[[], nn.Module]


def llama_config(**changed: Any) -> transformers.LlamaConfig:
    small = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return transformers.LlamaConfig(**{**small, **changed})


def llama(**changed: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(llama_config(**changed))


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=96,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


MODELS: dict[str, Build] = {
    "llama": llama,
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "t5": t5,
}


def on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


def emptied(build: Build) -> nn.Module:
    with accelerate.init_empty_weights():
        return build()


PLACES: dict[str, Callable[[Build], nn.Module]] = {
    "meta": on_meta,
    "init_empty_weights": emptied,
    "cpu": lambda build: build(),
}


def saved(model: nn.Module, directory: Path, shards: str = SHARDS) -> Path:
    """Save a checkpoint as transformers writes it."""
    model.save_pretrained(directory, max_shard_size=shards)
    return directory


@pytest.fixture(scope="module", params=MODELS)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model's name, the model, and its checkpoint in shards."""
    torch.manual_seed(SEED)
    model = MODELS[request.param]()
    return request.param, model, saved(model, tmp_path_factory.mktemp("known"))


class Small(nn.Module):
    """Parameters and buffers of many kinds. The last two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.randn(0, 6))
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shown: torch.Tensor = self.last(self.first(self.norm(x)) * self.scale)
        return shown


@pytest.fixture
def small(tmp_path: Path) -> tuple[Small, Path]:
    """Return a model with statistics, and its file from `safetensors.torch.save_model`."""
    torch.manual_seed(SEED)
    model = Small()
    model(torch.randn(8, 6))
    safetensors.torch.save_model(model, str(tmp_path / "small.safetensors"))
    return model.eval(), tmp_path / "small.safetensors"


# Warnings and result -----------------------------------------------------------------------------


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors themselves, under all names."""
    return dict(model.state_dict(keep_vars=True))


def tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that no checkpoint holds."""
    held = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in held}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return all state that must not change where loading fails."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    return {
        name: (
            id(t),
            type(t),
            t.device,
            t.dtype,
            t.shape,
            t.requires_grad,
            t.data_ptr(),
            "" if t.is_meta else bytes_of(t),
        )
        for name, t in tensors.items()
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_own_bytes_of_a_file(tensor: torch.Tensor) -> Path:
    """Check that the tensor maps a file, unchanged, and that its storage ends at its own end."""
    extent = AddressSpace().extent_at(tensor.data_ptr(), tensor.nbytes)
    assert extent is not None
    with open(extent.path, "rb") as file:
        file.seek(extent.offset)
        assert file.read(extent.nbytes) == bytes_of(tensor)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    return Path(extent.path)


def maps_of(path: Path) -> int:
    """Return the number of this process's maps of a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith(f" {path}") for line in lines)


# Values, objects and ties ------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_loaded_weights_are_the_file_bytes_in_the_same_objects(known: Any, place: str) -> None:
    name, original, directory = known
    model = PLACES[place](MODELS[name])
    first = next(model.parameters()).requires_grad_(False)
    before = weights(model)
    assert load_weights(model, directory, strict=True) == {}
    after = weights(model)
    assert {n: id(t) for n, t in after.items()} == {n: id(t) for n, t in before.items()}
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert [p.requires_grad for p in model.parameters() if p is not first] == [True] * (
        len(list(model.parameters())) - 1
    )
    assert not first.requires_grad
    assert_same(after, weights(type(original).from_pretrained(directory)), same_device=True)
    assert {assert_own_bytes_of_a_file(t) for t in after.values()} == set(
        directory.glob("*.safetensors")
    )


@pytest.mark.parametrize("place", PLACES)
def test_loaded_model_computes_the_same_as_from_pretrained(known: Any, place: str) -> None:
    name, original, directory = known
    expected_of = type(original).from_pretrained(directory)
    model = PLACES[place](MODELS[name]).eval()
    load_weights(model, directory, strict=True)
    tokens = torch.arange(12).view(2, 6)
    inputs = {"input_ids": tokens}
    if name == "t5":
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected_of(**inputs).logits)


def test_checkpoint_may_be_directory_index_file_or_link(tmp_path: Path) -> None:
    original = llama()
    shards = saved(original, tmp_path / "shards")
    single = saved(original, tmp_path / "single", shards="1GB")
    index = shards / "model.safetensors.index.json"
    assert len(list(shards.glob("*.safetensors"))) > 2
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in shards.iterdir():
        (linked / path.name).symlink_to(path)
    for checkpoint in (shards, str(index), single, single / "model.safetensors", linked):
        model = on_meta(llama)
        load_weights(model, checkpoint, strict=True)
        assert_same(weights(model), weights(original), same_device=True)


def test_parameter_under_two_names_stays_one(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return llama(tie_word_embeddings=True)

    directory = saved(build(), tmp_path)
    model = on_meta(build)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    load_weights(model, directory, strict=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in safetensors_names(directory)


def test_parameters_tied_by_transformers_share_memory(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return llama(tie_word_embeddings=True)

    directory = saved(build(), tmp_path)
    model = emptied(build)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert head is not embedding  # accelerate makes a new object when assigning
    load_weights(model, directory, strict=True)
    assert head.data_ptr() == embedding.data_ptr()
    assert_own_bytes_of_a_file(head)


def safetensors_names(directory: Path) -> set[str]:
    return {
        name
        for path in directory.glob("*.safetensors")
        for name in safetensors.torch.load_file(path)
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_parameters_tied_by_the_file_share_memory(
    small: tuple[Small, Path], place: str, tied: bool
) -> None:
    original, path = small
    assert len(safetensors.torch.load_file(path)) == len(original.state_dict()) - 1
    model = PLACES[place](Small).eval()
    if not tied:
        model.last.weight = nn.Parameter(torch.empty_like(model.first.weight))
    load_weights(model, path, strict=True)
    assert_same(model.state_dict(), original.state_dict(), same_device=True)
    assert model.last.weight.data_ptr() == model.first.weight.data_ptr()
    inputs = torch.randn(8, 6)
    assert torch.equal(model(inputs), original(inputs))
    with torch.no_grad():
        model.first.weight.add_(1)  # private to the process from now on, and shared by both
    assert torch.equal(model.last.weight, original.first.weight + 1)
    assert torch.equal(safetensors.torch.load_file(path)[kept_name(path)], original.first.weight)


def kept_name(path: Path) -> str:
    """Return which of the two names of the shared weight the file holds."""
    (name,) = {"first.weight", "last.weight"} & safetensors.torch.load_file(path).keys()
    return name


def test_parameters_with_gradient_or_other_layout_are_loaded(
    small: tuple[Small, Path],
) -> None:
    original, path = small
    model = Small()
    model(torch.randn(4, 6)).sum().backward()
    model.first.weight.data = model.first.weight.data.t()
    load_weights(model, path, strict=True)
    assert_same(model.state_dict(), original.state_dict(), same_device=True)


def test_module_under_two_names_is_found_under_either(tmp_path: Path) -> None:
    def build() -> nn.Module:
        linear = nn.Linear(3, 5)
        return nn.ModuleDict({"first": linear, "second": linear})

    original = build()["first"].state_dict()
    for name in ("first", "second"):
        path = tmp_path / f"{name}.safetensors"
        safetensors.torch.save_file({f"{name}.{n}": t for n, t in original.items()}, path)
        model = on_meta(build)
        load_weights(model, path, strict=True)
        assert_same(model["first"].state_dict(), original, same_device=True)


# Dtypes and shapes -------------------------------------------------------------------------------


def test_load_returns_dtypes_that_the_file_changed(tmp_path: Path) -> None:
    original = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
    safetensors.torch.save_file(original.state_dict(), tmp_path / "model.safetensors")
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4).half(), nn.BatchNorm1d(4).bfloat16()))
    before = load_weights(model, tmp_path, strict=True)
    assert before == {id(model[0].weight): torch.float16, id(model[0].bias): torch.float16}
    assert_same(model.state_dict(), original.state_dict(), same_device=True)
    for tensor in weights(model).values():
        assert_own_bytes_of_a_file(tensor)


def test_tensors_at_odd_addresses_of_a_file_are_maps(tmp_path: Path) -> None:
    values = {"flags": torch.tensor([1, 0, 1], dtype=torch.uint8), "weight": torch.randn(5, 3)}
    header = {
        "flags": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "weight": {"dtype": "F32", "shape": [5, 3], "data_offsets": [3, 63]},
    }
    text = json.dumps(header).encode()
    data = b"".join(bytes_of(value) for value in values.values())
    (tmp_path / "odd.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    model = on_meta(lambda: nn.Linear(3, 5, bias=False))
    model.register_buffer("flags", torch.empty(3, dtype=torch.uint8, device="meta"))
    load_weights(model, tmp_path / "odd.safetensors", strict=True)
    assert_same(model.state_dict(), values, same_device=True)
    assert_own_bytes_of_a_file(model.weight)
    assert model.weight.data_ptr() % 4 == (8 + len(text) + 3) % 4 != 0
    inputs = torch.randn(2, 3)
    assert torch.equal(model(inputs), nn.functional.linear(inputs, values["weight"]))


def test_buffers_missing_in_the_checkpoint_keep_their_value(
    tmp_path: Path,
) -> None:
    original = nn.BatchNorm1d(3)
    safetensors.torch.save_file(dict(original.named_parameters()), tmp_path / "a.safetensors")
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(4)
    with torch.no_grad():
        model.weight.fill_(9)
    load_weights(model, tmp_path, strict=True)
    assert torch.equal(model.running_mean, torch.full((3,), 4.0))
    assert torch.equal(model.weight, original.weight)
    empty = on_meta(lambda: nn.BatchNorm1d(3))
    before = state_of(empty)
    with pytest.raises(ValueError, match="it has no 'running_mean', 'running_var'"):
        load_weights(empty, tmp_path, strict=False)
    assert state_of(empty) == before


# Names -------------------------------------------------------------------------------------------


def test_base_checkpoint_loads_into_the_model_around_it(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return llama(tie_word_embeddings=True)

    original = build()
    directory = saved(original.model, tmp_path)
    assert "layers.0.mlp.up_proj.weight" in safetensors_names(directory)
    model = on_meta(build)
    load_weights(model, directory, strict=True)
    assert_same(weights(model), weights(original), same_device=True)


def test_base_checkpoint_without_the_head_names_it(tmp_path: Path) -> None:
    directory = saved(llama().model, tmp_path)
    model = on_meta(llama)
    before = state_of(model)
    with pytest.raises(ValueError, match=r"it has no 'lm_head.weight'\. "):
        load_weights(model, directory, strict=False)
    assert state_of(model) == before


def test_base_model_loads_from_the_larger_checkpoint(tmp_path: Path) -> None:
    original = llama()
    directory = saved(original, tmp_path)
    model = on_meta(lambda: transformers.LlamaModel(llama_config()))
    with pytest.warns(
        UserWarning, match=r"has a weight that the model lacks: 'lm_head.weight'\. It was ignored"
    ):
        load_weights(model, directory, strict=False)
    assert_same(weights(model), weights(original.model), same_device=True)
    again = on_meta(lambda: transformers.LlamaModel(llama_config()))
    before = state_of(again)
    with pytest.raises(
        ValueError, match=r"lacks: 'lm_head.weight'\. Pass strict=False to ignore it"
    ):
        load_weights(again, directory, strict=True)
    assert state_of(again) == before


def test_warning_as_error_leaves_the_model_unchanged(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {**nn.Linear(2, 2).state_dict(), **{f"more{i}": torch.ones(1) for i in range(7)}},
        tmp_path / "a.safetensors",
    )
    model = on_meta(lambda: nn.Linear(2, 2))
    before = state_of(model)
    with pytest.warns(UserWarning, match="'more0', 'more1', 'more2', 'more3', 'more4' and 2 more"):
        load_weights(on_meta(lambda: nn.Linear(2, 2)), tmp_path, strict=False)
    with warnings.catch_warnings(), pytest.raises(UserWarning):
        warnings.simplefilter("error")
        load_weights(model, tmp_path, strict=False)
    assert state_of(model) == before


# Errors leave the model unchanged ----------------------------------------------------------------


def write(path: Path, **changed: torch.Tensor | None) -> Path:
    """Write a file for `nn.Linear(3, 5)`, with changes."""
    tensors = {"weight": torch.randn(5, 3), "bias": torch.randn(5), **changed}
    safetensors.torch.save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        path / "linear.safetensors",
    )
    return path / "linear.safetensors"


MISFITS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({"bias": None}, r"linear\.safetensors does not fit this Linear: it has no 'bias'"),
    "shape": (
        {"weight": torch.randn(3, 5)},
        r"'weight' \(of shape \[5, 3\], in the file \[3, 5\]\)",
    ),
    "as many elements": ({"bias": torch.randn(5, 1)}, r"in the file \[5, 1\]"),
    "quantised": (
        {"weight": torch.ones(5, 3, dtype=torch.int8)},
        r"'weight' \(of torch.float32, in the file torch.int8: a quantised checkpoint\?\)",
    ),
    "both": ({"bias": None, "weight": torch.ones(1)}, "'weight' .*it has no 'bias'"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [*MISFITS, "nothing"])
def test_mismatch_is_named_and_changes_nothing(kind: str, place: str, tmp_path: Path) -> None:
    model = PLACES[place](lambda: nn.Linear(3, 5))
    before = state_of(model)
    if kind == "nothing":  # the control: this file fits
        load_weights(model, write(tmp_path), strict=True)
        assert state_of(model) != before
        return
    changed, message = MISFITS[kind]
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(model, write(tmp_path, **changed), strict=False)
    assert "from the checkpoint's own config" in str(caught.value)
    real = "have values in the model" in str(caught.value)
    assert real == (place == "cpu" and "bias" in changed and changed["bias"] is None)
    assert state_of(model) == before


def test_tensors_that_cannot_be_maps_raise(tmp_path: Path) -> None:
    model = nn.LazyLinear(5)
    with pytest.raises(ValueError, match="is a UninitializedParameter, which cannot show a file"):
        load_weights(model, write(tmp_path), strict=True)
    assert nn.parameter.is_lazy(model.weight)


def test_pickles_raise_and_are_never_read(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(ran),)

    pickles = tmp_path / "pickles"
    pickles.mkdir()
    for name in ("pytorch_model.bin", "model.pt", "named.safetensors"):
        (pickles / name).write_bytes(pickle.dumps(Harm()))
    model = on_meta(lambda: nn.Linear(3, 5))
    before = state_of(model)
    for name in ("pytorch_model.bin", "model.pt"):
        with pytest.raises(
            TransferError, match=r"is a torch pickle.*: convert it with safetensors"
        ):
            load_weights(model, pickles / name, strict=False)
    with pytest.raises(InvalidHeaderError):
        load_weights(model, pickles / "named.safetensors", strict=False)
    (pickles / "named.safetensors").unlink()
    (pickles / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
    for place in (pickles, pickles / "pytorch_model.bin.index.json"):
        with pytest.raises(TransferError, match="torch pickles are not supported: convert them"):
            load_weights(model, place, strict=False)
    assert state_of(model) == before
    assert not ran.exists()


@pytest.mark.parametrize("bare", (False, True), ids=("a weight_map", "a bare map"))
def test_index_of_another_name_is_accepted(bare: bool, tmp_path: Path) -> None:
    """accelerate accepts any JSON file, and a bare map."""
    source = llama()
    whole = saved(source, tmp_path / "whole")
    usual = whole / "model.safetensors.index.json"
    index = json.loads(usual.read_text())
    other = whole / "weight_map.index.json"
    other.write_text(json.dumps(index["weight_map"] if bare else index))
    usual.unlink()
    model = on_meta(llama)
    load_weights(model, other, strict=False)
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


def test_missing_or_damaged_shard_raises(tmp_path: Path) -> None:
    whole = saved(llama(), tmp_path / "whole")
    shards = sorted(path.name for path in whole.glob("*.safetensors"))
    model = on_meta(llama)
    before = state_of(model)
    for damage, error in (
        (lambda path: path.unlink(), TransferError),
        (lambda path: os.truncate(path, path.stat().st_size - 1), InvalidHeaderError),
        (lambda path: os.truncate(path, 4), InvalidHeaderError),
    ):
        damaged = tmp_path / "damaged"
        shutil.copytree(whole, damaged)
        damage(damaged / shards[1])
        with pytest.raises(error, match=shards[1]):
            load_weights(model, damaged, strict=False)
        shutil.rmtree(damaged)
        assert state_of(model) == before
    load_weights(model, whole, strict=True)


@pytest.mark.parametrize("change", ["none", "rewritten", "shortened", "removed"])
def test_file_changed_during_the_load_raises(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    real = loading.map_file

    def meanwhile(name: str, offset: int, nbytes: int) -> memoryview:
        if change == "rewritten":
            path.write_bytes(path.read_bytes())
        elif change == "shortened":
            os.truncate(path, 8)
        elif change == "removed":
            path.unlink()
        return real(name, offset, nbytes)

    monkeypatch.setattr(loading, "map_file", meanwhile)
    model = on_meta(lambda: nn.Linear(3, 5))
    before = state_of(model)
    if change == "none":
        load_weights(model, path, strict=True)
        assert not model.weight.is_meta
        return
    error = TransferError if change == "removed" else StaleCheckpointError
    with pytest.raises(error, match=str(path)):
        load_weights(model, path, strict=True)
    assert state_of(model) == before


def test_file_replaced_by_a_link_during_the_load_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = write(tmp_path), tmp_path / "other"
    real = loading.map_file

    def meanwhile(name: str, offset: int, nbytes: int) -> memoryview:
        path.rename(other)
        path.symlink_to(other)
        return real(name, offset, nbytes)

    monkeypatch.setattr(loading, "map_file", meanwhile)
    model = on_meta(lambda: nn.Linear(3, 5))
    with pytest.raises(TransferError, match="mapping"):
        load_weights(model, path, strict=True)
    assert model.weight.is_meta


@pytest.mark.parametrize("place", PLACES)
def test_interrupted_load_leaves_the_model_unchanged(
    known: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, directory = known
    model = PLACES[place](MODELS[name])
    before = state_of(model)
    real, calls = loading.assign, iter(range(1000))

    def interrupted(tensor: torch.Tensor, value: torch.Tensor) -> None:
        real(tensor, value)
        if next(calls) == 9:
            assert state_of(model) != before
            raise KeyboardInterrupt

    monkeypatch.setattr(loading, "assign", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_weights(model, directory, strict=True)
    assert state_of(model) == before
    load_weights(model, directory, strict=True)
    assert state_of(model) != before


def test_weak_reference_to_a_meta_weight_stays_one_to_the_weight(tmp_path: Path) -> None:
    path = write(tmp_path)
    model = on_meta(lambda: nn.Linear(3, 5))
    held = weakref.ref(model.bias)
    load_weights(model, path, strict=True)
    assert held() is model.bias
    assert not model.bias.is_meta


def test_load_of_a_meta_weight_saved_by_a_computation_raises(tmp_path: Path) -> None:
    path = write(tmp_path)
    model = on_meta(lambda: nn.Linear(3, 5))
    result = model.weight * model.weight
    before = state_of(model)
    with pytest.raises(RuntimeError, match=r"'weight' cannot be loaded.*saved it"):
        load_weights(model, path, strict=True)
    assert state_of(model) == before
    del result
    load_weights(model, path, strict=True)
    assert not model.weight.is_meta


# Buffers that no checkpoint holds ----------------------------------------------------------------

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SMALL_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
WITH_TABLES: dict[str, Build] = {
    "llama": llama,
    "llama in bf16": lambda: llama().bfloat16(),
    "llama 3": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "llama yarn": lambda: llama(
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{n: v for n, v in SMALL_TEXT.items() if n != "head_dim"})
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SMALL_TEXT, sliding_window=16)
    ),
    "clip": lambda: transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    ),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "in another module"])
@pytest.mark.parametrize("kind", WITH_TABLES)
def test_tables_of_transformers_models_equal_the_cpu(
    kind: str, wrapped: bool, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        model = WITH_TABLES[kind]()
        return nn.ModuleDict({"inner": model}) if wrapped else model

    original = build()
    assert tables(original)
    safetensors.torch.save_model(original, str(tmp_path / "model.safetensors"))
    model = on_meta(build)
    objects = {name: id(buffer) for name, buffer in tables(model).items()}
    assert all(buffer.is_meta for buffer in tables(model).values())
    load_weights(model, tmp_path, strict=True)
    assert {name: id(buffer) for name, buffer in tables(model).items()} == objects
    assert_same(tables(model), tables(original), same_device=True)
    assert_same(weights(model), weights(original), same_device=True)


class Careless(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A transformers model whose code for one table writes to all other tensors."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.zeros(3))
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Careless) and "table" in module._buffers:
            with torch.no_grad():
                for tensor in (module.kept, module.gain, module.lm_head.weight, module.table):
                    tensor.fill_(1)


@pytest.mark.parametrize("fits", [True, False])
def test_computing_tables_leaves_other_tensors_unchanged(fits: bool, tmp_path: Path) -> None:
    model = Careless(llama_config())
    model.table = torch.empty(4, device="meta")
    assert model.kept.sum() == 0
    before = state_of(model)
    tensors = dict(model.named_parameters())  # tensors missing in the checkpoint are kept
    if not fits:
        tensors.pop("gain")
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    if not fits:
        with pytest.raises(ValueError, match="it has no 'gain'"):
            load_weights(model, tmp_path, strict=True)
        assert state_of(model) == before
        return
    (value,) = loading.recompute_buffers(model)
    assert value.name == "table" and torch.equal(value.shown, torch.ones(4))
    assert state_of(model) == before
    load_weights(model, tmp_path, strict=True)
    assert torch.equal(model.table, torch.ones(4))
    assert torch.equal(model.kept, torch.zeros(3))


class WithTable(nn.Module):
    """A buffer that is computed when the model is built, and nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4), persistent=False)


class Forgetful(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A transformers model that computes one of its tables in part."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("partly", torch.zeros(4), persistent=False)
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module.__class__ is Forgetful:
            module.partly[:2] = 1.0
            module.mask[:] = True


class Failing(Forgetful):
    def _init_weights(self, module: nn.Module) -> None:
        if "mask" in self._buffers:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (WithTable, "'table': these buffers are on meta"),
        (lambda: Forgetful(llama_config()), "'partly': these buffers are on meta"),
        (lambda: Failing(llama_config()), "'partly', 'mask': these buffers are on meta"),
    ],
    ids=["unknown", "in part", "failing"],
)
def test_tables_that_cannot_be_computed_are_named(build: Build, names: str, tmp_path: Path) -> None:
    original = build()
    safetensors.torch.save_model(original, str(tmp_path / "model.safetensors"))
    model = on_meta(build)
    before = state_of(model)
    with pytest.raises(ValueError, match=rf"{names}.*accelerate\.init_empty_weights\(\)"):
        load_weights(model, tmp_path, strict=True)
    assert state_of(model) == before
    model = emptied(build)  # the advice helps
    load_weights(model, tmp_path, strict=True)
    assert_same(tables(model), tables(original), same_device=True)


# During forwards and on a disabled model ---------------------------------------------------------


def test_load_in_inference_mode_makes_ordinary_weights(
    small: tuple[Small, Path],
) -> None:
    original, path = small
    model = on_meta(Small)
    with torch.inference_mode(), torch.device("meta"):
        load_weights(model, path, strict=True)
    assert_same(model.state_dict(), original.state_dict(), same_device=True)
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())
    model.train()(torch.randn(4, 6)).sum().backward()
    assert model.first.weight.grad is not None


def test_tables_are_computed_on_the_cpu(tmp_path: Path) -> None:
    original = llama()
    directory = saved(original, tmp_path)
    with torch.device("meta"):
        model = llama()
        load_weights(model, directory, strict=True)
    assert_same(tables(model), tables(original), same_device=True)


def test_small_tensors_share_a_map_and_large_ones_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 4) for _ in range(50)] + [nn.Linear(64, 256)])

    path = tmp_path / "list.safetensors"
    safetensors.torch.save_file(build().state_dict(), path)
    model = on_meta(build)
    load_weights(model, path, strict=True)
    assert maps_of(path) == 1
    del model
    assert maps_of(path) == 0
    monkeypatch.setattr(loading, "SHARED_MAP_BYTES", 16 << 10)
    model = on_meta(build)
    load_weights(model, path, strict=True)
    before = maps_of(path)
    assert before > 1
    model[50].weight = None
    assert maps_of(path) == before - 1
    assert_own_bytes_of_a_file(model[49].weight)
