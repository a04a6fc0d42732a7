"""Calls the fake driver the way a statically linked CUDA runtime does, and prints what the preloaded library counted.

python counted_client.py FOLDER_OF_GRAPH_COUNTER FAKE_DRIVER
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

sys.path.insert(0, sys.argv[1])
from graph_counter import Counters

driver = ctypes.CDLL(sys.argv[2])
PER_THREAD_STREAMS = 2


def function(name: str, *types: Any, flags: int = 0) -> Any:
    address, status = ctypes.c_void_p(), ctypes.c_int()
    result = driver.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(address), 13000, ctypes.c_uint64(flags), ctypes.byref(status)
    )
    assert result == 0, name
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address.value)


word = ctypes.c_size_t
instantiate = function("cuGraphInstantiate", ctypes.POINTER(word), word, word)
update = function("cuGraphExecUpdate", word, word, word)
launch = function("cuGraphLaunch", word, word)
launch_per_thread = function("cuGraphLaunch", word, word, flags=PER_THREAD_STREAMS)
allocate = function("cuMemAllocManaged", ctypes.POINTER(word), word, ctypes.c_uint)
upload = function("cuMemcpyHtoDAsync", word, word, word, word)
copy = function("cuMemcpyAsync", word, word, word, word)
version = function("cuDriverGetVersion", ctypes.POINTER(ctypes.c_int))

counters = Counters.loaded()
start = counters.snapshot() if counters else {}
value = word()
results: dict[str, Any] = {}
results["instantiate"] = [instantiate(ctypes.byref(value), 40, 2), value.value]
results["update"] = [update(1, 1, 0)]
driver.fail_updates(910)
results["update"].append(update(1, 1, 0))
results["launch"] = [launch(1, 0), launch(0, 0), launch_per_thread(1, 0)]
results["allocate"] = [allocate(ctypes.byref(value), 4096, 1), value.value]
upload(0, 0, 100, 0)
upload(0, 0, 28, 0)
copy(0, 0, 7, 0)
found = ctypes.c_int()
results["version"] = [version(ctypes.byref(found)), found.value]
results["counted"] = counters.since(start) if counters else None
if counters:
    counters.profile(True)
    for _ in range(3):
        launch(1, 0)
    results["device_ms"] = counters.device_ms()
    results["wrapped"] = counters.snapshot()["functions_wrapped"]
print(json.dumps(results))
