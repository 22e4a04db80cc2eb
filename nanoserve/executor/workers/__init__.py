"""Worker processes, one per device: pipeline stages and tensor-parallel ranks.

Ranks are stage-major: with `M` tensor-parallel ranks, worker `s * M + t` is rank `t` of stage `s`.
The engine sends every plan to all workers at once (`messages`, over ZeroMQ), ahead of the hidden
states, which go from stage to stage (`distributed`, over torch.distributed). The first rank of the
last stage samples and answers.
"""
