"""The tutorial's program with its tensors in a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.devices import driver_or_skip
from tests.support.documented_commands import blocks_of
from tests.support.nodes.fleet import Fleet
from tests.support.tutorial_program import PAGE, run

MAKES_CACHE = """\
        memory = SealedMemory.create(math.prod(shape) * 2)  # 2 bytes an element
        self.cache = memory.torch().view(torch.bfloat16).view(shape)
"""


@pytest.mark.gpu
def test_the_tensor_tutorial_on_a_gpu(fleet: Fleet, tmp_path: Path) -> None:
    """With the memory that the page shows for a GPU, and with torch's default allocator."""
    uuid = driver_or_skip("cuda").devices()[0].uuid
    (program,) = blocks_of(PAGE, "python")
    assert MAKES_CACHE in program
    daemon = fleet.shared("node")
    imports = "from kvxferd import client, resident\nfrom kvxferd.memory.device_pool import DevicePool\n"
    program = program.replace("from kvxferd import client\n", imports).replace(
        "client.connect(socket).register(", "resident.register(client.connect(socket), "
    )
    program = program.replace("ref = prefill", "torch.cuda.synchronize()\nref = prefill")
    tensor = 'self.cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")'
    pooled = (
        f'self.pool = DevicePool("{uuid}")\n        with torch.cuda.use_mem_pool(self.pool.torch_pool()):\n'
    )
    for made in (f"        {pooled}            {tensor}\n", f"        {tensor}\n"):
        printed = run(program.replace(MAKES_CACHE, made), daemon.worker_socket, tmp_path)
        assert "the caches are equal: True" in printed
