"""Bugs in the step loop, the checkpoints' content and the recipes' arithmetic."""

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "recipes/core/train.py",
        "return loss / self._global_size, stop > 0, save > 0",
        "return loss, stop > 0, save > 0",
        "the logged loss is the sum over the batch, not its mean",
        "tests/distributed/test_fit.py",
    ),
]
