"""A made-up report of a study, of a real one's size and shape, for tests of pages."""

import math

import numpy as np
from numpy.typing import NDArray

from pulse_rl.study.results import (
    SPANS,
    Bounds,
    Exponent,
    KStepSparsity,
    Prediction,
    Recurrence,
    Report,
    Settings,
    StepStudy,
    Summary,
    TensorGroup,
    TensorStudy,
    Version,
    Visible,
)

PARTS = {  # a Llama's layer: part → kind, shape
    "input_layernorm.weight": ("norm", (576,)),
    "self_attn.q_proj.weight": ("attention", (576, 576)),
    "self_attn.k_proj.weight": ("attention", (192, 576)),
    "self_attn.v_proj.weight": ("attention", (192, 576)),
    "self_attn.o_proj.weight": ("attention", (576, 576)),
    "post_attention_layernorm.weight": ("norm", (576,)),
    "mlp.gate_proj.weight": ("mlp", (1536, 576)),
    "mlp.up_proj.weight": ("mlp", (1536, 576)),
    "mlp.down_proj.weight": ("mlp", (576, 1536)),
}
PRECISIONS = {  # of the changes in BF16, and scales
    "BF16": (1.0, 0),
    "F16": (0.999, 0),
    "F8_E4M3": (0.009, 0),
    "F8_E5M2": (0.04, 0),
    "F8_E4M3/tensor": (0.07, 272),
    "F8_E5M2/tensor": (0.05, 272),
    "I8/row": (0.003, 204_733),
}
LR = 3e-6
CHANGE = {-17: 0.93, -16: 0.88, -15: 0.78, -14: 0.61, -13: 0.34, -12: 0.18, -11: 0.067, -10: 0.02, -9: 0.009, -8: 0.004}


