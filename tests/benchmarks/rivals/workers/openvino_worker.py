"""OpenVINO GenAI's continuous batching.   usage: openvino_worker.py MODEL_FOLDER PRECISION KV_PRECISION SLOTS

KV_PRECISION "default": its own choice, 8 bits on a CPU.
SLOTS 0: no limit on how many run at once. (With dynamic_split_fuse, the default, the limit is not kept.)
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import openvino
import openvino_genai

CACHE_GIB = 2


def main() -> None:
    """Serve lines until standard input ends."""
    folder, precision, kv_precision, slots = *sys.argv[1:4], int(sys.argv[4])
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GIB
    scheduling.max_num_batched_tokens = 2048
    scheduling.enable_prefix_caching = False
    scheduling.dynamic_split_fuse = slots == 0
    if slots:
        scheduling.max_num_seqs = slots
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
    }
    if kv_precision != "default":
        properties["KV_CACHE_PRECISION"] = kv_precision
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduling, "CPU", properties)
    generate(pipeline, [([5, 6, 7], 4)])
    print("[]", flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(pipeline, json.loads(line))), flush=True)


def generate(
    pipeline: openvino_genai.ContinuousBatchingPipeline, requests: list[tuple[list[int], int]]
) -> list[list[float]]:
    """Do all requests; [first token, last token, tokens] of each, seconds since the start."""
    began_s = time.perf_counter()
    handles = []
    for number, (prompt, length) in enumerate(requests):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = length
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handles.append(pipeline.add_request(number, ids, config))
    timings = [[0.0, 0.0, 0.0] for _ in requests]
    open_ones = set(range(len(requests)))
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now_s = time.perf_counter() - began_s
        for number in list(open_ones):
            if handles[number].can_read():
                timing = timings[number]
                timing[0] = timing[0] or now_s
                timing[1] = now_s
                timing[2] += sum(len(output.generated_ids) for output in handles[number].read().values())
                if timing[2] >= requests[number][1]:
                    open_ones.discard(number)
    return timings


if __name__ == "__main__":
    main()
