"""One of the processes of test_workspace_exchange.py: the store of `jax.distributed` itself."""

import sys
import time

import jax

address, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, num_processes=2, process_id=process)

from jax._src import distributed  # noqa: E402
from test_workspace_exchange import Blocks  # noqa: E402

from jax_megamoe import _exchange, _workspace  # noqa: E402

client = distributed.global_state.client
me = _exchange.Process(_workspace._host(), (f"gpu{process}",))
processes = _exchange.find_processes(client, process, me, 2, 30.0)
assert processes[0].host == processes[1].host
assert [p.gpus for p in processes] == [("gpu0",), ("gpu1",)]

for name in ("one", "two"):
    blocks = Blocks(f"{name} {process}")
    _exchange.share(blocks, client, processes, process, name, 30.0)
    assert blocks.state == "kept" and list(blocks.opened.values()) == [f"{name} 0", f"{name} 1"]

# Process 1 comes after process 0 has given up, and then both try again.
if process == 0:
    try:
        _exchange.share(Blocks("early"), client, processes, 0, "late", 0.5)
    except TimeoutError as error:
        assert "process 0 waited 0.5 s" in str(error), error
        client.key_value_set("gave_up", "")
else:
    client.blocking_key_value_get("gave_up", 30_000)
    time.sleep(0.5)
blocks = Blocks(f"late {process}")
_exchange.share(blocks, client, processes, process, "late", 30.0)
assert list(blocks.opened.values()) == ["late 0", "late 1"]
print("passed")
