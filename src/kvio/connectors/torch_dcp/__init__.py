"""Save checkpoints of ``torch.distributed.checkpoint`` in a kvio store.

```python
writer = KvioWriter(store, "run-7")
dcp.save(state_dict, storage_writer=writer)
dcp.load(state_dict, storage_reader=KvioReader(store, "run-7"))
```

A save writes its data under new keys, waits until they have the requested level, and then publishes
a manifest in JSON; docs/connectors/torch_dcp.md lists the promises. Items that are not tensors
arrive from torch's planner as bytes pickled by ``torch.save``. They are stored unchanged, and
`KvioReader` returns them only if torch's restricted unpickler (``weights_only=True``) accepts them.
"""

from __future__ import annotations

from kvio.errors import MissingDependencyError

try:
    import torch.distributed.checkpoint._state_dict_stager  # noqa: F401  # the newest import
except ImportError as exc:
    raise MissingDependencyError(
        "kvio.connectors.torch_dcp needs torch, and a recent one (2.15 is tested): "
        "pip install 'kvio[torch]'"
    ) from exc

from kvio.connectors.torch_dcp.reader import KvioReader
from kvio.connectors.torch_dcp.safetensors import KvioSafetensorsWriter
from kvio.connectors.torch_dcp.staging import KvioStager
from kvio.connectors.torch_dcp.versions import remove_unfinished, versions
from kvio.connectors.torch_dcp.writer import KvioWriter

__all__ = [
    "KvioReader",
    "KvioSafetensorsWriter",
    "KvioStager",
    "KvioWriter",
    "remove_unfinished",
    "versions",
]
