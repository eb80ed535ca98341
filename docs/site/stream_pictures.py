"""The pictures of "Streams": what each stream is given in a phase of a step, and what waits for what.

Drawn from recordings of a small model on the simulated accelerator (`stream_events.py`). A box stands as far
to the left as the waits let it, so boxes above each other may run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from drawing import COLORS, Drawing
from stream_events import Box, Recording, boxes, recorded
from torch import nn

from shardwise.verify.streams import DEVICE

FILLS = {
    "copy in": COLORS[5], "cast": COLORS[5], "gather": COLORS[0], "copy out": COLORS[5], "stage": COLORS[5],
    "reduce": COLORS[1], "all-reduce": COLORS[2], "add": COLORS[3], "optimizer": COLORS[4], "step": COLORS[4],
}  # fmt: skip
STREAMS = ("computing", "copy-in", "all-gather", "reduce-scatter", "all-reduce")
LEFT, GAP, LANE = 124.0, 16.0, 36.0
NAMES = tuple(
    f"streams_{phase}.svg" for phase in ("forward", "backward", "hsdp", "accumulation", "end", "next")
)
Train = Callable[[nn.Module, Recording], None]


def lanes(drawing: Drawing, title: str, found: list[Box]) -> None:
    """A line for each stream with its boxes, and an arrow for each wait between two of them."""
    drawing.title(title)
    streams = [name for name in STREAMS if any(_lane(box) == name for box in found)]
    top, ends, place = drawing.y, dict.fromkeys(streams, LEFT - 2), dict[int, tuple[float, float, float]]()
    for name in streams:
        drawing.text(LEFT - 12, name, anchor="end")
        drawing.y += LANE
    bottom, beneath, arrows = drawing.y, len(drawing.parts), []
    for box in found:
        sources = [place[id(one)] for one in box.after if id(one) in place]
        name, width = _lane(box), 6.6 * len(box.words) + 12
        begin = max([ends[name] + (GAP if sources else 2), *(end + GAP for _, end, _ in sources)])
        drawing.y = top + LANE * streams.index(name)
        fill = next((FILLS[kind] for kind in FILLS if box.words.startswith(kind)), "#78818c")
        names = ", ".join(step.operation.name for step in box.steps)
        drawing.box(begin, width + 1, fill=fill, inside=box.words, tip=f"{box.words}: {names}")
        ends[name] = begin + width
        place[id(box)] = (begin, begin + width, drawing.y)
        arrows += [((end, y + 9), (begin, drawing.y + 9)) for _, end, y in sources]
    for source, target in arrows:
        drawing.arrow(source, target, beneath=beneath)
    drawing.y = bottom + 6
    drawing.width = max(drawing.width, max(ends.values()) + 16)


def _lane(box: Box) -> str:
    return next(name for name in STREAMS if f"the {name} stream" == box.stream)


def steps(
    *, of: str, layout: str = "interleaved", hsdp: bool = False, races: bool = False, **how: Any
) -> list[Box]:
    """The boxes of some phases of the second of two training steps, or of the forward after it.

    Args:
        races: take a recording in which operations have no order, too.
    """
    recording = recorded(training(**how), layout=layout, hsdp=hsdp)
    assert races or not recording.findings, recording.findings
    phases = of.split(" and ")
    return boxes([step for step in recording.steps if step.phase in phases])


def training(
    *,
    micro_batches: int = 1,
    all_reduce_once: bool = False,
    in_backward: bool = False,
    event: bool = False,
    after: bool = False,
) -> Train:
    """Two steps, each of some backwards, and a forward."""

    def train(model: Any, recording: Recording) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        if in_backward:
            for param in model.parameters():
                alone = torch.optim.SGD([param], lr=0.1, foreach=False)
                param.register_post_accumulate_grad_hook(step_of(alone, recording))
        for last in (False, True):
            for number in range(micro_batches):
                x = torch.randn(4, 8, device=DEVICE)
                mark = "" if last and number == micro_batches - 1 else "earlier "
                if all_reduce_once:
                    model.set_requires_all_reduce(number == micro_batches - 1)
                with recording.at(mark + "forward"):
                    loss = model(x).square().mean()
                with recording.at(mark + "backward"):
                    loss.backward()
            if not in_backward:
                with recording.at("optimizer" if last else "earlier"):
                    optimizer.step()
                optimizer.zero_grad()
            if event:
                model.set_post_optim_event(torch.accelerator.current_stream().record_event())
            if after:
                with recording.at("averages" if last else "earlier"):
                    loss.detach().mul(2)
        x = torch.randn(4, 8, device=DEVICE)
        with recording.at("next forward"):
            model(x)

    return train


def step_of(optimizer: torch.optim.Optimizer, recording: Recording) -> Callable[[nn.Parameter], None]:
    def step(param: nn.Parameter) -> None:
        with recording.purpose("step"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def forward() -> str:
    drawing = Drawing("Forward on the streams of both layouts")
    lanes(drawing, 'layout="interleaved"', steps(of="forward"))
    lanes(drawing, 'layout="contiguous"', steps(of="forward", layout="contiguous"))
    return drawing.svg()


def backward() -> str:
    drawing = Drawing("Backward on the streams of both layouts")
    lanes(drawing, 'layout="interleaved"', steps(of="backward"))
    lanes(drawing, 'layout="contiguous"', steps(of="backward", layout="contiguous"))
    return drawing.svg()


def hsdp() -> str:
    drawing = Drawing("Backward with HSDP on the streams")
    lanes(drawing, "HSDP: 2 replicas of 2 ranks", steps(of="backward", hsdp=True))
    return drawing.svg()


def accumulation() -> str:
    drawing = Drawing("The second backward of two before a step, on the streams")
    lanes(drawing, "FSDP, each backward reduces", steps(of="backward", micro_batches=2))
    once = {"micro_batches": 2, "all_reduce_once": True}
    lanes(drawing, "HSDP, the last backward all-reduces", steps(of="backward", hsdp=True, **once))
    return drawing.svg()


def end() -> str:
    drawing = Drawing("The end of backward and the optimizer on the streams")
    lanes(drawing, "An optimizer after backward", _last(steps(of="backward and optimizer")))
    lanes(drawing, "Optimizers in backward", _last(steps(of="backward and next forward", in_backward=True)))
    return drawing.svg()


def next_forward() -> str:
    drawing = Drawing("The optimizer and the next forward on the streams")
    phases = "optimizer and averages and next forward"
    lanes(drawing, "As it is", _first(steps(of=phases, after=True)))
    lanes(drawing, "With set_post_optim_event", _first(steps(of=phases, after=True, event=True)))
    return drawing.svg()


def _last(found: list[Box]) -> list[Box]:
    """From the backward of the last block but one on, until the next forward has begun."""
    begin = next(i for i, box in enumerate(found) if box.words == "backward 1")
    end = next((i for i, box in enumerate(found) if box.words == "forward 0"), len(found))
    return found[begin : end + 1]


def _first(found: list[Box]) -> list[Box]:
    """Until the first block has run."""
    end = next(i for i, box in enumerate(found) if box.words == "forward 1")
    return found[: end + 1]


def draw() -> dict[str, str]:
    """The pictures by name."""
    makers = (forward, backward, hsdp, accumulation, end, next_forward)
    return {name: make() for name, make in zip(NAMES, makers, strict=True)}
