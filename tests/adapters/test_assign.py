"""A parameter can view other memory and stay the same object, even where `.data =` raises."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator import ACCELERATOR, needs_accelerator
from tierstore.adapters.codecs.plain import assign

pytestmark = needs_accelerator


class Stubborn(torch.nn.Parameter):
    """A parameter of a backend that does not let `.data` cross devices."""

    @property
    def data(self) -> torch.Tensor:
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise RuntimeError("Attempted to call `variable.set_data(tensor)`, but the types differ")


@pytest.mark.parametrize("kind", [torch.nn.Parameter, Stubborn])
def test_assign_and_back_keeps_the_parameter(kind: type[torch.nn.Parameter]) -> None:
    parameter = kind(torch.arange(3.0))
    parameter.note = "kept"
    identity, original = id(parameter), parameter.detach()

    assign(parameter, torch.full((3,), 7.0, device=ACCELERATOR))
    assert parameter.device.type == ACCELERATOR
    assert parameter.tolist() == [7.0, 7.0, 7.0]

    assign(parameter, original)
    assert parameter.device.type == "cpu"
    assert parameter.data_ptr() == original.data_ptr()
    assert (id(parameter), type(parameter), parameter.note) == (identity, kind, "kept")
    assert parameter.requires_grad


def test_stubborn_parameter_rejects_data() -> None:
    with pytest.raises(RuntimeError, match="set_data"):
        Stubborn(torch.zeros(1)).data = torch.zeros(1)
