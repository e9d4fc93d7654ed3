"""Training models that do not fit: parameters, gradients and optimizer state in a store.

    model = OffloadModel(module, store)
    optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, lr=1e-4)
    for x, y in data:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

The idea of going through a model slice by slice, with the optimizer on the CPU, is that of
FairScale's `OffloadModel` (after Pudipeddi et al., "Training Large Neural Networks with Constant
Memory using a New Execution Algorithm", 2020). Everything here is exact: losses, parameters and
the state of the optimizer are those of ordinary training, to the last bit.
"""

from tierstore.adapters.training.model import OffloadModel
from tierstore.adapters.training.optimizer import OffloadOptimizer

__all__ = ["OffloadModel", "OffloadOptimizer"]