def example(versions: int = 41, layers: int = 30, *, settings: bool = True) -> Report:
    """A report on a Llama. versions, layers: their number; settings: whether a learning rate is known."""
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[str, int | None, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("embedding", None, (49152, 576)),
        "model.norm.weight": ("norm", None, (576,)),
    }
    for layer in range(layers):
        for part, (kind, shape) in PARTS.items():
            shapes[f"model.layers.{layer}.{part}"] = (kind, layer, shape)
    steps = versions - 1
    base = {"embedding": 0.0021, "attention": 0.0064, "mlp": 0.0059, "norm": 0.00003}
    tensors = []
    for name, (kind, depth, shape) in sorted(shapes.items()):
        elements = math.prod(shape)
        series = base[kind] * (1 + 0.3 * rng.standard_normal()) * (1 + 0.1 * rng.standard_normal(steps)).clip(0.3)
        changes = int(abs(series).sum() * elements)
        low, high = sorted((float(abs(series).min()), float(abs(series).max())))
        tensors.append(
            TensorStudy(
                name=name,
                dtype="BF16",
                shape=shape,
                kind=kind,
                depth=depth,
                elements=elements,
                changes=changes,
                density=changes / elements / steps,
                min=low,
                max=high,
            )
        )
    elements = sum(tensor.elements for tensor in tensors)
    density = sum(tensor.changes for tensor in tensors) / elements / steps * (1 + 0.05 * rng.standard_normal(steps))
    return Report(
        pulse_rl="0.1.0",
        source="run" if settings else "checkpoints",
        location="runs/math",
        versions=tuple(Version(number=n, name=f"version {n}") for n in range(versions)),
        stride=1,
        elements=elements,
        full_nbytes=2 * elements,
        settings=Settings(lr=LR, betas=(0.9, 0.999)) if settings else None,
        spans=tuple(_span(k, density) for k in SPANS if k < versions),
        steps=tuple(_step(t, density, elements, settings) for t in range(steps)),
        tensors=tuple(tensors),
        kinds=_groups({k: [t for t in tensors if t.kind == k] for k in base}, steps),
        depths=_groups(
            {str(d): [t for t in tensors if t.depth == d] for d in range(layers)}
            | {"outside": [t for t in tensors if t.depth is None]},
            steps,
        ),
        distances=tuple(2**n for n in range(8)),
        exponents=tuple(_exponent(e, elements * steps, settings) for e in range(-24, 2)),
        recurrence=Recurrence(
            again=0.52,
            back=0.21,
            expected_again=0.44,
            steps=steps,
            times=tuple(int(elements * 0.97 * 0.02**n) if n else elements * 96 // 100 for n in range(steps + 1)),
            returned=elements // 300,
        ),
        notes=(),
        seconds=21.4,
    )


def _summary(series: NDArray[np.float64]) -> Summary:
    return Summary(mean=float(series.mean()), std=float(series.std()), min=float(series.min()), max=float(series.max()))


def _span(k: int, density: NDArray[np.float64]) -> KStepSparsity:
    sparsity = 1 - density[: len(density) - k + 1] * k**0.55
    return KStepSparsity(
        k=k, bases=tuple(range(len(sparsity))), sparsity=tuple(sparsity.tolist()), over_time=_summary(sparsity)
    )


def _step(t: int, density: NDArray[np.float64], elements: int, settings: bool) -> StepStudy:
    changes, here = int(density[t] * elements), float(density[t])
    predicted = (
        Prediction(lr=LR, density=here * 0.91, spread=here * 1.2, highest=here * 14, by_rate=here * 0.97)
        if settings
        else None
    )
    return StepStudy(
        base=t,
        target=t + 1,
        changes=changes,
        density=here,
        ups=0.5,
        mean_distance=1.3,
        again=0.5 if t else None,
        back=0.2 if t else None,
        kinds={"mlp": here * 1.1, "attention": here * 1.2, "embedding": here * 0.4, "norm": here * 0.01},
        bounds=Bounds(
            positions_uniform=8.8 * changes,
            positions_by_tensor=8.1 * changes,
            positions_by_exponent=2.6 * changes,
            positions=2.5 * changes,
            moves_by_exponent=1.5 * changes,
            moves=1.45 * changes,
        ),
        codecs={"context": int(changes * 0.52), "gap": int(changes * 2.7)},
        precisions={
            name: Visible(elements, int(changes * share), share * here, scales, scales // 500)
            for name, (share, scales) in PRECISIONS.items()
        },
        moved=0.19 * LR,
        rate=0.19 if settings else None,
        prediction=predicted,
    )


def _groups(members: dict[str, list[TensorStudy]], steps: int) -> tuple[TensorGroup, ...]:
    found = []
    for name, tensors in members.items():
        elements, changes = sum(t.elements for t in tensors), sum(t.changes for t in tensors)
        density = changes / elements / steps
        found.append(
            TensorGroup(
                name=name,
                tensors=len(tensors),
                elements=elements,
                changes=changes,
                density=density,
                min=density * 0.8,
                max=density * 1.3,
                sparsity={str(k): 1 - density * k**0.55 for k in SPANS if k <= steps},
            )
        )
    return tuple(found)


def _exponent(e: int, total: int, settings: bool) -> Exponent:
    elements = int(total * math.exp(-((e + 6) ** 2) / 8) / 5)
    probability = CHANGE.get(e, 0.97 if e < -17 else 0.0004 * 2.0 ** (-7 - e))
    changes, ulp = int(elements * probability), 2.0 ** (e - 7)
    return Exponent(
        dtype="BF16",
        exponent=e,
        ulp=ulp,
        elements=elements,
        changes=changes,
        probability=changes / max(1, elements),
        distances=tuple(int(changes * share) for share in (0.86, 0.08, 0.03, 0.02, 0.005, 0.003, 0.001, 0.001)),
        sign_changes=changes // 1000,
        ups=changes // 2,
        predicted=min(1.0, LR * 0.17 / ulp) if settings else None,
        spread=min(1.0, LR * 0.2 / ulp) if settings else None,
        highest=min(1.0, LR * 10 / ulp) if settings else None,
        rate=probability * ulp / LR if settings else None,
    )
