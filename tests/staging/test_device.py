"""Staging memory on torch devices: one code path for the CPU, a device of Python, and CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvio import ConfigError, KiB, UnsupportedError
from kvio.staging import StagingTier
from kvio.staging.device import DeviceMemory
from kvio.staging.engine import LocalEngine
from kvio.staging.memory import flat_parts, open_memory
from kvio.staging.options import TierOptions

from .controlled import LONG_S, open_controlled
from .device_promises import CAPACITY, NBYTES, SPANS, DevicePromises, noise
from .hung import Hung

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.torch

CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


def host_tensor(data: bytes, dtype: str) -> Any:
    """Make a tensor on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))


class TestCpu(DevicePromises):
    where = "cpu"

    def tensor_of(self, data: bytes, dtype: str = "uint8") -> Any:
        return host_tensor(data, dtype)

    def overwrite(self, tensor: Any) -> None:
        tensor.fill_(0xFF)

    # On the CPU a tensor is host memory, so that its bytes are summed at once.
    def test_bytes_come_back_as_they_went_in(self, memory: Any) -> None:
        data = noise(NBYTES)
        filled = memory.fill(SPANS, flat_parts(self.mixed(data)), checksum=True)
        assert filled == memory.fill(SPANS, [memoryview(data)], checksum=True)
        with memory.lend(SPANS) as lent:
            assert b"".join(lent) == data

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("keys", "nbytes"), [("k", 32 * KiB), ("kl", 200)], ids=["a block", "small ones"]
    )
    def test_a_drain_that_hangs_sees_its_own_bytes(
        self, memory: DeviceMemory, keys: str, nbytes: int
    ) -> None:
        """Given up, with a ring no longer than a block: others go past it all the same."""
        data = {key: noise(nbytes, seed) for seed, key in enumerate(keys)}
        options = TierOptions(drain_threads=1, timeout=1.0, retries=9)
        with open_controlled() as store, Hung(store, *data) as hung:
            tier = StagingTier(store, LocalEngine(store, memory, options), options)
            tier.pause()
            first = [tier.write_block(key, data[key]) for key in data]
            tier.resume()
            for receipt in first:
                receipt.wait(timeout=LONG_S)
            for n in range(4):
                tier.write_block(f"other-{n}", noise(nbytes, 9 + n)).wait(timeout=LONG_S)

            assert store.stats().quarantined_threads >= 1
            assert hung.parts.keys() & data.keys()
            assert all(hung.sees(key) == data[key] for key in hung.parts)
            hung.let_go()
            tier.close(timeout=LONG_S)


@gpu[0]
@gpu[1]
class TestCuda(DevicePromises):
    where = "cuda"

    def tensor_of(self, data: bytes, dtype: str = "uint8") -> Any:
        return host_tensor(data, dtype).cuda()

    def overwrite(self, tensor: Any) -> None:
        tensor.fill_(0xFF)

    def test_the_ring_is_pinned(self) -> None:
        """Copies to the host go at full speed, beside the work of the device."""
        memory = open_memory("cuda", CAPACITY)
        with memory.lend(SPANS) as (lent, *_):
            assert torch.frombuffer(lent, dtype=torch.uint8).is_pinned()

    def test_pinned_memory_is_pinned_and_given_back(self) -> None:
        """Pinned staging memory is known to CUDA from its first byte to its last."""
        memory = open_memory("pinned", CAPACITY)
        memory.fill(SPANS, flat_parts(self.mixed(noise(NBYTES))), checksum=True)
        for view in memory.views(SPANS):
            assert torch.frombuffer(view, dtype=torch.uint8).is_pinned()
        assert b"".join(memory.views(SPANS)) == noise(NBYTES)

        memory.close()

        again = open_memory("pinned", CAPACITY)
        again.close()


def test_the_promises_hold_on_a_device_out_of_reach() -> None:
    """Every promise is kept on a device whose bytes no host code reaches and that is late."""
    script = Path(__file__).with_name("on_kvdev.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)],
        cwd=script.parents[2],
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.skipif(CUDA, reason="needs a machine without CUDA")
@pytest.mark.parametrize("where", ["cuda", "cuda:0", "pinned"])
def test_cuda_is_refused_where_there_is_none(where: str) -> None:
    """Without a driver no call of CUDA is made, and the reason is given in a sentence."""
    with pytest.raises(UnsupportedError, match="torch sees no"):
        open_memory(where, CAPACITY)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("where", ["", "gpu", "cuda:x"])
def test_no_such_device_name(where: str) -> None:
    """A name that torch does not know is an error of configuration."""
    with pytest.raises(ConfigError, match="staging memory"):
        open_memory(where, CAPACITY)


def test_a_device_without_memory_of_its_own_is_refused() -> None:
    """The meta device has no bytes to stage."""
    with pytest.raises(UnsupportedError, match="meta"):
        open_memory("meta", CAPACITY)


def test_torch_is_not_imported_for_host_memory() -> None:
    """Who stages in host memory does not pay for torch, installed or not."""
    code = (
        "import sys; from kvio.staging.memory import open_memory;"
        "open_memory('host', 4096); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
