"""OpenVINO GenAI's engine in this process, asked for one shape a line, as `cleave bench engine --stdin` is.

usage: speed_openvino.py FILE.gguf SEQUENCES THREADS

It runs the engine's own batching pipeline, one step at a time; prompts run whole, without a prefix cache.
"""

import random
import sys
import time

from shapes import answer

STEPS = 32


def main() -> None:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = int(sys.argv[2])
    scheduler.max_num_batched_tokens = 1 << 16
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    pipe = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(sys.argv[3])})
    dice, number = random.Random(7), iter(range(1 << 30))

    def add(tokens: int, drawn: int):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.min_new_tokens = drawn, drawn
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        prompt = np.array([[dice.randrange(16, 256) for _ in range(tokens)]], dtype=np.int64)
        return pipe.add_request(next(number), ov.Tensor(prompt), config)

    def drain() -> None:
        while pipe.has_non_finished_requests():
            pipe.step()

    def prefill(tokens: int) -> float:
        handle = add(tokens, 1)
        start = time.perf_counter()
        drain()
        took = time.perf_counter() - start
        del handle
        return tokens / took

    def decode(count: int, tokens: int) -> float:
        handles = [add(tokens, STEPS + 4) for _ in range(count)]
        # The first step draws from every prompt; the next ones settle.
        for _ in range(3):
            pipe.step()
        start = time.perf_counter()
        for _ in range(STEPS):
            pipe.step()
        took = time.perf_counter() - start
        drain()
        del handles
        return count * STEPS / took

    answer(prefill, decode)


if __name__ == "__main__":
    main()
