"""What the installed libraries make of a matrix of bfloat16: the references of `weights.views.rules`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

BLOCK = 128


def library(rule: str, kind: str, ue8m0: bool, weight: Any, codes: str = "fp8") -> tuple[Any, ...]:
    """The codes and scales of a matrix, by the library of a rule. Skips the test where that is not installed.

    For NVFP4 the global scale, too.
    """
    if codes == "fp4":
        return packed([weight], kind)[0]
    if rule == "transformers":
        return _transformers(kind, ue8m0, weight)
    if rule == "compressed-tensors":
        return _compressed_tensors(kind, weight, codes)
    if rule == "deepseek" and not ue8m0:
        return _triton(weight)
    return _vllm(kind, ue8m0, weight)  # DeepGEMM's powers of two are vLLM's


def _padded(weight: Any) -> Any:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def _triton(weight: Any) -> tuple[Any, Any]:
    """The kernel that slime and verl have, for devices alone: written again in torch, operation by operation."""
    blocks = _padded(weight).float()
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-10) / torch.tensor(448.0)
    codes = (blocks * (1.0 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn)
    whole = codes.view(codes.shape[0] * BLOCK, -1)
    return whole[: weight.shape[0], : weight.shape[1]], scales[:, 0, :, 0]


def _transformers(kind: str, ue8m0: bool, weight: Any) -> tuple[Any, Any]:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    size = [BLOCK, BLOCK] if kind == "block" else None
    config = SimpleNamespace(weight_block_size=size, scale_fmt="ue8m0" if ue8m0 else None)
    if not hasattr(module, "Fp8Quantize"):
        pytest.skip("a transformers without Fp8Quantize")
    made = module.Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("a.weight", weight)
    return made["a.weight"], made["a.weight_scale_inv"]


def _vllm(kind: str, ue8m0: bool, weight: Any) -> tuple[Any, Any]:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax
    from vllm.utils import deep_gemm

    if kind == "block":
        cast = deep_gemm.per_block_cast_to_fp8
        return getattr(cast, "_torchdynamo_orig_callable", cast)(weight, [BLOCK, BLOCK], ue8m0)  # type: ignore[no-any-return]
    if kind == "channel":
        scale = fp8._fp8_channel_scale(weight_amax(weight, dim=1, keepdim=True))
        return fp8._fp8_quant_per_channel(weight, scale), scale
    if kind == "tensor":  # its own operation has no build for CPUs: what QuantFP8.forward_native does, with its scale
        scale = fp8._fp8_scale(weight_amax(weight).reshape(1))
        scaled = (weight.to(torch.float32) * scale.reciprocal()).clamp(-448, 448)
        return scaled.to(torch.float8_e4m3fn), scale
    return _mxfp8_e4m3_quantize_torch(weight)  # type: ignore[no-any-return]


def packed(fused: Any, kind: str) -> list[tuple[Any, ...]]:
    """What compressed-tensors makes in FP4 of matrices that engines fuse."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4A16" if kind == "nv" else "MXFP4A16", ["Linear"])
    args, name = scheme.weights, f"{kind}fp4-pack-quantized"
    overall = generate_gparam(
        torch.stack([w.amin() for w in fused]).amin(), torch.stack([w.amax() for w in fused]).amax()
    )
    found = []
    for weight in fused:
        groups = weight.view(len(weight), -1, args.group_size)
        shared = overall if kind == "nv" else None
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=shared)
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}
        state |= {"weight_global_scale": overall} if kind == "nv" else {}
        compiled = FP4_E2M1_DATA.cast_to_fp4
        with pytest.MonkeyPatch.context() as patch:  # the same, without the seconds that compiling it takes
            patch.setattr(FP4_E2M1_DATA, "cast_to_fp4", staticmethod(compiled._torchdynamo_orig_callable))
            made = compressors.BaseCompressor.get_value_from_registry(name).compress(state, scheme)
        keys = ("weight_packed", "weight_scale", "weight_global_scale")
        found.append(tuple(made[key] for key in keys if key in made))
    return found


def _compressed_tensors(kind: str, weight: Any, codes_name: str) -> tuple[Any, Any]:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    fields: dict[str, Any] = {
        "block": {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        "channel": {"strategy": "channel"},
        "tensor": {"strategy": "tensor"},
        "mx": {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
    }
    args = QuantizationArgs(num_bits=8, type="int" if codes_name == "int8" else "float", symmetric=True, **fields[kind])
    if kind == "block":
        low, high = (getattr(_padded(weight), name)((1, 3)) for name in ("amin", "amax"))
    elif kind == "mx":
        low, high = (getattr(weight.view(len(weight), -1, 32), name)(-1) for name in ("amin", "amax"))
    else:
        low, high = (getattr(weight, name)(1, keepdim=True) for name in ("amin", "amax"))
        low, high = (low.amin().reshape(1), high.amax().reshape(1)) if kind == "tensor" else (low, high)
    scale, zero = calculate_qparams(low, high, args)
    codes = quantize(weight, scale, zero, args, dtype=args.pytorch_dtype())
    return codes, compress_mx_scale(scale, torch.uint8) if kind == "mx" else scale
