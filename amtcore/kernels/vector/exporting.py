"""Whether `torch.export` records a call."""

import torch


def is_exporting() -> bool:
    """Return True while `torch.export` records, in its default mode.

    Under `torch.compile`, and in the strict mode of `torch.export`, Dynamo answers True to
    `torch.compiler.is_exporting` as well. There a model must run as it does without a compiler.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
