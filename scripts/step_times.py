"""Measure the time of a step through the whole engine, on the clock and of the processor.

``python -m scripts.step_times --batch 16 --tokens 400`` answers as many equal prompts greedily,
once to warm up and once timed, and prints milliseconds for each of the tokens. Two trees are
compared by running it in each of them in turn.
"""

import argparse
import time

from nanoserve.utils.threads import prepare_threads

prepare_threads()

from nanoserve import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as of nanoserve; the bundled one if it is left out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    llm = LLM(options.model, dtype=options.dtype, quantization=options.quantization)
    llm.built.prepare()
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    prompts = ["Once upon a time"] * options.batch
    llm.generate(prompts, params)
    began, processor_began = time.perf_counter(), time.process_time()
    llm.generate(prompts, params)
    passed = 1000 * (time.perf_counter() - began) / options.tokens
    processor = 1000 * (time.process_time() - processor_began) / options.tokens
    print(f"{passed:.3f} ms a step on the clock, {processor:.3f} ms of the processor")
    llm.close()


if __name__ == "__main__":
    main()
