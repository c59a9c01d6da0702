"""Prefetching in kernels: memory that a loop needs soon is requested early, so that its cache misses overlap.

Rows of a table are read at random places. The processor cannot foresee them; a kernel that walks a list of rows can.
Nothing is computed here, so no result changes.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from headrace.kernel_cache import njit

AHEAD = np.uint64(16)
"""Entries of a list between the row requested and the row in work."""


def _prefetch(_context, flat, _at):  # type: ignore[no-untyped-def]
    """prefetch(flat, at): request the cache line of element `at` of a flat array, for reading. `at` must be in it."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0])  # type: ignore[no-untyped-call]
        line = builder.bitcast(builder.gep(array.data, [arguments[1]]), cgutils.voidptr_t)
        number = cgutils.int32_t
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        request = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(request, [line, number(0), number(3), number(1)])  # read, into all caches, data
        return context.get_dummy_value()

    return types.void(flat, types.uint64), codegen


prefetch: Any = intrinsic(_prefetch)


@njit(nogil=True, cache=True, inline="always")
def prefetch_row(flat, begin, width):  # type: ignore[no-untyped-def]
    """Request `width` floats of a flat array from `begin` on, both np.uint64: the first cache line and the last.

    Lines in between follow by themselves: the processor requests neighbours.
    """
    prefetch(flat, begin)
    prefetch(flat, begin + width - np.uint64(1))
