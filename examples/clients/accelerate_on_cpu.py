"""Enable sharding on CPU in accelerate and libraries built on it.

accelerate uses its FSDP plugin only on accelerators: CPU ranks have the distributed type MULTI_CPU, for which
it silently ignores the plugin and trains with DDP. Its FSDP2 code does run on CPU over gloo, so this module
sets the type to the one used on accelerators.
"""

from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState


def use_fsdp_plugin_on_cpu() -> None:
    """Set the distributed type; call this before anything makes an `Accelerator`."""
    as_accelerate_does = AcceleratorState.__init__

    def init(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        as_accelerate_does(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init
