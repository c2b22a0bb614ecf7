"""What makes the backend known to PyTorch: cheap, for ``import torch`` calls it where the package is installed.

The group itself, and the native library, are imported when the first group is made.
"""

import os


def register():
    """Registers the backend ``phalanx``, and with ``PHALANX_AS_GLOO=1`` takes gloo's place, with ``PHALANX_AS_HOROVOD=1`` Horovod's."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    if "PHALANX" not in dist.Backend._plugins:
        dist.Backend.register_backend("phalanx", _create, extended_api=True, devices=["cpu"])
        # PyTorch's flight recorder looks into groups written in C++; ours are recorded by PHALANX_TRACE.
        getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("phalanx")
    if _is_wanted("PHALANX_AS_GLOO", "gloo"):
        from phalanx_torch._gloo import as_gloo

        as_gloo()
    if _is_wanted("PHALANX_AS_HOROVOD", "Horovod"):
        from phalanx_torch._horovod import install_later

        install_later()


def _is_wanted(variable, name):
    wanted = os.environ.get(variable, "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"{variable} is {wanted!r}; give 1 to be taken for {name}, or 0")
    return wanted == "1"


def _create(options, backend_options):
    from phalanx_torch import process_group

    return process_group.create(options, backend_options)
