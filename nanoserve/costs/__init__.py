"""Step times on hardware that need not be here: exact operation counts over data-sheet numbers. No
torch.

    model, machine = load_shape("qwen2.5-32b"), load_machine("gllm-l20")
    costs = StepCosts(model, machine, ParallelLayout(pipeline_parallel=4))
    work = costs.work(decode_contexts=[120, 455], chunks=[(0, 512)], sampled=2)   # once per
    micro-batch, O(rows) costs.stage_seconds(work, stage)      # device time of one pipeline stage:
    operators, kernels, all-reduces costs.memory.kv_blocks(block_size)    # device blocks that fit;
    raises DoesNotFit, saying what would fit

Times are seconds, sizes bytes, per device of a stage unless a name says otherwise. Formulas:
docs/costs.md. A profile of the machine at hand (profile.py) answers the same questions.
"""
