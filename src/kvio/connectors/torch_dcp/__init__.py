"""Checkpoints of ``torch.distributed.checkpoint`` in a kvio store: whole, ordered, never a pickle.

```python
writer = KvioWriter(store, "run-7")
dcp.save(state_dict, storage_writer=writer)
dcp.load(state_dict, storage_reader=KvioReader(store, "run-7"))
```

A save writes its data under keys of its own, waits until they are as safe as asked, and only then
publishes a manifest; see docs/connectors/torch_dcp.md for what is promised. The manifest is JSON.
What is not a tensor comes from torch's planner as bytes that ``torch.save`` pickled: these are
stored as they come, and `KvioReader` hands them on only if torch's restricted unpickler, the one
behind ``weights_only=True``, accepts them.
"""

from __future__ import annotations

from kvio.errors import MissingDependencyError

try:
    import torch.distributed.checkpoint._state_dict_stager  # noqa: F401  # the newest thing needed
except ImportError as exc:
    raise MissingDependencyError(
        "kvio.connectors.torch_dcp needs torch, and a recent one (2.15 is tested): "
        "pip install 'kvio[torch]'"
    ) from exc

from kvio.connectors.torch_dcp.reader import KvioReader
from kvio.connectors.torch_dcp.staging import KvioStager
from kvio.connectors.torch_dcp.versions import remove_unfinished, versions
from kvio.connectors.torch_dcp.writer import KvioWriter

__all__ = ["KvioReader", "KvioStager", "KvioWriter", "remove_unfinished", "versions"]
