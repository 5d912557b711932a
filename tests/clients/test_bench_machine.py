from __future__ import annotations

import os

from headrace.clients.bench_machine import this_machine


def test_a_machine_has_a_processor_cores_memory_and_versions() -> None:
    machine = this_machine()
    assert machine.processor
    assert 1 <= machine.num_usable_cores <= machine.num_cores
    assert machine.num_usable_cores == len(os.sched_getaffinity(0))
    assert machine.memory_gib > 0
    assert machine.headrace
    assert machine.grpc
