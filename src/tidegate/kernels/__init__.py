"""All of Tidegate's loops over records: numba functions over flat arrays.

Importing this package loads no numba, importing one of its modules does; a kernel is compiled at its first call, or
taken from the cache (`kernel_cache` says where that is, `python -m tidegate.kernels` fills it).

House rules for a kernel:
K1  explicit signature, `nogil`, cached (`jit.kernel`); no allocation, no exception, no Python object.
K2  bytes are read and written through the functions of `jit` only, and every length is compared with the remaining
    bytes before it is used, because compiled code has no bounds checks.
K3  a kernel is total: it returns where it stopped, and its caller interprets that.
K4  `kernel.py_func` runs as plain Python with every access checked, so tests prove K2 on hostile bytes; and each kernel
    has a readable plain-Python twin in the tests.
"""
