"""Writes where nothing is, from a kernel on the first GPU: a mistake of an application, which the driver reports.

Through the driver's own library: torch checks what it is given. Only this process and its context end by it.
"""

import ctypes
import sys
from typing import Any

ILLEGAL_ADDRESS = 700
_KERNEL = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry wild()
{
    .reg .u64 %place;
    .reg .u32 %value;
    mov.u64 %place, 16;
    mov.u32 %value, 1;
    st.global.u32 [%place], %value;
    ret;
}
"""


def main() -> int:
    """Return 0 when the driver has refused the write."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any, wanted: int = 0) -> None:
        code = getattr(driver, name)(*arguments)
        if code != wanted:
            sys.exit(f"{name}: want code {wanted}, got {code}")

    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), _KERNEL)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"wild")
    call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    call("cuCtxSynchronize", wanted=ILLEGAL_ADDRESS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
