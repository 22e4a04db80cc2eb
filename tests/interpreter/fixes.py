"""Mistakes of Triton's interpreter that matter to these tests, put right or refused (seen in triton
3.6.0 and 3.7.1).

NumPy has no bfloat16, so the interpreter keeps such values as 16-bit integers and computes with
those integers as they are: sums and products of bfloat16 are silently garbage, and conversions from
float32 cut off what a GPU rounds. Here conversions round to nearest even and the operands of
`tl.dot` are widened (a GPU's products of two bfloat16 are exact in float32 as well). All other
arithmetic on bfloat16 is refused: a kernel converts to float32 first.

The interpreter rounds twice in `tl.fma`, and has none of the functions of libdevice. Here NumPy's
take their place.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

QUIET_NAN = 0x7FC0

Method = Callable[..., Any]


def repair_interpreter() -> None:
    """Change the interpreter of this process, once."""
    _wrap(InterpreterBuilder, "cast_impl", _casting_bfloat16)
    _wrap(InterpreterBuilder, "create_dot", _multiplying_bfloat16)
    _wrap(InterpreterBuilder, "create_fma", _rounding_once)
    for name in (
        "binary_op",
        "unary_op",
        "create_fma",
        "create_erf",
        "create_rsqrt",
        "create_clampf",
    ):
        _wrap(InterpreterBuilder, name, _refusing_bfloat16)
    _wrap(interpreter.ReduceScanOpInterface, "check_tensor", _refusing_bfloat16_reductions)
    _wrap(interpreter, "_patch_lang_tensor", _with_scalars_as_indices)

    for function in (np.exp, np.log, np.log1p):
        setattr(libdevice, function.__name__, _on_tensors(function))


def _wrap(owner: Any, name: str, wrapper: Callable[[Method], Method]) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))


def _is_bfloat16(value: TensorHandle | tl.dtype) -> bool:
    dtype = value.dtype if isinstance(value, TensorHandle) else value
    return bool(dtype.scalar == tl.bfloat16)


def _widened(handle: TensorHandle) -> TensorHandle:
    """bfloat16 is the upper half of a float32."""
    if not _is_bfloat16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(handle: TensorHandle) -> TensorHandle:
    """float32 to bfloat16, ties to even: adding just under half of the dropped bits' range carries
    where it must."""
    values = np.ascontiguousarray(handle.data, dtype=np.float32)
    bits = values.view(np.uint32)
    upper_half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    data = (
        np.where(np.isnan(values), QUIET_NAN, upper_half)
        .astype(np.uint16)
        .reshape(handle.data.shape)
    )
    return TensorHandle(data, tl.bfloat16)


def _casting_bfloat16(cast: Method) -> Method:
    def cast_impl(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
        if _is_bfloat16(target):
            return _rounded(cast(self, _widened(source), tl.float32))
        return cast(self, _widened(source), target)

    return cast_impl


def _multiplying_bfloat16(dot: Method) -> Method:
    def create_dot(
        self: InterpreterBuilder,
        left: TensorHandle,
        right: TensorHandle,
        added: TensorHandle,
        *options: object,
    ) -> TensorHandle:
        if _is_bfloat16(added):
            raise TypeError("tl.dot accumulates in bfloat16; give it a float32 accumulator")
        return dot(self, _widened(left), _widened(right), added, *options)

    return create_dot


def _rounding_once(fma: Method) -> Method:
    """A product of two float32 is exact in float64."""

    def create_fma(
        self: InterpreterBuilder, left: TensorHandle, right: TensorHandle, added: TensorHandle
    ) -> TensorHandle:
        if added.dtype.scalar != tl.float32:
            return fma(self, left, right, added)
        wide = left.data.astype(np.float64) * right.data.astype(np.float64)
        return TensorHandle((wide + added.data).astype(np.float32), tl.float32)

    return create_fma


def _on_tensors(function: Callable[[Any], Any]) -> Callable[[tl.tensor], tl.tensor]:
    def call(argument: tl.tensor) -> tl.tensor:
        with np.errstate(all="ignore"):
            data = function(argument.handle.data)
        return tl.tensor(TensorHandle(data, argument.dtype.scalar), argument.type)

    return call


def _refusing_bfloat16(operation: Method) -> Method:
    def refuse(self: InterpreterBuilder, *arguments: Any) -> TensorHandle:
        if any(
            isinstance(argument, TensorHandle) and _is_bfloat16(argument) for argument in arguments
        ):
            raise TypeError("arithmetic on bfloat16; convert to float32 first")
        return operation(self, *arguments)

    return refuse


def _refusing_bfloat16_reductions(check: Method) -> Method:
    def check_tensor(self: object, reduced: tuple[tl.tensor, ...]) -> None:
        if any(_is_bfloat16(tensor.dtype) for tensor in reduced):
            raise TypeError("a reduction of bfloat16; convert to float32 first")
        check(self, reduced)

    return check_tensor


def _with_scalars_as_indices(patch: Method) -> Method:
    """Bounds of loops that are read from memory: triton 3.6 asks NumPy for what NumPy 2.4 no longer
    does."""

    def patch_lang_tensor(tensor: type[tl.tensor], scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patch_lang_tensor
