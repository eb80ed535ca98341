"""Lets accelerate, and what is built on it, shard on CPU.

accelerate hands its FSDP plugin to accelerators alone: ranks on CPU have the distributed type MULTI_CPU, for
which it ignores the plugin without a word and trains with DDP. Its own FSDP2 code runs on CPU over gloo, so
the type is set here to the one that it has on accelerators.
"""

from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState


def use_fsdp_plugin_on_cpu() -> None:
    """Call it before anything makes an `Accelerator`."""
    as_accelerate_does = AcceleratorState.__init__

    def init(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        as_accelerate_does(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init
