"""Batch normalization with the statistics of all ranks."""

import zlib

import torch

from phalanx_torch.horovod._job import ProcessSet, global_process_set
from phalanx_torch.horovod._operations import Sum, allreduce


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """As ``torch.nn.BatchNorm``, over the batches of all ranks. In evaluation it is the same as that.

    Each forward pass in training is two allreduces, and so is each backward pass. Ranks may have batches of different sizes. The first allreduce also
    compares their ``eps`` and ``momentum``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: a batch has at least two dimensions, and not {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training and self.track_running_stats or self._process_set.size() == 1:
            return super().forward(input)
        dims = [0, *range(2, input.dim())]
        # Halves are too coarse for sums.
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        own = x.new_tensor([x.numel() / x.size(1), *self._settings()])
        sums = self._summed(torch.cat([x.sum(dims), own]))
        channels = x.size(1)
        count = sums[channels].detach()
        # Every rank has the same sums, and the same error.
        ranks, *bits = sums[channels + 1 :].tolist()
        if any(bit not in (0.0, ranks) for bit in bits):
            raise ValueError(
                f"SyncBatchNorm: the ranks' layers have different settings; this rank's has eps={self.eps} and momentum={self.momentum}. Give every rank "
                "the same"
            )
        if count <= 1:
            raise ValueError("SyncBatchNorm: Expected more than 1 value per channel over all ranks when training")
        mean = sums[:channels] / count
        view = [1, -1] + [1] * (x.dim() - 2)
        centered = x - mean.view(view)
        # Of the differences, for a variance that is small beside the mean.
        variance = self._summed(centered.square().sum(dims)) / count
        if self.training and self.track_running_stats:
            self._track(mean.detach(), (variance * (count / (count - 1))).detach())
        y = centered * torch.rsqrt(variance + self.eps).view(view)
        if self.affine:
            y = y * self.weight.view(view) + self.bias.view(view)
        return y.to(input.dtype)

    def _settings(self) -> list[float]:
        """1, and the bits of a hash of what ranks have alike: added up over n ranks they are n, and each is 0 or n. Such sums are exact in any type."""
        momentum = None if self.momentum is None else float(self.momentum)
        digest = zlib.crc32(repr((float(self.eps), momentum)).encode())
        return [1.0, *(float(digest >> place & 1) for place in range(32))]

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        return allreduce(tensor, op=Sum, process_set=self._process_set)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        # There is `track_running_stats`.
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
