"""What reading and writing safetensors files share: the format's dtypes, and failing on all ranks alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.commit import by_ranks
from shardwise.comm.boxes import gather_text
from shardwise.errors import CheckpointError, ShardwiseError

DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,  # two in an element of torch's; files count them one by one
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def together(what: str, action: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's result of `action`, which JSON can hold. Collective over `group`.

    Raises:
        CheckpointError: on every rank, with the problems of all, if it raised on any.
    """
    result, problem = None, None
    try:
        result = action()
    except Exception as error:
        problem = str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
    text = json.dumps([result, problem])
    told = [json.loads(each) for each in (gather_text(text, group=group) if group else [text])]
    ranks = dist.get_process_group_ranks(group) if group else [0]
    problems = {rank: found for rank, (_, found) in zip(ranks, told, strict=True) if found is not None}
    if problems:
        raise CheckpointError(f"{what} failed\n{by_ranks(problems)}")
    return [result for result, _ in told]
