"""What engines' workers get mixed in, so that a call by name reaches the plugin's counters in their processes."""

from typing import Any


class Counters:
    """``worker_extension_cls`` of an engine; a call by name needs no pickled function."""

    def epilora_calls(self) -> dict[str, Any] | None:
        """The plugin's counters in this worker, None where there is no plugin."""
        try:
            from torch_epilora.integrations.vllm import calls
        except ImportError:
            return None
        return calls()
