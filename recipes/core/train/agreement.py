"""How all ranks agree on what only some of them know (a signal, the clock of rank 0): by one sum
over the ranks after each step.

Other saves follow from the step, and are the same on all ranks. Before the first step,
`World.together` passes a stop on to all ranks.
"""

import torch
import torch.distributed
from torch import Tensor

from recipes.core.errors import shown
from recipes.core.run import signals, watchdog
from recipes.core.train.host_copy import HostCopy
from recipes.core.train.world import World

STOP = "stop"  # key in the store: why the first rank that was notified stops


class Agreement:
    """One sum over all ranks: the losses, how many ranks were notified to stop, and rank 0's
    requests (a save; the steps to the next sum).

    Creating it is a collective. The sum is asynchronous until `read`, so that a step loop can
    prepare its next step meanwhile.
    """

    def __init__(
        self,
        world: World,
        stop: signals.StopFlag,
        losses: list[Tensor] | None = None,
        save: bool = False,
        every: float = 1.0,
    ) -> None:
        self._world = world
        reason = stop.reason  # read once: a signal may arrive at any time
        if reason:
            # before the sum, so that every rank finds the reason after it
            world.store.compare_set(STOP, "", reason)
        flags = torch.tensor([bool(reason), save, every * (world.rank == 0)], dtype=torch.float64)
        scalars = [torch.stack(losses).double().to(world.device)] if losses else []
        self._sums = torch.cat([*scalars, flags.to(world.device, non_blocking=True)])
        self._work = None
        if world.size > 1:
            self._work = torch.distributed.all_reduce(self._sums, async_op=True)
        self._copy = HostCopy() if self._sums.is_cuda else None
        if self._copy:
            # The copy is queued after the sum, with an event to wait for. Reading the tensor would
            # wait for all queued work, and the GPU would be idle while the host prepares the next
            # step.
            if self._work:
                self._work.wait()
            self._sums = self._copy.take(self._sums)

    def read(self) -> tuple[list[float], str, bool, float]:
        """Waits for the sum. The same on all ranks: the losses, why all stop ("" if none must),
        whether to save, rank 0's ``every``.
        """
        self._world.pulse.beat(watchdog.WAITING)
        if self._copy:
            self._copy.wait()
        elif self._work:
            self._work.wait()
        *losses, stop, save, every = self._sums.tolist()
        reason = shown(self._world.store.get(STOP).decode(errors="replace")) if stop else ""
        self._world.pulse.beat(watchdog.SAVING)
        return losses, reason, save > 0, every
