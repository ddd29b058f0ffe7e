"""The driver of NVIDIA GPUs, and the only file that calls CUDA: its driver API, by cuda-python's bindings.

Importing this initialises nothing. Making a `CudaDriver` initialises CUDA in this process, after which its
children can no longer use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid as uuids
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvxferd.errors import Code, DeviceError
from kvxferd.memory.driver import PAIRS_PER_LAUNCH, AddressRange, Device, Rows, WriteOrder

_NAME_BYTES = 256

COPY_ROWS = Path(__file__).with_name("copy_rows.ptx")  # made of copy_rows.cu
_THREADS = 256  # of a block
_VECTOR_BYTES = 16  # that a thread copies at a time


class CudaDriver:
    """Keeps the contract of `Driver`. Contexts are the devices' primary ones, which torch uses too."""

    mem_type = "VRAM"

    def __init__(self) -> None:
        self._cuda = _import_bindings()
        # Without libcuda the bindings raise from the first call instead of returning an error.
        try:
            self._call("cuInit", 0)
        except DeviceError as error:
            raise DeviceError(error.message, Code.DEVICE_UNAVAILABLE) from error
        except Exception as error:
            raise DeviceError(
                f"cannot use a GPU: there is no NVIDIA driver here ({error})", Code.DEVICE_UNAVAILABLE
            ) from error
        version = int(self._call("cuDriverGetVersion"))
        self.name = f"cuda {version // 1000}.{version % 1000 // 10}"
        self._devices = tuple(self._query_device(i) for i in range(int(self._call("cuDeviceGetCount"))))
        if not self._devices:
            raise DeviceError("cannot use a GPU: the driver shows none", Code.DEVICE_UNAVAILABLE)
        self._contexts: dict[str, Any] = {}
        self._copy_kernels: dict[int, _CopyKernel] = {}  # by context

    def _call(self, name: str, *arguments: Any) -> Any:
        """Return a call's result, a tuple where it has several. Raises DeviceError."""
        status, *results = getattr(self._cuda, name)(*arguments)
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"cannot {name}: {self._status_text(status)}", _code_of(status.name))
        return results[0] if len(results) == 1 else tuple(results)

    def _status_text(self, status: Any) -> str:
        failed, text = self._cuda.cuGetErrorString(status)
        if failed != self._cuda.CUresult.CUDA_SUCCESS or not text:
            return str(status.name)
        return f"{text.decode()} ({status.name})"

    # --- devices

    def _query_device(self, ordinal: int) -> Device:
        device = self._call("cuDeviceGet", ordinal)
        # A MIG slice has a UUID of its own, which nvidia-smi writes with another prefix. Bindings before 13
        # have two calls, of which the older returns the whole card's, the same for all of its slices.
        calls = ("cuDeviceGetUuid_v2", "cuDeviceGetUuid")
        call = next(name for name in calls if hasattr(self._cuda, name))
        number = uuids.UUID(bytes=bytes(self._call(call, device).bytes))
        name = self._call("cuDeviceGetName", _NAME_BYTES, device).split(b"\0")[0].decode()
        return Device(f"GPU-{number}", ordinal, name, int(self._call("cuDeviceTotalMem", device)))

    def devices(self) -> tuple[Device, ...]:
        return self._devices

    def device(self, uuid: str) -> Device:
        for device in self._devices:
            if device.uuid == uuid:
                return device
        seen = ", ".join(device.uuid for device in self._devices)
        raise DeviceError(
            f"cannot use device {uuid}: this process sees {seen} (CUDA_VISIBLE_DEVICES)",
            Code.DEVICE_UNAVAILABLE,
        )

    def describe(self) -> dict[str, str]:
        described = {"driver": self.name}
        attributes = {
            "virtual memory": "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
            "export as descriptor": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
            "gpudirect rdma": "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED",
            "gpudirect rdma of mapped memory": "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
            "dma-buf": "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED",
        }
        for device in self._devices:
            able = [what for what, name in attributes.items() if self._has_attribute(device.ordinal, name)]
            described[f"{device.uuid} ({device.name})"] = ", ".join(able) or "nothing that is needed"
        return described

    def _has_attribute(self, ordinal: int, attribute: str) -> bool:
        return bool(self._attribute(ordinal, attribute))

    def _attribute(self, ordinal: int, attribute: str) -> int:
        number = getattr(self._cuda.CUdevice_attribute, attribute)
        return int(self._call("cuDeviceGetAttribute", number, self._call("cuDeviceGet", ordinal)))

    def _context(self, uuid: str) -> Any:
        if uuid not in self._contexts:
            device = self._call("cuDeviceGet", self.device(uuid).ordinal)
            self._contexts[uuid] = self._call("cuDevicePrimaryCtxRetain", device)
        return self._contexts[uuid]

    @contextlib.contextmanager
    def on(self, uuid: str) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._context(uuid))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def device_of(self, address: int) -> str:
        attribute = self._cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return self._devices[int(self._call("cuPointerGetAttribute", attribute, address))].uuid

    def write_order(self, uuid: str) -> WriteOrder:
        ordinal = self.device(uuid).ordinal
        ways = ("CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED", "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED")
        if not any(self._has_attribute(ordinal, way) for way in ways):
            return WriteOrder.NATIVE  # no network card can write there
        cuda = self._cuda
        none = cuda.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE
        if self._attribute(ordinal, "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING") > int(none):
            return WriteOrder.NATIVE  # for the device that owns the memory, and no other device reads it
        options = self._attribute(ordinal, "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS")
        host = cuda.CUflushGPUDirectRDMAWritesOptions.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
        return WriteOrder.FLUSH if options & int(host) else WriteOrder.NONE

    def flush_writes(self) -> None:
        cuda = self._cuda
        target = cuda.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        scope = cuda.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
        self._call("cuFlushGPUDirectRDMAWrites", target, scope)

    # --- physical memory

    def _properties(self, uuid: str) -> Any:
        cuda, device = self._cuda, self.device(uuid)
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.ordinal
        properties.requestedHandleTypes = self._fd_handle_type
        rdma = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"
        properties.allocFlags.gpuDirectRDMACapable = int(self._has_attribute(device.ordinal, rdma))
        return properties

    @property
    def _fd_handle_type(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def granularity(self, uuid: str) -> int:
        option = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(uuid), option))

    def create(self, uuid: str, size_bytes: int) -> int:
        return int(self._call("cuMemCreate", size_bytes, self._properties(uuid), 0))

    def retain(self, address: int) -> int:
        allowed = self._cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
        kinds = int(self._call("cuPointerGetAttribute", allowed, address))
        if not kinds & int(self._fd_handle_type):
            raise DeviceError(
                f"cannot export memory at {address:#x}: it was not allocated to be shared by descriptor "
                f"(its handle types: {kinds:#x}; cudaMalloc's are 0)",
                Code.REGION_NOT_EXPORTABLE,
            )
        return int(self._call("cuMemRetainAllocationHandle", address))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        try:
            fd = int(self._call("cuMemExportToShareableHandle", handle, self._fd_handle_type, 0))
        except DeviceError as error:
            raise DeviceError(error.message, Code.REGION_NOT_EXPORTABLE) from error
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, uuid: str, fd: int, size_bytes: int) -> int:
        handle = int(self._call("cuMemImportFromShareableHandle", fd, self._fd_handle_type))
        try:
            location = self._call("cuMemGetAllocationPropertiesFromHandle", handle).location
            where = location.type, int(location.id)
            here = (
                self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE,
                self.device(uuid).ordinal,
            )
            if where != here:
                raise DeviceError(
                    f"cannot import memory of {uuid}: it is on {self._location_name(*where)}",
                    Code.REGION_INVALID,
                )
        except BaseException:
            self.release(handle)
            raise
        return handle

    def _location_name(self, kind: Any, number: int) -> str:
        named = {device.ordinal: device.uuid for device in self._devices}
        is_device = kind == self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        return named.get(number, f"device {number}") if is_device else f"no device ({kind!s}, {number})"

    # --- addresses

    def allocation_range(self, address: int) -> AddressRange:
        base, size = self._call("cuMemGetAddressRange", address)
        return AddressRange(int(base), int(size))

    def reserve(self, size_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", size_bytes, 0, 0, 0))

    def unreserve(self, address: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def set_access(self, uuid: str, address: int, size_bytes: int) -> None:
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device(uuid).ordinal
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size_bytes, [access], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", address, size_bytes)

    def allocate_plain(self, uuid: str, size_bytes: int) -> int:
        with self.on(uuid):
            return int(self._call("cuMemAlloc", size_bytes))

    # --- copies

    def allocate_host(self, size_bytes: int) -> int:
        # Portable: pinned for every device that the process uses.
        address = int(self._call("cuMemHostAlloc", size_bytes, self._cuda.CU_MEMHOSTALLOC_PORTABLE))
        ctypes.memset(address, 0, size_bytes)
        return address

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def open_stream(self) -> Any:
        return self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def close_stream(self, stream: Any) -> None:
        self._call("cuStreamDestroy", stream)

    def copy(self, to: Sequence[int], source: Sequence[int], length: Sequence[int], stream: Any) -> None:
        start, done = self._cuda.cuMemcpyAsync, self._cuda.CUresult.CUDA_SUCCESS
        for destination, origin, size in zip(to, source, length, strict=True):
            (status,) = start(destination, origin, size, stream)
            if status != done:
                raise DeviceError(f"cannot cuMemcpyAsync {size} bytes: {self._status_text(status)}")

    def copy_rows(self, to: memoryview, source: memoryview, rows: Rows, stream: Any) -> None:
        kernel = self._copy_kernel()
        for first in range(0, len(to), PAIRS_PER_LAUNCH):
            few = slice(first, first + PAIRS_PER_LAUNCH)
            parameters = copy_parameters(to[few], source[few], rows)
            num_bytes = parameters.num_pairs * rows.rows * rows.width
            blocks = min(kernel.max_blocks, -(-num_bytes // (_THREADS * _VECTOR_BYTES)))
            pointer = ctypes.c_void_p(ctypes.addressof(parameters))
            grid, block = (blocks, 1, 1), (_THREADS, 1, 1)
            self._call(
                "cuLaunchKernel", kernel.function, *grid, *block, 0, stream, ctypes.addressof(pointer), 0
            )

    def _copy_kernel(self) -> _CopyKernel:
        """Return the kernel in the current context, where the first use compiles it (some 0.1 s)."""
        context = int(self._call("cuCtxGetCurrent"))
        if context not in self._copy_kernels:
            try:
                text = COPY_ROWS.read_bytes() + b"\0"
            except OSError as error:
                raise DeviceError(f"cannot load the kernel that copies rows: {error}") from error
            function = self._call("cuModuleGetFunction", self._call("cuModuleLoadData", text), b"copy_rows")
            ordinal = int(self._call("cuCtxGetDevice"))
            num_processors = self._attribute(ordinal, "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")
            self._copy_kernels[context] = _CopyKernel(function, max(1, num_processors // 2))
        return self._copy_kernels[context]

    def record(self, stream: Any) -> Any:
        event = self._call("cuEventCreate", self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        try:
            self._call("cuEventRecord", event, stream)
        except BaseException:
            self.drop_event(event)
            raise
        return event

    def is_done(self, event: Any) -> bool:
        (status,) = self._cuda.cuEventQuery(event)
        if status == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"cannot copy: {self._status_text(status)}")
        return True

    def drop_event(self, event: Any) -> None:
        self._call("cuEventDestroy", event)

    def synchronize(self, stream: Any) -> None:
        self._call("cuStreamSynchronize", stream)


class _CopyKernel(NamedTuple):
    """The kernel in one context."""

    function: Any
    max_blocks: int  # one for every second multiprocessor: the others are the engine's


class CopyParameters(ctypes.Structure):
    """The parameters of copy_rows.cu, passed by value."""

    _fields_ = (
        ("num_pairs", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("width", ctypes.c_uint64),
        ("to_pitch", ctypes.c_int64),
        ("source_pitch", ctypes.c_int64),
        ("to", ctypes.c_uint64 * PAIRS_PER_LAUNCH),
        ("source", ctypes.c_uint64 * PAIRS_PER_LAUNCH),
    )


def copy_parameters(to: memoryview, source: memoryview, rows: Rows) -> CopyParameters:
    """Return one launch's parameters; `to` and `source` as in `copy_rows`, `PAIRS_PER_LAUNCH` or less."""
    parameters = CopyParameters(len(to), rows.rows, rows.width, rows.to_pitch, rows.source_pitch)
    for field, addresses in ((parameters.to, to), (parameters.source, source)):
        memoryview(field).cast("B")[: 8 * len(to)] = addresses.cast("B")
    return parameters


def _import_bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"cannot use a GPU without cuda-python ({error}): pip install 'kvxferd[cuda]'",
            Code.DEVICE_UNAVAILABLE,
        ) from error
    return driver


def _code_of(status: str) -> Code:
    if status in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY", "CUDA_ERROR_INSUFFICIENT_DRIVER"):
        return Code.DEVICE_UNAVAILABLE
    return Code.DEVICE_ERROR
