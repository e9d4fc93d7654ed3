"""Train models that exceed memory: parameters, gradients and optimizer state live in a store.

    model = OffloadModel(module, store)
    optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, lr=1e-4)
    for x, y in data:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

Streaming a model slice by slice with the optimizer on the CPU follows FairScale's `OffloadModel`,
after Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a New Execution
Algorithm", 2020. Results are bit-identical to ordinary training: losses, parameters and optimizer
state.
"""

from tierstore.adapters.training.model import OffloadModel
from tierstore.adapters.training.optimizer import OffloadOptimizer

__all__ = ["OffloadModel", "OffloadOptimizer"]
